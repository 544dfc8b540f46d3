"""Shards: every real head, row and column exactly once, equal shapes, zeros elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from test_gpu_engine import FAMILIES
from tiny_llama import save_tiny_llama
from tokenweave.errors import ModelError
from tokenweave.models import read_config
from tokenweave.models.loading import Loader, Part
from tokenweave.models.sharding import Shard, chunk, chunk_size, head_rows, head_shard, shard_of


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, key/value heads, ranks), ranks <= query heads."""
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return kv_heads * group, kv_heads, draw(st.integers(1, min(kv_heads * group, 40)))


@given(head_counts())
def test_every_query_head_is_on_one_rank_beside_its_kv_head(counts: tuple[int, int, int]) -> None:
    heads, kv_heads, world_size = counts
    shards = [head_shard(heads, kv_heads, rank, world_size) for rank in range(world_size)]
    assert len({(len(shard.queries), len(shard.kv)) for shard in shards}) == 1
    seen: Counter[int] = Counter()
    for shard in shards:
        per_slot, rest = divmod(len(shard.queries), len(shard.kv))
        assert rest == 0
        for slot, head in enumerate(shard.queries):
            if head is not None:
                seen[head] += 1
                assert shard.kv[slot // per_slot] == head // (heads // kv_heads)
    assert seen == Counter(range(heads))


@given(head_counts())
def test_kv_heads_are_divided_or_copied(counts: tuple[int, int, int]) -> None:
    heads, kv_heads, world_size = counts
    shards = [head_shard(heads, kv_heads, rank, world_size) for rank in range(world_size)]
    copies = Counter(head for shard in shards for head in shard.kv if head is not None)
    expected = 1 if world_size <= kv_heads else min(world_size // kv_heads, heads // kv_heads)
    assert copies == Counter(dict.fromkeys(range(kv_heads), expected))


@given(head_counts())
def test_no_rank_has_more_slots_than_it_must(counts: tuple[int, int, int]) -> None:
    heads, kv_heads, world_size = counts
    shard = head_shard(heads, kv_heads, 0, world_size)
    group = heads // kv_heads
    if world_size <= kv_heads:
        assert len(shard.kv) == -(-kv_heads // world_size)
        assert len(shard.queries) == len(shard.kv) * group
    else:
        assert len(shard.kv) == 1
        assert len(shard.queries) == -(-group // min(world_size // kv_heads, group))


def test_smollm2_on_two_ranks() -> None:
    assert head_shard(9, 3, 0, 2).kv == (0, 1)
    assert head_shard(9, 3, 1, 2).kv == (2, None)
    assert head_shard(9, 3, 1, 2).queries == (6, 7, 8, None, None, None)


def test_copies_of_kv_heads() -> None:
    assert [head_shard(8, 2, rank, 4).kv for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [head_shard(8, 2, rank, 4).queries for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert head_shard(8, 2, 4, 5).queries == (None, None)


@given(head_counts())
def test_more_ranks_than_heads(counts: tuple[int, int, int]) -> None:
    heads, kv_heads, _ = counts
    with pytest.raises(ModelError, match=f"{heads + 1} is more than the model's {heads} query heads; use {heads} or"):
        head_shard(heads, kv_heads, 0, heads + 1)


@given(st.integers(1, 500), st.integers(1, 20))
def test_chunks_cover_in_order(count: int, world_size: int) -> None:
    size = chunk_size(count, world_size)
    assert size * world_size >= count
    assert size - -(-count // world_size) < 8
    assert world_size == 1 or size % 8 == 0
    covered: list[int] = []
    for rank in range(world_size):
        shard = chunk(count, rank, world_size)
        assert shard.size == size
        assert all(segment.target == 0 for segment in shard.segments)
        covered += [s.source + i for s in shard.segments for i in range(s.length)]
    assert covered == list(range(count))


class Memory:
    """A checkpoint of one tensor. Notes which elements are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.reads = torch.zeros(tensor.shape, dtype=torch.int64)

    def file_of(self, name: str) -> Path:
        return Path("memory")

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensor.shape)

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        if self.tensor.dim() == 1:
            assert rows is None
            assert columns is None
            return self.tensor
        rows = range(self.tensor.shape[0]) if rows is None else rows
        columns = range(self.tensor.shape[1]) if columns is None else columns
        index = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
        self.reads[index] += 1
        return self.tensor[index]

    def others(self, names: Set[str]) -> list[str]:
        return []


def whole_from(parts: list[torch.Tensor], shards: list[Shard], count: int, dim: int) -> torch.Tensor:
    """Puts shards back together; padding must be zero and copies equal."""
    shape = list(parts[0].shape)
    shape[dim] = count
    whole = torch.full(shape, float("nan"))
    for part, shard in zip(parts, shards, strict=True):
        padding = torch.ones(shard.size, dtype=torch.bool)
        for s in shard.segments:
            padding[s.target : s.target + s.length] = False
            piece = part.narrow(dim, s.target, s.length)
            there = whole.narrow(dim, s.source, s.length)
            assert bool(there.isnan().all()) or torch.equal(there, piece)
            there.copy_(piece)
        assert not part.index_select(dim, padding.nonzero().flatten()).any()
    return whole


@settings(deadline=None, max_examples=60)
@given(head_counts(), st.sampled_from([2, 4, 8]), st.booleans(), st.integers(0, 2**31))
def test_heads_read_by_all_ranks_are_the_whole(
    counts: tuple[int, int, int], head_dim: int, kv: bool, seed: int
) -> None:
    heads, kv_heads, world_size = counts
    full = (kv_heads if kv else heads) * head_dim
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(full, 5, generator=generator), torch.randn(full, generator=generator)
    shards = []
    for rank in range(world_size):
        mine = head_shard(heads, kv_heads, rank, world_size)
        shards.append(head_rows(mine.kv if kv else mine.queries, head_dim))
    source = Memory(weight)
    loader = Loader(source, torch.float32, torch.device("cpu"), unit_rows=head_dim)
    rows = [loader.rows([Part("w", (full, 5), shard)]) for shard in shards]
    assert torch.equal(whole_from(rows, shards, full, 0), weight)
    # Nothing is read beside what is kept: each element once, key/value heads once per copy.
    copies = sum(s.length for shard in shards for s in shard.segments) // full
    assert torch.equal(source.reads, torch.full_like(source.reads, copies))
    columns = [
        Loader(Memory(weight.t()), torch.float32, torch.device("cpu"), 1).columns("w", (5, full), s) for s in shards
    ]
    assert torch.equal(whole_from(columns, shards, full, 1), weight.t())
    biases = Loader(Memory(bias), torch.float32, torch.device("cpu"), head_dim)
    assert torch.equal(whole_from([biases.rows([Part("b", (full,), s)]) for s in shards], shards, full, 0), bias)


@pytest.mark.parametrize("unit_rows", [1, 6])
def test_long_reads_are_cut_at_whole_heads(monkeypatch: pytest.MonkeyPatch, unit_rows: int) -> None:
    monkeypatch.setattr("tokenweave.models.loading._READ_ELEMENTS", 40)
    weight = torch.randn(60, 5)
    source = Memory(weight)
    lengths: list[int] = []
    read = source.read

    def noted(name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        lengths.append(len(rows or ()))
        return read(name, rows, columns)

    monkeypatch.setattr(source, "read", noted)
    shard = chunk(60, 1, 2)
    out = Loader(source, torch.float32, torch.device("cpu"), unit_rows).rows([Part("w", (60, 5), shard)])
    assert torch.equal(out[:28], weight[32:])
    assert len(lengths) > 2
    assert all(length % unit_rows == 0 for length in lengths[:-1])


def test_fused_parts_lie_below_one_another() -> None:
    weight = torch.randn(10, 3)
    loader = Loader(Memory(weight), torch.float32, torch.device("cpu"), 1)
    shard = chunk(10, 1, 2)
    out = loader.rows([Part("a", (10, 3), shard), Part("b", (10, 3), shard)])
    assert torch.equal(out, torch.cat([weight[8:], torch.zeros(6, 3)] * 2))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_models_of_the_tests_on_gpus_can_be_sharded(tmp_path: Path, world_size: int) -> None:
    """TOKENWEAVE_TEST_RANKS=4 and 8 must not end at a model with too few heads."""
    models = dict(FAMILIES)
    models["tiny"] = read_config(save_tiny_llama(tmp_path))
    models |= {name: read_config(name) for name in ("Llama-3.1-8B", "SmolLM2-135M")}
    for config in models.values():
        shards = [shard_of(config, rank, world_size) for rank in range(world_size)]
        queries = Counter(head for shard in shards for head in shard.heads.queries if head is not None)
        assert queries == Counter(range(config.heads))
