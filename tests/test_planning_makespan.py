"""The two-stream makespan against an independent event simulation, and the batch's attention against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.errors import RequestError
from tokenweave.planning.batch import Batch, Run, runs_of
from tokenweave.planning.cost import makespan

us = st.integers(0, 50).map(float)


def stages_of(splits: int) -> st.SearchStrategy:
    stage = st.lists(st.tuples(us, us), min_size=splits, max_size=splits)
    return st.lists(st.tuples(st.lists(stage, min_size=1, max_size=3), st.integers(0, 40)), min_size=1, max_size=3)


def simulate(blocks: list, splits: int) -> float:
    """Earliest start of every task by relaxing its predecessors' ends until nothing moves; no notion of a schedule loop."""
    stages = [stage for inner, count in blocks for _ in range(count) for stage in inner]
    tasks = [(kind, s, i) for s in range(len(stages)) for i in range(splits) for kind in (0, 1)]
    before: dict = {}
    for kind, s, i in tasks:
        order = s * splits + i
        needs = [(kind, *divmod(order - 1, splits))] if order else []  # its stream is in order
        if kind == 1:
            needs.append((0, s, i))  # a collective sends what was computed
        elif s:
            needs.append((1, s - 1, i))  # compute reads this split's last collective
        before[kind, s, i] = needs
    end = dict.fromkeys(tasks, 0.0)
    moved = True
    while moved:
        moved = False
        for task in tasks:
            kind, s, i = task
            new = max([end[b] for b in before[task]], default=0.0) + stages[s][i][kind]
            moved |= new != end[task]
            end[task] = new
    return max((end[t] for t in tasks if t[0] == 1), default=0.0)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2).flatmap(lambda n: st.tuples(st.just(n), stages_of(n))))
def test_makespan_equals_an_event_simulation(case: tuple[int, list]) -> None:
    splits, blocks = case
    assert makespan(blocks) == pytest.approx(simulate(blocks, splits), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(stages_of(1))
def test_one_split_takes_the_sum_of_all_times(blocks: list) -> None:
    total = sum(count * sum(work + send for ((work, send),) in stages) for stages, count in blocks)
    assert makespan(blocks) == pytest.approx(total)


@settings(max_examples=50, deadline=None)
@given(st.lists(stages_of(2).map(lambda blocks: blocks[0][0][0]), min_size=2, max_size=6), st.integers(1, 60))
def test_many_alternatives_at_once_equal_one_by_one(stages: list, count: int) -> None:
    vector = [[tuple(np.array([stage[i][k] for stage in stages]) for k in (0, 1)) for i in (0, 1)]]
    together = makespan([(vector, count)])
    assert together == pytest.approx([makespan([([stage], count)]) for stage in stages])


def test_overlap_hides_the_shorter_stream() -> None:
    layer = [[(10.0, 4.0), (10.0, 4.0)]]
    assert makespan([(layer, 100)]) == 100 * 20 + 4  # compute bound: only the last collective shows
    assert (
        makespan([([[(4.0, 10.0), (4.0, 10.0)]], 100)]) == 4 + 100 * 20
    )  # communication bound: only the first compute


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
