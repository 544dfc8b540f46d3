"""What the planner knows of a step's requests: how much attention lies before any row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from tokenweave.errors import RequestError

_CONTEXT = itemgetter(1)
MOST_POSITIONS = 2**40
"""Of a step's contexts together: no fleet's memory holds as many, and integers of more are not exact in float64."""


class Run(NamedTuple):
    """Rows that attend alike: one prompt's chunk (causal), or all decodes of a step together.

    ``context`` positions precede the chunk; for decodes it is the mean, rounded up to an eighth of a power of two so
    that consecutive steps share a plan.
    """

    rows: int
    context: int
    causal: bool


def runs_of(sequences: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """(rows, context) of each sequence -> runs in a canonical order: the decodes, then chunks from short to long.

    The order of the requests changes nothing. Raises RequestError for rows < 1, context < 0, or more than
    :data:`MOST_POSITIONS` of context.
    """
    told = tuple(sequences)
    if not told:
        return ()
    chunks = [sequence for sequence in told if sequence[0] != 1]  # a step may have hundreds of decodes, and no time
    positions = sum(map(_CONTEXT, told))
    if min(map(_CONTEXT, told)) < 0 or any(rows < 1 for rows, _ in chunks):
        rows, context = next((r, c) for r, c in told if r < 1 or c < 0)
        raise RequestError(f"a sequence of {rows} rows after {context} positions; expected rows >= 1, context >= 0")
    if positions > MOST_POSITIONS:
        raise RequestError(f"contexts of {positions} positions in one step; expected at most {MOST_POSITIONS}")
    runs = tuple([Run(rows, context, True) for rows, context in sorted(chunks)])
    if not (decodes := len(told) - len(chunks)):
        return runs
    positions -= sum(map(_CONTEXT, chunks))
    return (Run(decodes, rounded_up(-(-positions // decodes)), False), *runs)


def rounded_up(context: int) -> int:
    """To a multiple of an eighth of the next power of two (exact up to 8)."""
    unit = 1 << max(0, context.bit_length() - 3)
    return -(-context // unit) * unit


@dataclass(frozen=True)
class Batch:
    """One step: its rows and their attention. Hashable; equal batches get equal plans."""

    runs: tuple[Run, ...]

    @cached_property
    def tokens(self) -> int:
        return sum(run.rows for run in self.runs)

    @cached_property
    def sampled(self) -> int:
        """Rows whose logits may be wanted: one a sequence."""
        return sum(1 if run.causal else run.rows for run in self.runs)

    @cached_property
    def total_attention(self) -> tuple[float, float]:
        """:meth:`attention` of all rows."""
        pairs, reads = self.attention(self.tokens)
        return float(pairs), float(reads)

    @cached_property
    def _table(self) -> np.ndarray:
        """Columns: first row, context, causal, pairs before the run, cache reads before the run."""
        rows = np.array(self.runs, dtype=np.float64).reshape(-1, 3)
        length, context, causal = rows.T
        pairs = length * context + np.where(causal > 0, length * (length + 1) / 2, length)
        reads = np.where(causal > 0, length + context, pairs)
        before = [np.concatenate([[0.0], np.cumsum(x)[:-1]]) for x in (length, pairs, reads)]
        return np.stack([before[0], context, causal, before[1], before[2]])

    def attention(self, rows: Any) -> tuple[Any, Any]:
        """Work of the first ``rows`` rows: (query, key) pairs, and K/V positions read from the cache.

        Args:
            rows: int or int64 [n], 0 <= rows <= tokens.

        Returns:
            two float64 of that shape. A decode reads every position it pairs with; a chunk's rows share the reads.
        """
        first, context, causal, pairs, reads = self._table
        run = np.searchsorted(first, rows, side="right") - 1
        inside = rows - first[run]
        triangle = np.where(causal[run] > 0, inside * (inside + 1) / 2, inside)
        own = inside * context[run] + triangle
        shared = np.where(inside > 0, inside + context[run], 0.0)
        return pairs[run] + own, reads[run] + np.where(causal[run] > 0, shared, own)
