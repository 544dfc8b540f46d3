"""Chooses how a step is run: mode, cut, CTAs and the SMs left to each GEMM.

Everything here is arithmetic on what all ranks know (the model, the GPU, the step's requests), so ranks always agree
without talking to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tokenweave.errors import ModelError, RequestError
from tokenweave.models.config import ModelConfig
from tokenweave.planning.asked import asked_mode
from tokenweave.planning.batch import Batch, runs_of
from tokenweave.planning.cost import MOST_TOKENS, CostModel
from tokenweave.planning.explanation import Cut, Explanation, Waves
from tokenweave.planning.hardware import Gpu
from tokenweave.planning.machine import Costs, Machine, left, machine_of
from tokenweave.planning.plan import Mode, Plan, Scheme, StepTimes, woven_plan
from tokenweave.planning.waves import even_cuts, gemm_sms, row_step, waves

# A woven step must promise to take at most this share of the best other mode's time: the model's own error.
GAIN, MEASURED_GAIN = 0.96, 0.98
MIXTURE_GAIN = 0.0  # never: of a mixture of experts the formulas know the grouped GEMMs, and not what is around them
CPU_GAIN = 1.0  # without GPUs any promise will do: weaving there is for running the path, its times prove nothing
TIE = 0.003  # cuts this close are equal to the model; the most even of them hides best what it does not know
STEPS_TIE = 0.01  # the same where whole steps, cut in the middle, were measured: of other cuts less is known
CHEAPER = 1.02  # a step may take so much longer for GEMMs that lose less: what hides collectives is known less well
CACHED_PLANS = 8192
SHOWN_CUTS = 5


@dataclass(frozen=True)
class _Woven:
    """The best cut of a batch: what a :class:`Plan` needs, and its predicted time."""

    cut: int
    scheme: Scheme
    us: float


class Planner:
    """Plans for one model on ``tp`` equal GPUs.

    Args:
        config: the model.
        gpu: a :class:`Gpu`, a name of the table, or None for this machine's (the ``cpu`` entry without one).
        tp: ranks.
        transport: of the fused collective; None for the one with the least wire on this GPU.
        mode: ``"auto"`` or a :class:`Mode` for every plan that does not name one itself; None for :func:`asked_mode`'s
            default, which must then be the same on all ranks.
        costs: what a step's parts cost, measured or described; it takes the place of ``gpu``, ``tp`` and ``transport``. By
            default what was measured on this machine, where ``gpu`` is None and there is such a table, else the data sheet.

    Attributes:
        model: the cost model that decides.

    Raises:
        RequestError: an unknown GPU, mode or transport, tp < 1, or more GPUs than one host's transports join.
        ModelError: more ranks than query heads; something else than a :class:`ModelConfig`.
    """

    def __init__(
        self,
        config: ModelConfig,
        gpu: Gpu | str | None = None,
        tp: int = 1,
        transport: str | None = None,
        mode: Mode | str | None = None,
        costs: Costs | None = None,
    ) -> None:
        if not isinstance(config, ModelConfig):
            raise ModelError(
                f"Planner: config={config!r}; expected a ModelConfig: read_config(...) makes one of a folder or a name"
            )
        if costs is None:
            costs = machine = machine_of(gpu, tp, transport)
            if gpu is None:  # this machine: it may have been measured
                from tokenweave.tuning.find import find_profile

                costs = find_profile(config, machine) or machine
        self.model = CostModel(config, costs)
        self._default_mode = asked_mode(mode)
        self._gain = _gain(self.model, config)
        self._cached = functools.lru_cache(maxsize=CACHED_PLANS)(self._choose)

    def plan(
        self,
        tokens: int,
        *,
        context: int = 0,
        sequences: Iterable[tuple[int, int]] | None = None,
        mode: Mode | str | None = None,
        allow_woven: bool = True,
        scheme: Scheme | None = None,
    ) -> Plan:
        """The plan of one step. Cached; equal arguments give the same plan on every rank.

        Args:
            tokens: rows of the step, 1 or more.
            context: positions that precede them, if they are one sequence (with ``sequences`` it has no meaning).
            sequences: (rows, context) of each sequence; default: one of ``tokens`` rows. Their order changes nothing.
            mode: ``"auto"`` or a mode that overrides the planner's; a woven step of one row is impossible and runs fused.
            allow_woven: False forbids a cut, whatever the mode says: a row of the suffix must be in the cache before a
                row of the prefix runs (a prefix-cache hit on blocks of the same step).
            scheme: the only one that a woven plan may have; None: any of the model's. One that the model does not know is taken
                to cost what its scheme of as many blocks does.

        Raises:
            RequestError: tokens < 1, sequences that do not add up to it, an unknown mode or scheme.
        """
        if scheme is not None and self._alike(scheme) is None:
            raise self._unknown(scheme)
        return self._cached(*self._request(tokens, context, sequences, mode, allow_woven), scheme)

    def explain(
        self,
        tokens: int,
        *,
        context: int = 0,
        sequences: Iterable[tuple[int, int]] | None = None,
        mode: Mode | str | None = None,
        allow_woven: bool = True,
    ) -> Explanation:
        """As :meth:`plan`, with waves and predicted times of every mode."""
        batch, asked, allow_woven = self._request(tokens, context, sequences, mode, allow_woven)
        plan = self._cached(batch, asked, allow_woven, None)
        woven = self._best_woven(batch) if allow_woven else None
        us = self._times(batch, woven)
        times = {"sequential": us.sequential_us, "fused": us.fused_us}
        if us.woven_us is not None:
            times["woven"] = us.woven_us
        times["no_comm"] = us.no_comm_us
        return Explanation(
            tokens,
            plan,
            None if woven is None else self._woven_plan(woven),
            self._waves(tokens, plan),
            {name: us / 1e3 for name, us in times.items()},
            self._reason(plan, asked, woven, times, allow_woven),
            self._best_cuts(batch) if allow_woven else (),
            self.model.costs.source,
        )

    def plan_us(self, tokens: int, plan: Plan) -> float:
        """us that a step of one prompt is predicted to take with this plan, whoever made it; fused ones with any number of blocks.

        Raises:
            RequestError: as :meth:`plan`; a cut behind the step's end.
        """
        batch, _, _ = self._request(tokens, 0, None, plan.mode, True)
        if plan.split is None:
            return self.model.unsplit_us(batch, str(plan.mode))
        if plan.split >= tokens:
            raise RequestError(f"a cut behind {plan.split} rows; the step has {tokens}")
        if (scheme := self._alike(plan.scheme)) is None:
            raise self._unknown(plan.scheme)
        return float(self.model.woven_us(batch, np.array([plan.split]), np.array([scheme]))[0])

    def _unknown(self, scheme: Scheme) -> RequestError:
        known = "; ".join(map(str, self.model.schemes))
        return RequestError(f"scheme {scheme}; expected as many blocks as one of these, and as late: {known}")

    def times(self, batch: Batch) -> StepTimes:
        """us of a step in every mode, and which of them would be chosen."""
        return self._times(batch, self._best_woven(batch))

    def _times(self, batch: Batch, woven: _Woven | None) -> StepTimes:
        model = self.model
        sequential, fused = (model.unsplit_us(batch, kind) for kind in ("sequential", "fused"))
        woven_us = None if woven is None else woven.us
        mode = self._best_mode(sequential, fused, woven_us)
        return StepTimes(batch.tokens, sequential, fused, woven_us, model.unsplit_us(batch, "no_comm"), mode)

    def _best_mode(self, sequential: float, fused: float, woven: float | None) -> Mode:
        """The fastest; woven only if it promises enough over the better of the others."""
        mode = Mode.FUSED if fused < sequential else Mode.SEQUENTIAL
        if self.model.tp > 1 and woven is not None and woven < min(fused, sequential) * self._gain:
            return Mode.WOVEN
        return mode

    def _request(
        self,
        tokens: int,
        context: int,
        sequences: Iterable[tuple[int, int]] | None,
        mode: Mode | str | None,
        allow_woven: bool,
    ) -> tuple[Batch, Mode | None, bool]:
        if tokens < 1:
            raise RequestError(f"a step of {tokens} tokens; expected 1 or more")
        if tokens > MOST_TOKENS:
            raise RequestError(f"a step of {tokens} tokens; expected at most {MOST_TOKENS}: no GPU holds more at once")
        batch = Batch(runs_of([(tokens, context)] if sequences is None else sequences))
        if batch.tokens != tokens:
            raise RequestError(f"the sequences have {batch.tokens} rows together; the step has {tokens}")
        return batch, self._default_mode if mode is None else asked_mode(mode), allow_woven

    def _choose(self, batch: Batch, mode: Mode | None, allow_woven: bool, scheme: Scheme | None) -> Plan:
        if mode is Mode.SEQUENTIAL:
            return Plan(Mode.SEQUENTIAL)
        fused = Plan(Mode.FUSED)  # nothing runs beside its collectives: the transport knows how many blocks are best
        if mode is Mode.FUSED:
            return fused
        if mode is Mode.WOVEN:
            woven = self._best_woven(batch, scheme) if allow_woven else None
            return fused if woven is None else self._woven_plan(woven)
        woven = self._best_woven(batch, scheme) if allow_woven and self.model.tp > 1 else None
        best = self._best_mode(
            self.model.unsplit_us(batch, "sequential"),
            self.model.unsplit_us(batch, "fused"),
            None if woven is None else woven.us,
        )
        if woven is not None and best is Mode.WOVEN:
            return self._woven_plan(woven)
        return fused if best is Mode.FUSED else Plan(Mode.SEQUENTIAL)

    def _candidates(
        self, batch: Batch, scheme: Scheme | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(cuts, indices of the model's schemes, predicted us), int64 and float64 [n]. None for a single row.

        For each scheme, only cuts whose halves need no more waves than the whole are considered where the batch has any
        such cut, else evenly spaced ones. Measured GEMM times make counting waves needless.
        """
        model, tokens = self.model, batch.tokens
        if not len(others := even_cuts(tokens, model.gpu)):
            return None
        sms = np.array([gemm_sms(model.gpu, model.held(each.ctas)) for each in model.schemes])
        neutral = [others[:0]] * len(sms) if model.costs.measured else model.tiling.neutral_cuts(tokens, sms)
        allowed = [cuts if len(cuts) else others for cuts in neutral]
        cuts = np.concatenate(allowed)
        schemes = np.repeat(np.arange(len(sms)), [len(cuts) for cuts in allowed])
        if scheme is not None:
            asked = schemes == self._alike(scheme)
            cuts, schemes = cuts[asked], schemes[asked]
        return cuts, schemes, model.woven_us(batch, cuts, schemes)

    def _cheap(self, tokens: int, cuts: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Which cuts cost the GEMMs no more than an equal one does; of those, the ones that cost at most half as much (or the
        least there is), where the step hardly takes longer for it: bool [n]. All, where none is so cheap, and where whole
        steps were measured, which say more than GEMMs alone."""
        if self.model.costs.steps:
            return np.ones(len(cuts), dtype=bool)
        cost, step = self.model.cut_us(tokens, cuts), row_step(self.model.gpu)
        equal = float(
            self.model.cut_us(tokens, max(step, tokens // 2 // step * step) if tokens > step else tokens // 2)
        )
        cheap = cost <= equal + 1e-9 * abs(equal)
        if not cheap.any():
            return np.ones(len(cuts), dtype=bool)
        half = cheap & (cost <= max(float(cost.min()), equal / 2))
        return half if half.any() and times[half].min() <= times[cheap].min() * CHEAPER else cheap

    def _best_woven(self, batch: Batch, scheme: Scheme | None = None) -> _Woven | None:
        """The best cut and scheme: the shortest makespan (see TIE, STEPS_TIE). None for a single row."""
        if (candidates := self._candidates(batch, scheme)) is None:
            return None
        cuts, schemes, times = candidates
        times = np.where(self._cheap(batch.tokens, cuts, times), times, np.inf)
        tie = STEPS_TIE if self.model.costs.steps else TIE
        close = np.nonzero(times <= times.min() * (1 + tie))[0]
        best = close[np.lexsort((times[close], abs(2 * cuts[close] - batch.tokens)))[0]]
        return _Woven(int(cuts[best]), scheme or self.model.schemes[schemes[best]], float(times[best]))

    def _alike(self, scheme: Scheme) -> int | None:
        """Index of the model's scheme that is this one, or else predicted as this one."""
        known = self.model.schemes
        if scheme in known:
            return known.index(scheme)
        return next((i for i, s in enumerate(known) if (s.ctas, s.late) == (scheme.ctas, scheme.late)), None)

    def _best_cuts(self, batch: Batch) -> tuple[Cut, ...]:
        """The fastest few, each in its best scheme; those that rule 3 of docs/planning.md drops come last."""
        if (candidates := self._candidates(batch)) is None:
            return ()
        cuts, schemes, times = candidates
        dropped, costs = ~self._cheap(batch.tokens, cuts, times), self.model.cut_us(batch.tokens, cuts)
        found: dict[int, Cut] = {}
        for index in np.lexsort((times, dropped)):
            cut, blocks = int(cuts[index]), self.model.schemes[schemes[index]].ctas
            if cut not in found:
                waves = self._waves(batch.tokens, Plan(Mode.WOVEN, split=cut, ctas=blocks))
                assert waves.prefix is not None
                assert waves.suffix is not None
                cost, ms = float(costs[index]), float(times[index]) / 1e3
                found[cut] = Cut(cut, blocks, (waves.prefix, waves.suffix), cost, ms)
            if len(found) == SHOWN_CUTS:
                break
        return tuple(found.values())

    def _woven_plan(self, woven: _Woven) -> Plan:
        return woven_plan(woven.cut, woven.scheme, left(self.model.costs, woven.scheme.ctas))

    def _waves(self, tokens: int, plan: Plan) -> Waves:
        model = self.model
        sms = int(gemm_sms(model.gpu, model.held(plan.ctas) if plan.mode is Mode.WOVEN else 0))
        (tiles,) = model.tiling.whole_tiles(tokens, np.array([sms]))
        parts = [tokens] if plan.split is None else [tokens, plan.split, tokens - plan.split]
        counts = [
            [waves(gemm, model.tiling.tiles[tile], rows, sms) for rows in parts]
            for gemm, tile in zip(model.gemms, tiles, strict=True)
        ]
        whole, prefix, suffix = ([sum(column) for column in zip(*counts, strict=True)] + [None, None])[:3]
        shapes = [(tile.rows, tile.columns) for tile in (model.tiling.tiles[index] for index in tiles)]
        names = [gemm.name for gemm in model.gemms]
        by_gemm = dict(zip(names, map(tuple, counts), strict=True))
        return Waves(whole, prefix, suffix, by_gemm, dict(zip(names, shapes, strict=True)))

    def _reason(
        self, plan: Plan, asked: Mode | None, woven: _Woven | None, times: dict[str, float], allow_woven: bool
    ) -> str:
        if asked is not None and asked is plan.mode:
            return f"{asked} was asked for"
        if asked is not None:
            return f"{asked} was asked for, but " + ("cuts are vetoed" if not allow_woven else "one row cannot be cut")
        if self.model.tp == 1:
            return "one rank has nothing to communicate"
        if plan.mode is Mode.WOVEN:
            return f"weaving saves {1 - times['woven'] / times['sequential']:.0%} of sequential's time"
        if not allow_woven:
            return "cuts are vetoed"
        if woven is None:
            return "one row cannot be cut"
        if not self._gain:
            return "a mixture of experts is woven by a tuned table alone: formulas do not know what is around its GEMMs"
        gain = 1 - times["woven"] / times[str(plan.mode)]
        return (
            f"the best cut would change {plan.mode}'s time by {-gain:+.1%}; it must save {1 - self._gain:.0%} or more"
        )


def _gain(model: CostModel, config: ModelConfig) -> float:
    """The share of the best other mode's time that a woven step must promise to take at most; 0: none is chosen."""
    if model.gpu.arch == "cpu":
        return CPU_GAIN
    if model.costs.measured:
        return MEASURED_GAIN
    return MIXTURE_GAIN if config.experts else GAIN


@functools.lru_cache(maxsize=16)
def _planner(config: ModelConfig, machine: Machine) -> Planner:
    return Planner(config, mode="auto", costs=machine)


def plan(
    tokens: int,
    config: ModelConfig,
    *,
    gpu: Gpu | str | None = None,
    tp: int = 1,
    transport: str | None = None,
    context: int = 0,
    sequences: Iterable[tuple[int, int]] | None = None,
    mode: Mode | str | None = None,
    allow_woven: bool = True,
) -> Plan:
    """The plan of one step: :meth:`Planner.plan` of a planner that is kept for the next call with the same arguments."""
    mode = asked_mode(mode) or "auto"
    planner = _planner(config, machine_of(gpu, tp, transport))
    return planner.plan(tokens, context=context, sequences=sequences, mode=mode, allow_woven=allow_woven)
