"""The buckets that steps are captured for: a few sizes of steps that plan and launch alike, and which of them a step fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenweave.engine.split_buffer import RowRange, SplitShape
from tokenweave.planning.plan import Mode, Plan

TILE = 128  # rows: beyond so many, a bucket is a multiple of it
MAX_ROWS = 8192  # of a step that is captured: above, the host keeps up with the GPU
_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
_SEQUENCES = (1, 4, 16, 64, 256, 1024)


def bucket_rows(rows: int) -> int:
    """Rows of the bucket that a step of ``rows`` rows falls into."""
    if rows <= TILE:
        return next(size for size in _SMALL if size >= rows)
    return -(-rows // TILE) * TILE


def fill_bucket(sequences: Sequence[tuple[int, int]], max_rows: int) -> list[tuple[int, int]]:
    """(rows, context) of a step's sequences -> those of a step that fills its bucket: the longest one gets what is
    missing. Steps of at most a tile, and steps that are not captured, stay as they are."""
    rows = sum(tokens for tokens, _ in sequences)
    filled = list(sequences)
    if TILE < rows <= MAX_ROWS:
        index = max(range(len(filled)), key=lambda i: filled[i][0])
        tokens, context = filled[index]
        filled[index] = (tokens + max(0, min(bucket_rows(rows), max_rows) - rows), context)
    return filled


@dataclass(frozen=True)
class SplitBucket:
    """A split as it is captured; the bound on a sequence's rows is part of attention's launch shape."""

    shape: SplitShape
    max_queries: int


@dataclass(frozen=True)
class Bucket:
    """What a graph is captured for. Equal steps of all ranks fall into equal buckets."""

    splits: tuple[SplitBucket, ...]
    max_length: int
    mode: Mode
    ctas: int | None
    cluster: int | None
    gemm_sms: tuple[tuple[tuple[str, str], int], ...]
    start_at: frozenset[str]

    @property
    def rows(self) -> int:
        return sum(split.shape.rows for split in self.splits)


def bucket_of(ranges: Sequence[RowRange], plan: Plan, max_rows: int, max_length: int) -> Bucket | None:
    """The bucket of a step.

    Args:
        ranges: its splits.
        max_rows: most rows of a step. max_length: of any sequence.

    Returns:
        None for a step that no bucket covers.
    """
    rows, sequences = sum(r.rows for r in ranges), max(len(r.sequences) for r in ranges)
    if rows > MAX_ROWS or sequences > _SEQUENCES[-1]:
        return None
    capacity = min(bucket_rows(rows), max_rows)
    if len(ranges) == 1 and len(ranges[0].sequences) == rows:
        # A row a sequence: attention splits long contexts over blocks, by their bound, so it must not be far off.
        longest = max(s.length for s in ranges[0].sequences)
        length = 1024
        while length < longest:
            length *= 4
        shape = SplitShape(capacity, capacity, capacity)
        return Bucket((SplitBucket(shape, 1),), min(length, max_length), *plan.launch)
    room = min(next(size for size in _SEQUENCES if size >= sequences), max_rows)
    splits: list[SplitBucket] = []
    for given in ranges:
        size = given.rows if given is not ranges[-1] else capacity - sum(s.shape.rows for s in splits)
        longest = max(s.tokens for s in given.sequences)
        splits.append(SplitBucket(SplitShape(size, room, room), max(2, 1 << (longest - 1).bit_length())))
    return Bucket(tuple(splits), max_length, *plan.launch)
