"""vLLM's CPU build, whose V1 runner prepares attention by other means (see :mod:`tokenweave.integrations.vllm.v1_cpu`)."""

from __future__ import annotations

from typing import Any

import torch

from tokenweave.integrations.vllm.compat.v0_30 import (
    activate,
    experts_problem,
    forward_context,
    normalise_queries_keys,
    partial_experts,
    rotate,
)

__all__ = [
    "WARMS_UP_AFTER_CAPTURE",
    "activate",
    "cut_metadata",
    "experts_problem",
    "flash_version",
    "forward_context",
    "metadata_problem",
    "normalise_queries_keys",
    "partial_experts",
    "rotate",
]

WARMS_UP_AFTER_CAPTURE = False


def metadata_problem(metadata: Any, layer: Any) -> str | None:
    """None: the metadata is built anew for each split."""
    return None


def flash_version(layer: Any) -> int:
    """There is none."""
    return 0


def cut_metadata(
    metadata: Any,
    *,
    attention: Any,
    block_size: int,
    tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> Any:
    """Metadata of a split, by the runner's builder (``metadata``); requests without rows in it are left out."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    there = (query_start_loc[1:] > query_start_loc[:-1]).nonzero().flatten()
    starts = torch.cat([query_start_loc[:1], query_start_loc[there + 1]])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens[there],
        num_reqs=there.numel(),
        num_actual_tokens=tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        block_table_tensor=block_table[there],
        slot_mapping=slot_mapping,
    )
    return metadata.build(0, common)
