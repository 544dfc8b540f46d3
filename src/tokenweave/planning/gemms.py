"""GEMMs as the library runs them: tiles, waves, and what they cost on the SMs that they get.

A GEMM's output is cut in tiles of rows x columns; each SM computes one tile at a time, so ``sms`` of them make a wave and
a partly filled last wave takes as long as a full one.

What Hopper's library really runs (cuBLAS 13 on H200, every kernel of 4096 GEMMs traced by ``benchmarks/gemm_waves``):

- Kernels of many tile shapes, chosen by (M, N, K) and the SM target. The model takes the one that is fastest by its own
  estimate, which is the library's aim too.
- Clusters of two blocks nearly always, so the number of tiles is rounded up to pairs.
- One persistent block an SM, at most the SM target. Up to two waves each block's tiles are fixed in advance; from three on
  blocks take the next tile from a counter (which a memset clears first).
- Beside SMs that another kernel holds, blocks that find no place wait: fixed tiles then take twice as long, counted ones
  another wave or two. Told of the SMs that are left, it plans for those.
- Split-K for few rows and long sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    # Seen on H200. 192 x 192, 128 x 256 and 128 x 320 are three quarters of what was traced.
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


class Kernel(NamedTuple):
    """What the library runs for a GEMM: the tile of each block, how many parts the sum is cut in, blocks, and their waves."""

    tile: Tile
    split: int
    blocks: int
    waves: int


def library_kernel(m: int, n: int, k: int, gpu: Gpu, sms: int | None = None) -> Kernel:
    """The kernel that the model expects the library to run when it plans for ``sms`` SMs (default: all)."""
    planned = _grid(gpu, gpu.sms if sms is None else sms)
    shapes, count, us, _ = _shapes_us(np.asarray(m, dtype=np.int64), n, k, gpu, planned)
    best = int(us.argmin())
    tile, split = shapes[best]
    return Kernel(tile, split, min(planned, int(count[best])), int(ceil_div(count[best], planned)))


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
    _, count, us, wave = _shapes_us(rows, n, k, gpu, planned, experts, tflops)
    if planned > usable:  # the kernel is chosen without knowing of the held SMs
        rounds = ceil_div(count, planned)
        beside = np.where(rounds <= FIXED_WAVES, 2 * rounds, ceil_div(count, usable) + 1)
        more = np.where(np.minimum(count, planned) > usable, beside - rounds, 0) * wave
        best = np.take_along_axis(us + more, us.argmin(axis=0)[None], axis=0)[0]
    else:
        best = us.min(axis=0)
    weights = np.minimum(experts, rows * experts) * (n * k)
    memory = (weights + rows * experts * (n + k)) * (BYTES / (gpu.hbm_gbs * HBM_SHARE * 1e3))
    return np.maximum(best, memory) + (gpu.kernel_us + (0.0 if gpu.arch == "cpu" else GEMM_US))


def _shapes_us(
    rows: np.ndarray, n: int, k: int, gpu: Gpu, planned: int, experts: int = 1, tflops: float | None = None
) -> tuple[list[tuple[Tile, int]], np.ndarray, np.ndarray, np.ndarray]:
    """The library's choices: (tile, parts of the sum) [s]; their blocks' worth of tiles and us on ``planned`` SMs [s, ...]; us
    of a wave [s, 1 ...]."""
    tiles = TILES[gpu.arch]
    shapes = [(tile, 1) for tile in tiles] + [(tile, 2) for tile in tiles if tile.rows <= SPLIT_ROWS]
    column = (-1,) + (1,) * rows.ndim
    count = np.stack([_blocks(rows, n, tile, gpu, experts) * split for tile, split in shapes])
    wave = np.array([wave_us(ceil_div(k, split), tile, gpu, tflops) for tile, split in shapes]).reshape(column)
    adding = np.array([SPLIT_US * (split > 1) for _, split in shapes]).reshape(column)
    return shapes, count, ceil_div(count, planned) * wave + adding, wave


def _grid(gpu: Gpu, sms: int) -> int:
    """Blocks that the library launches for so many SMs: whole clusters, at least one block."""
    return int(gemm_sms(gpu, gpu.sms - min(sms, gpu.sms)))


def _blocks(rows: Any, n: int, tile: Tile, gpu: Gpu, experts: int) -> Any:
    """Tiles, in whole clusters that lie along the rows or along the columns, whichever wastes less."""
    down, across, cluster = ceil_div(rows, tile.rows), ceil_div(n, tile.columns), gpu.gemm_cluster
    along_columns = down * (ceil_div(across, cluster) * cluster)
    along_rows = ceil_div(down, cluster) * cluster * across
    return np.minimum(along_columns, along_rows) * experts
