"""Fused, woven or stock, for so many rows: by the mode that was given, else by what was measured, else by the planner. What
a step's requests allow of it is ``decide.py``'s business."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tokenweave.integrations.vllm.measured import Measured
from tokenweave.planning import Mode, Plan, Planner
from tokenweave.planning.plan import Scheme

EAGER_ROWS = 4096  # from so many rows on the host issues a step's launches faster than the GPU runs them, as a rule


class Choice:
    """What decides about steps; the same on all ranks.

    Args:
        planner: of the model, the GPU and the ranks.
        mode: of all steps, or None for auto.
        plain: whether the weights are bf16 (or alike), which is what the planner knows.

    Attributes:
        planner: as given.
    """

    def __init__(self, planner: Planner, mode: Mode | None, *, plain: bool) -> None:
        self.planner = planner
        self._mode, self._plain = mode, plain
        self._measured: Measured | None = None
        self._schemes: Mapping[int, Scheme] = {}
        self._plans: dict[tuple[int, bool, Mode | None], Plan] = {}

    @property
    def mode(self) -> Mode | None:
        """Of all steps; None: auto. It may be changed between steps, on all ranks alike."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode | None) -> None:
        self._mode = mode

    @property
    def measured(self) -> Measured | None:
        """What auto goes by where it is there; the planner otherwise."""
        return self._measured

    @measured.setter
    def measured(self, measured: Measured | None) -> None:
        self._measured = measured
        self._plans.clear()

    @property
    def schemes(self) -> Mapping[int, Scheme]:
        """Rows -> the scheme whose woven steps of so many were the fastest; empty: the planner's word counts."""
        return self._schemes

    @schemes.setter
    def schemes(self, schemes: Mapping[int, Scheme]) -> None:
        self._schemes = schemes
        self._plans.clear()

    @property
    def tried(self) -> tuple[Scheme, ...]:
        """Schemes to measure: the planner's, but those whose collectives take more than twice as long as others', and one with no
        GEMM told. None where it plans with a table that was measured on this machine: that has compared them."""
        model = self.planner.model
        if model.costs.measured:
            return ()
        most = max(scheme.ctas or 0 for scheme in model.schemes)
        found = [scheme for scheme in model.schemes if 2 * (scheme.ctas or 0) >= most]
        return (*found, Scheme(most)) if most else tuple(found)

    def scheme(self, rows: int) -> Scheme | None:
        """Of a woven step of so many rows: that of the measured size nearest to it, by ratio."""
        if not self.schemes:
            return None
        return self.schemes[min(self.schemes, key=lambda size: abs(math.log(size / rows)))]

    def ms(self, rows: int, plan: Plan) -> float:
        """Expected, of a step as a graph."""
        if self._measured is not None:
            return self._measured.ms(plan.mode, rows)
        return self.planner.plan_us(rows, plan) / 1e3

    def launched_ms(self, rows: int, plan: Plan) -> float:
        """Expected, of a step that is launched kernel by kernel; infinite where the host is not known to keep up."""
        if self._measured is not None:
            return self._measured.launched_ms(plan.mode, rows)
        return self.ms(rows, plan) if rows >= EAGER_ROWS else math.inf

    def stock_ms(self, rows: int) -> float:
        """Measured, of a step as stock; infinite where that is out of the question: a mode was given, or nothing measured."""
        if self._mode is not None or self._measured is None:
            return math.inf
        return self._measured.ms(Mode.SEQUENTIAL, rows)

    def plan(self, rows: int, *, allow_woven: bool = True) -> Plan:
        """The plan of a step of so many rows; ``SEQUENTIAL`` is stock vLLM.

        It depends on nothing else, so that steps of a size share a graph.
        """
        key = rows, allow_woven, self._mode
        if key not in self._plans:
            mode = self._mode
            if mode is None and self._measured is not None:
                mode = self._measured.best(rows, allow_woven=allow_woven)
            elif mode is None and not self._plain:
                allow_woven = False  # of GEMMs that the planner doesn't know it is only asked whether fusing pays
            self._plans[key] = self.planner.plan(
                rows, mode=mode or "auto", allow_woven=allow_woven, scheme=self.scheme(rows)
            )
        return self._plans[key]
