"""What is captured when, and on which buffers: the graphs' bookkeeping, with captures and replays that only write down."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graph_stand_ins import (
    MAX_ROWS,
    Buffers,
    make_runtime,
    planner,
    run,
    small_runtime,
)

from ranks import run_ranks
from tokenweave.collective import Workspace
from tokenweave.errors import CollectiveError
from tokenweave.integrations.vllm import graphs as module
from tokenweave.integrations.vllm import runtime as runtime_module
from tokenweave.integrations.vllm.choice import Choice
from tokenweave.integrations.vllm.decide import plan_of
from tokenweave.integrations.vllm.measured import Measured
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Rows
from tokenweave.integrations.vllm.step import Planned
from tokenweave.planning import Mode, Plan

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_step_gets_a_graph_that_later_steps_of_its_size_replay() -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()
    rows = run(runtime, buffers, [600, 390])
    assert rows is not None
    assert rows.shape[0] == 990
    assert (len(runtime.walk.eager), len(runtime.graphs), runtime.steps.graphs) == (1, 1, 1)
    assert runtime.walk.layers == [2]  # before the capture
    run(runtime, buffers, [1024])  # the same size
    run(runtime, buffers, [900])
    assert (len(runtime.walk.eager), len(runtime.graphs), runtime.steps.graphs) == (1, 1, 3)
    (found,) = runtime.graphs._graphs.values()
    assert found.graph.replays == 3
    (cut,) = found.graph.walked
    assert cut.rows == cut.tables.token_ids.shape[0] == 1024
    assert 0 < cut.plan.split < 897
    assert cut.tables.seq_lens.shape[0] == 16  # room for more requests than the steps had
    assert cut.tables.addresses() == buffers.step([1024])[1].addresses()
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
    monkeypatch.setattr("tokenweave.integrations.vllm.choice.EAGER_ROWS", 1100)
    assert run(runtime, buffers, [700, 400]) is not None
    (cut,) = runtime.walk.launched
    assert (cut.rows, cut.longest_query, cut.longest_sequence) == (1100, 700, 700)
    assert runtime.steps.graphs == 0


def test_small_steps_have_graphs_where_vllm_replays_pieces() -> None:
    runtime, buffers = small_runtime(Mode.FUSED), Buffers()
    sizes = {rows: runtime.graphs.rows_of(rows) for rows in (1, 16, 17, 33, 64, 65, 128, 129, 512, 513)}
    assert sizes == {1: 16, 16: 16, 17: 32, 33: 64, 64: 64, 65: 128, 128: 128, 129: 256, 512: 512, 513: 640}
    for _ in range(4):
        run(runtime, buffers, [20, 1, 1])
    assert len(runtime.graphs) == 1
    assert runtime.steps.rows == {Mode.FUSED: 4 * 22}
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
    run(runtime, buffers, [200] * 5)
    assert run(runtime, buffers, [500, 500]) is not None
    assert len(runtime.graphs._graphs) == 1
    assert run(runtime, buffers, [100] * 9) is None
    assert runtime.steps.reasons == {Reason.EAGER_SLOWER: 1}


def test_more_requests_than_a_graph_has_room_for() -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.graphs.rooms = (2, 3)
    assert run(runtime, buffers, [200] * 4) is None
    assert runtime.steps.reasons == {Reason.EAGER_SLOWER: 1}
    run(runtime, buffers, [450] * 2)
    run(runtime, buffers, [300] * 3)  # a graph of its own
    assert [found.room for found in runtime.graphs._graphs.values()] == [2, 3]


def test_graphs_are_captured_anew_when_the_cache_moves() -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    run(runtime, buffers, [1000])
    run(runtime, buffers, [2000])
    before = [found.graph for found in runtime.graphs._graphs.values()]
    eager = len(runtime.walk.eager)
    moved = Buffers()
    runtime.addresses = lambda: (1, 3)
    assert run(runtime, moved, [1000]) is not None
    assert [found.capacity for found in runtime.graphs._graphs.values()] == [2048, 1024]
    other, found = runtime.graphs._graphs.values()
    assert (len(runtime.graphs), other.graph) == (1, None)  # what it read is gone
    assert found.graph not in before
    assert found.addresses == (*moved.step([1])[1].addresses(), 1, 3)
    assert found.graph.walked[0].tables.addresses() == moved.step([1])[1].addresses()
    assert run(runtime, moved, [2000]) is not None
    assert (len(runtime.graphs), len(runtime.walk.eager)) == (2, eager)  # no collective outside a replay


@pytest.mark.parametrize("table", ["ids", "positions", "starts", "lengths", "blocks", "slots"])
def test_a_graph_is_captured_anew_when_any_table_moves(table: str) -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()
    run(runtime, buffers, [1000])
    (found,) = runtime.graphs._graphs.values()
    before = found.graph
    setattr(buffers, table, getattr(buffers, table).clone())
    assert run(runtime, buffers, [900, 100]) is not None
    assert found.graph is not before
    assert (before.replays, found.graph.replays) == (1, 1)
    expected, read = buffers.step([900, 100])[1], found.graph.walked[0].tables
    for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "block_table", "slots"):
        assert getattr(read, name).data_ptr() == getattr(expected, name).data_ptr(), name


def test_ranks_decide_alike_where_the_cache_moved_on_one_alone() -> None:
    ranks, buffers = [make_runtime(Mode.WOVEN), make_runtime(Mode.WOVEN)], Buffers()
    decided: list[list[Any]] = [[], []]
    for number, counts in enumerate(([2000], [1024], [1000], [1500], [1000], [700])):
        ranks[1].addresses = lambda number=number: (1, 2 + number // 2)
        for runtime, mine in zip(ranks, decided, strict=True):
            step = runtime.prepare(*buffers.step(counts))
            mine.append((step.cut.plan, step.graph.capacity))
            runtime.forward(Planned(step, dict), None)
    assert decided[0] == decided[1]
    assert list(ranks[0].graphs._graphs) == list(ranks[1].graphs._graphs)


def test_a_graph_that_one_rank_cannot_make_is_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.anywhere = lambda true: True
    assert run(runtime, buffers, [1000]) is None  # the other rank's would wait for this one, which runs stock
    assert runtime.off is Reason.ERROR
    runtime, said = make_runtime(Mode.FUSED), []
    runtime.anywhere = lambda true: said.append(true) or true

    def capture(found: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runtime.graphs, "capture", capture)
    assert run(runtime, buffers, [1000]) is None
    assert (said, runtime.off) == ([True], Reason.ERROR)


def launched(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1000 rows run kernel by kernel from now on."""
    monkeypatch.setattr("tokenweave.integrations.vllm.choice.EAGER_ROWS", 1000)
    monkeypatch.setattr(runtime.graphs, "rows_of", lambda rows: None)


@pytest.mark.parametrize("when", ["before the step", "in a launch", "before a capture", "before another capture"])
def test_a_collective_that_failed_ends_the_engine(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens were sampled, and its keys and values may be in the prefix cache."""
    runtime, buffers, failed = make_runtime(Mode.FUSED), Buffers(), []
    kept = runtime.residual

    def check() -> None:
        if failed:
            raise CollectiveError("collective failed: rank 1 waited")

    monkeypatch.setattr(runtime.workspace, "check", check)
    assert run(runtime, buffers, [1000]) is not None
    if when == "before the step":
        failed.append(True)
    elif when == "in a launch":
        launched(runtime, monkeypatch)
        runtime.walk = lambda *given: failed.append(True) or 1 / 0
    else:  # seen when the GPU has come to the capture
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: failed.append(True))
    if when == "before another capture":
        (found,) = runtime.graphs._graphs.values()
        found.graph = None  # as if something had moved
    with pytest.raises(runtime_module.Unrecoverable, match=r"tokens were sampled .* rank 1 waited\. .* start it again"):
        run(runtime, buffers, [2000 if when == "before a capture" else 1000])
    assert runtime.off is None, "or the next step would run as stock"
    assert runtime.residual is kept


def test_a_collective_that_failed_for_a_graph_that_is_not_made_leaves_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank could not launch what runs before a capture, this one's kernels waited for it in vain: in no step."""
    runtime, buffers, failed = make_runtime(Mode.FUSED), Buffers(), []

    def check() -> None:
        if failed:
            raise CollectiveError("collective failed: rank 0 waited")

    monkeypatch.setattr(runtime.workspace, "check", check)
    monkeypatch.setattr(runtime.graphs, "capture", lambda found: failed.append(True))
    runtime.anywhere = lambda true: True
    assert run(runtime, buffers, [1000]) is None
    assert runtime.off is Reason.ERROR
    assert run(runtime, buffers, [1000]) is None


def test_no_graph_is_made_behind_a_collective_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail once the step has begun, in which an earlier one still runs."""
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    step, tables = buffers.step([1000])
    planned = runtime.prepare(step, tables)

    def check() -> None:
        raise CollectiveError("collective failed: rank 0 waited")

    monkeypatch.setattr(runtime.workspace, "check", check)
    monkeypatch.setattr(runtime.graphs, "capture", lambda found: pytest.fail("captured"))
    with pytest.raises(CollectiveError, match="rank 0 waited"):
        runtime.graphs.run(planned.graph, tables)


@pytest.mark.parametrize("what", ["a plan", "a launch", "a capture after a move", "a replay"])
def test_what_fails_on_one_rank_alone_ends_the_engine(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others run the step, and its next collective is not stock's."""
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    assert run(runtime, buffers, [1000]) is not None
    (found,) = runtime.graphs._graphs.values()

    def broken(*given: Any) -> None:
        raise RuntimeError("out of memory")

    def alone(error: Exception) -> None:
        raise runtime_module.Unrecoverable(str(error))

    monkeypatch.setattr(runtime, "_expect_failed_everywhere", alone)
    if what == "a plan":
        runtime.requests.hazard = runtime.choice.plan = broken
    elif what == "a launch":
        launched(runtime, monkeypatch)
        runtime.walk = broken
    elif what == "a capture after a move":
        runtime.addresses = lambda: (1, 3)
        monkeypatch.setattr(runtime.graphs, "capture", broken)
    else:
        monkeypatch.setattr(found.graph, "replay", broken)
    with pytest.raises(runtime_module.Unrecoverable, match="out of memory"):
        run(runtime, buffers, [1000])
    assert runtime.off is None


def _fails(ranks: list[int], limit: float) -> str:
    runtime = object.__new__(runtime_module.Runtime)
    runtime.peers, runtime.workspace = (
        dist.group.WORLD,
        Workspace(  # type: ignore[assignment]
            None, max_tokens=8, hidden=8, dtype=torch.float32, time_limit=limit
        ),
    )
    try:
        if dist.get_rank() in ranks:
            runtime._expect_failed_everywhere(RuntimeError("out of memory"))
        return ""
    except runtime_module.Unrecoverable as error:
        return str(error)
    finally:
        runtime.workspace.close()


def test_ranks_tell_whether_all_of_them_failed() -> None:
    """Without a collective, to which those that did not fail would never come."""
    assert run_ranks(2, _fails, [0, 1], 30.0) == ["", ""]
    first, second = run_ranks(2, _fails, [1], 0.3)
    assert first == ""
    assert "a step failed on rank 1, and others run it: out of memory" in second


def test_a_plugin_that_is_off_keeps_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    run(runtime, buffers, [1000])
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert (len(runtime.graphs), runtime.residual.shape[0]) == (1, MAX_ROWS)
    runtime.turn_off(Reason.ERROR)
    assert (len(runtime.graphs), runtime.residual.numel(), emptied) == (0, 0, [True])


@pytest.mark.parametrize("why", ["walk", "off", "embeds"])
def test_a_planned_step_that_vllm_runs_after_all_has_its_metadata(why: str) -> None:
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    metadata = Planned(runtime.prepare(*buffers.step([1000])), lambda: {"layer": "vLLM's"})
    if why == "walk":
        runtime.walk = lambda *args, **more: 1 / 0
    elif why == "off":
        runtime.turn_off(Reason.ERROR)
    assert runtime.forward(metadata, object() if why == "embeds" else None) is None
    assert metadata == {"layer": "vLLM's"}
    assert (runtime.off is None) == (why == "embeds")


def test_the_graph_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    for counts in ([1000], [1200], [1000], [1400], [1000]):
        run(runtime, buffers, counts)
    assert [found.capacity for found in runtime.graphs._graphs.values()] == [1408, 1024]
    assert len(runtime.graphs) == 2


def test_what_is_left_to_stock_is_not_launched_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenweave.integrations.vllm.runtime.EAGER_ROWS", 1000)
    runtime, buffers = make_runtime(Mode.FUSED), Buffers()
    runtime.graphs.least_rows = 1200  # vLLM has graphs up to there
    assert run(runtime, buffers, [1100]) is None
    assert runtime.steps.reasons == {Reason.EAGER_SLOWER: 1}


def test_a_hazard_takes_the_fused_plan() -> None:
    runtime = make_runtime(Mode.WOVEN)
    woven = plan_of(runtime, [Rows("r", 1000, 0)], 1024)
    assert woven.mode is Mode.WOVEN
    runtime.requests.hazard = lambda step, cut: cut == woven.split
    assert plan_of(runtime, [Rows("r", 1000, 0)], 1024) == Plan(
        Mode.FUSED, ctas=plan_of(runtime, [], 1024).ctas, cluster=plan_of(runtime, [], 1024).cluster
    )
    assert runtime.steps.reasons[Reason.PREFIX_HAZARD] == 3


@pytest.mark.parametrize(("fused", "mode"), [(42.0, None), (38.0, Mode.FUSED)])
def test_a_hazard_takes_the_fastest_that_was_measured_without_weaving(fused: float, mode: Mode | None) -> None:
    runtime, buffers = make_runtime(), Buffers()
    runtime.choice.measured = Measured((1024, 2048), stock=(20.0, 40.0), fused=(fused / 2, fused), woven=(17.0, 34.0))
    step = [Rows("r", 2000, 0)]
    assert plan_of(runtime, step, 2048).mode is Mode.WOVEN
    runtime.requests.hazard = lambda step, cut: True
    plan = plan_of(runtime, step, 2048)
    assert (plan and plan.mode) is mode  # None: stock
    if mode is None:
        assert run(runtime, buffers, [2000]) is None
        assert runtime.steps.reasons == {Reason.PREFIX_HAZARD: 2, Reason.PLANNER: 1}


def test_a_step_that_ends_at_the_cut_runs_as_stock() -> None:
    runtime, buffers = small_runtime(Mode.WOVEN), Buffers()
    cut = runtime.choice.plan(16).split
    assert run(runtime, buffers, [cut]) is None  # its graph, for 16 rows, would have nothing but padding in the suffix
    assert runtime.steps.reasons == {Reason.PLANNER: 1}
    assert run(runtime, buffers, [cut + 1]) is not None
    assert runtime.steps.rows == {Mode.WOVEN: cut + 1}


@pytest.mark.parametrize(
    ("rows", "cut", "mode"),
    [
        (2000, 400, Mode.FUSED),
        (2000, 600, Mode.WOVEN),
        (2000, 1448, Mode.WOVEN),
        (2000, 1648, Mode.FUSED),
        (1940, 1448, Mode.FUSED),  # with its padding the suffix would be large enough
    ],
)
def test_both_splits_of_a_long_context_must_fill_the_gpu(rows: int, cut: int, mode: Mode) -> None:
    runtime = make_runtime(Mode.WOVEN)
    chosen = runtime.choice.plan

    def plan(rows: int, *, allow_woven: bool = True) -> Plan:
        found = chosen(rows, allow_woven=allow_woven)
        return found if found.split is None else dataclasses.replace(found, split=cut)

    runtime.choice.plan = plan
    found = plan_of(runtime, [Rows("r", rows, 20000)], 2048)  # some 524 rows of it are enough for half of 132 SMs
    assert found.mode is mode


def test_decodes_alone_and_few_rows_after_long_contexts_run_as_stock() -> None:
    runtime = make_runtime(Mode.WOVEN)
    _, tables = Buffers().step([1] * 60)
    assert runtime.prepare([Rows(f"r{i}", 11, 5000) for i in range(60)], tables) is None
    assert runtime.steps.reasons == {Reason.DECODES: 1}
    few = small_runtime(Mode.FUSED)
    few.prepare([Rows("r", 11, 200), Rows("s", 1, 300)], Buffers().step([11, 1])[1])
    assert not few.steps.reasons  # little to attend to: a replay is worth more
    few.prepare([Rows("r", 300, 9000)], Buffers().step([300])[1])
    assert few.steps.reasons[Reason.LONG_CONTEXT] == 1
    beside = [Rows(f"s{i}", 1, 6000) for i in range(30)]  # whose tiles fill the GPU meanwhile
    few.prepare([Rows("r", 300, 9000), *beside], Buffers().step([300, *[1] * 30])[1])
    assert few.steps.reasons[Reason.LONG_CONTEXT] == 1
    assert (
        runtime.prepare([Rows("r", 600, 20000)], tables) is not None
    )  # 19 tiles of rows, 4 key/value heads, 132 SMs ...
    assert Reason.LONG_CONTEXT not in runtime.steps.reasons  # ... are more than half
    assert runtime.prepare([Rows("r", 500, 20000)], tables) is None
    assert runtime.steps.reasons[Reason.LONG_CONTEXT] == 1
    assert plan_of(runtime, [Rows("r", 1000, 20000)], 1024).mode is Mode.FUSED  # as a whole it is enough
    assert plan_of(runtime, [Rows("r", 2000, 20000)], 2048).mode is Mode.WOVEN
    assert plan_of(runtime, [Rows("r", 1000, 2000)], 1024).mode is Mode.WOVEN


def test_quantised_models_are_not_cut_by_a_planner_that_knows_bf16() -> None:
    assert Choice(planner(), None, plain=True).plan(2048).mode is Mode.WOVEN
    quantised = Choice(planner(), None, plain=False)
    assert quantised.plan(2048).mode is Mode.FUSED
    quantised.measured = Measured((1024, 2048), stock=(20.0, 40.0), fused=(19.0, 38.0), woven=(18.0, 36.0))
    assert quantised.plan(2048).mode is Mode.WOVEN
    assert quantised.plan(2048, allow_woven=False).mode is Mode.FUSED
    assert Choice(planner(), Mode.WOVEN, plain=False).plan(2048).mode is Mode.WOVEN
