"""Collectives of small batches alone, and among the GEMMs of a step: by threads a row, one shot or two, beside FlashInfer's.

    torchrun --nproc-per-node 2 benchmarks/oneshot_in_step/measure.py [OUT.json] [--tokens 129,257,...]        # a minute

A step is six layers of Llama-3.1-8B's GEMMs for so many ranks and silu_mul, without attention, as a CUDA graph; of its time that of the
same graph without collectives and norms is taken away, and what is left is divided by its twelve collectives. Alone: twelve of them and
nothing else. bf16, rounds of all ways in random order, the slowest rank of each; the rows of every way are compared with those of the
first one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from tokenweave.bench.environment import describe
from tokenweave.bench.flashinfer_fusion import FlashInferFusion
from tokenweave.bench.launch import Rank, joined
from tokenweave.bench.timing import GraphClock, median_estimate, ratio_estimate, slowest_rank, take_turns
from tokenweave.collective import Workspace, cuda_backend, fused_allreduce_rmsnorm
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.files import write_result
from tokenweave.models.kernels import silu_mul
from tokenweave.stages import Epilogue

LAYERS, COLLECTIVES, ROUNDS = 6, 12, 40
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128  # Llama-3.1-8B
THREADS = (128, 256, 512)  # a row; the collective's own choice is the way "one-shot"
REFERENCE = "norm"  # no collective: each rank norms its own sums
EPS = 1e-5
TOLERANCE = 0.05  # of a way's last rows, in the Euclidean norm: bf16 with sums in another order, over six layers

Collective = Callable[[torch.Tensor], None]  # partial sums become normalised rows, in place


class Step:
    """Six layers' GEMMs of one rank.

    Args:
        tokens: rows. workspace: with two regions.
    """

    def __init__(self, tokens: int, workspace: Workspace) -> None:
        ranks, generator = workspace.world_size, torch.Generator(workspace.device).manual_seed(1 + workspace.rank)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            made = torch.randn(rows, columns, device=workspace.device, dtype=torch.bfloat16, generator=generator)
            return made * columns**-0.5

        width, inner = HEADS * HEAD_DIM // ranks, INTERMEDIATE // ranks
        qkv = width + 2 * KV_HEADS * HEAD_DIM // ranks
        self._layers = [
            (matrix(qkv, HIDDEN), matrix(HIDDEN, width), matrix(2 * inner, HIDDEN), matrix(HIDDEN, inner))
            for _ in range(LAYERS)
        ]
        self._width = width
        self._rows = torch.randn(tokens, HIDDEN, device=workspace.device, generator=generator).bfloat16()
        self._partial = [workspace.buffer(tokens, region=region) for region in range(2)]

    def run(self, collective: Collective | None) -> torch.Tensor:
        """The last rows. None: every GEMM reads the same normal rows, and there is no collective."""
        x = self._rows
        for qkv, o, gate_up, down in self._layers:
            heads = (x @ qkv.t())[:, : self._width]
            x = self._summed(torch.mm(heads, o.t(), out=self._partial[0]), collective)
            x = self._summed(torch.mm(silu_mul(x @ gate_up.t()), down.t(), out=self._partial[1]), collective)
        return x

    def _summed(self, partial: torch.Tensor, collective: Collective | None) -> torch.Tensor:
        if collective is None:
            return self._rows
        collective(partial)
        return partial

    def alone(self, collective: Collective) -> None:
        """The collectives of a step and nothing else."""
        for number in range(COLLECTIVES):
            collective(self._partial[number % 2])


def threads_a_row(threads: int | None) -> AbstractContextManager[object]:
    """One-shot kernels that are chosen within have so many; None: what the package chooses."""
    if threads is None:
        return nullcontext()
    chosen = cuda_backend._oneshot_kernel

    @functools.lru_cache(maxsize=64)
    def instead(*shape: object) -> object:
        return dataclasses.replace(chosen(*shape), group_threads=threads)

    return mock.patch.object(cuda_backend, "_oneshot_kernel", instead)


def ways(
    rows: torch.Tensor, workspace: Workspace, fusion: FlashInferFusion | None
) -> dict[str, tuple[int | None, Collective]]:
    """Way -> (threads a row, collective); the reference is the first. ``rows``: the residual, of a batch's size."""
    weight = torch.ones(HIDDEN, device=workspace.device, dtype=torch.bfloat16)

    def norm(x: torch.Tensor) -> None:
        add_rmsnorm(x, rows, Epilogue(weight, EPS))

    def one_shot(x: torch.Tensor) -> None:
        fused_allreduce_rmsnorm(x, rows, weight, EPS, workspace, layout="replicated")

    def two_shot(x: torch.Tensor) -> None:
        fused_allreduce_rmsnorm(x, rows, weight, EPS, workspace)

    def flashinfer(x: torch.Tensor, one_shot: bool) -> None:
        assert fusion is not None
        fusion.run(x, rows, rows, weight, EPS, one_shot)

    found: dict[str, tuple[int | None, Collective]] = {REFERENCE: (None, norm), "one-shot": (None, one_shot)}
    found |= {f"one-shot, {threads} threads": (threads, one_shot) for threads in THREADS}
    found["two-shot"] = None, two_shot
    if fusion is not None and fusion.takes(len(rows), False):
        found["flashinfer one-shot"] = None, functools.partial(flashinfer, one_shot=True)
        found["flashinfer two-shot"] = None, functools.partial(flashinfer, one_shot=False)
    return found


def measure(tokens: int, workspace: Workspace, fusion: FlashInferFusion | None, me: Rank) -> list[dict[str, object]]:
    """A row a way."""
    step, clock = Step(tokens, workspace), GraphClock(me.group, me.device)
    residual = torch.empty(tokens, HIDDEN, device=me.device, dtype=torch.bfloat16)
    normal = torch.randn(residual.shape, device=me.device, generator=torch.Generator(me.device).manual_seed(7))
    found = ways(residual, workspace, fusion)
    graphs, errors = {"without": captured(clock, lambda: step.run(None))}, {}
    first: torch.Tensor | None = None
    for way, (threads, collective) in found.items():
        with threads_a_row(threads):
            residual.copy_(normal)
            rows = step.run(collective).float()
            if way != REFERENCE:
                first = rows if first is None else first
                errors[way] = float((rows - first).norm() / first.norm())
            graphs[f"{way} in step"] = captured(clock, functools.partial(step.run, collective))
            graphs[f"{way} alone"] = captured(clock, functools.partial(step.alone, collective))
    for way, error in errors.items():
        assert error < TOLERANCE, f"{tokens} tokens, {way}: {error:.3f} away from the one-shot kernel's rows"

    def sample(graph: torch.cuda.CUDAGraph) -> float:
        return clock.replay(graph, lambda: residual.copy_(normal), replays=3)

    turns = take_turns({name: functools.partial(sample, graph) for name, graph in graphs.items()}, ROUNDS)
    workspace.check()
    times = slowest_rank(turns, me.group, me.device)
    table = []
    for way in found:
        inside = [(a - b) / COLLECTIVES for a, b in zip(times[f"{way} in step"], times["without"], strict=True)]
        alone = [us / COLLECTIVES for us in times[f"{way} alone"]]
        row: dict[str, object] = {"tokens": tokens, "way": way}
        row |= {
            "in_step": dataclasses.asdict(median_estimate(inside)),
            "alone": dataclasses.asdict(median_estimate(alone)),
        }
        if fusion is not None and way != REFERENCE:
            ratio = ratio_estimate(times["flashinfer one-shot in step"], times[f"{way} in step"])
            row["step_over_flashinfer_one_shot"] = dataclasses.asdict(ratio)
        table.append(row)
    return table


def captured(clock: GraphClock, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``run`` as a graph, after it has run once."""
    run()
    torch.cuda.synchronize()
    return clock.capture(run, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parser.add_argument("--tokens", default="64,129,200,257,320,391,450,512", help="default %(default)s")
    parsed = parser.parse_args()
    sizes = [int(size) for size in parsed.tokens.split(",")]
    with joined() as me, torch.inference_mode():
        options = {"max_tokens": max(sizes), "hidden": HIDDEN, "dtype": torch.bfloat16, "device": me.device}
        with Workspace(me.group, regions=2, transport="p2p", **options) as workspace:
            fusion = None
            try:
                fusion = FlashInferFusion(me.group, max(sizes), HIDDEN)
            except ImportError as error:
                me.say(f"FlashInfer's all-reduce is not measured: {error}")
            rows = [row for size in sizes for row in measure(size, workspace, fusion, me)]
            if fusion is not None:
                fusion.close()
        if me.rank == 0:
            for row in rows:
                print(json.dumps(row), flush=True)
            if parsed.out:
                result = {"environment": describe(), "layers": LAYERS, "hidden": HIDDEN, "rows": rows}
                write_result(result, parsed.out)


if __name__ == "__main__":
    main()
