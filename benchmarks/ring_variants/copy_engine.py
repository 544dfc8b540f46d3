"""What the copy engines could take from the SMs: the peers' results, while the kernel goes on with the next rows.

    torchrun --nproc-per-node 2 benchmarks/ring_variants/copy_engine.py [OUT.json]        # half a minute

First, copies to the peer's symmetric memory as nodes of a CUDA graph, both ranks at once, by size. Then the collective with
few blocks as it is, and cut in parts: the kernel, compiled from sources without the store to the peer, works on one part
while a copy engine sends the last one's results; one more collective of two rows stands for the barrier at the end. Last,
the collective without the store of the residual, for what one row less through the SM's port is worth. The results are
compared. Two ranks, bf16; CUDA graphs, median of replays in turns, the slower rank counts.
"""

from __future__ import annotations

import torch
from common import HIDDEN, MOST, captured, changed_sources, collective, inputs, main, result_of, timed

from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows

COPIES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)
TO_PEER = "for (int k = 1; k <= N; ++k) st_global(table[(RANK + k) % N] + at, words);"
TO_RESIDUAL = "if (math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);"


def copies(workspace: Workspace) -> list[dict]:
    """Eight copies after each other in a graph, by size."""
    rows = []
    source = workspace.buffer(MOST, region=1).view(-1)
    for size in COPIES:
        n = size // 2

        def run(n: int = n) -> None:
            for _ in range(8):
                _at_peer(workspace, source[:n]).copy_(source[:n])

        us = timed({"copy": captured(run)})["copy"] / 8
        rows.append({"what": "copies", "bytes": size, "us": round(us, 2), "gb_s": round(size / us / 1e3, 1)})
    return rows


def collectives(workspace: Workspace) -> list[dict]:
    """The collective as it is and in parts with the copy engine, by rows and blocks."""
    shapes = [(tokens, ctas) for tokens in (1024, 4096, 16384) for ctas in (4, 8)]
    whole = {shape: captured(lambda shape=shape: collective(workspace, 0, *shape)) for shape in shapes}
    with changed_sources((TO_RESIDUAL, ";")):
        lighter = {shape: captured(lambda shape=shape: collective(workspace, 0, *shape)) for shape in shapes}
    with changed_sources((TO_PEER, "for (int k = N; k <= N; ++k) st_global(table[RANK] + at, words);")):
        return _with_copies(workspace, shapes, whole, lighter)


def _with_copies(workspace: Workspace, shapes: list[tuple[int, int]], whole: dict, lighter: dict) -> list[dict]:
    expected = {shape: result_of(workspace, whole[shape], shape[0]) for shape in shapes}
    rows = []
    side = torch.cuda.Stream()
    for tokens, ctas in shapes:
        graphs = {"whole": whole[tokens, ctas], "no residual store": lighter[tokens, ctas]}
        for parts in (1, 2, 4, 8):
            if tokens // parts >= 32 * ctas:  # enough rows a block for the ring
                graphs[f"{parts} parts"] = captured(
                    lambda tokens=tokens, ctas=ctas, parts=parts: _in_parts(workspace, side, tokens, ctas, parts)
                )
        for name, graph in graphs.items():
            assert torch.equal(result_of(workspace, graph, tokens), expected[tokens, ctas]), (
                f"{name} of {tokens} is wrong"
            )
        row = {"what": "collective", "tokens": tokens, "hidden": HIDDEN, "ctas": ctas}
        rows.append(row | {name: round(us, 1) for name, us in timed(graphs).items()})
    return rows


def _in_parts(workspace: Workspace, side: torch.cuda.Stream, tokens: int, ctas: int, parts: int) -> None:
    here = torch.cuda.current_stream()
    size = tokens // parts
    for start in range(0, tokens, size):
        rows = collective(workspace, start, size, ctas)
        mine = owned_rows(size, workspace.rank, 2)
        own = rows[mine.start : mine.stop].view(-1)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            _at_peer(workspace, own).copy_(own)
    here.wait_stream(side)
    x, weight = workspace.buffer(2, region=1), inputs(workspace)[1]
    fused_allreduce_rmsnorm(x, torch.zeros_like(x), weight, 1e-5, workspace, ctas=1)  # all have arrived everywhere


def _at_peer(workspace: Workspace, mine: torch.Tensor) -> torch.Tensor:
    """The same place in the peer's memory."""
    assert workspace.symmetric is not None
    offset = workspace.offset_of(mine)
    assert offset is not None
    return workspace.symmetric.handle.get_buffer(1 - workspace.rank, [mine.numel()], mine.dtype, offset // 2)


if __name__ == "__main__":
    main(__doc__, lambda workspace: copies(workspace) + collectives(workspace))
