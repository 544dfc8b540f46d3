"""Walks the schedule on all ranks together and keeps each point's time, the slowest rank's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from tokenweave.planning.profile_points import Point
from tokenweave.tuning.schedule import PHASES, Phase, Setting, planned

log = logging.getLogger(__name__)
_CHECK_EVERY = 4  # points between two looks at the clock, which the ranks take together


class Pieces(Protocol):
    """What can be measured, on one rank."""

    def measure(self, point: Point) -> list[float]:
        """us of one execution, several samples. Every rank is asked for the same points in the same order; sample i of all
        ranks was taken at the same time."""


class Tuner:
    """Measures everything that a table needs.

    Args:
        setting: the same on all ranks. pieces: this rank's.
        slowest: numbers of this rank -> the largest of all ranks', each; collective.
        clock: seconds, of this process.
        seconds: after so many, optional phases are left out.
        progress: called with (points done, points in all, name of the phase).
        phase_done: called when all points of a phase are measured.

    Attributes:
        times: point -> us, as far as it got.
        skipped: names of phases that were left out or cut short.
    """

    def __init__(
        self,
        setting: Setting,
        pieces: Pieces,
        slowest: Callable[[Sequence[float]], list[float]],
        clock: Callable[[], float],
        seconds: float,
        progress: Callable[[int, int, str], None],
        phases: Sequence[Phase] = PHASES,
        *,
        phase_done: Callable[[], object] = lambda: None,
    ) -> None:
        self._setting, self._pieces, self._slowest = setting, pieces, slowest
        self._clock, self._seconds, self._progress = clock, seconds, progress
        self._phase_done, self._phases = phase_done, phases
        self.times: dict[Point, float] = {}
        self.skipped: list[str] = []

    def run(self) -> dict[Point, float]:
        """Measures; returns ``times``."""
        began = self._clock()
        total = planned(self._setting)
        for phase in self._phases:
            points = [p for p in dict.fromkeys(phase.points(self._setting, self.times)) if p not in self.times]
            for index, point in enumerate(points):
                self._progress(len(self.times), total, phase.name)
                if phase.optional and index % _CHECK_EVERY == 0 and self._late(began):
                    self.skipped.append(phase.name)
                    log.warning(
                        "tune: %.0f seconds are over: %d points of %r are left out; the table is whole without",
                        self._seconds,
                        len(points) - index,
                        phase.name,
                    )
                    break
                self.times[point] = median(self._slowest(self._pieces.measure(point)))
            self._phase_done()
        self._progress(len(self.times), len(self.times), "done")
        return self.times

    def _late(self, began: float) -> bool:
        """Whether any rank's time is up: they must leave out the same points."""
        return self._slowest([self._clock() - began])[0] > self._seconds
