"""Steps whose own graph is not made: which way they go, and when one is made. Nothing runs, see graph_stand_ins.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from graph_stand_ins import Buffers, make_runtime, run

from tokenweave.integrations.vllm.measured import HOST_MARGIN, Measured
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.ways import CAPTURE_MS, Times, Way, Ways
from tokenweave.planning import Mode

ROWS = (512, 1024, 2048)
pytestmark = pytest.mark.usefixtures("no_gpu")


def measured_runtime(stock: float = 20.0, fused: float = 10.0, launching: float = 1000.0) -> Any:
    """In auto mode. ``stock``, ``fused``: ms of 1024 rows, all others in proportion; weaving never pays."""
    runtime = make_runtime()
    share = [n / 1024 for n in ROWS]
    times = [[stock * s, fused * s, 1.5 * stock * s] for s in share]
    runtime.choice.measured = Measured.of(ROWS, times, (launching, math.inf))
    return runtime


def test_times_are_interpolated_and_grow_with_the_rows_beyond() -> None:
    measured = Measured.of(ROWS, [[10.0, 8.0, math.inf], [20.0, 16.0, 18.0], [40.0, 32.0, 30.0]], (20.0, 50.0))
    assert measured.ms(Mode.FUSED, 1024) == pytest.approx(16.0)
    assert measured.ms(Mode.SEQUENTIAL, 1448) == pytest.approx(28.3, abs=0.1)  # halfway, in logarithms
    assert measured.ms(Mode.FUSED, 100) == pytest.approx(8.0)
    assert measured.ms(Mode.WOVEN, 512) == pytest.approx(18.0)  # not measured: the smallest that was
    assert measured.ms(Mode.WOVEN, 4096) == pytest.approx(60.0)
    assert measured.launched_ms(Mode.FUSED, 512) == pytest.approx(20.0 * HOST_MARGIN)  # the host's
    assert measured.launched_ms(Mode.FUSED, 2048) == pytest.approx(32.0)  # the GPU's
    assert "to launch one: 20.0 fused, 50.0 woven" in str(measured)
    assert math.isinf(Measured.of((16,), [[4.0, 3.0, math.inf]], (1.0, 1.0)).ms(Mode.WOVEN, 16))


def test_the_fastest_way_and_when_a_graph_has_paid_for_itself() -> None:
    ways = Ways(layers=10)
    assert ways.price_ms == 10 * CAPTURE_MS == 30.0
    assert Ways(layers=10, alike=False).price_ms == 50.0
    times = Times(own=10.0, larger=14.0, launched=15.0, stock=20.0)
    assert times.fastest() == (Way.LARGER, 14.0)
    assert [ways.choose("a", times) for _ in range(8)] == [*[Way.LARGER] * 7, None]
    assert ways.choose("a", times) is Way.LARGER  # it was dropped since: the count begins anew
    assert ways.choose("b", times) is Way.LARGER  # each size has its own
    assert [ways.choose("c", Times(own=10.0, launched=10.0)) for _ in range(100)] == [Way.LAUNCHED] * 100
    assert ways.choose("d", Times(own=10.0, larger=9.9, stock=math.inf)) is Way.LARGER
    assert ways.choose("e", Times(own=10.0)) is None  # there is no other way
    assert ways.choose("f", Times(own=10.0, stock=50.0)) is None  # nor one that costs less than the graph
    assert ways.choose("g", Times(own=math.inf)) is None  # nor is it known what its own takes: it was asked for
    assert ways.choose("h", Times(own=math.inf, stock=5.0)) is Way.STOCK


def test_stock_serves_until_a_graph_is_worth_its_making() -> None:
    runtime, buffers = measured_runtime(), Buffers()
    waited = 0
    while run(runtime, buffers, [1000]) is None:
        waited += 1
    assert waited == 10  # 11 times 19.5 - 10.0 is more than 96 ms, 10 times is not
    assert runtime.steps.reasons == {Reason.NEW_BUCKET: waited}
    assert (runtime.steps.graphs, len(runtime.graphs)) == (1, 1)
    assert run(runtime, buffers, [1024]) is not None
    assert runtime.steps.graphs == 2


def test_a_larger_graph_serves_meanwhile_and_only_while_it_is_faster() -> None:
    runtime, buffers = measured_runtime(stock=20.0, fused=12.0), Buffers()
    while run(runtime, buffers, [1500]) is None:
        pass
    assert [found.capacity for found in runtime.graphs._graphs.values()] == [1536]
    rows = run(runtime, buffers, [1000])  # 18 ms there, 20 as stock, 12 in its own
    assert rows is not None
    assert rows.shape[0] == 1000
    (larger,) = runtime.graphs._graphs.values()
    assert larger.graph.replays == 2
    assert larger.cut.tables.token_ids.shape[0] == 1536
    assert run(runtime, buffers, [800]) is None  # 18 ms there, 17.5 as stock
    for _ in range(20):
        run(runtime, buffers, [1000])
    assert [found.capacity for found in runtime.graphs._graphs.values()] == [1536, 1024]


def test_a_larger_graph_must_suit_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(Mode.WOVEN), Buffers()
    run(runtime, buffers, [2000])
    (large,) = runtime.graphs._graphs.values()
    cut = large.cut.plan.split
    assert cut is not None
    run(runtime, buffers, [cut])  # the prefix alone
    assert large.graph.replays == 1
    runtime.requests.hazard = lambda step, split: split == cut
    run(runtime, buffers, [1900])  # in this one a cut there is forbidden
    assert large.graph.replays == 1
    runtime.requests.hazard = lambda step, split: False
    run(runtime, buffers, [1700])
    assert large.graph.replays + sum(f.graph.replays for f in runtime.graphs._graphs.values()) > 2
    runtime.use("fused")
    before = large.graph.replays
    run(runtime, buffers, [1500])  # a woven graph is not what was asked for
    assert large.graph.replays == before


def test_a_mode_that_is_asked_for_later_needs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = make_runtime(), Buffers()
    runtime.choice.measured = Measured.of((256,), [[10.0, 8.0, math.inf]], (20.0, 20.0))  # too small to be woven
    runtime.use("woven")
    assert run(runtime, buffers, [1000]) is not None
    assert runtime.steps.rows == {Mode.WOVEN: 1000}


def test_rows_of_padding_beyond_a_tile_are_for_dense_models_alone() -> None:
    runtime, buffers = measured_runtime(stock=100.0), Buffers()
    runtime.vllm_config = SimpleNamespace(quant_config=object())
    for _ in range(3):
        run(runtime, buffers, [2000])
    assert len(runtime.graphs) == 1
    assert run(runtime, buffers, [1000]) is None
    assert runtime.steps.reasons[Reason.NEW_BUCKET] >= 1


def test_what_the_host_keeps_up_with_is_launched_and_gets_no_graph() -> None:
    runtime, buffers = measured_runtime(fused=18.0, launching=10.0), Buffers()
    for _ in range(50):
        assert run(runtime, buffers, [2000]) is not None
    assert (len(runtime.walk.launched), len(runtime.graphs), runtime.steps.graphs) == (50, 0, 0)
    assert [cut.rows for cut in runtime.walk.launched[:1]] == [2000]
    run(runtime, buffers, [600])  # 10.5 ms, and the host takes 12.5
    assert runtime.steps.reasons == {Reason.NEW_BUCKET: 1}
