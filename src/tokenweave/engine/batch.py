"""One step's rows: a list of chunks, flattened for the model, whole or cut in two at any row.

A step's rows are its chunks' tokens one after the other. A split takes a row range, so a cut may fall between requests
or inside one: the suffix's part of that request then has the prefix's part as context, which the prefix writes to the
cache first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenweave.models.inputs import Inputs, SequenceRows
from tokenweave.planning.plan import Plan
from tokenweave.stages import Split


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request that a step computes: a part of its prompt, or one decoded token.

    Attributes:
        request: number of the request.
        first: position of the first token in its sequence; all earlier ones are in the cache.
        token_ids: at least one.
        cache_start: cache row of the sequence's position 0.
        sampled: True if the last token is followed by one that must be sampled (the prompt is complete, or a decode).
    """

    request: int
    first: int
    token_ids: tuple[int, ...]
    cache_start: int
    sampled: bool


def rows_of(chunks: Sequence[Chunk]) -> int:
    """Rows of the step."""
    return sum(len(chunk.token_ids) for chunk in chunks)


def row_range(
    chunks: Sequence[Chunk], start: int, stop: int, device: torch.device | str = "cpu"
) -> tuple[Inputs, torch.Tensor]:
    """Rows ``start`` to ``stop`` of the step, ``0 <= start < stop <= rows_of(chunks)``.

    Returns:
        (inputs, sampled): what the stages compute with, and int64 [n], the rows of this range (0 = its first) whose
        logits are wanted, ascending; both on ``device``.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    cache_rows: list[int] = []
    sampled: list[int] = []
    sequences: list[SequenceRows] = []
    row = 0  # of the step, at the chunk's first token
    for chunk in chunks:
        size = len(chunk.token_ids)
        low, high = max(start - row, 0), min(stop - row, size)
        if low < high:
            context = chunk.first + low
            sequences.append(SequenceRows(len(token_ids), high - low, chunk.cache_start, context))
            token_ids += chunk.token_ids[low:high]
            positions += range(context, chunk.first + high)
            cache_rows += range(chunk.cache_start + context, chunk.cache_start + chunk.first + high)
            if chunk.sampled and high == size:
                sampled.append(len(token_ids) - 1)
        row += size
    if not 0 <= start < stop <= row:
        raise ValueError(f"rows {start}..{stop} of a step of {row} rows; expected 0 <= start < stop <= {row}")
    columns = torch.tensor([token_ids, positions, cache_rows], dtype=torch.int64).to(device, non_blocking=True)
    inputs = Inputs(columns[0], columns[1], columns[2], tuple(sequences))
    return inputs, torch.tensor(sampled, dtype=torch.int64).to(device, non_blocking=True)


def cut(
    chunks: Sequence[Chunk], at: int, device: torch.device | str = "cpu"
) -> tuple[tuple[Inputs, torch.Tensor], tuple[Inputs, torch.Tensor]]:
    """(prefix, suffix) as :func:`row_range`: rows 0..at and at..end, ``0 < at < rows_of(chunks)``."""
    return row_range(chunks, 0, at, device), row_range(chunks, at, rows_of(chunks), device)


def splits_of(chunks: Sequence[Chunk], plan: Plan, residual: torch.Tensor) -> list[Split]:
    """The step as the schedule walks it: one split, or the prefix and the suffix of a woven plan.

    The final rows of the splits, one after the other, are in the order of the chunks that are ``sampled``.

    Args:
        residual: [at least rows_of(chunks), hidden]; each split gets its view.
    """
    edges = [0, rows_of(chunks)] if plan.split is None else [0, plan.split, rows_of(chunks)]
    splits = []
    for start, stop in itertools.pairwise(edges):
        inputs, sampled = row_range(chunks, start, stop, residual.device)
        splits.append(Split(start, stop - start, inputs, residual[start:stop], sampled))
    return splits
