"""Times of chains of calls, captured as CUDA graphs and replayed on all ranks together, alone or beside other work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tokenweave.bench.timing import SLEEP_CYCLES, GraphClock, host_seconds

Call = Callable[[], object]

CHAIN_US = 800.0  # what a chain should take: long against its start, short against the tuner's minute
MIN_CALLS, MAX_CALLS = 3, 40
SAMPLES = 5
WARM_SECONDS, SAMPLE_SECONDS = 0.1, 0.03  # what the power limit takes to settle the clock; of each sample after that
COVER = 1.6  # work beside a chain is made to last so many times the chain's estimate
_HEAD_START_CYCLES = 20_000  # about 10 us: the other work has its SMs before the clock starts


def calls_of(us: float) -> int:
    """Calls of a chain, of about ``us`` each."""
    return max(MIN_CALLS, min(MAX_CALLS, round(CHAIN_US / max(us, 1.0))))


def _cover_us(us: float) -> float:
    """What lasts longer than a chain of calls of about ``us`` each."""
    return COVER * us * calls_of(us) + 30.0


class Chains:
    """Captures and times. Estimates and calls have to be the same on all ranks.

    Args:
        group: the ranks. device: this rank's GPU, the current one.

    Attributes:
        compute, comm: capture GEMMs and the like, and collectives, which go first where both want an SM.
        uncovered: samples in which the work beside ended first.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.compute, self.comm = GraphClock(group, device), GraphClock(group, device, priority=-1)
        self._side = torch.cuda.Stream(device)
        self._start, self._end, self._other_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._meet = torch.zeros(1, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool lives as long as a graph that captured into it.
        self._anchor: torch.cuda.CUDAGraph | None = self.captured(self.compute, [lambda: self._meet.add_(0)], 1)
        self.uncovered = 0

    def close(self) -> None:
        """Drops what is captured."""
        self._anchor = None

    def alone(self, clock: GraphClock, calls: Sequence[Call], us: float) -> list[float]:
        """us of one of ``calls``, which take turns, in a chain; samples. ``us``: about that."""
        return self._replayed(clock, calls, us, 0.0, 0.0)

    def sustained(self, clock: GraphClock, calls: Sequence[Call], us: float) -> list[float]:
        """As :meth:`alone`, in a run with hardly a pause that lasts until the clocks are those of such a load."""
        return self._replayed(clock, calls, us, WARM_SECONDS, SAMPLE_SECONDS)

    def _replayed(self, clock: GraphClock, calls: Sequence[Call], us: float, warm: float, sample: float) -> list[float]:
        """``warm``, ``sample``: seconds of replays before, and in each sample; one replay at least."""
        count = calls_of(us)
        graph = self.captured(clock, calls, count)

        def replayed(seconds: float) -> float:
            return clock.replay(graph, _nothing, max(1, math.ceil(seconds * 1e6 / (us * count)))) / count

        replayed(warm)
        return [replayed(sample) for _ in range(SAMPLES)]

    def beside(
        self,
        clock: GraphClock,
        calls: Sequence[Call],
        us: float,
        other: GraphClock,
        beside: Sequence[Call],
        beside_us: float,
    ) -> list[float]:
        """As :meth:`alone`, while the calls ``beside``, of about ``beside_us`` all together, go round and round."""
        count = calls_of(us)
        rounds = max(1, math.ceil(_cover_us(us) / beside_us))
        graph = self.captured(clock, calls, count)
        background = self.captured(other, beside, rounds * len(beside), len(beside))
        samples = []
        for index in range(SAMPLES):
            took, theirs = self._replay_beside(graph, background)
            if index:  # the first one warms up
                samples.append(took / count)
                self.uncovered += theirs < took
        return samples

    def captured(self, clock: GraphClock, calls: Sequence[Call], count: int, kinds: int = 1) -> torch.cuda.CUDAGraph:
        """``count`` calls in turn. The first ``kinds`` run once before, on the stream that captures: nothing may be set up
        in a capture, and the others are the same kernels on other weights."""
        clock.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(clock.stream):
            for call in calls[:kinds]:
                call()

        def walk() -> None:
            for call in itertools.islice(itertools.cycle(calls), count):
                call()

        return clock.capture(walk, 1, self._pool)

    def host_us(self, call: Call, parts: int) -> list[float]:
        """us of host time of each of ``parts`` parts of ``call``, with an idle GPU; samples."""
        call()
        return [seconds * 1e6 / parts for seconds in host_seconds(call, SAMPLES, self._group)]

    def _replay_beside(self, graph: torch.cuda.CUDAGraph, other: torch.cuda.CUDAGraph) -> tuple[float, float]:
        """us of one replay of ``graph`` while ``other`` runs; and of ``other`` from the same moment on."""
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(self._meet, group=self._group)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            other.replay()
            self._other_end.record()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self._start.record()
        graph.replay()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end) * 1e3, self._start.elapsed_time(self._other_end) * 1e3


def _nothing() -> None:
    pass
