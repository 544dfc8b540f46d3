"""Which heads, rows and columns each tensor-parallel rank keeps. Pure functions; every rank gets equal shapes.

Equal shapes mean padding where sizes do not divide: a padded head or row is zero in every weight, so it adds exactly
zero to the partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenweave.errors import ModelError
from tokenweave.models.config import ModelConfig

# Chunks of a dimension that does not divide are rounded up to this many rows: GEMMs want their sizes aligned.
ALIGNMENT = 8


@dataclass(frozen=True)
class Segment:
    """``length`` rows (or columns) of a full weight, from ``source`` on, that a shard holds from ``target`` on."""

    target: int
    source: int
    length: int


@dataclass(frozen=True)
class Shard:
    """What one rank keeps of one dimension: ``size`` rows, of which those outside all segments are zero."""

    size: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class HeadShard:
    """One rank's attention heads. Query slot ``i`` attends to key/value slot ``i // (len(queries) // len(kv))``.

    Attributes:
        queries: query head in each query slot, None for a padded one.
        kv: key/value head in each slot, None for a padded one.
    """

    queries: tuple[int | None, ...]
    kv: tuple[int | None, ...]


def _portion(count: int, part: int, parts: int) -> range:
    """The ``part``-th of ``parts`` contiguous portions of 0..count, the longer ones first."""
    base, longer = divmod(count, parts)
    start = part * base + min(part, longer)
    return range(start, start + base + (part < longer))


def _filled(heads: range, slots: int) -> tuple[int | None, ...]:
    return (*heads, *[None] * (slots - len(heads)))


def head_shard(heads: int, kv_heads: int, rank: int, world_size: int) -> HeadShard:
    """The heads of one rank; each real query head is on exactly one rank, beside its key/value head.

    Up to ``kv_heads`` ranks divide the key/value heads with all their query heads. More ranks hold
    ``world_size // kv_heads`` copies of each key/value head (at most one per query head of its group), and the copies
    divide the group's query heads; ranks left over hold padded heads alone.

    Raises:
        ModelError: more ranks than query heads.
    """
    if world_size > heads:
        raise ModelError(
            f"tensor parallel size {world_size} is more than the model's {heads} query heads; use {heads} or less"
        )
    group = heads // kv_heads
    if world_size <= kv_heads:
        slots = -(-kv_heads // world_size)
        kv = _filled(_portion(kv_heads, rank, world_size), slots)
        queries = [q for head in kv for q in _filled(range(0) if head is None else _group(head, group), group)]
        return HeadShard(tuple(queries), kv)
    copies = min(world_size // kv_heads, group)
    slots = -(-group // copies)
    head, copy = divmod(rank, copies)
    if head >= kv_heads:
        return HeadShard((None,) * slots, (None,))
    mine = _portion(group, copy, copies)
    return HeadShard(_filled(range(head * group + mine.start, head * group + mine.stop), slots), (head,))


def _group(kv_head: int, group: int) -> range:
    return range(kv_head * group, (kv_head + 1) * group)


def head_rows(slots: tuple[int | None, ...], head_dim: int) -> Shard:
    """The rows (of q, k or v weights) or columns (of the output projection) of these head slots."""
    segments = [
        Segment(slot * head_dim, head * head_dim, head_dim) for slot, head in enumerate(slots) if head is not None
    ]
    return Shard(len(slots) * head_dim, _merged(segments))


def _merged(segments: list[Segment]) -> tuple[Segment, ...]:
    """Neighbours joined, so that a run of heads is one read."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if last and (last.target + last.length, last.source + last.length) == (segment.target, segment.source):
            merged[-1] = Segment(last.target, last.source, last.length + segment.length)
        else:
            merged.append(segment)
    return tuple(merged)


def chunk_size(count: int, world_size: int) -> int:
    """Rows per rank of a dimension of ``count`` cut in contiguous chunks, a multiple of 8 for more than one rank."""
    if world_size == 1:
        return count
    per_rank = -(-count // world_size)
    return -(-per_rank // ALIGNMENT) * ALIGNMENT


def chunk(count: int, rank: int, world_size: int) -> Shard:
    """One rank's contiguous chunk of a dimension: the MLP's intermediate rows, the vocabulary."""
    size = chunk_size(count, world_size)
    start, stop = min(count, rank * size), min(count, (rank + 1) * size)
    return Shard(size, (Segment(0, start, stop - start),) if stop > start else ())


@dataclass(frozen=True)
class ModelShard:
    """What one rank keeps of a model.

    Attributes:
        rank, world_size: of the tensor-parallel group.
        heads: this rank's attention heads.
        query, kv: rows of the q weight (and columns of the output projection), rows of the k and v weights.
        intermediate: rows of gate and up, columns of down (every expert's, for mixture-of-experts).
        vocab: rows of the embedding and of the head.
    """

    rank: int
    world_size: int
    heads: HeadShard
    query: Shard
    kv: Shard
    intermediate: Shard
    vocab: Shard


def shard_of(config: ModelConfig, rank: int, world_size: int) -> ModelShard:
    """What ``rank`` of ``world_size`` keeps. Raises ModelError where there are more ranks than query heads."""
    heads = head_shard(config.heads, config.kv_heads, rank, world_size)
    return ModelShard(
        rank=rank,
        world_size=world_size,
        heads=heads,
        query=head_rows(heads.queries, config.head_dim),
        kv=head_rows(heads.kv, config.head_dim),
        intermediate=chunk(config.intermediate, rank, world_size),
        vocab=chunk(config.vocab, rank, world_size),
    )
