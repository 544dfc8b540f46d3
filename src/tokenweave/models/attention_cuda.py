"""Causal attention of all sequences of a split in one launch, on NVIDIA GPUs: torch's FlashAttention-2 over the cache."""

from __future__ import annotations

import functools
import logging

import torch

from tokenweave.models.inputs import PackedSequences

log = logging.getLogger(__name__)


@functools.cache
def available(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether :func:`attend_packed` takes such a cache; where it doesn't on a GPU, says why in the log."""
    if device.type != "cuda":
        return False
    missing = None
    if dtype not in (torch.bfloat16, torch.float16):
        missing = f"FlashAttention takes bfloat16 and float16, and the model runs in {dtype}"
    elif head_dim % 8 or head_dim > 256:
        missing = f"FlashAttention takes heads of a multiple of 8 up to 256, and the model's have {head_dim}"
    elif not torch.backends.cuda.is_flash_attention_available():
        missing = "this build of torch has no FlashAttention"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        missing = f"{torch.cuda.get_device_name(device)} has less than compute capability 8.0"
    if missing is not None:
        log.warning("attention runs sequence by sequence, without CUDA graphs: %s", missing)
    return missing is None


def attend_packed(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: PackedSequences
) -> torch.Tensor:
    """As :func:`tokenweave.models.attention.attend`, with no word from the host about lengths.

    With ``seqused_k`` the kernel takes its lengths from there and from ``cum_seq_k`` nothing but where each sequence's
    keys start, so that the starts of the sequences' runs in the cache may stand there. Causal means that the last query
    of a sequence sees its last position.

    Args:
        queries: [tokens, heads, head_dim], each row's elements contiguous.
        keys, values: one layer's cache, [rows, kv_heads, head_dim].

    Returns:
        [tokens, heads, head_dim]; rows that belong to no sequence hold anything.
    """
    return torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        sequences.query_starts,
        sequences.cache_starts,
        sequences.max_queries,
        sequences.max_length,
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
        seqused_k=sequences.lengths,
    )[0]
