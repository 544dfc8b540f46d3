"""What a stage's compute gets as ``inputs``: the batch description of one split's rows, the same for every model family."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceRows:
    """Query rows of a split that belong to one sequence: a prefill chunk, a part of one, or a decode step's single row.

    The sequence owns a contiguous run of cache rows: position ``p`` has its key and value in row ``cache_start + p``.

    Attributes:
        first: first of these rows within the split.
        tokens: number of rows, at least 1.
        cache_start: cache row of the sequence's position 0.
        context: positions that precede these rows. They are in the cache before these rows attend.
    """

    first: int
    tokens: int
    cache_start: int
    context: int

    @property
    def length(self) -> int:
        """Positions up to and including the last of these rows: what the last row attends to."""
        return self.context + self.tokens


@dataclass(frozen=True)
class Inputs:
    """One split's rows.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens], each row's position in its sequence.
        cache_rows: int64 [tokens], the cache row that takes each row's key and value; no row twice.
        sequences: cover rows 0..tokens in order, without gaps.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cache_rows: torch.Tensor
    sequences: tuple[SequenceRows, ...]
