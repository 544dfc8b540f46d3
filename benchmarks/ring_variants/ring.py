"""The two-shot kernel with few blocks beside one whose threads copy the vectors that they read themselves, in turns.

    torchrun --nproc-per-node 2 benchmarks/ring_variants/ring.py [OUT.json]        # half a minute

Two ranks, bf16, CUDA graphs; the slower rank counts. Results are compared bit by bit.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import HIDDEN, captured, changed_sources, collective, main, result_of, timed

from tokenweave.collective import Workspace
from tokenweave.collective.kernels import SOURCES

SHAPES = [(1024, 4), (1024, 8), *((tokens, ctas) for tokens in (4096, 16384) for ctas in (4, 8, 12))]
VARIANT = Path(__file__).parent / "lane_copies.cu"


def measure(workspace: Workspace) -> list[dict]:
    """Microseconds of both, a row a shape."""

    def graphs() -> dict[tuple[int, int], torch.cuda.CUDAGraph]:
        return {shape: captured(lambda shape=shape: collective(workspace, 0, *shape)) for shape in SHAPES}

    shipped = graphs()
    with changed_sources(((SOURCES / "twoshot_ring.cu").read_text(), VARIANT.read_text())):
        variant = graphs()
    rows = []
    for tokens, ctas in SHAPES:
        both = {"shipped": shipped[tokens, ctas], VARIANT.stem: variant[tokens, ctas]}
        expected, got = (result_of(workspace, graph, tokens) for graph in both.values())
        assert torch.equal(got, expected), f"{tokens} rows, {ctas} blocks: wrong"
        times = {name: round(us, 1) for name, us in timed(both).items()}
        rows.append({"tokens": tokens, "hidden": HIDDEN, "ctas": ctas, **times})
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
