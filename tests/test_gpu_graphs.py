"""CUDA graphs of the fused collective: many alive on one channel, in changing order, eager calls between; two in flight.

PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_graphs.py
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch

from collective_cases import EPS, bits, fresh_seed
from gpu_cases import RANKS, gathered, on_ranks, opened
from row_count_cases import COUNTED, check_row_count
from shared_gpu import gpus_as_they_are
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm

pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]
MOST, HIDDEN = 2048, 4096
SHAPES = (  # tokens, layout, ctas, steps one after the other in the graph
    (1, "replicated", None, 1),
    (5, "replicated", None, 3),  # as many as a channel has inboxes
    (512, "replicated", None, 1),
    (3, "sharded", None, 1),
    (257, "sharded", 4, 1),
    (1000, "sharded", 31, 2),
    (2048, "sharded", 8, 1),
    (2048, "sharded", None, 1),
)


@dataclass
class Chain:
    """Calls that start from inputs of their own each time, so that every run has the same result.

    Attributes:
        expected: (rows, residual) of the first run. rows, residual: of the latest, to poison before the next.
        count: rows that are real, on the device; None for all of them.
    """

    tokens: int
    layout: str
    ctas: int | None
    steps: int
    channel: int
    region: int
    workspace: Workspace
    partial: torch.Tensor
    start: torch.Tensor
    weight: torch.Tensor
    rows: torch.Tensor
    residual: torch.Tensor
    count: torch.Tensor | None = None
    expected: tuple[torch.Tensor, torch.Tensor] | None = None
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        x = self.workspace.buffer(self.tokens, region=self.region)
        x.copy_(self.partial)
        self.residual.copy_(self.start)
        for _ in range(self.steps):
            fused_allreduce_rmsnorm(
                x,
                self.residual,
                self.weight,
                EPS,
                self.workspace,
                channel=self.channel,
                ctas=self.ctas,
                layout=self.layout,
                row_count=self.count,
            )
        self.rows.copy_(x)

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.run()

    def poison(self) -> None:
        self.rows.fill_(float("nan"))
        self.residual.fill_(float("nan"))

    def right(self) -> bool:
        assert self.expected is not None
        pairs = zip((self.rows, self.residual), self.expected, strict=True)
        return all(torch.equal(bits(got), bits(wanted)) for got, wanted in pairs)


def _chain(
    workspace: Workspace, shape, seed: int, *, channel: int = 0, region: int = 0, real: int | None = None
) -> Chain:
    tokens, layout, ctas, steps = shape
    device = workspace.device
    mine = torch.Generator(device).manual_seed(seed * 31 + workspace.rank)
    ours = torch.Generator(device).manual_seed(seed)
    partial = torch.randn(tokens, HIDDEN, device=device, generator=mine).bfloat16()
    start = torch.randn(tokens, HIDDEN, device=device, generator=ours).bfloat16()
    weight = (torch.rand(HIDDEN, device=device, generator=ours) + 0.5).bfloat16()
    count = None if real is None else torch.tensor([real], dtype=torch.int32, device=device)
    rows, residual = torch.empty_like(partial), torch.empty_like(start)
    chain = Chain(
        tokens, layout, ctas, steps, channel, region, workspace, partial, start, weight, rows, residual, count
    )
    chain.run()
    chain.expected = chain.rows.clone(), chain.residual.clone()
    real = tokens if real is None else real
    for other in gathered(chain.rows[:real]):
        assert torch.equal(bits(other), bits(chain.rows[:real])), f"ranks differ: {shape}"
    return chain


def _shared_channel(replays: int, seed: int) -> tuple[int, float]:
    pick = random.Random(seed)  # the same on all ranks
    with opened(MOST, HIDDEN) as workspace:
        chains = [_chain(workspace, shape, seed + number) for number, shape in enumerate(SHAPES)]
        chains.append(_chain(workspace, (300, "sharded", 4, 1), seed + 50, real=123))
        room = min(300, workspace.symmetric.inbox_rows)  # a batch of a counted number of rows is one call
        chains.append(_chain(workspace, (room, "replicated", None, 1), seed + 51, real=min(123, room - 5)))
        eager = [_chain(workspace, shape, seed + 100 + n, channel=n % 2) for n, shape in enumerate(SHAPES)]
        for chain in chains:
            chain.capture()
        torch.cuda.synchronize()
        began, done = time.perf_counter(), 0
        while done < replays:
            burst = pick.choices(chains, k=pick.randrange(1, 40))
            if pick.random() < 0.1:  # a graph goes, another comes, and the rest stay alive
                burst[0].graph = None
                burst[0].capture()
            ran = []
            for chain in burst:
                chain.poison()
                chain.graph.replay()
                ran.append(chain)
                if pick.random() < 0.3:
                    other = pick.choice(eager)
                    other.poison()
                    other.run()
                    ran.append(other)
            for chain in ran:  # waits for the GPU; nothing did before
                assert chain.right(), f"{chain.tokens} rows, {chain.layout}, after {done} replays"
            done += len(burst)
        seconds = time.perf_counter() - began
        workspace.check()
        for chain in chains:
            chain.graph = None
    return done, seconds


def test_graphs_that_share_a_channel():
    done, seconds = on_ranks(_shared_channel, 4000, fresh_seed(), timeout=150)[0]
    print(f"{done} replays of {len(SHAPES) + 2} graphs in {seconds:.1f} s")


def _in_flight(rounds: int, seed: int) -> None:
    pick = random.Random(seed)
    with opened(MOST, HIDDEN, regions=2) as workspace:
        shapes = (
            (2048, "sharded", 8, 2),
            (1000, "sharded", 4, 2),
            (64, "replicated", None, 3),
            (257, "sharded", 12, 1),
        )
        sides = [
            [
                _chain(workspace, shape, seed + 10 * side + n, channel=side, region=side)
                for n, shape in enumerate(shapes)
            ]
            for side in range(2)
        ]
        for chain in (*sides[0], *sides[1]):
            chain.capture()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        for _ in range(rounds):
            pair = [pick.choice(side) for side in sides]
            for chain, stream in zip(pair, streams, strict=True):
                chain.poison()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    chain.graph.replay()
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            assert all(chain.right() for chain in pair)
        workspace.check()
        for chain in (*sides[0], *sides[1]):
            chain.graph = None


def test_graphs_of_two_channels_in_flight():
    on_ranks(_in_flight, 500, fresh_seed())


@pytest.mark.parametrize("counted", COUNTED, ids=str)
def test_the_row_count_is_read_on_the_device(counted):
    on_ranks(check_row_count, counted, fresh_seed())


def _two_streams(rounds: int) -> None:
    """Two collectives in flight on two streams, each with its channel and its region."""
    with opened(1024, 4096, regions=2) as workspace:
        weight = torch.ones(4096, device=workspace.device).bfloat16()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        x = [workspace.buffer(1024, region=i) for i in range(2)]
        start = [torch.randn(1024, 4096, device=workspace.device).bfloat16() for _ in range(2)]
        residual = [torch.zeros(1024, 4096, device=workspace.device).bfloat16() for _ in range(2)]
        expected = []
        for i in range(2):
            x[i].copy_(start[i])
            rows, _ = fused_allreduce_rmsnorm(x[i], residual[i].clone(), weight, EPS, workspace, ctas=8)
            expected.append(rows.clone())
        for _ in range(rounds):
            for i in range(2):
                streams[i].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[i]):
                    x[i].copy_(start[i])
                    residual[i].zero_()
                    fused_allreduce_rmsnorm(x[i], residual[i], weight, EPS, workspace, ctas=8, channel=i)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        for i in range(2):
            assert torch.equal(bits(x[i]), bits(expected[i]))


def test_two_collectives_in_flight():
    on_ranks(_two_streams, 300)


def _compiled() -> None:
    with opened(256, 4096) as workspace:
        device = workspace.device
        matrix = (
            torch.randn(4096, 4096, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16() / 64
        )
        weight = torch.ones(4096, device=device).bfloat16()

        def layer(x, residual, rows):
            y, _ = fused_allreduce_rmsnorm(x @ matrix, residual, weight, EPS, workspace)
            z, _ = fused_allreduce_rmsnorm(y @ matrix, residual, weight, EPS, workspace, rows=rows)
            return z

        generator = torch.Generator(device).manual_seed(2 + workspace.rank)
        x = torch.randn(200, 4096, device=device, generator=generator).bfloat16()
        rows = torch.tensor([0, 7, 100, 199], device=device)
        one, two = torch.zeros_like(x), torch.zeros_like(x)
        expected = layer(x, one, rows)
        compiled = torch.compile(layer, fullgraph=True)
        with gpus_as_they_are():
            result = compiled(x, two, rows)
        assert torch.equal(expected, result)
        assert torch.equal(one, two)
        for mode in ("eager", "compiled"):
            run = layer if mode == "eager" else compiled
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = run(x, two, rows)
            for _ in range(1000):
                two.zero_()
                graph.replay()
            assert torch.equal(captured, expected)
            run(x, two, rows)
            del graph


def test_torch_compile_and_graphs():
    on_ranks(_compiled)
