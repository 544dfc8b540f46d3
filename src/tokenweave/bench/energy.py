"""Power by a GPU's own energy counter, which moves in steps: energy and time are taken between two of its changes.

NVML's counter of all energy is refreshed every 20 to 100 ms. On H200 it is 100 ms: what it grows by over a few tenths of a
second is a multiple of about 70 J under a limit of 700 W (benchmarks/results, latency runs of 2026-11). Read at two other
moments it is off by up to a refresh's energy, which is a large part of a short window's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_CHANGES = 10
_EVERY = 2e-3  # seconds between readings: how well a change's time is known, 0.2 % of a second
_ABOVE_LIMIT = 1.05  # of the power limits: GPUs keep to theirs on average, so more than that is a wrong measurement


@dataclass(frozen=True)
class Change:
    """A refresh of the counter: ``seconds`` of :func:`time.perf_counter`, and the ``joules`` that it then showed."""

    seconds: float
    joules: float


def power(changes: Sequence[Change]) -> float | None:
    """Watts between the first change and the last; None where there are not two."""
    if len(changes) < 2:
        return None
    first, last = changes[0], changes[-1]
    return (last.joules - first.joules) / (last.seconds - first.seconds)


class EnergyWatch:
    """Reads a counter in a thread while it is entered, and notes when it changes. To be entered once, on a GPU that has been
    busy for a refresh: the first change tells of what came before it.

    Args:
        read: gives the counter, in joules.
        clock: gives seconds.

    Attributes:
        changes: seen, in order; complete once it is left.
        failure: what ``read`` raised, after which nothing more was read; or None.
    """

    def __init__(self, read: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self.changes: list[Change] = []
        self.failure: str | None = None
        self._read, self._clock = read, clock
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy counter", daemon=True)

    def __enter__(self) -> EnergyWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._note_changes()
        except Exception as error:  # NVML's, whose type needs the library
            self.failure = str(error) or repr(error)

    def _note_changes(self) -> None:
        before, shown = self._clock(), self._read()
        while not self._left.wait(_EVERY):
            now, joules = self._clock(), self._read()
            if joules != shown:  # at some time between the two readings
                self.changes.append(Change((before + now) / 2, joules))
            before, shown = now, joules


@dataclass(frozen=True)
class RankPower:
    """What one rank's GPU took over a window.

    Attributes:
        changes: of its counter. seconds: between the first and the last. watts: over these, or None.
        limit_w: that the GPU keeps to; None where it can't be read.
        failure: why the counter can't be read, or None.
    """

    changes: int
    seconds: float
    watts: float | None
    limit_w: float | None
    failure: str | None = None


def rank_power(watch: EnergyWatch | None, limit_w: float | None) -> RankPower:
    """Of a watch that has been left; None for a GPU whose counter can't be read."""
    if watch is None:
        return RankPower(0, 0.0, None, limit_w, "its energy counter can't be read")
    changes = watch.changes
    seconds = changes[-1].seconds - changes[0].seconds if changes else 0.0
    return RankPower(len(changes), seconds, power(changes), limit_w, watch.failure)


def refused(ranks: Sequence[RankPower]) -> str | None:
    """Why these figures are not to be used; None if they are."""
    for rank, one in enumerate(ranks):
        if one.failure is not None:
            return f"rank {rank}'s GPU: {one.failure}"
    rank, least = min(enumerate(ranks), key=lambda pair: pair[1].changes)
    if least.changes < LEAST_CHANGES:
        return (
            f"the energy counter of rank {rank}'s GPU changed {least.changes} times in the longest window; expected at "
            f"least {LEAST_CHANGES}"
        )
    watts = sum(one.watts for one in ranks if one.watts is not None)
    limits = [one.limit_w for one in ranks if one.limit_w is not None]
    if len(limits) == len(ranks) and watts > _ABOVE_LIMIT * sum(limits):
        return f"the energy counters say {watts:.0f} W, the GPUs' power limits {sum(limits):.0f} W, together"
    return None
