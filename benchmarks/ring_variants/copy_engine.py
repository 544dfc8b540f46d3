"""What the copy engines could take from the SMs: the peers' results, while the kernel goes on with the next rows.

    torchrun --nproc-per-node 2 benchmarks/ring_variants/copy_engine.py [OUT.json]        # half a minute

First, copies to the peer's symmetric memory as nodes of a CUDA graph, both ranks at once, by size. Then the collective with
few blocks as it is, and cut in parts: the kernel, compiled from sources without the store to the peer, works on one part while a copy
engine sends the last one's results; one more collective of two rows stands for the barrier at the end. Last, the collective
without the store of the residual, for what one row less through the SM's port is worth. The results are compared. Two ranks, bf16; CUDA graphs, median of replays in turns, the slower rank counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from tokenweave.bench.environment import describe
from tokenweave.bench.launch import joined
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm, launch
from tokenweave.collective import compile as compiler
from tokenweave.collective.rows import owned_rows

HIDDEN = 4096
ROW = HIDDEN * 2  # bytes
COPIES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)
TO_PEER = "for (int k = 1; k <= N; ++k) st_global(table[(RANK + k) % N] + at, words);"
TO_RESIDUAL = "if (math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    with joined() as me:
        assert me.ranks == 2, "the results go to one peer"
        options = {"max_tokens": 16384, "hidden": HIDDEN, "dtype": torch.bfloat16, "device": me.device, "channels": 1}
        with Workspace(me.group, regions=2, transport="p2p", **options) as workspace:
            rows = copies(workspace) + collectives(workspace)
        if me.rank == 0:
            for row in rows:
                print(row, flush=True)
            if parsed.out:
                parsed.out.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


def copies(workspace: Workspace) -> list[dict]:
    """Eight copies after each other in a graph, by size."""
    rows = []
    source = workspace.buffer(16384, region=1).view(-1)
    for size in COPIES:
        n = size // 2

        def run(n: int = n) -> None:
            for _ in range(8):
                _at_peer(workspace, source[:n]).copy_(source[:n])

        us = _timed({"copy": _graph(run)})["copy"] / 8
        rows.append({"what": "copies", "bytes": size, "us": round(us, 2), "gb_s": round(size / us / 1e3, 1)})
    return rows


def collectives(workspace: Workspace) -> list[dict]:
    """The collective as it is and in parts with the copy engine, by rows and blocks."""
    shapes = [(tokens, ctas) for tokens in (1024, 4096, 16384) for ctas in (4, 8)]
    whole = {shape: _graph(lambda shape=shape: _call(workspace, 0, *shape)) for shape in shapes}
    with _changed(TO_RESIDUAL, ";"):
        lighter = {shape: _graph(lambda shape=shape: _call(workspace, 0, *shape)) for shape in shapes}
    with _changed(TO_PEER, "for (int k = N; k <= N; ++k) st_global(table[RANK] + at, words);"):
        return _with_copies(workspace, shapes, whole, lighter)


def _with_copies(workspace: Workspace, shapes: list[tuple[int, int]], whole: dict, lighter: dict) -> list[dict]:
    expected = {shape: _result(workspace, whole[shape], shape[0]) for shape in shapes}
    rows = []
    side = torch.cuda.Stream()
    for tokens, ctas in shapes:
        graphs = {"whole": whole[tokens, ctas], "no residual store": lighter[tokens, ctas]}
        for parts in (1, 2, 4, 8):
            if tokens // parts >= 32 * ctas:  # enough rows a block for the ring
                graphs[f"{parts} parts"] = _graph(
                    lambda tokens=tokens, ctas=ctas, parts=parts: _in_parts(workspace, side, tokens, ctas, parts)
                )
        for name, graph in graphs.items():
            assert torch.equal(_result(workspace, graph, tokens), expected[tokens, ctas]), (
                f"{name} of {tokens} is wrong"
            )
        row = {"what": "collective", "tokens": tokens, "hidden": HIDDEN, "ctas": ctas}
        rows.append(row | {name: round(us, 1) for name, us in _timed(graphs).items()})
    return rows


@contextlib.contextmanager
def _changed(line: str, instead: str) -> Iterator[None]:
    """Kernels that are loaded now are compiled from sources with another line."""
    before = compiler.SOURCES, os.environ.get("TOKENWEAVE_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "csrc"
        shutil.copytree(compiler.SOURCES, sources)
        text = (sources / "twoshot_ring.cu").read_text()
        assert text.count(line) == 1, "the source has changed: update this probe"
        (sources / "twoshot_ring.cu").write_text(text.replace(line, instead))
        compiler.SOURCES = sources
        os.environ["TOKENWEAVE_CACHE"] = folder
        _forget_kernels()
        try:
            yield
        finally:
            compiler.SOURCES = before[0]
            os.environ.pop("TOKENWEAVE_CACHE")
            if before[1] is not None:
                os.environ["TOKENWEAVE_CACHE"] = before[1]
            _forget_kernels()


def _forget_kernels() -> None:
    compiler._sources.cache_clear()
    launch.loaded.cache_clear()


def _call(workspace: Workspace, start: int, tokens: int, ctas: int) -> torch.Tensor:
    x = workspace.buffer(tokens, start=start)
    residual, weight = _inputs(workspace)
    return fused_allreduce_rmsnorm(x, residual[start : start + tokens], weight, 1e-5, workspace, ctas=ctas)[0]


def _in_parts(workspace: Workspace, side: torch.cuda.Stream, tokens: int, ctas: int, parts: int) -> None:
    here = torch.cuda.current_stream()
    size = tokens // parts
    for start in range(0, tokens, size):
        rows = _call(workspace, start, size, ctas)
        mine = owned_rows(size, workspace.rank, 2)
        own = rows[mine.start : mine.stop].view(-1)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            _at_peer(workspace, own).copy_(own)
    here.wait_stream(side)
    x, weight = workspace.buffer(2, region=1), _inputs(workspace)[1]
    fused_allreduce_rmsnorm(x, torch.zeros_like(x), weight, 1e-5, workspace, ctas=1)  # all have arrived everywhere


_kept: list[torch.Tensor] = []


def _inputs(workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual, weight): the same each time, so that graphs hold the same memory."""
    if not _kept:
        generator = torch.Generator(workspace.device).manual_seed(1)
        residual = torch.randn(16384, HIDDEN, device=workspace.device, generator=generator).bfloat16()
        _kept.extend((residual, torch.ones(HIDDEN, device=workspace.device).bfloat16()))
    return _kept[0], _kept[1]


def _result(workspace: Workspace, graph: torch.cuda.CUDAGraph, tokens: int) -> torch.Tensor:
    """The rows of one replay from fixed inputs."""
    generator = torch.Generator(workspace.device).manual_seed(2 + workspace.rank)
    workspace.buffer(16384).normal_(generator=generator)
    residual, _ = _inputs(workspace)
    residual.normal_(generator=torch.Generator(workspace.device).manual_seed(3))
    dist.barrier(workspace.group)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier(workspace.group)
    return workspace.buffer(tokens).clone()


def _at_peer(workspace: Workspace, mine: torch.Tensor) -> torch.Tensor:
    """The same place in the peer's memory."""
    assert workspace.symmetric is not None
    offset = workspace.offset_of(mine)
    assert offset is not None
    return workspace.symmetric.handle.get_buffer(1 - workspace.rank, [mine.numel()], mine.dtype, offset // 2)


def _graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()  # compiles
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def _timed(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Microseconds of each, median of 15 rounds of 3 replays in a row."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(15):
        for name, graph in graphs.items():
            dist.barrier()
            torch.cuda.synchronize()
            graph.replay()  # removes the ranks' skew
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 3 * 1e3)
    medians = torch.tensor([median(times[name]) for name in graphs], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(graphs, medians.tolist(), strict=True))


if __name__ == "__main__":
    main()
