import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.batch import Chunk, beside, row_range, rows_of, splits_of
from tokenweave.models.inputs import Inputs
from tokenweave.planning.plan import Mode, Plan


@st.composite
def batches(draw):
    chunks, start = [], 0
    for number in range(draw(st.integers(1, 6))):
        first, size = draw(st.integers(0, 9)), draw(st.sampled_from([1, 1, 2, 3, 7]))
        start += draw(st.integers(0, 3))  # gaps between the runs of cache rows
        tokens = tuple(draw(st.integers(0, 99)) for _ in range(size))
        chunks.append(Chunk(number, first, tokens, start, draw(st.booleans())))
        start += first + size
    return chunks


def flat_rows(chunks):
    """(token, position, cache row, sampled, sequence's first cache row) of each row, the slow way."""
    return [
        (token, c.first + i, c.cache_start + c.first + i, c.sampled and i == len(c.token_ids) - 1, c.cache_start)
        for c in chunks
        for i, token in enumerate(c.token_ids)
    ]


def check(inputs, sampled, expected):
    assert inputs.token_ids.tolist() == [row[0] for row in expected]
    assert inputs.positions.tolist() == [row[1] for row in expected]
    assert inputs.cache_rows.tolist() == [row[2] for row in expected]
    assert sampled.tolist() == [i for i, row in enumerate(expected) if row[3]]
    assert {t.dtype for t in (inputs.token_ids, inputs.positions, inputs.cache_rows, sampled)} == {torch.int64}
    row = 0
    for sequence in inputs.sequences:
        assert sequence.first == row
        assert sequence.tokens >= 1
        assert sequence.context == expected[row][1]
        assert {r[4] for r in expected[row : row + sequence.tokens]} == {sequence.cache_start}
        row += sequence.tokens
    assert row == len(expected)


def cut(chunks, at):
    """(inputs, sampled rows) of the prefix and of the suffix of a woven step."""
    splits = splits_of(chunks, Plan(Mode.WOVEN, split=at), torch.zeros(rows_of(chunks), 8))
    return [(split.inputs, split.sampled) for split in splits]


@given(batches())
@settings(max_examples=100, deadline=None)
def test_every_cut_gives_the_rows_on_either_side(chunks):
    expected = flat_rows(chunks)
    assert rows_of(chunks) == len(expected)
    check(*row_range(chunks, 0, len(expected)), expected)
    for at in range(1, len(expected)):
        prefix, suffix = cut(chunks, at)
        check(*prefix, expected[:at])
        check(*suffix, expected[at:])


def test_a_cut_inside_a_request_makes_the_prefix_the_suffixs_context():
    chunks = [Chunk(0, 4, (10, 11, 12, 13, 14), 20, True)]
    (prefix, none), (suffix, last) = cut(chunks, 2)
    assert [(s.first, s.tokens, s.cache_start, s.context) for s in prefix.sequences] == [(0, 2, 20, 4)]
    assert [(s.first, s.tokens, s.cache_start, s.context) for s in suffix.sequences] == [(0, 3, 20, 6)]
    assert suffix.cache_rows.tolist() == [26, 27, 28]
    assert none.tolist() == []
    assert last.tolist() == [2]


def test_splits_are_views_of_one_residual():
    chunks = [Chunk(0, 0, (1, 2, 3), 0, False), Chunk(1, 5, (4,), 9, True)]
    residual = torch.zeros(10, 8)
    (whole,) = splits_of(chunks, Plan(Mode.FUSED), residual)
    assert (whole.start, whole.tokens, whole.residual.shape[0]) == (0, 4, 4)
    prefix, suffix = splits_of(chunks, Plan(Mode.WOVEN, split=3), residual)
    assert (prefix.start, prefix.tokens, suffix.start, suffix.tokens) == (0, 3, 3, 1)
    suffix.residual.fill_(1)
    assert residual.sum(dim=1).tolist() == [0, 0, 0, 8, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("at", "message"), [(4, "step of 4 rows"), (5, "step of 4 rows"), (0, "one row in its prefix"), (-1, "one row in")]
)
def test_a_cut_outside_the_step_is_an_error(at, message):
    chunks = [Chunk(0, 0, (1, 2, 3, 4), 0, True)]
    with pytest.raises(ValueError, match=message):
        cut(chunks, at)


def test_each_split_is_told_what_the_plan_says_of_it():
    sms = {("qkv", "prefix"): 124, ("gate_up", "suffix"): 120, ("attention", "suffix"): 124}
    plan = Plan(Mode.WOVEN, split=4, ctas=8, gemm_sms=sms)
    inputs = Inputs(*(torch.zeros(4, dtype=torch.int64) for _ in range(3)), ())
    prefix, suffix = (beside(inputs, plan, split) for split in ("prefix", "suffix"))
    assert (prefix.gemm_sms, prefix.held) == ({"qkv": 124}, 0)
    assert (suffix.gemm_sms["gate_up"], suffix.held) == (120, 8)
    assert beside(inputs, Plan(Mode.FUSED), "step").held == 0
