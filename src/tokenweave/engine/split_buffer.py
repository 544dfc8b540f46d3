"""A split's rows in one buffer: all that the stages read of them reaches the GPU in one copy, into memory that stays.

``[token ids | positions | cache rows | sampled rows]`` as int64, then ``[query starts | cache starts | lengths | row
count]`` as int32. A shape may have room for more than a step brings: the rest is padding, rows that write nothing to the
cache and sequences without rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tokenweave.models.inputs import Inputs, PackedSequences, SequenceRows

PADDING = -1
"""The cache row of rows that mean nothing."""


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a step, on the host.

    Attributes:
        token_ids, positions, cache_rows: int64 [rows], as :class:`tokenweave.models.Inputs` has them.
        sampled: int64 [n], the rows (0 = the first of these) whose logits are wanted, ascending.
        sequences: cover the rows.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    cache_rows: np.ndarray
    sampled: np.ndarray
    sequences: tuple[SequenceRows, ...]

    @property
    def rows(self) -> int:
        return len(self.token_ids)


class SplitTensors(NamedTuple):
    """Views of a buffer; all int64 but the last four, which are int32."""

    token_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    cache_rows: torch.Tensor  # [rows]
    sampled: torch.Tensor  # [sampled]
    query_starts: torch.Tensor  # [sequences + 1]
    cache_starts: torch.Tensor  # [sequences + 1]
    lengths: torch.Tensor  # [sequences]
    row_count: torch.Tensor  # [1]


@dataclass(frozen=True)
class SplitShape:
    """How much of each a buffer has room for."""

    rows: int
    sequences: int
    sampled: int

    @property
    def words(self) -> int:
        """int64 elements of the buffer; even, so that the next one's start is aligned to 16 bytes."""
        words = 3 * self.rows + self.sampled + (3 * self.sequences + 3 + 1) // 2
        return words + words % 2

    def views(self, buffer: torch.Tensor) -> SplitTensors:
        """The parts of ``buffer``, int64 [words]."""
        longs = buffer.split([self.rows] * 3 + [self.sampled, self.words - 3 * self.rows - self.sampled])
        sizes = [self.sequences + 1, self.sequences + 1, self.sequences, 1]
        ints = longs[4].view(torch.int32)[: sum(sizes)].split(sizes)
        return SplitTensors(*longs[:4], *ints)

    def fill(self, buffer: torch.Tensor, given: RowRange, past: int) -> None:
        """Writes rows to a buffer on the host.

        Args:
            past: stands for a sampled row where there are fewer than ``self.sampled``.

        Raises:
            ValueError: there is less room than ``given`` needs.
        """
        rows, sequences, sampled = given.rows, len(given.sequences), len(given.sampled)
        if rows > self.rows or sequences > self.sequences or sampled > self.sampled:
            raise ValueError(f"{rows} rows, {sequences} sequences, {sampled} sampled rows do not fit into {self}")
        views = self.views(buffer)
        starts, cache_starts, lengths = np.array([(s.first, s.cache_start, s.length) for s in given.sequences]).T
        for view, values, padding in (
            (views.token_ids, given.token_ids, 0),
            (views.positions, given.positions, 0),
            (views.cache_rows, given.cache_rows, PADDING),
            (views.sampled, given.sampled, past),
            (views.query_starts, starts, rows),
            (views.cache_starts, cache_starts, 0),
            (views.lengths, lengths, 0),
        ):
            target = view.numpy()
            target[: len(values)] = values
            target[len(values) :] = padding
        views.row_count[0] = rows


def packed_inputs(tensors: SplitTensors, max_queries: int, max_length: int) -> Inputs:
    """Inputs whose tensors are these views, on the GPU; the lengths' bounds as :class:`PackedSequences` has them."""
    packed = PackedSequences(
        tensors.query_starts, tensors.cache_starts, tensors.lengths, max_queries=max_queries, max_length=max_length
    )
    return Inputs(tensors.token_ids, tensors.positions, tensors.cache_rows, (), packed)


def on_device(given: RowRange, device: torch.device) -> tuple[Inputs, torch.Tensor]:
    """(inputs, sampled) of rows in exactly as much memory as they need; the host does not wait for the copy."""
    shape = SplitShape(given.rows, len(given.sequences), len(given.sampled))
    host = torch.empty(shape.words, dtype=torch.int64, pin_memory=True)
    shape.fill(host, given, past=0)
    tensors = shape.views(host.to(device, non_blocking=True))
    longest = max(s.length for s in given.sequences)
    return packed_inputs(tensors, max(s.tokens for s in given.sequences), longest), tensors.sampled
