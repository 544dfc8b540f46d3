import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.kv_cache import KVCache, RowAllocator
from tokenweave.errors import RequestError


def test_cache_has_one_key_and_one_value_tensor_per_layer():
    cache = KVCache(layers=3, rows=10, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert [tuple(t.shape) for t in cache.keys + cache.values] == [(10, 2, 8)] * 6
    assert {t.dtype for t in cache.keys + cache.values} == {torch.bfloat16}
    assert len({t.data_ptr() for t in cache.keys + cache.values}) == 6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says there how much memory a process has")
def test_rows_on_a_cpu_take_no_memory_until_they_are_written():
    """A cache is made of a quarter of the machine's free memory, whatever is needed of it."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = KVCache(layers=1, rows=1 << 20, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    assert cache.keys[0].nbytes + cache.values[0].nbytes == 512 << 20
    assert resident() - before < 64 << 20


@given(
    rows=st.integers(1, 40),
    actions=st.lists(
        st.one_of(st.tuples(st.just("allocate"), st.integers(1, 15)), st.tuples(st.just("free"), st.integers(0, 99)))
    ),
)
@settings(max_examples=300, deadline=None)
def test_runs_never_overlap_first_fit_is_first_and_freed_runs_coalesce(rows, actions):
    allocator = RowAllocator(rows)
    taken: list[int | None] = [None] * rows  # the reference: who holds each row
    held: list[int] = []
    for kind, number in actions:
        if kind == "allocate":
            starts = [s for s in range(rows - number + 1) if all(owner is None for owner in taken[s : s + number])]
            start = allocator.allocate(number)
            assert start == (starts[0] if starts else None)
            if start is not None:
                taken[start : start + number] = [start] * number
                held.append(start)
        elif held:
            start = held.pop(number % len(held))
            allocator.free(start)
            taken = [None if owner == start else owner for owner in taken]
        assert allocator.free_rows == taken.count(None)
    for start in held:
        allocator.free(start)
    assert allocator.allocate(rows) == 0  # everything came back as one run


def test_misuse_is_an_error():
    allocator = RowAllocator(4)
    with pytest.raises(ValueError, match="row 0"):
        allocator.free(0)
    with pytest.raises(ValueError, match="length=0"):
        allocator.allocate(0)
    with pytest.raises(RequestError, match="cache_tokens=0"):
        RowAllocator(0)
