"""The kernels: their compile-time constants, and their launch shapes as pure functions of (ranks, hidden, dtype, options)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tokenweave.cuda.dtypes import DTYPES, ELEMENT_BYTES

SOURCES = Path(__file__).parent / "csrc"
# enum Option of csrc/row.cuh
HAS_RESIDUAL, BIAS, POST_NORM, WEIGHT_FP32, ROWS, ROW_COUNT, WEIGHT_OFFSET = (1 << i for i in range(7))
FP8, ROW_SCALES, UNQUANTISED = (1 << i for i in range(7, 10))
SHARED_BYTES = 227 << 10  # a block's shared memory on sm_90 and sm_100, CUDA C++ Programming Guide
STATIC_SHARED = 2048  # barriers and reduction slots
_IN_FLIGHT = 576 << 10  # bytes; on H200 with 18 links, 12 to 16 blocks were fastest with 512 to 640 KiB


@dataclass(frozen=True)
class Kernel:
    """One instantiation of one of the kernels in ``csrc/``; the fields are its compile-time constants.

    Attributes:
        name: file and function: ``"twoshot_ring"``, ``"twoshot_registers"``, ``"twoshot_multimem"``, ``"oneshot"`` ...
        ranks, rank: of the group.
        hidden: elements a row. dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        options: bits of ``enum Option`` in ``csrc/row.cuh``.
        group_threads: threads that share a row. groups: rows at a time in a block.
        stages: rows that the ring holds, each of all ranks and the residual; 0 for the other kernels.
        emulated: 1 for peer-to-peer loops in place of the multicast instructions; for tests.
        norm_threads: threads whose order the norm's sum follows; 0 for ``group_threads``.
    """

    name: str
    ranks: int
    rank: int
    hidden: int
    dtype: str
    options: int
    group_threads: int
    groups: int = 1
    stages: int = 0
    emulated: int = 0
    norm_threads: int = 0

    @property
    def source(self) -> Path:
        """Its file."""
        return SOURCES / f"{self.name}.cu"

    @property
    def threads(self) -> int:
        """Threads per block: the groups, and the ring's producer warp."""
        return self.group_threads * self.groups + (32 if self.stages else 0)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return self.stages * (self.ranks + 1) * self.hidden * ELEMENT_BYTES[self.dtype]

    def defines(self) -> list[tuple[str, str]]:
        """The preprocessor definitions that select this instantiation."""
        values = {key.upper(): value for key, value in asdict(self).items() if key not in ("name", "dtype")}
        values["DTYPE"] = DTYPES[self.dtype]
        values["NORM_THREADS"] = self.norm_threads or self.group_threads
        return [(f"TW_{key}", str(value)) for key, value in values.items()]


def ring_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int) -> Kernel | None:
    """The two-shot kernel with a shared-memory ring, or None where fewer than two rows fit."""
    threads, groups = groups_of(hidden, dtype)
    room = (SHARED_BYTES - STATIC_SHARED) // ((ranks + 1) * hidden * ELEMENT_BYTES[dtype])
    groups = min(groups, 4 if room < 8 else 8, room)
    if groups < 1 or room < 2:
        return None
    stages = min(room // groups, max(1, 32 // groups)) * groups
    return Kernel("twoshot_ring", ranks, rank, hidden, dtype, options, threads, groups, stages)


def register_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int) -> Kernel:
    """The two-shot kernel with plain loads."""
    threads, groups = groups_of(hidden, dtype)
    if ranks > 5:  # a row of all of them needs more registers than 512 threads have
        groups = max(1, min(groups, 384 // threads))
    return Kernel("twoshot_registers", ranks, rank, hidden, dtype, options, threads, groups)


def multimem_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int, *, emulated: bool = False) -> Kernel:
    """The two-shot kernel for multicast addresses; ``emulated``: with peer-to-peer loops in their place, for tests."""
    threads, groups = groups_of(hidden, dtype)
    return Kernel("twoshot_multimem", ranks, rank, hidden, dtype, options, threads, groups, emulated=int(emulated))


def oneshot_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int, rows: int = 1) -> Kernel:
    """The one-shot kernel: a block a row.

    On two ranks a handful of rows is fastest with the other kernels' threads per row; on more, where a thread waits for
    several peers, and for batches up to 2 MiB a thread per vector is (5 % at 64 rows of 4096, 9 % at 256), and larger ones
    with fewer threads again (2 and 4 H200). 1024 threads have no registers for two vectors of five ranks or more.
    """
    norm_threads, _ = groups_of(hidden, dtype)
    row_bytes = hidden * ELEMENT_BYTES[dtype]
    vectors = row_bytes // 16
    threads = norm_threads
    wide = (rows > 8 and (vectors <= 1024 or ranks <= 4)) or (ranks > 2 and vectors <= 1024)
    if wide and rows * row_bytes <= 2 << 20:
        threads = max(norm_threads, -(-vectors // -(-vectors // 1024) // 32) * 32)
    return Kernel("oneshot", ranks, rank, hidden, dtype, options, threads, norm_threads=norm_threads)


def oneshot_kernels(ranks: int, rank: int, hidden: int, dtype: str, options: int) -> list[Kernel]:
    """The one-shot kernel in every shape that some number of rows takes."""
    every = (oneshot_kernel(ranks, rank, hidden, dtype, options, rows) for rows in (1, 9, 1 << 20))
    return list(dict.fromkeys(every))


def groups_of(hidden: int, dtype: str) -> tuple[int, int]:
    """Threads per row, and rows at a time in at most 512 threads.

    Four 16-byte vectors a thread where the row is short enough. All kernels take the same threads per row, so that the
    norm's sum has the same order, and a row the same bits, in all of them.
    """
    vectors = hidden * ELEMENT_BYTES[dtype] // 16
    per_thread = max(4, -(-vectors // 512))
    threads = -(-vectors // per_thread // 32) * 32
    return threads, min(15, 512 // threads)  # 15 named barriers


def ring_depth(kernel: Kernel, ctas: int) -> int:
    """Stages to use: all blocks together keep about half a MiB of the peers' rows in flight; a multiple of the groups."""
    remote = ctas * (kernel.ranks - 1) * kernel.hidden * ELEMENT_BYTES[kernel.dtype]
    rounds = int(_IN_FLIGHT / remote / kernel.groups + 0.5)
    return kernel.groups * max(1, min(rounds, kernel.stages // kernel.groups))
