"""One step's rows: a list of chunks, flattened for the model, whole or cut in two at any row.

A step's rows are its chunks' tokens one after the other. A split takes a row range, so a cut may fall between requests
or inside one: the suffix's part of that request then has the prefix's part as context, which the prefix writes to the
cache first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from tokenweave.engine.split_buffer import RowRange, on_device
from tokenweave.models.inputs import Inputs, Launches, SequenceRows
from tokenweave.planning.plan import Plan
from tokenweave.stages import Split

L = TypeVar("L", bound=Launches)


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


def row_range_of(chunks: Sequence[Chunk], start: int, stop: int) -> RowRange:
    """Rows ``start`` to ``stop`` of the step, ``0 <= start < stop <= rows_of(chunks)``, on the host."""
    token_ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    cache_rows: list[np.ndarray] = []
    sampled: list[int] = []
    sequences: list[SequenceRows] = []
    row = rows = 0  # of the step, at the chunk's first token; of the range
    for chunk in chunks:
        size = len(chunk.token_ids)
        low, high = max(start - row, 0), min(stop - row, size)
        if low < high:
            context = chunk.first + low
            sequences.append(SequenceRows(rows, high - low, chunk.cache_start, context))
            token_ids.append(np.array(chunk.token_ids[low:high], dtype=np.int64))
            positions.append(np.arange(context, chunk.first + high))
            cache_rows.append(positions[-1] + chunk.cache_start)
            rows += high - low
            if chunk.sampled and high == size:
                sampled.append(rows - 1)
        row += size
    if not 0 <= start < stop <= row:
        raise ValueError(f"rows {start}..{stop} of a step of {row} rows; expected 0 <= start < stop <= {row}")
    return RowRange(
        np.concatenate(token_ids),
        np.concatenate(positions),
        np.concatenate(cache_rows),
        np.array(sampled, dtype=np.int64),
        tuple(sequences),
    )


def row_range(
    chunks: Sequence[Chunk], start: int, stop: int, device: torch.device | str = "cpu", packed: bool = False
) -> tuple[Inputs, torch.Tensor]:
    """As :func:`row_range_of`, for the stages.

    Args:
        packed: the sequences go to the device as well, for attention in one launch.

    Returns:
        (inputs, sampled): what the stages compute with, and int64 [n], the rows of this range (0 = its first) whose
        logits are wanted, ascending; both on ``device``.
    """
    rows, device = row_range_of(chunks, start, stop), torch.device(device)
    if packed:
        inputs, sampled = on_device(rows, device)
        return dataclasses.replace(inputs, sequences=rows.sequences), sampled
    columns = torch.from_numpy(np.stack([rows.token_ids, rows.positions, rows.cache_rows])).to(device)
    inputs = Inputs(columns[0], columns[1], columns[2], rows.sequences)
    return inputs, torch.from_numpy(rows.sampled).to(device)


def splits_of(
    chunks: Sequence[Chunk],
    plan: Plan,
    residual: torch.Tensor,
    packed: bool = False,
    reached: Callable[[str], None] | None = None,
) -> list[Split]:
    """The step as the schedule walks it: one split, or the prefix and the suffix of a woven plan.

    The final rows of the splits, one after the other, are in the order of the chunks that are ``sampled``.

    Args:
        residual: [at least rows_of(chunks), hidden]; each split gets its view.
        packed: as :func:`row_range`.
        reached: of the splits' :class:`Inputs`; None for nobody.

    Raises:
        ValueError: the plan's cut leaves no row on one side.
    """
    edges = [0, rows_of(chunks)] if plan.split is None else [0, plan.split, rows_of(chunks)]
    splits = []
    for (start, stop), name in zip(itertools.pairwise(edges), ("prefix", "suffix"), strict=False):
        inputs, sampled = row_range(chunks, start, stop, residual.device, packed)
        if residual.is_cuda:
            inputs = beside(inputs, plan, name)
        if reached is not None:
            inputs = dataclasses.replace(inputs, reached=reached)
        splits.append(Split(start, stop - start, inputs, residual[start:stop], sampled))
    return splits


def beside(inputs: L, plan: Plan, split: str) -> L:
    """A split's inputs, told of the collective that the plan runs beside its compute."""
    told = {gemm: sms for (gemm, of), sms in plan.gemm_sms.items() if of == split}
    held = (plan.ctas or 0) if "attention" in told else 0  # a block, an SM
    return dataclasses.replace(inputs, gemm_sms=told, held=held)
