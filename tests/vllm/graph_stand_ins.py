"""What stands for the GPU, vLLM's runner and a model where the plugin's graphs are tested: captures, replays and walks only write down
what was asked of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenweave.integrations.vllm import graphs as module
from tokenweave.integrations.vllm import warm_up
from tokenweave.integrations.vllm.choice import Choice
from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.graphs import Graphs
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.requests import Rows
from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.step import Cut, Planned
from tokenweave.integrations.vllm.ways import Ways
from tokenweave.models.config import ModelConfig
from tokenweave.planning import Mode, Planner

MAX_ROWS, REQUESTS = 2048, 64


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    """Remembers what was walked while it captured; a replay says so."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.walked: list[Cut] = []
        self.replays = 0

    @staticmethod
    @contextlib.contextmanager
    def capture(stream: Stream, pool: Any) -> Iterator[Graph]:
        """In the place of :func:`tokenweave.cuda.graph.capturing`."""
        assert pool == (0, 0)
        Graph.capturing = Graph()
        try:
            yield Graph.capturing
        finally:
            Graph.capturing = None

    def replay(self) -> None:
        assert len(self.walked) == 1
        self.replays += 1


class Walks:
    """In the place of :meth:`Runtime.walk`: steps that were ``launched``, and what ran ``eager`` before a capture."""

    def __init__(self) -> None:
        self.launched: list[Cut] = []
        self.eager: list[Cut] = []
        self.layers: list[int | None] = []
        self.layouts: list[tuple[list[int], list[int]]] = []

    def __call__(self, cut: Cut, row_count: torch.Tensor | None = None, layers: int | None = None) -> None:
        if row_count is None:
            self.launched.append(cut)
            return
        assert row_count.data_ptr() == cut.tables.query_start_loc[-1:].data_ptr()
        if Graph.capturing is not None:
            Graph.capturing.walked.append(cut)
            return
        self.eager.append(cut)
        self.layers.append(layers)
        self.layouts.append((cut.tables.query_start_loc.tolist(), cut.tables.seq_lens.tolist()))


@functools.cache
def planner() -> Planner:
    return Planner(ModelConfig("llama", 4096, 14336, 32, 32, 8, 128, 128256, 8192), "h200", 2, "p2p", "auto")


def make_runtime(mode: Mode | None = None, max_length: int = 1500) -> Any:
    """A runtime without workspace, model and GPU."""
    runtime = object.__new__(Runtime)
    runtime.max_rows, runtime.max_requests, runtime.max_length = MAX_ROWS, REQUESTS, max_length
    runtime.device, runtime.choice = torch.device("cuda"), Choice(planner(), mode, plain=True)
    runtime.steps, runtime.off, runtime.warmed_up = Steps(), None, False
    runtime.workspace = SimpleNamespace(
        check=lambda: None, group=None, transport="torch", buffer=lambda rows: torch.zeros(rows, 4), world_size=2
    )
    runtime.requests = SimpleNamespace(hazard=lambda step, cut: False, planned=lambda step: None)
    runtime.model = SimpleNamespace(
        layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(num_heads=16, num_kv_heads=4)))] * 32
    )
    runtime.vllm_config = SimpleNamespace(quant_config=None)
    runtime.compat = SimpleNamespace(metadata_problem=lambda metadata, layer: None)
    runtime.addresses, runtime.anywhere = lambda: (1, 2), lambda true: true
    runtime._expect_failed_everywhere = lambda error: None
    runtime.residual = torch.zeros(MAX_ROWS, 4)
    runtime.walk, runtime.ways = Walks(), Ways(layers=32)
    runtime.graphs = Graphs(runtime, least_rows=513)
    return runtime


class Buffers:
    """The runner's, filled with what a step leaves there."""

    def __init__(self) -> None:
        self.ids = torch.arange(MAX_ROWS, dtype=torch.int32)
        self.positions = torch.arange(MAX_ROWS)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32)
        self.blocks = torch.zeros(REQUESTS, 16, dtype=torch.int32)
        self.slots = torch.full((1, MAX_ROWS), -1)

    def step(self, counts: list[int]) -> tuple[list[Rows], Tables]:
        rows, n = sum(counts), len(counts)
        self.starts[1 : n + 1] = torch.tensor(counts).cumsum(0)
        self.starts[n + 1 :] = rows
        self.lengths.zero_()
        self.lengths[:n] = torch.tensor(counts)
        self.slots.fill_(-1)
        self.slots[0, :rows] = torch.arange(rows)
        tables = Tables(
            self.ids[:rows],
            self.positions[:rows],
            self.starts[: n + 1],
            self.lengths[:n],
            self.blocks[:n],
            self.slots[0, :rows],
            object(),
        )
        return [Rows(f"r{i}", count, 0) for i, count in enumerate(counts)], tables


def run(runtime: Any, buffers: Buffers, counts: list[int]) -> torch.Tensor | None:
    """A step as the state and the model run it."""
    step, tables = buffers.step(counts)
    planned = runtime.prepare(step, tables)
    return None if planned is None else runtime.forward(Planned(planned, dict), None)


def small_runtime(mode: Mode | None = None) -> Any:
    """One that also takes what vLLM would replay in pieces."""
    runtime = make_runtime(mode)
    runtime.graphs = Graphs(runtime, least_rows=1)
    return runtime


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the GPU and the other ranks."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(module, "capturing", Graph.capture)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(warm_up, "slowest", lambda times, group, device: times)
