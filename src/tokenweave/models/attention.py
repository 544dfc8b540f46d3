"""Causal attention of a split's query rows to the cache rows of their sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from tokenweave.models.inputs import SequenceRows

# Query rows of one call. Blocks read only the keys that their last row sees, so that half of the products above the
# diagonal are never formed, and the mask stays small.
_BLOCK = 256


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: Sequence[SequenceRows]
) -> torch.Tensor:
    """Each query row attends to its sequence's cache rows up to and including its own position.

    Args:
        queries: [tokens, heads, head_dim]; heads a multiple of kv_heads, consecutive heads share a key/value head.
        keys, values: one layer's cache, [rows, kv_heads, head_dim], with these rows' own entries already written.
        sequences: cover the query rows.

    Returns:
        [tokens, heads, head_dim], contiguous.
    """
    out = torch.empty_like(queries)
    for sequence in sequences:
        rows = slice(sequence.first, sequence.first + sequence.tokens)
        run = slice(sequence.cache_start, sequence.cache_start + sequence.length)
        _attend_one(queries[rows], keys[run], values[run], sequence.context, out[rows])
    return out


def _attend_one(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, out: torch.Tensor
) -> None:
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    for start in range(0, tokens, _BLOCK):
        stop = min(start + _BLOCK, tokens)
        seen = context + stop
        # The query heads of a group lie below one another as rows of one problem: no copies of keys and values.
        block = queries[start:stop].view(stop - start, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        mask = None
        if stop - start > 1:  # row i of the block sees context + start + i + 1 positions
            mask = torch.ones(stop - start, seen, dtype=torch.bool, device=queries.device).tril(context + start)
            mask = mask.repeat(group, 1)
        result = scaled_dot_product_attention(
            block.reshape(1, kv_heads, -1, head_dim),
            keys[:seen].transpose(0, 1).unsqueeze(0),
            values[:seen].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
        )
        out[start:stop].view(stop - start, kv_heads, group, head_dim).copy_(
            result.view(kv_heads, group, stop - start, head_dim).permute(2, 0, 1, 3)
        )
