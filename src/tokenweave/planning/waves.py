"""Waves of a whole batch and of its parts: where a batch may be cut.

A partly filled wave takes as long as a full one. That is the saw-tooth that a cut of the batch can fall foul of: two
halves of 2 waves each cost more than a whole of 3. To compare the waves of a whole with those of its parts they are all
counted in the whole's tile shape: a wave of half-sized tiles is another, cheaper unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenweave.planning.gemms import (
    BYTES,
    TILES,
    Gemm,
    Tile,
    attention_gemms,
    ceil_div,
    gemm_sms,
    gemm_us,
    mlp_gemms,
    tile_time_us,
    wave_us,
    waves,
)
from tokenweave.planning.hardware import Gpu

__all__ = [
    "BYTES",
    "TILES",
    "Gemm",
    "Tile",
    "Tiling",
    "attention_gemms",
    "ceil_div",
    "even_cuts",
    "gemm_sms",
    "gemm_us",
    "mlp_gemms",
    "row_step",
    "tile_time_us",
    "wave_us",
    "waves",
]

MAX_CUTS = 128  # of one batch, where waves rule none out
NEAR_CUTS = 128  # around the middle, whose waves are counted first
NEUTRAL_CUTS = 32  # of those without more waves than the whole, the nearest to the middle
SLIVERS = 32  # up to as many row steps a batch may be cut anywhere: filling the SMs matters more than balance


def row_step(gpu: Gpu) -> int:
    """Cuts are tried at multiples of this many rows: the tile heights of large GEMMs are multiples of it."""
    return 16 if gpu.arch == "cpu" else 64


def even_cuts(tokens: int, gpu: Gpu) -> np.ndarray:
    """Prefix lengths worth trying where no cut is wave-neutral, int64 [n <= MAX_CUTS].

    Multiples of :func:`row_step`, or of its double, fourfold, ...; the middle of a batch that is no longer than a row
    step; empty for fewer than two tokens. Long batches get a coarser grid so that a plan stays under a millisecond, and
    keep a third of the rows on either side: a sliver cannot hide the rest's collective.
    """
    step = row_step(gpu)
    if tokens <= step:
        return np.array([(tokens + 1) // 2] if tokens > 1 else [], dtype=np.int64)
    long = tokens > SLIVERS * step
    while (tokens - 1) // step > MAX_CUTS:
        step *= 2
    cuts = np.arange(step, tokens, step, dtype=np.int64)
    return cuts[(3 * cuts >= tokens) & (3 * cuts <= 2 * tokens)] if long else cuts


class Tiling:
    """The tile shapes and waves of several GEMMs on one GPU, for many numbers of SMs and cuts at once."""

    def __init__(self, gemms: Sequence[Gemm], gpu: Gpu) -> None:
        self.gemms, self.tiles = tuple(gemms), TILES[gpu.arch]
        self._step = row_step(gpu)
        self._height = np.array([tile.rows for tile in self.tiles])
        # [gemms, tiles]: tiles side by side of one row of tiles, and us of a wave
        self._across = np.array([[ceil_div(g.n, t.columns) * g.experts for t in self.tiles] for g in gemms])
        self._wave_us = np.array([[wave_us(g.k, t, gpu) for t in self.tiles] for g in gemms])
        self._experts, self._routed = np.array([[g.experts, g.experts_per_token] for g in gemms]).T

    def whole_tiles(self, tokens: int, sms: np.ndarray) -> np.ndarray:
        """Index into ``tiles`` of the uncut batch's shape, the fastest: int64 [choices] -> int64 [choices, gemms].

        That shape is the unit in which the waves of the whole and of its halves are counted.
        """
        rows = ceil_div(tokens * self._routed, self._experts)[:, None]
        in_whole = ceil_div(rows, self._height) * self._across
        return (ceil_div(in_whole, sms[:, None, None]) * self._wave_us).argmin(axis=2)

    def neutral_cuts(self, tokens: int, sms: np.ndarray) -> list[np.ndarray]:
        """Cuts whose halves need no more waves together than the whole on the same SMs, for each number of SMs.

        Waves are summed over the GEMMs. Both sides are counted on the SMs that the GEMMs of a woven step have: that a held
        SM costs time is the makespan's business, that a cut wastes SMs is this function's.

        Returns:
            int64 [n <= NEUTRAL_CUTS] for each of ``sms``, from the nearest to the middle on. Empty only where no cut of
            the batch is neutral, wherever it lies.
        """
        tiles = self.whole_tiles(tokens, sms)
        steps = np.arange(self._step, tokens, self._step, dtype=np.int64)
        near = steps[max(0, (len(steps) - NEAR_CUTS) // 2) :][:NEAR_CUTS]
        parts = np.concatenate([near, tokens - near, [tokens]])
        total = sum(self._waves(g, parts, tiles[:, g, None], sms[:, None]) for g in range(len(self.gemms)))
        mask = total[:, : len(near)] + total[:, len(near) : -1] <= total[:, -1:]
        found = []
        for of_near, shapes, usable in zip(mask, tiles, sms.tolist(), strict=True):
            cuts = near[of_near]
            if not len(cuts):
                cuts = self._neutral_anywhere(tokens, usable, shapes, steps, len(near))
            found.append(cuts[abs(2 * cuts - tokens).argsort(kind="stable")[:NEUTRAL_CUTS]])
        return found

    def _neutral_anywhere(self, tokens: int, sms: int, tiles: np.ndarray, steps: np.ndarray, known: int) -> np.ndarray:
        """All neutral cuts among ``steps``, of which ``known`` are known not to be, and the ends of rows of tiles.

        No other cut can be neutral where none of these is: lengthening its prefix until a row of tiles ends adds no tiles
        to it and can only take some from the suffix.
        """
        gemms = range(len(self.gemms))
        whole = [int(self._waves(g, tokens, tiles[g], sms)) for g in gemms]
        if min(whole) < 2:  # each half has a wave of every GEMM
            return steps[:0]
        ends = [
            np.arange(1, ceil_div(tokens * routed, unit), dtype=np.int64) * unit // routed
            for unit, routed in zip((self._height[tiles] * self._experts).tolist(), self._routed.tolist(), strict=True)
            if unit % (self._step * routed)
        ]
        if not ends and len(steps) <= known:
            return steps[:0]
        cuts = np.unique(np.concatenate([steps, *ends])) if ends else steps
        for g in gemms:  # halves never need fewer waves than the whole: the sum is neutral where every GEMM is
            halves = self._waves(g, cuts, tiles[g], sms) + self._waves(g, tokens - cuts, tiles[g], sms)
            cuts = cuts[halves <= whole[g]]
        return cuts

    def _waves(self, gemm: int, tokens: Any, tiles: Any, sms: Any) -> Any:
        """Waves of one GEMM for rows of the batch. ``tiles`` are indices; ints or int64 arrays that broadcast."""
        rows_of_tiles = ceil_div(tokens * self._routed[gemm], self._height[tiles] * self._experts[gemm])
        return ceil_div(rows_of_tiles * self._across[gemm, tiles], sms)
