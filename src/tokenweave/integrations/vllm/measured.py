"""Which mode is fastest, as measured on this machine when vLLM starts: the last word in auto mode.

The planner knows GEMMs, attention and links; it does not know vLLM's compiled kernels, its quantised GEMMs, or how fast its
host launches them. So a few sizes are run both ways, and what was not faster is not used. Before that two of them are woven
in several schemes: a planner without a table of this machine knows little of what those cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from tokenweave.planning import Mode

MARGIN = 0.99  # a mode must take at most this share of stock's time: clocks wander by about as much
SIZES = (16, 64, 256, 512, 640, 1024, 2048, 4096, 8192)  # rows
WOVEN_ROWS = 512  # smaller steps are not woven: halves of a tile each
SCHEME_SIZES = (1024, 2048)  # rows of the steps in which schemes are compared
SCHEME_MS = 150.0  # unless they are predicted to take longer
REPEATS = 5
HOST_MARGIN = 1.25  # the process that launches a step also prepares the next one
SIZE_MS = 250.0  # the rounds of a size take each mode about so long, by prediction
MOST_MS = 300.0
"""Sizes that are predicted to take longer are not measured: they would cost more of the start than they tell."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step by size.

    Attributes:
        rows: ascending.
        stock, fused, woven: of each size, by the slowest rank; infinite where it was not measured. The latter two as graphs.
        launching: what the host takes to launch a fused and a woven step kernel by kernel, whatever its rows.
    """

    rows: tuple[int, ...]
    stock: tuple[float, ...]
    fused: tuple[float, ...]
    woven: tuple[float, ...]
    launching: tuple[float, float] = (math.inf, math.inf)

    @classmethod
    def of(cls, rows: Sequence[int], times: Sequence[Sequence[float]], launching: Sequence[float]) -> Measured:
        """From (stock, fused, woven) of each size, and the host's (fused, woven)."""
        stock, fused, woven = zip(*times, strict=True)
        return cls(tuple(rows), stock, fused, woven, (launching[0], launching[1]))

    def ms(self, mode: Mode, rows: int) -> float:
        """Of a step, as a graph unless it is stock's (``SEQUENTIAL``). Between sizes it is interpolated over logarithms; beyond
        the last it grows with the rows, and before the first it is that one's."""
        times = {Mode.SEQUENTIAL: self.stock, Mode.FUSED: self.fused, Mode.WOVEN: self.woven}[mode]
        known = [(n, ms) for n, ms in zip(self.rows, times, strict=True) if ms < math.inf]
        if not known:
            return math.inf
        sizes, values = zip(*known, strict=True)
        inside = math.exp(float(np.interp(np.log(rows), np.log(sizes), np.log(values))))
        return inside * max(1.0, rows / sizes[-1])

    def launched_ms(self, mode: Mode, rows: int) -> float:
        """Of a fused or woven step that is launched kernel by kernel."""
        host = dict(zip((Mode.FUSED, Mode.WOVEN), self.launching, strict=True))[mode]
        return max(self.ms(mode, rows), host * HOST_MARGIN)

    def best(self, rows: int, *, allow_woven: bool = True) -> Mode:
        """The fastest mode for a step; ``SEQUENTIAL`` is stock. Between sizes, and beyond them, shares of stock's time are
        interpolated over the logarithm of the rows; a mode is not chosen below the sizes at which it was measured."""
        shares = {Mode.FUSED: self._share(self.fused, rows)}
        if allow_woven:
            shares[Mode.WOVEN] = self._share(self.woven, rows)
        mode = min(shares, key=lambda m: shares[m])
        return mode if shares[mode] <= MARGIN else Mode.SEQUENTIAL

    def _share(self, times: Sequence[float], rows: int) -> float:
        known = [
            (n, mine / stock) for n, mine, stock in zip(self.rows, times, self.stock, strict=True) if mine < math.inf
        ]
        if not known or (known[0][0] > self.rows[0] and rows < known[0][0]):
            return math.inf
        sizes, shares = zip(*known, strict=True)
        return float(np.interp(np.log2(rows), np.log2(sizes), shares))

    def __str__(self) -> str:
        """For the log."""
        texts = []
        for n, *times in zip(self.rows, self.stock, self.fused, self.woven, strict=True):
            named = zip(times, ("stock", "fused", "woven"), strict=True)
            texts.append(f"{n} rows: " + ", ".join(f"{ms:.2f} {name}" for ms, name in named if ms < math.inf))
        fused, woven = self.launching
        return "; ".join([*texts, f"to launch one: {fused:.1f} fused, {woven:.1f} woven"])


def milliseconds(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Median wall time of each call, the host's part included, after a round that is not counted. They take turns, so that a
    clock that wanders does so for all. ``repeats`` are the same on all ranks, whose calls wait for each other."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, of in zip(calls, times, strict=True):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(device)
            of.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(of[1:]) for of in times]


def launching_ms(call: Callable[[], object], device: torch.device) -> float:
    """What the host takes for a call that launches kernels, the least of some, none of which waits for the GPU."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize(device)
    return min(times)


def slowest(
    times: Sequence[Sequence[float]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[float]]:
    """The largest of each figure over all ranks, so that all decide alike."""
    table = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return table.tolist()
