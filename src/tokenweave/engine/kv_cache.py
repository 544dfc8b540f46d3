"""Keys and values of all sequences: per layer one tensor of rows, and who holds which run of rows.

A sequence owns one contiguous run for its whole life, long enough for its prompt and every token that it may generate.
Attention then reads plain views (no block table, no gathers), and a running sequence can never run out of rows.
"""

from __future__ import annotations

import bisect

import torch

from tokenweave.errors import RequestError


class KVCache:
    """One rank's keys and values.

    Args:
        layers: of the model.
        rows: token positions that all sequences together may hold.
        kv_heads: key/value heads that this rank keeps.
        head_dim: elements of a head.
        dtype, device: of the tensors.

    Attributes:
        keys, values: per layer, [rows, kv_heads, head_dim]. A row is written before it counts, but attention kernels load
            rows past a sequence's end and give them a weight of zero: so on GPUs all are zero at first, and what writes
            values writes finite ones (``models/csrc/rope_cache.cu``). On CPUs rows take no memory until they are written.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows = rows
        shape = (rows, kv_heads, head_dim)
        new = torch.empty if torch.device(device).type == "cpu" else torch.zeros
        self.keys = [new(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [new(shape, dtype=dtype, device=device) for _ in range(layers)]


class RowAllocator:
    """First fit over contiguous runs of rows. Freed runs join their free neighbours.

    Args:
        rows: of the cache, >= 1.
    """

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise RequestError(f"cache_tokens={rows}; expected at least 1")
        self.rows = rows
        self._free = [(0, rows)]  # (start, length), ascending, never adjacent
        self._held: dict[int, int] = {}

    @property
    def free_rows(self) -> int:
        """Rows that no run holds; the longest run that fits may be shorter."""
        return sum(length for _, length in self._free)

    def allocate(self, length: int) -> int | None:
        """First row of a run of ``length`` >= 1 rows at the lowest place where it fits; None if it fits nowhere now."""
        if length < 1:
            raise ValueError(f"RowAllocator.allocate: length={length}; expected at least 1")
        for index, (start, available) in enumerate(self._free):
            if available >= length:
                rest = [(start + length, available - length)] if available > length else []
                self._free[index : index + 1] = rest
                self._held[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Gives back the run that starts at ``start``.

        Raises:
            ValueError: no run that is held starts there.
        """
        length = self._held.pop(start, None)
        if length is None:
            raise ValueError(f"RowAllocator.free: no run that is held starts at row {start}")
        index = bisect.bisect(self._free, (start, 0))
        end = start + length
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))
