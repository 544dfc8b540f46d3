"""The simulation against the engine's scheduler, and what must hold for every run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation_reference import reference, steps_of
from tiny_llama import answers, make_engine, new_requests, save_tiny_llama
from tokenweave.engine.sampling import SamplingParams
from tokenweave.errors import RequestError
from tokenweave.simulation import Limits, StepTable, Trace, measure, poisson, read_trace, simulate, sized
from tokenweave.simulation.replica import _until

UNIT = 2.0**-10


class Exact:
    """Step times that are sums of powers of two, so that no order of adding them rounds: ties are ties.

    Coarse ones are whole multiples of what arrivals are multiples of: most arrivals meet the end of a step.
    """

    def __init__(self, kink: int = 10**9, coarse: bool = False) -> None:
        self.kink, self.coarse = kink, coarse

    def __call__(self, rows: int, decodes: int, pairs: float, positions: int) -> float:
        if self.coarse:
            return 8 * UNIT * (1 + rows // 8)
        return UNIT * (32 + rows + decodes) + UNIT / 64 * (pairs + positions)

    mixed = __call__

    def decode(self, decodes: int, positions: int) -> tuple[float, float, int]:
        growth = 0.0 if self.coarse else UNIT / 64 * decodes
        return self(decodes, decodes, 0, positions), growth, 1 + positions % self.kink


def trace_of(lengths: list[tuple[int, int, int]]) -> Trace:
    prompts, outputs, gaps = np.array(lengths).T
    return Trace("test", prompts, outputs, np.cumsum(gaps) * 8 * UNIT)


lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 60)), min_size=1, max_size=25)


@given(
    lengths=lengths,
    kv_tokens=st.integers(70, 200),
    max_batch_tokens=st.integers(1, 32),
    max_requests_running=st.integers(1, 12),
    replicas=st.integers(1, 4),
    routing=st.sampled_from(["least-loaded", "round-robin"]),
    kink=st.sampled_from([3, 50, 10**9]),
    coarse=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_steps_and_times_are_the_engines_schedulers(
    lengths, kv_tokens, max_batch_tokens, max_requests_running, replicas, routing, kink, coarse
):
    trace, steps = trace_of(lengths), Exact(kink, coarse)
    limits = Limits(max_batch_tokens, max_requests_running, kv_tokens)
    outcome = simulate(trace, steps, limits, replicas, routing, record=True)
    fleet = reference(trace, steps, limits, replicas, routing)
    for number, expected in enumerate(fleet):
        assert steps_of(outcome, number) == [(step.decodes, step.chunks) for step in expected.steps]
        served = np.nonzero(outcome.replica == number)[0].tolist()
        assert served == sorted(expected.finished)
        for name in ("started", "first_token", "finished"):
            assert getattr(outcome, name)[served].tolist() == [getattr(expected, name)[r] for r in served]
        counts = outcome.counts[number]
        assert counts.steps == len(expected.steps)
        assert counts.mixed_steps == sum(bool(step.chunks) for step in expected.steps)
        assert counts.busy == sum(step.end - step.start for step in expected.steps)


@given(
    first=st.integers(1, 64),
    growth=st.integers(-16, 64),
    start=st.integers(0, 999),
    most=st.integers(1, 60),
    at=st.integers(0, 59),
    off=st.integers(-1, 1),
)
@settings(max_examples=300, deadline=None)
def test_a_stretch_ends_at_the_first_boundary_at_or_after_an_arrival(first, growth, start, most, at, off):
    first += 1 + max(0, -growth) * most  # steps take time
    ends = np.cumsum([first + step * growth for step in range(most)])
    time = ends[at % most] + off
    expected = next((count for count, end in enumerate(ends, 1) if end >= time), most)
    assert _until(UNIT * (start + time), UNIT * start, most, UNIT * first, UNIT * growth) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("max_batch_tokens", "max_num_seqs"), [(16, 3), (64, 16), (7, 7)])
def test_a_burst_takes_the_steps_that_the_engine_runs(model, max_batch_tokens, max_num_seqs):
    numbers = np.random.default_rng(max_batch_tokens)
    trace = Trace("test", numbers.integers(1, 41, 12), numbers.integers(1, 13, 12))
    engine = make_engine(model, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, cache_rows=2048)
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in trace.outputs]
    answers(engine, new_requests([[5] * int(n) for n in trace.prompts], params))
    outcome = simulate(trace, Exact(), Limits(max_batch_tokens, max_num_seqs, 2048), record=True)
    assert [(step.prefill_tokens, step.decode_tokens) for step in engine.steps] == [
        (sum(size for _, _, size in chunks), decodes) for decodes, chunks in steps_of(outcome, 0)
    ]
    engine.close()


@given(lengths=lengths, rate=st.floats(0.5, 200), seed=st.integers(0, 99), replicas=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_interpolated_times_are_the_same_step_by_step(lengths, rate, seed, replicas):
    prompts, outputs, _ = np.array(lengths).T
    trace = Trace("test", prompts * 20, outputs * 10, poisson(len(lengths), rate, seed))
    table = StepTable(synthetic_us, 256)

    def cost(rows: int, decodes: int, pairs: float, positions: int) -> float:
        return table.mixed(rows, decodes, pairs, positions) if rows > decodes else table.decode(decodes, positions)[0]

    limits = Limits(256, 8, 4000)
    outcome = simulate(trace, table, limits, replicas, "round-robin", record=True)
    for number, expected in enumerate(reference(trace, cost, limits, replicas, "round-robin")):
        assert steps_of(outcome, number) == [(step.decodes, step.chunks) for step in expected.steps]
        for name in ("started", "first_token", "finished"):
            times = [getattr(expected, name)[r] for r in np.nonzero(outcome.replica == number)[0]]
            np.testing.assert_allclose(getattr(outcome, name)[outcome.replica == number], times, rtol=1e-9)


def synthetic_us(chunks: tuple[tuple[int, int], ...], decodes: int, context: int) -> float:
    """Stairs in the rows; the slower of the prompts' and the decodes' attention; a memory-bound floor."""
    rows = decodes + sum(size for size, _ in chunks)
    pairs = sum(size * before + size * (size + 1) / 2 for size, before in chunks)
    return 300 + max(900, 250 * -(-rows // 64)) + max(100, pairs / 500, decodes * context / 50)


@given(
    lengths=lengths,
    kv_tokens=st.integers(70, 300),
    max_batch_tokens=st.integers(1, 64),
    max_requests_running=st.integers(1, 12),
    replicas=st.integers(1, 5),
    routing=st.sampled_from(["least-loaded", "round-robin"]),
)
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_and_no_limit_is_broken(
    lengths, kv_tokens, max_batch_tokens, max_requests_running, replicas, routing
):
    trace = trace_of(lengths)
    limits = Limits(max_batch_tokens, max_requests_running, kv_tokens)
    outcome = simulate(trace, Exact(), limits, replicas, routing, record=True)
    assert (trace.arrivals <= outcome.started).all()
    assert (outcome.started < outcome.first_token).all()
    assert (outcome.first_token <= outcome.finished).all()
    assert ((outcome.first_token == outcome.finished) == (trace.outputs == 1)).all()
    assert sum(c.prompt_tokens for c in outcome.counts) == trace.prompts.sum()
    assert sum(c.decode_tokens for c in outcome.counts) == (trace.outputs - 1).sum()
    for number, record in enumerate(outcome.records):
        mine = np.nonzero(outcome.replica == number)[0]
        order = outcome.started[mine]
        assert (order[:-1] <= order[1:]).all(), "first come, first served"
        assert outcome.counts[number].most_kv_tokens <= kv_tokens
        for before, after in itertools.pairwise(record):
            assert before.end <= after.start, "one step at a time"
        for stretch in record:
            rows = stretch.decodes + sum(size for _, _, size in stretch.chunks)
            assert 1 <= rows <= max_batch_tokens
            inside = (outcome.started[mine] <= stretch.start) & (outcome.finished[mine] > stretch.start)
            held = (trace.prompts + trace.outputs)[mine][inside].sum()
            assert inside.sum() <= max_requests_running
            assert held <= kv_tokens


@pytest.mark.parametrize("routing", ["least-loaded", "round-robin"])
@pytest.mark.parametrize("rate", [None, 40.0])
def test_more_replicas_and_more_memory_are_not_worse(routing, rate):
    trace = sized(read_trace("sharegpt"), 1500, 3, keep_order=False)
    if rate is not None:
        trace = Trace(trace.name, trace.prompts, trace.outputs, poisson(len(trace), rate, 0))
    table = StepTable(synthetic_us, 2048)
    runs = [measure(simulate(trace, table, Limits(2048, 128, 200_000), n, routing)) for n in (1, 2, 4, 8)]
    for fewer, more in itertools.pairwise(runs):
        assert more.seconds <= fewer.seconds * 1.001
        assert more.ttft_ms.p99 <= fewer.ttft_ms.p99 * 1.01
        assert more.latency_ms.p50 <= fewer.latency_ms.p50 * 1.01
    caches = [measure(simulate(trace, table, Limits(2048, 128, kv), 1, routing)) for kv in (20_000, 60_000, 200_000)]
    assert caches[0].seconds >= caches[1].seconds * 0.999 >= caches[2].seconds * 0.998
    assert caches[0].most_kv_tokens > 12_000, "the small cache was what requests waited for"


def test_routing_by_load_beats_round_robin_where_requests_differ():
    trace = sized(read_trace("sharegpt"), 3000, 1, keep_order=False)
    trace = Trace(trace.name, trace.prompts, trace.outputs, poisson(len(trace), 110.0, 0))
    table, limits = StepTable(synthetic_us, 2048), Limits(2048, 128, 400_000)
    waits = {
        routing: measure(simulate(trace, table, limits, 4, routing)).ttft_ms.p90
        for routing in ("least-loaded", "round-robin")
    }
    assert waits["least-loaded"] < waits["round-robin"]


def test_slower_steps_make_slower_runs():
    trace = sized(read_trace("arxiv_summarization"), 500, 0, keep_order=False)
    limits = Limits(1024, 64, 300_000)
    plain, slow = (measure(simulate(trace, StepTable(synthetic_us, 1024, us), limits)) for us in (0.0, 1000.0))
    assert slow.seconds == pytest.approx(plain.seconds + plain.steps * 1e-3, rel=1e-9)
    assert slow.steps == plain.steps, "a burst's steps do not depend on their times"


def test_requests_that_can_never_fit_are_refused_before_anything_runs():
    trace = Trace("test", np.array([10, 90, 50]), np.array([5, 20, 60]))
    with pytest.raises(
        RequestError, match=r"2 of 3 requests can never be served, the first of them request 1: 90 prompt"
    ):
        simulate(trace, Exact(), Limits(8, 4, 100))
    for bad in (Limits(0, 4, 200), Limits(8, 0, 200), Limits(8, 4, 0)):
        with pytest.raises(RequestError, match="expected at least 1"):
            simulate(trace, Exact(), bad)
    with pytest.raises(RequestError, match="replicas=0"):
        simulate(trace, Exact(), Limits(8, 4, 200), 0)
    with pytest.raises(RequestError, match="routing 'random'; expected one of least-loaded, round-robin"):
        simulate(trace, Exact(), Limits(8, 4, 200), routing="random")


def test_metrics_of_a_run_that_can_be_checked_by_hand():
    class Second:
        def mixed(self, rows, decodes, pairs, positions):
            return 1.0

        def decode(self, decodes, positions):
            return 1.0, 0.0, 10**9

    trace = Trace("test", np.array([4, 4, 2]), np.array([3, 1, 2]), np.array([0.0, 0.5, 20.0]))
    outcome = simulate(trace, Second(), Limits(4, 4, 100))
    # Request 0: prompt until 1, then two tokens at 2 and 3. Request 1 shares its steps: 3 rows, then the last one.
    assert outcome.first_token.tolist() == [1.0, 3.0, 21.0]
    assert outcome.finished.tolist() == [3.0, 3.0, 22.0]
    metrics = measure(outcome, ttft_target_ms=1000, tpot_target_ms=1000)
    assert metrics.seconds == 22.0
    assert metrics.requests_per_s == 3 / 22
    assert metrics.output_tokens_per_s == 6 / 22
    assert metrics.ttft_ms.p50 == 1000.0
    assert metrics.tpot_ms.mean == 1000.0
    assert metrics.within_targets == 2 / 3  # request 1 waited for 2.5 s
    assert metrics.busy == pytest.approx(5 / 22)
    assert (metrics.steps, metrics.mixed_steps) == (5, 4)
    alone = measure(simulate(Trace("test", np.array([4]), np.array([1])), Second(), Limits(4, 4, 100)))
    assert alone.tpot_ms is None
    assert alone.within_targets is None
