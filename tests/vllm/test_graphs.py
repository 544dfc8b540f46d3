"""What is captured when, and on which buffers: the graphs' bookkeeping, with captures and replays that only write down."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenweave.errors import CollectiveError
from tokenweave.integrations.vllm import graphs as module
from tokenweave.integrations.vllm import warm_up
from tokenweave.integrations.vllm.choice import Choice
from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.graphs import Graphs
from tokenweave.integrations.vllm.measured import Measured
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Rows
from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.step import Cut, Planned
from tokenweave.models.config import ModelConfig
from tokenweave.planning import Mode, Plan, Planner

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


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(module, "capturing", Graph.capture)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(warm_up, "slowest", lambda times, group, device: times)
    monkeypatch.setattr(warm_up, "_anywhere", lambda true, runtime: true)


class Walks:
    """In the place of :meth:`Runtime.walk`."""

    def __init__(self) -> None:
        self.eager: list[Cut] = []
        self.layers: list[int | None] = []
        self.layouts: list[tuple[list[int], list[int]]] = []

    def __call__(self, cut: Cut, row_count: torch.Tensor | None = None, layers: int | None = None) -> None:
        assert row_count is not None
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
        group=None, transport="torch", buffer=lambda rows: torch.zeros(rows, 4), world_size=2
    )
    runtime.requests = SimpleNamespace(hazard=lambda step, cut: False, planned=lambda step: None)
    runtime.model = SimpleNamespace(
        layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(num_heads=16, num_kv_heads=4)))] * 32
    )
    runtime.vllm_config = SimpleNamespace(quant_config=None)
    runtime.compat = SimpleNamespace(metadata_problem=lambda metadata, layer: None)
    runtime.addresses = lambda: (1, 2)
    runtime.walk = Walks()
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
    return None if planned is None else runtime.forward(Planned({}, planned), None)


def test_a_new_size_runs_as_stock_then_launch_by_launch_then_as_a_graph() -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()
    assert run(runtime, buffers, [1000]) is None
    assert runtime.steps.reasons == {Reason.NEW_BUCKET: 1}
    rows = run(runtime, buffers, [600, 390])  # the same size: 1024
    assert rows is not None
    assert rows.shape[0] == 990
    assert (len(runtime.walk.eager), len(runtime.graphs), runtime.steps.graphs) == (1, 0, 0)
    run(runtime, buffers, [1024])
    run(runtime, buffers, [900])
    assert (len(runtime.walk.eager), len(runtime.graphs), runtime.steps.graphs) == (1, 1, 2)
    (found,) = runtime.graphs._graphs.values()
    assert found.graph.replays == 2
    (cut,) = found.graph.walked
    assert cut.rows == cut.tables.token_ids.shape[0] == 1024
    assert 0 < cut.plan.split < 897
    assert cut.tables.seq_lens.shape[0] == 16  # room for more requests than the steps had
    assert cut.tables.addresses() == buffers.step([1024])[1].addresses()
    assert run(runtime, buffers, [896]) is None  # another size
    assert runtime.steps.rows == {Mode.WOVEN: 990 + 1024 + 900}


def test_small_steps_have_no_graph_and_large_ones_run_launch_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    assert runtime.graphs.rows_of(512) is None
    assert runtime.graphs.rows_of(513) == 640
    assert runtime.graphs.rows_of(2048) == 2048
    monkeypatch.setattr(module, "MAX_ROWS", 1024)
    assert runtime.graphs.rows_of(1025) is None
    assert run(runtime, buffers, [1100]) is None
    assert runtime.steps.reasons == {Reason.EAGER_SLOWER: 1}
    monkeypatch.setattr("tokenweave.integrations.vllm.runtime.EAGER_ROWS", 1100)
    monkeypatch.setattr(Walks, "__call__", lambda self, cut, row_count=None, layers=None: self.eager.append(cut))
    assert run(runtime, buffers, [700, 400]) is not None
    (cut,) = runtime.walk.eager
    assert (cut.rows, cut.longest_query, cut.longest_sequence) == (1100, 700, 700)


def small_runtime(mode: Mode | None = None) -> Any:
    """One that also takes what vLLM would replay in pieces."""
    runtime = make_runtime(mode)
    runtime.graphs = Graphs(runtime, least_rows=1)
    return runtime


def test_small_steps_have_graphs_where_vllm_replays_pieces() -> None:
    runtime, buffers = small_runtime(Mode.FUSED), Buffers()
    sizes = {rows: runtime.graphs.rows_of(rows) for rows in (1, 16, 17, 33, 64, 65, 128, 129, 512, 513)}
    assert sizes == {1: 16, 16: 16, 17: 32, 33: 64, 64: 64, 65: 128, 128: 128, 129: 256, 512: 512, 513: 640}
    for _ in range(4):
        run(runtime, buffers, [20, 1, 1])
    assert len(runtime.graphs) == 1
    assert runtime.steps.rows == {Mode.FUSED: 3 * 22}
    runtime.max_rows = 48
    assert [runtime.graphs.rows_of(rows) for rows in (20, 33, 48)] == [32, 48, 48]


def test_no_small_step_is_woven_unless_asked_for() -> None:
    runtime, buffers = small_runtime(), Buffers()
    for rows in (1, 5, 16, 100, 128):
        for _ in range(3):
            run(runtime, buffers, [rows])
    assert runtime.off is None
    assert Mode.WOVEN not in runtime.steps.rows


def test_a_graph_with_more_room_serves_before_another_is_made() -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.graphs.rooms = (2, 4, 8)
    for _ in range(3):
        run(runtime, buffers, [200] * 5)
    assert run(runtime, buffers, [500, 500]) is not None
    assert len(runtime.graphs._graphs) == 1
    assert Reason.NEW_BUCKET not in runtime.steps.reasons or runtime.steps.reasons[Reason.NEW_BUCKET] == 1
    assert run(runtime, buffers, [100] * 9) is None
    assert runtime.steps.reasons[Reason.EAGER_SLOWER] == 1


def test_the_most_important_sizes_come_first() -> None:
    graphs = small_runtime().graphs
    sizes = graphs._by_importance()
    assert sizes[:9] == [2048, 1024, 512, 256, 128, 64, 32, 16, 1536]
    assert sorted(sizes) == [16, 32, 64, *range(128, 2049, 128)]
    assert [graphs._rooms_at_start(size) for size in (16, 64, 2048)] == [[16], [16, 64], [16, 64]]
    assert make_runtime().graphs._by_importance()[:4] == [2048, 1024, 1536, 768]


def test_more_requests_than_a_graph_has_room_for() -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.graphs.rooms = (2, 3)
    assert run(runtime, buffers, [200] * 4) is None
    assert runtime.steps.reasons == {Reason.EAGER_SLOWER: 1}
    run(runtime, buffers, [300] * 3)
    run(runtime, buffers, [450] * 2)  # a graph of its own
    assert runtime.steps.reasons[Reason.NEW_BUCKET] == 2
    for _ in range(2):
        run(runtime, buffers, [300] * 3)
    (found,) = [found for found in runtime.graphs._graphs.values() if found.graph is not None]
    assert found.cut.tables.seq_lens.shape[0] == 3


def test_graphs_are_made_anew_when_the_cache_moves() -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    for _ in range(4):
        run(runtime, buffers, [1000])
    assert len(runtime.graphs) == 1
    runtime.addresses = lambda: (1, 3)
    assert run(runtime, buffers, [1000]) is None
    assert len(runtime.graphs) == 0
    for _ in range(2):
        run(runtime, buffers, [1000])
    assert len(runtime.graphs) == 1


def test_the_graph_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    for counts in ([1000], [1200], [1000], [1400], [1000]):
        run(runtime, buffers, counts)
    assert [key[0] for key in runtime.graphs._graphs] == [1408, 1024]
    assert len(runtime.graphs) == 1  # 1024 was captured in its third step


def stock_of(times: dict[int, float], sizes: list[int]) -> Any:
    def stock(rows: int) -> Any:
        sizes.append(rows)
        return SimpleNamespace(rows=rows, ms=times[rows])

    return stock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Milliseconds a replay takes per 1000 rows, by mode; stock steps say theirs. Woven ones in a scheme take as often as long as
    its text says."""
    pace: dict[Any, float] = {}

    def milliseconds(call: Any, device: Any, repeats: int) -> float:
        assert repeats == 3
        if isinstance(call, SimpleNamespace):
            return call.ms
        cut = call.__self__.walked[0]
        plan = cut.plan
        scheme = plan.scheme
        return pace[plan.mode] * cut.rows / 1000 * pace.get((cut.rows, str(scheme)), 1.0)

    monkeypatch.setattr(module, "milliseconds", milliseconds)
    return pace


def test_what_is_measured_at_the_start_decides(clock: dict[Mode, float]) -> None:
    runtime, buffers = make_runtime(), Buffers()
    _, tables = buffers.step([7, 8])
    before = [buffer.clone() for buffer in (buffers.starts, buffers.lengths, buffers.slots, buffers.positions)]
    clock.update({Mode.FUSED: 9.0, Mode.WOVEN: 10.0})
    sizes: list[int] = []
    stock = stock_of({640: 5.8, 1024: 10.3, 2048: 30.0}, sizes)  # fused is 0.99 of stock's at 640
    warm_up.warm_up(runtime, tables, stock)
    assert runtime.off is None
    assert sizes == [2048, 1024, 640]
    assert runtime.choice.measured is not None
    assert runtime.choice.measured.best(640) is Mode.SEQUENTIAL
    assert runtime.choice.measured.best(1024) is runtime.choice.measured.best(2048) is Mode.FUSED
    after = (buffers.starts, buffers.lengths, buffers.slots, buffers.positions)
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    modes = {key[0]: key[2] for key in runtime.graphs._graphs}
    assert {key[1] for key in runtime.graphs._graphs} == {16, REQUESTS}
    assert 640 not in modes
    assert {modes[size] for size in (1024, 1536, 2048)} == {Mode.FUSED}
    assert all(found.graph is not None for found in runtime.graphs._graphs.values())
    made = len(runtime.graphs)
    warm_up.warm_up(runtime, tables, stock)  # vLLM captures many graphs of its own
    assert (len(sizes), len(runtime.graphs)) == (3, made)
    assert run(runtime, buffers, [2000]) is not None
    assert runtime.steps.graphs == 1


def test_the_step_in_which_it_is_measured_is_left_whole(clock: dict[Mode, float]) -> None:
    runtime, buffers = make_runtime(), Buffers()
    runtime.graphs.rooms = (16, 32)  # vLLM takes more requests than graphs have room for
    _, tables = buffers.step([20] * REQUESTS)
    every = (buffers.ids, buffers.positions, buffers.starts, buffers.lengths, buffers.slots)
    before = [buffer.clone() for buffer in every]
    clock.update({Mode.FUSED: 9.0, Mode.WOVEN: 10.0})

    def stock(rows: int) -> Any:
        for buffer in every:  # as vLLM's dummy batches: to the end, whatever the rows
            buffer.fill_(-rows)
        return SimpleNamespace(rows=rows, ms=30.0)

    warm_up.warm_up(runtime, tables, stock)
    assert runtime.off is None
    assert all(a.equal(b) for a, b in zip(before, every, strict=True))


def test_an_engine_without_graphs_is_done_with_it_at_once() -> None:
    runtime, buffers = make_runtime(), Buffers()
    runtime.graphs = None
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.warmed_up, "or every step would build its metadata twice"


def test_no_kernel_waits_for_a_rank_that_is_not_there_yet(
    clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    walked: list[int] = []  # before each of the ranks' meetings

    def anywhere(true: bool, runtime: Any) -> bool:
        walked.append(len(runtime.walk.eager))
        return true

    monkeypatch.setattr(warm_up, "_anywhere", anywhere)
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert walked == [0, len(runtime.walk.eager)]
    assert walked[1] > 0


def test_a_kernel_that_gave_up_leaves_stock(clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()

    def check(workspace: Any) -> None:
        raise CollectiveError("a peer fell behind")

    monkeypatch.setattr(warm_up, "check", check)
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert (runtime.off, len(runtime.graphs)) == (Reason.ERROR, 0)


@pytest.mark.parametrize(("plain", "mixture", "layers"), [(True, False, 2), (False, False, None), (True, True, None)])
def test_before_a_capture_as_many_layers_run_as_differ(plain: bool, mixture: bool, layers: int | None) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.vllm_config = SimpleNamespace(quant_config=None if plain else object())
    if mixture:
        runtime.model = SimpleNamespace(layers=[SimpleNamespace(block_sparse_moe=object())] * 32)
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is None
    assert set(runtime.walk.layers) == {layers}


@pytest.mark.parametrize(
    ("requests", "length", "sizes", "made"),
    [(2, 600, [640, 1024], 1280), (1, 700, [640], 768), (1, 100, [], None), (64, 40, [640, 1024, 2048], 2048)],
)
def test_no_step_is_larger_than_all_requests_at_their_longest(
    requests: int, length: int, sizes: list[int], made: int | None
) -> None:
    runtime, buffers = make_runtime(Mode.FUSED, max_length=length), Buffers()
    runtime.max_requests = requests
    runtime.graphs = Graphs(runtime, least_rows=513)
    assert runtime.graphs.sizes == sizes
    assert runtime.graphs._by_importance()[:1] == ([] if made is None else [made])
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is None
    for cut, (starts, _) in zip(runtime.walk.eager, runtime.walk.layouts, strict=True):
        assert starts[-1] == min(cut.rows, requests * length), "as many real rows as there can be"


def test_where_whole_graphs_serve_all_steps_none_is_made() -> None:
    runtime = make_runtime()
    assert Graphs(runtime, least_rows=MAX_ROWS + 1)._by_importance() == []


def test_what_is_left_to_stock_is_not_launched_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenweave.integrations.vllm.runtime.EAGER_ROWS", 1000)
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.graphs.least_rows = 1200  # vLLM has graphs up to there
    assert run(runtime, buffers, [1100]) is None
    assert runtime.steps.reasons == {Reason.EAGER_SLOWER: 1}


def test_small_steps_are_measured_too_but_not_woven(clock: dict[Mode, float]) -> None:
    runtime, buffers = small_runtime(), Buffers()
    _, tables = buffers.step([7, 8])
    clock.update({Mode.FUSED: 9.0, Mode.WOVEN: 8.0})
    stock = {16: 6.0, 64: 6.0, 256: 7.0, 512: 4.0, 640: 10.0, 1024: 10.3, 2048: 30.0}
    warm_up.warm_up(runtime, tables, stock_of(stock, []))
    measured = runtime.choice.measured
    assert measured is not None
    assert "64 rows: 6.00 stock, 0.58 fused; 256 rows: 7.00 stock, 2.30 fused; 512 rows" in str(measured)
    assert {rows: measured.best(rows) for rows in (16, 64, 128, 384, 512, 640, 2048)} == {
        16: Mode.FUSED,
        64: Mode.FUSED,
        128: Mode.FUSED,
        384: Mode.FUSED,
        512: Mode.SEQUENTIAL,
        640: Mode.WOVEN,
        2048: Mode.WOVEN,
    }
    made = {key[0] for key in runtime.graphs._graphs}
    assert {16, 64, 128, 640, 2048} <= made
    assert 512 not in made


def test_schemes_are_compared_at_the_start(clock: dict[Any, float]) -> None:
    runtime, buffers = make_runtime(), Buffers()
    _, tables = buffers.step([7, 8])
    assert [str(scheme) for scheme in runtime.choice.tried] == [
        "4 / 2, qkv+gate_up limited",
        "4 / 2, qkv+down limited, late",
        "8 / 2, qkv+gate_up limited",
        "8 / 2, qkv+down limited, late",
        "8 / 1, none limited",
    ]
    clock.update({Mode.FUSED: 9.0, Mode.WOVEN: 9.5})
    clock[1024, "8 / 1, none limited"] = 0.9  # 8.55 ms a 1000 rows
    clock[2048, "4 / 2, qkv+down limited, late"] = 0.8
    clock[640, "8 / 1, none limited"] = 0.5  # not tried there, but the nearest size's
    warm_up.warm_up(runtime, tables, stock_of({640: 10.0, 1024: 10.3, 2048: 30.0}, []))
    assert {size: str(scheme) for size, scheme in runtime.choice.schemes.items()} == {
        1024: "8 / 1, none limited",
        2048: "4 / 2, qkv+down limited, late",
    }
    plans = {rows: runtime.plan([], rows) for rows in (640, 1024, 1408, 1536, 2048, 4096)}
    assert {plan.mode for plan in plans.values()} == {Mode.WOVEN}
    assert {rows for rows, plan in plans.items() if not plan.gemm_sms and plan.ctas == 8} == {640, 1024, 1408}
    assert {rows for rows, plan in plans.items() if plan.start_at and plan.ctas == 4} == {1536, 2048, 4096}
    ctas = {key[0]: key[3] for key in runtime.graphs._graphs}
    assert all(value in (8, 4) for value in ctas.values()), "what was only tried is dropped"
    assert len({key for key in runtime.graphs._graphs if key[0] == 1024}) == len(runtime.graphs.rooms)


def test_long_steps_are_measured_less_often(clock: dict[Any, float]) -> None:
    runtime = make_runtime()
    graphs = runtime.graphs
    for ms, repeats, sizes in (
        (20.0, 3, [640, 1024, 2048]),
        (150.0, 2, [640, 1024, 2048]),
        (400.0, 1, [640, 1024, 2048]),
    ):
        graphs._predicted_ms = lambda size, ms=ms: ms
        assert (graphs._repeats(1024), graphs.sizes) == (repeats, sizes)
    graphs._predicted_ms = lambda size: size / 2
    assert graphs.sizes == [640]
    assert graphs.scheme_sizes == []


def test_dummy_steps_fill_their_size_and_write_no_cache(clock: dict[Mode, float]) -> None:
    runtime, buffers = make_runtime(Mode.FUSED, max_length=900), Buffers()
    _, tables = buffers.step([7, 8])
    warm_up.warm_up(runtime, tables, stock_of({}, []))
    assert runtime.choice.measured is None  # the mode was given
    for cut, (starts, lengths) in zip(runtime.walk.eager, runtime.walk.layouts, strict=True):
        counts = [b - a for a, b in itertools.pairwise(starts)]
        assert sum(counts) == cut.rows
        assert counts == lengths  # no context
        assert max(counts) <= 900


def test_an_error_at_the_start_leaves_stock_on_all_ranks() -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()

    def broken(cut: Cut, row_count: torch.Tensor | None = None, layers: int | None = None) -> None:
        raise RuntimeError("out of memory")

    runtime.walk = broken
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is Reason.ERROR
    assert len(runtime.graphs) == 0


def test_an_error_on_another_rank_leaves_stock_too(clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()
    monkeypatch.setattr(warm_up, "_anywhere", lambda true, runtime: True)
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is Reason.ERROR
    assert run(runtime, buffers, [1000]) is None or runtime.forward(Planned({}, None), None) is None  # type: ignore[arg-type]


def test_a_hazard_takes_the_fused_plan() -> None:
    runtime = make_runtime(Mode.WOVEN)
    woven = runtime.plan([Rows("r", 1000, 0)], 1024)
    assert woven.mode is Mode.WOVEN
    runtime.requests.hazard = lambda step, cut: cut == woven.split
    assert runtime.plan([Rows("r", 1000, 0)], 1024) == Plan(
        Mode.FUSED, ctas=runtime.plan([], 1024).ctas, cluster=runtime.plan([], 1024).cluster
    )
    assert runtime.steps.reasons[Reason.PREFIX_HAZARD] == 3


def test_decodes_alone_and_few_rows_after_long_contexts_run_as_stock() -> None:
    runtime = make_runtime(Mode.WOVEN)
    _, tables = Buffers().step([1] * 60)
    assert runtime.prepare([Rows(f"r{i}", 11, 5000) for i in range(60)], tables) is None
    assert runtime.steps.reasons == {Reason.DECODES: 1}
    few = small_runtime(Mode.FUSED)
    few.prepare([Rows("r", 11, 200), Rows("s", 1, 300)], Buffers().step([11, 1])[1])
    assert few.steps.reasons == {Reason.NEW_BUCKET: 1}  # little to attend to: a replay is worth more
    few.prepare([Rows("r", 300, 9000)], Buffers().step([300])[1])
    assert few.steps.reasons[Reason.LONG_CONTEXT] == 1
    beside = [Rows(f"s{i}", 1, 6000) for i in range(30)]  # whose tiles fill the GPU meanwhile
    few.prepare([Rows("r", 300, 9000), *beside], Buffers().step([300, *[1] * 30])[1])
    assert few.steps.reasons[Reason.LONG_CONTEXT] == 1
    assert runtime.prepare([Rows("r", 600, 20000)], tables) is None  # 19 tiles of rows, 4 key/value heads, 132 SMs ...
    assert Reason.LONG_CONTEXT not in runtime.steps.reasons  # ... are more than half
    assert runtime.prepare([Rows("r", 500, 20000)], tables) is None
    assert runtime.steps.reasons[Reason.LONG_CONTEXT] == 1
    assert runtime.plan([Rows("r", 1000, 20000)], 1024).mode is Mode.FUSED  # as a whole it is enough
    assert runtime.plan([Rows("r", 2000, 20000)], 2048).mode is Mode.WOVEN
    assert runtime.plan([Rows("r", 1000, 2000)], 1024).mode is Mode.WOVEN


def test_quantised_models_are_not_cut_by_a_planner_that_knows_bf16() -> None:
    assert Choice(planner(), None, plain=True).plan(2048).mode is Mode.WOVEN
    quantised = Choice(planner(), None, plain=False)
    assert quantised.plan(2048).mode is Mode.FUSED
    quantised.measured = Measured((1024, 2048), stock=(20.0, 40.0), fused=(19.0, 38.0), woven=(18.0, 36.0))
    assert quantised.plan(2048).mode is Mode.WOVEN
    assert quantised.plan(2048, allow_woven=False).mode is Mode.FUSED
    assert Choice(planner(), Mode.WOVEN, plain=False).plan(2048).mode is Mode.WOVEN


@pytest.mark.parametrize(
    ("mode", "least", "after_capture", "ours", "refused"),
    [
        (None, 1, True, 1.9, False),  # whole steps will tell
        (None, 1, True, 2.1, True),
        (None, 1, False, 1.1, True),
        (Mode.FUSED, 1, True, 1.1, True),
        (None, MAX_ROWS + 1, True, 1.1, True),  # vLLM replays every step as a graph of its own: none is measured
        (None, MAX_ROWS + 1, True, 1.0, False),
    ],
)
def test_a_slow_collective_is_refused_unless_whole_steps_decide(
    mode: Mode | None, least: int, after_capture: bool, ours: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenweave.integrations.vllm import first_use

    monkeypatch.setattr(first_use, "_warm_up", lambda device: None)
    monkeypatch.setattr(first_use, "_microseconds", lambda call: 100 * ours if call.__name__ == "ours" else 100.0)
    monkeypatch.setattr(first_use, "slowest", lambda times, group, device: times)
    runtime = make_runtime(mode)
    runtime.graphs = Graphs(runtime, least_rows=least)
    runtime.compat.WARMS_UP_AFTER_CAPTURE = after_capture
    runtime.device = torch.device("cpu")
    runtime.residual, runtime.workspace.hidden, runtime.workspace.dtype = torch.zeros(4, 4), 4, torch.float32
    assert (first_use.slower_collective(runtime) is not None) == refused
