"""What is timed as an engine starts, what that decides, and which graphs are made then; nothing runs, see graph_stand_ins.py."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stand_ins import (
    MAX_ROWS,
    REQUESTS,
    Buffers,
    make_runtime,
    run,
    small_runtime,
)

from tokenweave.errors import CollectiveError
from tokenweave.integrations.vllm import trials as module
from tokenweave.integrations.vllm import warm_up
from tokenweave.integrations.vllm.decide import plan_of
from tokenweave.integrations.vllm.graphs import Graphs
from tokenweave.integrations.vllm.measured import REPEATS, milliseconds
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.step import Cut, Planned
from tokenweave.integrations.vllm.trials import Trials
from tokenweave.planning import Mode

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_the_most_important_sizes_come_first() -> None:
    trials = small_runtime().trials
    graphs = trials._by_importance()
    one, many = 16, REQUESTS
    assert graphs[:9] == [(2048, one), (2048, many), *((size, one) for size in (1024, 512, 256, 128, 64, 32, 16))]
    assert graphs[9:12] == [(1536, one), (768, one), (384, one)]
    assert graphs[12:18] == [(size, many) for size in (1024, 512, 256, 128, 64, 32)]
    assert graphs[18:22] == [(size, one) for size in (1792, 1280, 896, 640)]
    assert graphs[22:25] == [(size, many) for size in (1536, 768, 384)]
    assert sorted({size for size, _ in graphs}) == [16, 32, 64, *range(128, 2049, 128)]
    assert len(set(graphs)) == len(graphs)
    assert [trials._rooms(size) for size in (16, 64, 2048)] == [[16], [16, 64], [16, 64]]
    sizes = [size for size, room in make_runtime().trials._by_importance() if room == one]
    assert sizes[:4] == [2048, 1024, 1536, 768]


@pytest.mark.parametrize(("count", "padding"), [(9, 1.0), (12, 0.5), (22, 0.25)])
def test_no_step_is_much_smaller_than_the_graph_it_finds(count: int, padding: float) -> None:
    made = {size for size, room in small_runtime().trials._by_importance()[:count] if room == 16}
    for rows in range(129, 2049):
        capacity = -(-rows // 128) * 128  # what its own graph would compute
        assert min(size for size in made if size >= rows) <= (1 + padding) * capacity


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

    def ms(call: Any) -> float:
        if isinstance(call, SimpleNamespace):
            return call.ms
        cut = call.__self__.walked[0]
        plan = cut.plan
        return pace[plan.mode] * cut.rows / 1000 * pace.get((cut.rows, str(plan.scheme)), 1.0)

    def milliseconds(calls: list[Any], device: Any, repeats: int) -> list[float]:
        assert repeats == REPEATS
        return [ms(call) for call in calls]

    monkeypatch.setattr(module, "milliseconds", milliseconds)
    monkeypatch.setattr(module, "launching_ms", lambda call, device: call() or pace.get("launching", 1.0))
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


def test_no_kernel_waits_for_a_rank_that_is_not_there_yet(clock: dict[Mode, float]) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    walked: list[int] = []  # before each of the ranks' meetings

    def anywhere(true: bool) -> bool:
        walked.append(len(runtime.walk.eager))
        return true

    runtime.anywhere = anywhere
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert walked[0] == 0
    assert walked[-1] == len(runtime.walk.eager) > 0


def test_a_kernel_that_gave_up_leaves_stock(clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()

    def check() -> None:
        raise CollectiveError("a peer fell behind")

    monkeypatch.setattr(runtime.workspace, "check", check)
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
    assert runtime.trials.sizes == sizes
    assert [size for size, _ in runtime.trials._by_importance()[:1]] == ([] if made is None else [made])
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is None
    for cut, (starts, _) in zip(runtime.walk.eager, runtime.walk.layouts, strict=True):
        assert starts[-1] == min(cut.rows, requests * length), "as many real rows as there can be"


def test_where_whole_graphs_serve_all_steps_none_is_made() -> None:
    runtime = make_runtime()
    assert Trials(runtime, Graphs(runtime, least_rows=MAX_ROWS + 1))._by_importance() == []


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
    plans = {rows: plan_of(runtime, [], rows) for rows in (640, 1024, 1408, 1536, 2048, 4096)}
    assert {plan.mode for plan in plans.values()} == {Mode.WOVEN}
    assert {rows for rows, plan in plans.items() if not plan.gemm_sms and plan.ctas == 8} == {640, 1024, 1408}
    assert {rows for rows, plan in plans.items() if plan.start_at and plan.ctas == 4} == {1536, 2048, 4096}
    ctas = {key[0]: key[3] for key in runtime.graphs._graphs}
    assert all(value in (8, 4) for value in ctas.values()), "what was only tried is dropped"
    assert len({key for key in runtime.graphs._graphs if key[0] == 1024}) == len(runtime.graphs.rooms)


def test_schemes_are_not_compared_where_a_table_of_this_machine_has_done_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make_runtime()
    assert runtime.trials.scheme_sizes == [1024, 2048]
    costs = runtime.choice.planner.model.costs
    monkeypatch.setattr(type(costs), "measured", property(lambda self: True))
    assert (runtime.choice.tried, runtime.trials.scheme_sizes) == ((), [])


def test_a_graph_has_the_price_that_the_slowest_rank_saw(
    clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    predicted = runtime.ways.price_ms
    monkeypatch.setattr(warm_up, "slowest", lambda times, group, device: [[ms, 7 * each] for ms, each in times])
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is None
    assert runtime.ways.price_ms == 7 * runtime.trials.capture_ms < predicted


def test_long_steps_are_measured_less_often(clock: dict[Any, float]) -> None:
    runtime = make_runtime()
    trials = runtime.trials
    for ms, repeats, sizes in (
        (20.0, 5, [640, 1024, 2048]),
        (100.0, 2, [640, 1024, 2048]),
        (300.0, 1, [640, 1024, 2048]),
    ):
        trials._predicted_ms = lambda size, ms=ms: ms
        assert (trials._repeats(1024), trials.sizes) == (repeats, sizes)
    trials._predicted_ms = lambda size: size / 8
    assert trials.sizes == [640, 1024, 2048]
    assert trials.scheme_sizes == [1024]
    trials._predicted_ms = lambda size: size / 4
    assert (trials.sizes, trials.scheme_sizes) == ([640, 1024], [])


@pytest.mark.parametrize(("each", "made"), [(1.0, 10), (2.0, 5), (100.0, 4), (0.01, 24)])
def test_as_many_graphs_are_made_as_there_is_time_for(
    each: float, made: int, clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()  # nothing is measured, so that none is there before
    monkeypatch.setattr(module, "CAPTURE_MS", 1e3 * each / 32)
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    found = [(graph.capacity, graph.room) for graph in runtime.graphs._graphs.values()]
    assert len(found) == made
    assert {(2048, 16), (2048, REQUESTS)} <= set(found)


def test_what_was_measured_is_kept_when_there_is_no_time_left(
    clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, buffers = make_runtime(), Buffers()
    clock.update({Mode.FUSED: 9.0, Mode.WOVEN: 10.0})
    monkeypatch.setattr(warm_up, "START_S", -1.0)
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({640: 10.0, 1024: 15.0, 2048: 30.0}, []))
    found = {(graph.capacity, graph.room) for graph in runtime.graphs._graphs.values()}
    assert {(640, 16), (1024, 16), (2048, 16)} <= found  # timed
    assert len(found) == 3 + warm_up.LEAST_GRAPHS
    assert {graph.cut.plan.mode for graph in runtime.graphs._graphs.values()} == {Mode.FUSED}


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


def test_an_error_between_what_ranks_do_together_leaves_stock(clock: dict[Mode, float]) -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()

    def broken(true: bool) -> bool:
        raise RuntimeError("the ranks do not reach each other")

    runtime.anywhere = broken
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert (runtime.off, len(runtime.graphs)) == (Reason.ERROR, 0)


def test_no_step_is_timed_that_another_rank_could_not_make(clock: dict[Mode, float]) -> None:
    """Stock's collectives would wait for it without end."""
    runtime, buffers, timed = make_runtime(), Buffers(), []
    runtime.trials._time = lambda size, calls: timed.append(size) or [1.0] * len(calls)
    runtime.anywhere = lambda true: True
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({640: 5.8, 1024: 10.3, 2048: 30.0}, []))
    assert runtime.off is Reason.ERROR
    assert not timed


def test_figures_that_cannot_be_exchanged_leave_stock(
    clock: dict[Mode, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, buffers, told = make_runtime(Mode.FUSED), Buffers(), []

    def broken(*given: Any) -> list[list[float]]:
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(warm_up, "slowest", broken)
    runtime.anywhere = lambda true: told.append(true) or true
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert (runtime.off, len(runtime.graphs)) == (Reason.ERROR, 0)
    assert told == [False, True], "the other ranks hear of it"


def test_an_error_on_another_rank_leaves_stock_too(clock: dict[Mode, float]) -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()
    runtime.anywhere = lambda true: True
    warm_up.warm_up(runtime, buffers.step([7])[1], stock_of({}, []))
    assert runtime.off is Reason.ERROR
    assert run(runtime, buffers, [1000]) is None or runtime.forward(Planned(None, dict), None) is None  # type: ignore[arg-type]


def test_calls_take_turns_and_their_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []

    def call(name: str, seconds: list[float]) -> Any:
        def run() -> None:
            order.append(name)
            now[0] += seconds.pop(0)

        return run

    monkeypatch.setattr("tokenweave.integrations.vllm.measured.time.perf_counter", lambda: now[0])
    calls = [call("a", [9.0, 1.0, 5.0, 1.0]), call("b", [0.1, 2.0, 2.0, 3.0])]
    assert milliseconds(calls, torch.device("cpu"), 3) == pytest.approx([1000.0, 2000.0])
    assert order == ["a", "b"] * 4
