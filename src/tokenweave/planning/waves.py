"""Tiles and waves: what a GEMM of M rows costs on the SMs that it gets.

A GEMM's output is cut in tiles of rows x columns; each SM computes one tile at a time, so ``sms`` of them make a wave and
a partly filled last wave takes as long as a full one. That is the saw-tooth that a cut of the batch can fall foul of:
two halves of 2 waves each cost more than a whole of 3.

What Hopper's library really runs (cuBLAS 13 on H200, every kernel of 4096 GEMMs traced by ``benchmarks/gemm_waves``):

- Kernels of many tile shapes, chosen by (M, N, K) and the SM target. The model takes the one that is fastest by its own
  estimate, which is the library's aim too.
- Clusters of two blocks nearly always, so the number of tiles is rounded up to pairs.
- One persistent block an SM, at most the SM target. Up to two waves each block's tiles are fixed in advance; from three on
  blocks take the next tile from a counter (which a memset clears first).
- Beside SMs that another kernel holds, blocks that find no place wait: fixed tiles then take twice as long, counted ones
  another wave or two. Told of the SMs that are left, it plans for those.
- Split-K for few rows and long sums.

To compare the waves of a whole with those of its parts they are all counted in the whole's tile shape: a wave of half-sized
tiles is another, cheaper unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenweave.models.config import ModelConfig
from tokenweave.models.sharding import shard_of
from tokenweave.planning.hardware import HBM_SHARE, Gpu

BYTES = 2  # per element of weights and activations: bf16


def ceil_div(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for ints and int64 arrays."""
    return -(-a // b)


@dataclass(frozen=True)
class Gemm:
    """``[rows, k] x [k, n]``, one rank's share; with experts, rows * experts_per_token rows spread evenly over them."""

    name: str
    n: int
    k: int
    experts: int = 1
    experts_per_token: int = 1

    def rows(self, tokens: Any) -> Any:
        """Rows of one expert's GEMM, an int or an int64 array as ``tokens`` is."""
        return ceil_div(tokens * self.experts_per_token, self.experts)


@dataclass(frozen=True)
class Tile:
    """Output rows and columns that one SM computes at a time."""

    rows: int
    columns: int

    @property
    def efficiency(self) -> float:
        """Share of the tensor rate, relative to 256 x 128: small tiles load more per FLOP (1/rows + 1/columns)."""
        return (1 + LOADS * (1 / 128 + 1 / 256)) / (1 + LOADS * (1 / self.rows + 1 / self.columns))


def _tiles(*shapes: tuple[int, Sequence[int]]) -> tuple[Tile, ...]:
    return tuple(Tile(rows, columns) for rows, all_columns in shapes for columns in all_columns)


# Fitted to 461 GEMMs of up to 300 us on H200, shorter than what the power limit notices: median error 1.5 %.
LOADS = 16.2
GEMM_US = 2.8  # on top of a kernel's launch: the first tile's loads, the last one's results
WAVE_US = 0.23  # of each wave
TILE_US = 0.91 / (256 * 128)  # per element of a tile: writing it
SPLIT_US = 4.0  # another kernel that adds the parts of a split sum
SPLIT_ROWS = 128  # sums are split in tiles of at most so many rows

_SMALL = ((16, (64, 128)), (32, (64, 128)))
TILES = {
    # Ampere's and Ada's come in powers of two.
    "sm_80": _tiles(*_SMALL, (64, (64, 128, 256)), (128, (64, 128, 256)), (256, (64, 128))),
    "sm_89": _tiles(*_SMALL, (64, (64, 128, 256)), (128, (64, 128, 256)), (256, (64, 128))),
    # Seen on H200: rows are the tokens'. 128 x 256 columns by 192 and 320 rows do nine tenths of the work.
    "sm_90": _tiles(
        (32, (64,)),
        (64, (48, 64, 72, 80, 96, 112, 128, 144, 176, 192, 256, 320, 384, 448, 512)),
        (80, (128,)),
        (96, (64, 128, 192, 256)),
        (128, (80, 96, 112, 128, 144, 168, 176, 192, 256, 320)),
        (160, (128,)),
        (192, (64, 128, 192)),
        (232, (64,)),
        (256, (128,)),
    ),
    "cpu": (Tile(16, 64),),
}
TILES["sm_100"] = TILES["sm_90"]
"""Architecture -> tile shapes that its GEMM library has."""

FIXED_WAVES = 2  # up to so many waves a block's tiles are fixed when the kernel starts
MAX_CUTS = 128  # of one batch, where waves rule none out
NEAR_CUTS = 128  # around the middle, whose waves are counted first
NEUTRAL_CUTS = 32  # of those without more waves than the whole, the nearest to the middle
SLIVERS = 32  # up to as many row steps a batch may be cut anywhere: filling the SMs matters more than balance


def row_step(gpu: Gpu) -> int:
    """Cuts are tried at multiples of this many rows: the tile heights of large GEMMs are multiples of it."""
    return 16 if gpu.arch == "cpu" else 64


def attention_gemms(config: ModelConfig, tp: int) -> tuple[Gemm, Gemm]:
    """qkv and o of one rank. Raises ModelError where there are more ranks than query heads."""
    shard = shard_of(config, 0, tp)
    return (
        Gemm("qkv", shard.query.size + 2 * shard.kv.size, config.hidden),
        Gemm("o", config.hidden, shard.query.size),
    )


def mlp_gemms(config: ModelConfig, tp: int) -> tuple[Gemm, Gemm]:
    """gate_up and down of one rank, grouped over the experts where there are any."""
    inner = shard_of(config, 0, tp).intermediate.size
    spread = (config.experts, config.experts_per_token) if config.experts else (1, 1)
    return Gemm("gate_up", 2 * inner, config.hidden, *spread), Gemm("down", config.hidden, inner, *spread)


def gemm_sms(gpu: Gpu, held: Any) -> Any:
    """SMs that a GEMM beside ``held`` busy ones can use, whole clusters of them, at least one SM. int or int64."""
    return np.maximum(1, (gpu.sms - held) // gpu.gemm_cluster * gpu.gemm_cluster)


def tiles_in(gemm: Gemm, tile: Tile, tokens: Any) -> Any:
    """Tiles of the GEMM's output for ``tokens`` rows of the batch."""
    return ceil_div(gemm.rows(tokens), tile.rows) * ceil_div(gemm.n, tile.columns) * gemm.experts


def waves(gemm: Gemm, tile: Tile, tokens: Any, sms: int) -> Any:
    """Rounds of ``sms`` tiles that the GEMM takes for ``tokens`` rows."""
    return ceil_div(tiles_in(gemm, tile, tokens), sms)


def wave_us(k: int, tile: Tile, gpu: Gpu, tflops: float | None = None) -> float:
    """us of one wave: each SM computes one tile over ``k``. ``tflops``: of all SMs; by default what long runs sustain."""
    flops_per_us = (tflops or gpu.sustained_tflops) * 1e6 / gpu.sms * tile.efficiency
    area = tile.rows * tile.columns
    return WAVE_US + TILE_US * area + 2 * area * k / flops_per_us


def tile_time_us(gemm: Gemm, tile: Tile, tokens: Any, sms: int, gpu: Gpu) -> Any:
    """us of the GEMM in this tile shape if memory were no limit; never falls with more tokens or fewer SMs."""
    return waves(gemm, tile, tokens, sms) * wave_us(gemm.k, tile, gpu)


def gemm_us(
    m: Any,
    n: int,
    k: int,
    gpu: Gpu,
    *,
    sms: int | None = None,
    held: int = 0,
    experts: int = 1,
    tflops: float | None = None,
) -> Any:
    """us of ``[m, k] x [k, n]`` for each of ``experts``: waves or memory, and the launch.

    Args:
        m: rows, int or int64 [...].
        sms: how many SMs the library plans for; None for all.
        held: SMs that another kernel holds meanwhile.
        tflops: of all SMs in large tiles; by default what long runs sustain, which is less than a short burst's.
    """
    rows = np.asarray(m, dtype=np.int64)
    planned = _grid(gpu, gpu.sms if sms is None else sms)
    usable = _grid(gpu, gpu.sms - held)
    shapes = [(tile, 1) for tile in TILES[gpu.arch]] + [
        (tile, 2) for tile in TILES[gpu.arch] if tile.rows <= SPLIT_ROWS
    ]
    count = np.stack([_blocks(rows, n, tile, gpu, experts) * split for tile, split in shapes])
    each = np.array([wave_us(-(-k // split), tile, gpu, tflops) for tile, split in shapes])
    adding = np.array([SPLIT_US * (split > 1) for _, split in shapes])
    column = (-1,) + (1,) * rows.ndim
    rounds = ceil_div(count, planned)
    us = rounds * each.reshape(column) + adding.reshape(column)
    if planned > usable:
        kernel = us.argmin(axis=0)  # chosen without knowing of the held SMs
        beside = np.where(rounds <= FIXED_WAVES, 2 * rounds, ceil_div(count, usable) + 1)
        slowed = np.where(np.minimum(count, planned) > usable, beside, rounds) * each.reshape(column)
        best = np.take_along_axis(slowed + adding.reshape(column), kernel[None], axis=0)[0]
    else:
        best = us.min(axis=0)
    weights = np.minimum(experts, rows * experts) * (n * k)
    memory = (weights + rows * experts * (n + k)) * (BYTES / (gpu.hbm_gbs * HBM_SHARE * 1e3))
    return np.maximum(best, memory) + (gpu.kernel_us + (0.0 if gpu.arch == "cpu" else GEMM_US))


def _grid(gpu: Gpu, sms: int) -> int:
    """Blocks that the library launches for so many SMs: whole clusters, at least one block."""
    return int(gemm_sms(gpu, gpu.sms - min(sms, gpu.sms)))


def _blocks(rows: Any, n: int, tile: Tile, gpu: Gpu, experts: int) -> Any:
    """Tiles, in whole clusters that lie along the rows or along the columns, whichever wastes less."""
    down, across, cluster = ceil_div(rows, tile.rows), ceil_div(n, tile.columns), gpu.gemm_cluster
    along_columns = down * (ceil_div(across, cluster) * cluster)
    along_rows = ceil_div(down, cluster) * cluster * across
    return np.minimum(along_columns, along_rows) * experts


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
