"""The collective's kernels from edited sources: with mistakes that a check has to find, and as racecheck can follow them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from collective_cases import Case
from tokenweave.collective import kernels

Edit = tuple[str, str, str]
"""A file of ``csrc/``, text that it has once, and what takes its place."""

RING = "twoshot_ring.cu"
_ARRIVALS: Edit = (RING, "mbarrier_init(&empty[threadIdx.x], 1);", "mbarrier_init(&empty[threadIdx.x], S::GT);")

EACH_READER_FREES: tuple[Edit, ...] = (
    _ARRIVALS,
    (RING, "if (math.t == 0) {\n        fence_proxy_async_shared();", "{\n        fence_proxy_async_shared();"),
)
"""A stage of the ring is freed by an arrival of every thread that read it, where the shipped kernel has one thread arrive for
all, behind their barrier. Nothing else differs."""

ROUNDED_VECTORS: tuple[Edit, ...] = (
    (
        "row.cuh",
        "f[k * 4 + j] = __uint_as_float(q.w[j]);",
        "f[k * 4 + j] = __uint_as_float((q.w[j] + 0x7fff + (q.w[j] >> 16 & 1)) & 0xffff0000u);",
    ),
)
"""Weights, post-norms and biases in float32 are rounded to bf16 as they are read."""


@dataclass(frozen=True)
class Mistake:
    """What is wrong in the sources, and a case and its kernel in which it shows."""

    edits: tuple[Edit, ...]
    case: Case
    kernel: str


MISTAKES = {
    # The last rank reads a row behind its residual.
    "memory": Mistake(
        (("row.cuh", "hi = min(tokens, lo + chunk)", "hi = lo + chunk + 1"),), Case(71, 4096), "twoshot_registers"
    ),
    # A group's threads add up sums that others may not have written yet.
    "sum": Mistake(
        (("row.cuh", 'asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(S::GT) : "memory");', ""),),
        Case(71, 4096),
        "twoshot_registers",
    ),
    # As EACH_READER_FREES, but before it reads.
    "refill": Mistake(
        (
            _ARRIVALS,
            (RING, "        mbarrier_arrive(&empty[s]);\n", ""),
            (RING, "if (arrived < 0) break;", "if (arrived < 0) break;\n      mbarrier_arrive(&empty[s]);"),
        ),
        Case(71, 4096, ctas=2),  # 18 rows a block and 8 stages
        "twoshot_ring",
    ),
}


@contextlib.contextmanager
def compiled_from(*edits: Edit) -> Iterator[None]:
    """Kernels that this process compiles meanwhile are of edited sources, and stay out of the cache of others.

    The edits are made one after the other. Kernels that are loaded already stay what they are (``cuda.launch.loaded``).
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "csrc"
        shutil.copytree(kernels.SOURCES, sources)
        for file, text, instead in edits:
            source = (sources / file).read_text()
            assert source.count(text) == 1, (
                f"{file} has changed, update tests/kernel_edits.py: {text!r} is not there once"
            )
            (sources / file).write_text(source.replace(text, instead))
        with mock.patch.object(kernels, "SOURCES", sources), mock.patch.dict(os.environ, TOKENWEAVE_CACHE=folder):
            yield
