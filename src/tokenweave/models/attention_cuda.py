"""Causal attention of all sequences of a split in one launch, on NVIDIA GPUs."""

from __future__ import annotations

import torch

from tokenweave.errors import RequestError
from tokenweave.models.attention_choice import choose
from tokenweave.models.inputs import PackedSequences


def available(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether :func:`attend_packed` takes such a cache; where it doesn't on a GPU, says why in the log.

    Raises:
        RequestError: TOKENWEAVE_ATTENTION names a kernel that doesn't run here.
    """
    return choose(device, dtype, head_dim) is not None


def attend_packed(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: PackedSequences, held: int = 0
) -> torch.Tensor:
    """As :func:`tokenweave.models.attention.attend`, with no word from the host about lengths.

    Equal inputs give equal bits, whichever kernel runs (:func:`tokenweave.models.attention_choice.choose`).

    Args:
        queries: [tokens, heads, head_dim], each row's elements contiguous.
        keys, values: one layer's cache, [rows, kv_heads, head_dim]; values finite in every row, as
            :func:`tokenweave.models.kernels.rope_cache` leaves them.
        held: SMs that another kernel holds meanwhile. FlashAttention-3 starts as many blocks as there are SMs: one that
            waits for such an SM would begin when the others are nearly done.

    Returns:
        [tokens, heads, head_dim]; rows that belong to no sequence hold anything.

    Raises:
        RequestError: no kernel takes such tensors, or TOKENWEAVE_ATTENTION names one that doesn't run here.
    """
    choice = choose(queries.device, queries.dtype, queries.shape[-1])
    if choice is None:
        raise RequestError(
            f"attend_packed: no kernel takes {queries.dtype} heads of {queries.shape[-1]} on {queries.device}; "
            "ask available() first, and use attend() where it says no"
        )
    return choice.kernel(queries, keys, values, sequences, held)
