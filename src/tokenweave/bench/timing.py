"""How speed is judged: rounds in which every mode runs once, in random order, after the same idle time; medians, and
bootstrap intervals of their ratios. Figures from different loops are never compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokenweave.cuda.graph import capturing
from tokenweave.errors import RequestError

MIN_ROUNDS = 20
SLEEP_CYCLES = 500_000  # about 0.25 ms on H200: the host queues a whole sample behind it


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def median_estimate(samples: Sequence[float], draws: int = 2000) -> Estimate:
    """Median of ``samples``; the interval is the 2.5 and 97.5 percentile of the medians of ``draws`` resamplings."""
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(values), size=(draws, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), (2.5, 97.5))
    return Estimate(float(np.median(values)), float(low), float(high))


def ratio_estimate(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Median of the rounds' ratios ours / theirs, which share each round's clocks and temperature."""
    return median_estimate([a / b for a, b in zip(ours, theirs, strict=True)])


def paired_rounds(
    modes: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0, after_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Runs every mode once a round, in an order that is drawn anew for each round.

    Args:
        modes: name -> a function that runs the mode once and returns its time. The same names, in the same order, on
            all ranks.
        rounds: at least 20.
        seed: of the order; the same on all ranks, which must run the same mode together.
        after_round: called after each, e.g. to sample clocks.

    Returns:
        Name -> the times of all rounds.
    """
    if rounds < MIN_ROUNDS:
        raise RequestError(f"{rounds} rounds; expected at least {MIN_ROUNDS}: fewer say too little about noise")
    return take_turns(modes, rounds, seed, after_round)


def take_turns(
    modes: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0, after_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """:func:`paired_rounds` of any number: enough to choose by, not to report."""
    order, shuffle = list(modes), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(modes[name]())
        after_round()
    return times


def slowest_rank(
    times: Mapping[str, Sequence[float]], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, list[float]]:
    """Each round's time on the rank that took longest. Collective over ``group``."""
    table = torch.tensor([list(samples) for samples in times.values()], dtype=torch.float64, device=device)
    if table.numel() and dist.is_initialized():
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(times, table.tolist(), strict=True))


def host_seconds(call: Callable[[], object], samples: int, group: dist.ProcessGroup | None) -> list[float]:
    """Seconds that the host needs to issue ``call``, with idle GPUs, from the same moment on all ranks. Collective."""
    found = []
    for _ in range(samples):
        torch.cuda.synchronize()
        dist.barrier(group)
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return found


class GraphClock:
    """Captures chains of calls as CUDA graphs and times their replay, started together on all ranks.

    Args:
        group: the ranks; a process that is no rank has none to meet. device: this rank's GPU, the current one.
        priority: of what is captured; -1 goes first.

    Attributes:
        stream: captures.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, priority: int = 0) -> None:
        self._group = group
        self._meet = torch.zeros(1, device=device)
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def capture(self, call: Callable[[], object], calls: int, pool: Any = None) -> torch.cuda.CUDAGraph:
        """``calls`` calls in a row as one graph. ``call`` must have run before: nothing may be set up in a capture.

        Args:
            pool: of memory, as :func:`torch.cuda.graph_pool_handle` gives it, of which another graph is alive; None: its own.
        """
        torch.cuda.synchronize()
        with capturing(self.stream, pool) as graph:
            for _ in range(calls):
                call()
        torch.cuda.synchronize()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, reset: Callable[[], None], replays: int = 1) -> float:
        """Microseconds of one replay on this rank, the mean of ``replays`` that follow one another.

        The GPU idles while the host queues the sample, then the ranks meet on the device, so that the start of the
        first call is not a wait for another rank's host.
        """
        reset()
        torch.cuda._sleep(SLEEP_CYCLES)
        if dist.is_initialized():
            dist.all_reduce(self._meet, group=self._group)
        self._start.record()
        for _ in range(replays):
            graph.replay()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / replays
