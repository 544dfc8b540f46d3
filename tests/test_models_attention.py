"""attend() against attention written out in float64, for queries anywhere in their sequences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.kv_cache import KVCache
from tokenweave.models.attention import attend
from tokenweave.models.config import ModelConfig
from tokenweave.models.inputs import Inputs, SequenceRows
from tokenweave.models.llama import Attention
from tokenweave.models.rotary import Rotary


def reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: list[SequenceRows]
) -> torch.Tensor:
    out = torch.full(queries.shape, float("nan"), dtype=torch.float64)
    group = queries.shape[1] // keys.shape[1]
    for sequence in sequences:
        for row in range(sequence.tokens):
            seen = slice(sequence.cache_start, sequence.cache_start + sequence.context + row + 1)
            for head in range(queries.shape[1]):
                q, k, v = queries[sequence.first + row, head], keys[seen, head // group], values[seen, head // group]
                scores = (k.double() @ q.double()) / math.sqrt(q.numel())
                out[sequence.first + row, head] = scores.softmax(0) @ v.double()
    return out


def make(
    runs: list[tuple[int, int]], kv_heads: int, group: int, head_dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[SequenceRows]]:
    """Runs are (context, tokens). Cache rows that no sequence holds are NaN, and so is what lies past each run."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(run[1] for run in runs)
    rows = sum(sum(run) + 3 for run in runs)
    keys = torch.full((rows, kv_heads, head_dim), float("nan"))
    values = keys.clone()
    queries = torch.randn(tokens, kv_heads * group, head_dim, generator=generator)
    sequences, first, start = [], 0, 2
    for context, count in runs:
        for cache in (keys, values):
            cache[start : start + context + count] = torch.randn(
                context + count, kv_heads, head_dim, generator=generator
            )
        sequences.append(SequenceRows(first, count, start, context))
        first, start = first + count, start + context + count + 3
    return queries, keys, values, sequences


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([4, 16]),
    st.integers(0, 2**31),
)
def test_equals_the_definition(
    runs: list[tuple[int, int]], kv_heads: int, group: int, head_dim: int, seed: int
) -> None:
    case = make(runs, kv_heads, group, head_dim, seed)
    torch.testing.assert_close(attend(*case).double(), reference(*case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("context", "tokens"), [(0, 255), (0, 256), (0, 257), (3, 600), (300, 2), (511, 1)])
def test_long_chunks(context: int, tokens: int) -> None:
    case = make([(context, tokens)], 1, 2, 8, 0)
    torch.testing.assert_close(attend(*case).double(), reference(*case), rtol=1e-5, atol=1e-5)


def test_rows_that_a_split_of_none_has() -> None:
    queries, keys, values, _ = make([(0, 1)], 2, 2, 8, 0)
    assert attend(queries[:0], keys, values, []).shape == (0, 4, 8)


def test_a_value_that_is_not_finite_stays_in_its_own_sequence():
    """Some kernels of attention multiply rows past a sequence's end by zero: all cached values are finite, the key is not."""
    config = ModelConfig(
        family="llama", hidden=32, intermediate=8, layers=1, heads=4, kv_heads=2, head_dim=8, vocab=8, context=16
    )
    generator = torch.Generator().manual_seed(0)
    qkv, output = (torch.randn(*shape, generator=generator) for shape in ((64, 32), (32, 32)))
    attention = Attention(qkv, None, None, 1e-5, output, None, query_slots=4, kv_slots=2, head_dim=8)
    x = torch.randn(6, 32, generator=generator)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    runs = (SequenceRows(0, 3, 8, 0), SequenceRows(3, 3, 2, 0))  # the second lies right before the first
    inputs = Inputs(
        token_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.tensor([0, 1, 2, 0, 1, 2]),
        cache_rows=torch.tensor([8, 9, 10, 2, 3, 4]),
        sequences=runs,
    )
    cache, out = KVCache(1, 12, 2, 8, torch.float32, torch.device("cpu")), torch.empty(6, 32)
    attention.compute(0, cache, Rotary(config, 16, torch.device("cpu")), x, inputs, out)
    keys, values = cache.keys[0], cache.values[0]
    assert values[inputs.cache_rows].isfinite().all()
    assert values[[9, 10]].count_nonzero() == 0
    assert keys[[9, 10]].isnan().all()
    assert keys[[2, 3, 4, 8]].isfinite().all()
    assert out[1:3].isnan().all()
    assert out[3:].isfinite().all()
