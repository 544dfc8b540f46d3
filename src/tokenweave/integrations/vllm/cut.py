"""A step's device-side tables, and those of its prefix and suffix. Tensor arithmetic alone: a captured graph repeats it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tables:
    """What vLLM's runner prepared for a step, as views of its persistent buffers.

    Attributes:
        token_ids, positions: [tokens].
        query_start_loc: int32 [requests + 1], first row of each request; the tail of padding requests is the row count.
        seq_lens: int32 [requests], positions that a request's last row attends to; 0 for padding.
        block_table: int32 [requests, blocks].
        slots: int64 [tokens], where keys and values go; -1 for padding.
        metadata: the step's attention metadata, a pattern for those of the splits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    metadata: Any

    def grown(self, tokens: int, requests: int) -> Tables:
        """Views of the same buffers from their start on, for ``tokens`` rows of ``requests``; they must hold as many."""
        return Tables(
            _grown(self.token_ids, tokens),
            _grown(self.positions, tokens),
            _grown(self.query_start_loc, requests + 1),
            _grown(self.seq_lens, requests),
            _grown(self.block_table, requests),
            _grown(self.slots, tokens),
            self.metadata,
        )

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are: a graph is valid as long as they stay."""
        tensors = (self.token_ids, self.positions, self.query_start_loc, self.seq_lens, self.block_table, self.slots)
        return tuple(tensor.data_ptr() for tensor in tensors)


def _grown(view: torch.Tensor, length: int) -> torch.Tensor:
    return view.as_strided((length, *view.shape[1:]), view.stride())


def split_tables(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, start: int, stop: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(query_start_loc, seq_lens) of rows ``start`` to ``stop`` (None: the end), with all requests, many of them empty.

    A request that is cut has, in the prefix, fewer positions by its rows in the suffix: attention aligns its last row with
    its last position.
    """
    if start == 0 and stop is None:
        return query_start_loc, seq_lens
    if stop is not None:
        queries = query_start_loc[1:] - query_start_loc[:-1]
        behind = torch.minimum((query_start_loc[1:] - stop).clamp_(min=0), queries)
        return query_start_loc.clamp(min=start, max=stop) - start, seq_lens - behind
    return (query_start_loc - start).clamp_(min=0), seq_lens
