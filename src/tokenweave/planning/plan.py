"""What the planner decides for one step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Mode(str, Enum):
    """How a step walks the stages."""

    SEQUENTIAL = "sequential"  # all-reduce, residual add, RMSNorm on every rank
    FUSED = "fused"  # one split, the fused collective
    WOVEN = "woven"  # two splits, one's collective beside the other's compute

    def __str__(self) -> str:
        return self.value


GEMMS = ("qkv", "o", "gate_up", "down")
"""A layer's."""

TOLD = (*GEMMS, "attention")
"""What can be told of SMs that a collective holds."""

POINTS = ("qkv", "attention", "o", "gate_up", "activation", "down")
"""Where a compute says that it has come to: just before each of its GEMMs, attention, and the MLP's activation."""

FIRST_GEMMS = ("qkv", "gate_up")
"""Of a stage: what runs beside a collective that starts at once. It is over, as a rule, before o and down begin."""

LATE = ("qkv", "activation")
"""Points at which collectives start that let gate_up pass, which loses most to SMs that others hold."""

LATE_GEMMS = ("qkv", "down")
"""What runs beside such collectives."""


@dataclass(frozen=True)
class Scheme:
    """How the splits of a woven step share the GPU.

    Attributes:
        ctas, cluster: of the collectives, as :class:`Plan`'s.
        told: of :data:`TOLD`, those that are told of the SMs that a collective leaves; the others plan for all.
        late: collectives start at :data:`LATE`, and not at once.
    """

    ctas: int | None = None
    cluster: int | None = None
    told: tuple[str, ...] = ()
    late: bool = False

    def __str__(self) -> str:
        """E.g. "8 / 2, qkv+gate_up limited, late": blocks, of a cluster, and so on."""
        blocks = "default" if self.ctas is None else f"{self.ctas} / {self.cluster or 1}"
        return f"{blocks}, {'+'.join(self.told) or 'none'} limited" + (", late" if self.late else "")


def told_schemes(ctas: int | None, cluster: int | None) -> tuple[Scheme, Scheme]:
    """With so many blocks, what runs beside them told: collectives at once, and late."""
    return Scheme(ctas, cluster, FIRST_GEMMS), Scheme(ctas, cluster, LATE_GEMMS, late=True)


@dataclass(frozen=True)
class Plan:
    """How one step of ``tokens`` rows is run. A pure function of what all ranks know, so ranks always agree.

    Attributes:
        mode: sequential, fused or woven.
        split: rows in the prefix; None unless ``mode`` is woven, then 0 < split < tokens.
        ctas: thread blocks of the fused collective (one SM each), so that it leaves the others to the GEMMs beside it; None
            for the transport's own choice, where nothing runs beside it or there is none.
        cluster: thread blocks per cluster of the collective's launch; None for no clusters.
        gemm_sms: SMs left to each GEMM, keyed by (GEMM name, split name) such as ``("gate_up", "prefix")``, and to attention.
        start_at: of a woven plan, :data:`POINTS` of the other split's compute at which a collective starts: the first that it
            comes to. Empty: at once. A GEMM that suffers most from SMs held by another kernel is so spared of it.
    """

    mode: Mode
    split: int | None = None
    ctas: int | None = None
    cluster: int | None = None
    gemm_sms: Mapping[tuple[str, str], int] = field(default_factory=dict)
    start_at: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            raise ValueError(f"Plan: mode={self.mode!r}; expected a Mode, such as Mode.WOVEN")
        if isinstance(self.start_at, str):
            raise ValueError(f"Plan: start_at={self.start_at!r}; expected a set of points of {', '.join(POINTS)}")
        object.__setattr__(self, "start_at", frozenset(self.start_at))  # graphs are looked up by it
        if unknown := sorted(self.start_at.difference(POINTS), key=str):
            raise ValueError(f"Plan: start_at={unknown}; expected points of {', '.join(POINTS)}")
        if (self.split is not None) != (self.mode is Mode.WOVEN):
            raise ValueError(
                f"Plan: split={self.split} with mode={self.mode}: a split belongs to a woven plan and only to it"
            )
        if self.split is not None and self.split < 1:
            raise ValueError(f"Plan: split={self.split}: a woven plan needs at least one row in its prefix")

    @functools.cached_property
    def launch(self) -> tuple[Mode, int | None, int | None, tuple[tuple[tuple[str, str], int], ...], frozenset[str]]:
        """All but the split, hashable: mode, ctas, cluster, gemm_sms, start_at. A captured graph runs one of these."""
        return self.mode, self.ctas, self.cluster, tuple(sorted(self.gemm_sms.items())), self.start_at

    @property
    def scheme(self) -> Scheme:
        """How a woven step's splits share the GPU; what :func:`woven_plan` was given, if the collective holds any SMs."""
        told = tuple(dict.fromkeys(name for name, _ in self.gemm_sms))
        return Scheme(self.ctas, self.cluster, told, bool(self.start_at))


def woven_plan(split: int, scheme: Scheme, left: int | None) -> Plan:
    """The plan of a woven step.

    Args:
        split: rows of the prefix.
        left: SMs that the collective leaves to GEMMs; None where it holds none.
    """
    told = {(gemm, part): left for gemm in scheme.told for part in ("prefix", "suffix") if left is not None}
    start_at = frozenset(LATE if scheme.late else ())
    return Plan(Mode.WOVEN, split, scheme.ctas, scheme.cluster, told, start_at)


@dataclass(frozen=True)
class StepTimes:
    """us of one step in every mode.

    Attributes:
        tokens: its rows.
        sequential_us, fused_us: of the whole step on one stream.
        woven_us: with the best cut; None where the step is one row.
        no_comm_us: the reference without communication: collectives removed, every rank norms all rows.
        mode: what the planner would run. auto_us: its time.
    """

    tokens: int
    sequential_us: float
    fused_us: float
    woven_us: float | None
    no_comm_us: float
    mode: Mode

    @property
    def auto_us(self) -> float:
        return self.of(self.mode)

    def of(self, mode: Mode) -> float:
        """us in this mode. Raises ValueError for woven where the step is one row."""
        us = {Mode.SEQUENTIAL: self.sequential_us, Mode.FUSED: self.fused_us, Mode.WOVEN: self.woven_us}[mode]
        if us is None:
            raise ValueError("a step of one row cannot be woven")
        return us
