"""What the probes of the ring kernel share: the program around them, other sources, one collective with few blocks as a
graph, times in turns."""

from __future__ import annotations

import argparse
import contextlib
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
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm, kernels
from tokenweave.cuda.launch import loaded
from tokenweave.files import write_result

HIDDEN = 4096
MOST = 16384  # rows

_kept: list[torch.Tensor] = []


def main(doc: str, measure: Callable[[Workspace], list[dict]]) -> None:
    """A probe on two ranks: prints its rows, and writes them to the file that the command line names.

    Args:
        doc: what the program is. measure: on every rank, in a workspace of two regions; rank 0's rows count.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    with joined() as me:
        assert me.ranks == 2, "what is measured stores to one peer"
        with Workspace(
            me.group,
            max_tokens=MOST,
            hidden=HIDDEN,
            dtype=torch.bfloat16,
            device=me.device,
            channels=1,
            regions=2,
            transport="p2p",
        ) as workspace:
            rows = measure(workspace)
        if me.rank == 0:
            for row in rows:
                print(row, flush=True)
            if parsed.out:
                write_result({"environment": describe(), "rows": rows}, parsed.out)


@contextlib.contextmanager
def changed_sources(*edits: tuple[str, str]) -> Iterator[None]:
    """Kernels that are loaded now are compiled from sources with other lines in the ring kernel: pairs of old and new."""
    before = kernels.SOURCES, os.environ.get("TOKENWEAVE_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "csrc"
        shutil.copytree(kernels.SOURCES, sources)
        text = (sources / "twoshot_ring.cu").read_text()
        for line, instead in edits:
            assert text.count(line) == 1, f"the source has changed, update this probe: {line!r} is not there once"
            text = text.replace(line, instead)
        (sources / "twoshot_ring.cu").write_text(text)
        kernels.SOURCES = sources
        os.environ["TOKENWEAVE_CACHE"] = folder
        loaded.cache_clear()
        try:
            yield
        finally:
            kernels.SOURCES = before[0]
            os.environ.pop("TOKENWEAVE_CACHE")
            if before[1] is not None:
                os.environ["TOKENWEAVE_CACHE"] = before[1]
            loaded.cache_clear()


def collective(workspace: Workspace, start: int, tokens: int, ctas: int) -> torch.Tensor:
    """The two-shot collective of rows ``start`` to ``start + tokens`` with ``ctas`` blocks; its rows."""
    x = workspace.buffer(tokens, start=start)
    residual, weight = inputs(workspace)
    return fused_allreduce_rmsnorm(x, residual[start : start + tokens], weight, 1e-5, workspace, ctas=ctas)[0]


def inputs(workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual, weight): the same each time, so that graphs hold the same memory."""
    if not _kept:
        generator = torch.Generator(workspace.device).manual_seed(1)
        residual = torch.randn(MOST, HIDDEN, device=workspace.device, generator=generator).bfloat16()
        _kept.extend((residual, torch.ones(HIDDEN, device=workspace.device).bfloat16()))
    return _kept[0], _kept[1]


def result_of(workspace: Workspace, graph: torch.cuda.CUDAGraph, tokens: int) -> torch.Tensor:
    """The rows of one replay from fixed inputs."""
    generator = torch.Generator(workspace.device).manual_seed(2 + workspace.rank)
    workspace.buffer(MOST).normal_(generator=generator)
    residual, _ = inputs(workspace)
    residual.normal_(generator=torch.Generator(workspace.device).manual_seed(3))
    dist.barrier(workspace.group)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier(workspace.group)
    return workspace.buffer(tokens).clone()


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``run`` as a graph, with the kernels that are loaded now."""
    run()  # compiles
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def timed(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
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
