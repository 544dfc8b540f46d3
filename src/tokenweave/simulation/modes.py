"""The predictor as the simulation asks it: a mode's step times."""

from __future__ import annotations

from tokenweave.planning.plan import Mode, StepTimes
from tokenweave.planning.predict import Predictor
from tokenweave.simulation.table import Chunks, ExactUs

MODES = ("sequential", "fused", "woven", "auto", "no_comm")
"""``sequential`` is without TokenWeave, ``auto`` with it; ``no_comm`` is the reference without communication. Steps of one row
cannot be woven: fused."""


def exact_us(predictor: Predictor, mode: str) -> ExactUs:
    """us of a step in one of :data:`MODES`. Several modes should share a predictor: it computes all of them at once."""

    def us(chunks: Chunks, decodes: int, context: int) -> float:
        return _of(predictor.step_of(chunks, decodes, context), mode)

    return us


def _of(times: StepTimes, mode: str) -> float:
    if mode == "auto":
        return times.auto_us
    if mode == "no_comm":
        return times.no_comm_us
    if mode == "woven" and times.woven_us is None:
        return times.fused_us
    return times.of(Mode(mode))
