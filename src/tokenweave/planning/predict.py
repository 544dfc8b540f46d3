"""How long steps take on a machine that need not be at hand: every mode's time of one model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from tokenweave.errors import RequestError
from tokenweave.models.config import ModelConfig
from tokenweave.planning.batch import Batch, Run, rounded_up, runs_of
from tokenweave.planning.machine import Costs
from tokenweave.planning.plan import StepTimes
from tokenweave.planning.planner import Planner

CACHED_STEPS = 1 << 16


class Predictor:
    """Step times of one model on one machine. Made in some 20 ms, then kept.

    Args:
        config: the model.
        costs: the machine, described (:func:`machine_of`) or measured.

    Attributes:
        planner: chooses the cuts.

    Raises:
        ModelError: more ranks than query heads.
    """

    def __init__(self, config: ModelConfig, costs: Costs) -> None:
        self.planner = Planner(config, mode="auto", costs=costs)
        self._steps = functools.lru_cache(maxsize=CACHED_STEPS)(self._predict)
        self._parts = functools.lru_cache(maxsize=CACHED_STEPS)(self._of_parts)

    def step(self, sequences: Iterable[tuple[int, int]]) -> StepTimes:
        """Of a step of these (rows, context); their order changes nothing. Cached.

        Raises:
            RequestError: no sequences, rows < 1 or context < 0.
        """
        runs = runs_of(sequences)
        if not runs:
            raise RequestError("a step of no sequences; expected one or more")
        return self._steps(runs)

    def step_of(self, chunks: Sequence[tuple[int, int]], decodes: int = 0, decode_context: int = 0) -> StepTimes:
        """As :meth:`step`, for chunks of prompts and ``decodes`` sequences of one row, ``decode_context`` positions on average.

        The average is rounded up to an eighth of a power of two. A known step costs a microsecond or two if ``chunks`` is
        a tuple.
        """
        return self._parts(tuple(chunks), decodes, rounded_up(decode_context))

    def _of_parts(self, chunks: tuple[tuple[int, int], ...], decodes: int, context: int) -> StepTimes:
        if decodes < 0:
            raise RequestError(f"{decodes} decodes; expected 0 or more")
        if any(rows < 2 for rows, _ in chunks):
            return self.step([*chunks, *[(1, context)] * decodes])
        runs = runs_of(chunks)
        if decodes:
            runs = (Run(decodes, context, False), *runs)
        if not runs:
            raise RequestError("a step of no sequences; expected one or more")
        return self._steps(runs)

    def _predict(self, runs: tuple[Run, ...]) -> StepTimes:
        return self.planner.times(Batch(runs))


@functools.lru_cache(maxsize=16)
def predictor_of(config: ModelConfig, costs: Any) -> Predictor:
    """A predictor that is kept for the next call with equal arguments. ``costs`` has to be hashable."""
    return Predictor(config, costs)


def predict_step(config: ModelConfig, costs: Any, sequences: Iterable[tuple[int, int]]) -> StepTimes:
    """:meth:`Predictor.step` of :func:`predictor_of`."""
    return predictor_of(config, costs).step(sequences)
