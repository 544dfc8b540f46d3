"""The two-stream makespan against an independent event simulation, and the batch's attention against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.errors import RequestError
from tokenweave.planning.batch import Batch, Run, runs_of
from tokenweave.planning.makespan import Part, makespan

us = st.integers(0, 50).map(float)


parts = st.tuples(us, us, us).map(lambda t: Part(min(t[:2]), max(t[:2]), t[2]))
leading = st.tuples(parts, st.sampled_from([0.0, 0.0, 3.0, 17.0])).map(lambda t: t[0]._replace(lead=t[1]))


def stages_of(splits: int, part: st.SearchStrategy = parts) -> st.SearchStrategy:
    stage = st.lists(part, min_size=splits, max_size=splits)
    return st.lists(st.tuples(st.lists(stage, min_size=1, max_size=3), st.integers(0, 40)), min_size=1, max_size=3)


def simulate(blocks: list, splits: int) -> float:
    """In steps of time: from one start or end of a task to the next, every running task advances at its pace of the moment."""
    stages = [stage for inner, count in blocks for _ in range(count) for stage in inner]
    order = [(s, i) for s in range(len(stages)) for i in range(splits)]
    computed, sent = [0.0] * len(order), [0.0] * len(order)  # share that is done
    led = [stages[s][i].lead for s, i in order]  # what is left of each lead
    now = 0.0
    while (sending := next((t for t, share in enumerate(sent) if share < 1), None)) is not None:
        computing = next((t for t, share in enumerate(computed) if share < 1), None)
        if computing is not None and computing >= splits and sent[computing - splits] < 1:
            computing = None  # reads this split's last collective
        follower = sending + 1  # of the other split, or none: what may delay the collective
        delayed = splits > 1 and follower < len(order) and led[follower] > 0
        communicates = computed[sending] >= 1 and not delayed
        if computing is not None and led[computing] > 0:
            assert not communicates
            now, led[computing] = now + led[computing], 0.0
            continue
        paces = {}
        if communicates:
            paces["send"] = stages[order[sending][0]][order[sending][1]].send
        if computing is not None:
            part = stages[order[computing][0]][order[computing][1]]
            paces["compute"] = part.held if communicates and paces["send"] > 0 else part.work
        remaining = {
            "send": (1 - sent[sending]) * paces.get("send", 0),
            "compute": 0 if computing is None else (1 - computed[computing]) * paces["compute"],
        }
        step = min(remaining[kind] for kind in paces)
        now += step
        for kind, table, task in (("send", sent, sending), ("compute", computed, computing)):
            if kind in paces:
                assert task is not None
                done = remaining[kind] <= step * (1 + 1e-12)
                table[task] = 1.0 if done else table[task] + step / paces[kind]
    return now


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2).flatmap(lambda n: st.tuples(st.just(n), stages_of(n, leading if n == 2 else parts))))
def test_makespan_equals_a_simulation_in_time(case: tuple[int, list]) -> None:
    splits, blocks = case
    assert makespan(blocks) == pytest.approx(simulate(blocks, splits), rel=1e-9, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(stages_of(1))
def test_one_split_takes_the_sum_of_all_times(blocks: list) -> None:
    total = sum(count * sum(part.work + part.send for (part,) in stages) for stages, count in blocks)
    assert makespan(blocks) == pytest.approx(total)


@settings(max_examples=50, deadline=None)
@given(st.lists(stages_of(2, leading).map(lambda blocks: blocks[0][0][0]), min_size=2, max_size=6), st.integers(1, 60))
def test_many_alternatives_at_once_equal_one_by_one(stages: list, count: int) -> None:
    vector = [[Part(*(np.array([stage[i][k] for stage in stages]) for k in range(4))) for i in (0, 1)]]
    together = makespan([(vector, count)])
    assert together == pytest.approx([makespan([([stage], count)]) for stage in stages])


@settings(max_examples=100, deadline=None)
@given(stages_of(2), st.floats(0, 20), st.integers(0, 100))
def test_no_part_that_takes_longer_shortens_the_whole(blocks: list, more: float, pick: int) -> None:
    base = makespan(blocks)
    for field in Part._fields:
        grown = [
            ([[part._replace(held=part.held + more) for part in stage] for stage in stages], count)
            if field == "held"
            else (
                [
                    [part._replace(**{field: getattr(part, field) + more}, held=part.held + more) for part in stage]
                    for stage in stages
                ],
                count,
            )
            for stages, count in blocks
        ]
        assert makespan(grown) >= base - 1e-9 * (1 + base)


def test_overlap_hides_the_shorter_stream() -> None:
    layer = [[Part(10.0, 10.0, 4.0)] * 2]
    assert makespan([(layer, 100)]) == 100 * 20 + 4  # compute bound: only the last collective shows
    bound = [[Part(4.0, 4.0, 10.0)] * 2]
    assert makespan([(bound, 100)]) == 4 + 100 * 20  # communication bound: only the first compute
    slowed = [[Part(10.0, 12.0, 6.0)] * 2]  # beside 6 of collective a compute does half of itself, then 5 more
    assert makespan([(slowed, 100)]) == pytest.approx(10 + 199 * 11 + 6)
    late = [[Part(6.0, 9.0, 6.0, 4.0)] * 2]  # beside all of the 6 the rest does two thirds of itself, then 2 more
    assert makespan([(late, 100)]) == pytest.approx(10 + 199 * (4 + 6 + 2) + 6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=8), st.randoms())
def test_attention_of_any_first_rows(sequences: list[tuple[int, int]], random) -> None:
    batch = Batch(runs_of(sequences))
    shuffled = list(sequences)
    random.shuffle(shuffled)
    assert Batch(runs_of(shuffled)) == batch
    assert batch.tokens == sum(rows for rows, _ in sequences)
    assert batch.sampled == len(sequences)
    pairs = [run.context + 1 + (i if run.causal else 0) for run in batch.runs for i in range(run.rows)]
    cuts = np.arange(batch.tokens + 1)
    counted, reads = batch.attention(cuts)
    assert counted.tolist() == np.concatenate([[0], np.cumsum(pairs)]).tolist()
    assert (np.diff(reads) >= 0).all()
    chunks = [rows + context for rows, context in sequences if rows > 1]
    decodes = sum(run.rows * (run.context + 1) for run in batch.runs if not run.causal)
    assert reads[-1] == sum(chunks) + decodes


def test_decode_contexts_are_rounded_up_so_that_steps_share_plans() -> None:
    assert runs_of([(1, 1000), (1, 1002)]) == runs_of([(1, 1001), (1, 1003)]) == (Run(2, 1024, False),)
    assert runs_of([(1, 5)]) == (Run(1, 5, False),)


@pytest.mark.parametrize("sequence", [(0, 5), (3, -1)])
def test_impossible_sequences_are_refused(sequence: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="expected rows >= 1"):
        runs_of([sequence])
