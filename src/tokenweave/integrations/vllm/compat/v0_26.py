"""vLLM 0.26 to 0.29."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.forward_context import (
    BatchDescriptor,
    create_forward_context,
    override_forward_context,
    set_forward_context,
)

from vllm import ir

WARMS_UP_AFTER_CAPTURE = True
"""Whether vLLM runs a step of its own, on the final KV cache, when its graphs are there and before it serves: then schemes and
modes are measured, and graphs are made."""

SAME_PATTERN = True
"""Whether steps' attention metadata differ in nothing but what :func:`cut_metadata` replaces: the V2 runner has one builder call,
without a common prefix, and what else a builder of FlashAttention sets is for context parallelism, inputs other than text and
windows that a model's config asks for."""


def normalise_queries_keys(attention: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3's norm of every head, by vLLM's kernel; other models' queries and keys as they are."""
    if not hasattr(attention, "q_norm"):
        return q, k
    heads = q.view(q.shape[0], -1, attention.head_dim), k.view(k.shape[0], -1, attention.head_dim)
    # Under Inductor the native form is meant to be compiled: run by hand it would be a dozen kernels.
    providers = ["vllm_c", "native"] if q.is_cuda else ["native"]
    with ir.ops.rms_norm.set_priority(providers):
        q_normed, k_normed = attention.q_norm(heads[0]), attention.k_norm(heads[1])
    return q_normed.view(q.shape), k_normed.view(k.shape)


def rotate(rotary: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary embedding, by vLLM's kernel: under Inductor the module itself would be the form meant to be compiled."""
    return rotary.forward_cuda(positions, q, k) if q.is_cuda else rotary(positions, q, k)


def activate(mlp: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, by vLLM's kernel."""
    return mlp.act_fn.forward_cuda(gate_up) if gate_up.is_cuda else mlp.act_fn(gate_up)


def partial_experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A mixture's sum over this rank's shares of its experts, without the all-reduce; inside the rows' forward context."""
    config = block.experts.moe_config
    logits, _ = block.gate(x)
    before, config.skip_final_all_reduce = config.skip_final_all_reduce, True
    try:
        return block.experts(x, logits)
    finally:
        config.skip_final_all_reduce = before


def experts_problem(block: Any) -> str | None:
    """Why a mixture's sum cannot be had un-reduced, or None."""
    runner = block.experts
    config = getattr(runner, "moe_config", None)
    if config is None or not hasattr(config, "skip_final_all_reduce"):
        return "its experts reduce their own sum"
    if getattr(runner, "_fused_output_is_reduced", False) or config.is_sequence_parallel:
        return "its kernel reduces the sum"
    return None


def forward_context(
    vllm_config: Any, layers: Iterable[str], metadata: Any, slots: torch.Tensor
) -> AbstractContextManager[None]:
    """Enters vLLM's forward context for a split's rows. One object for a whole pass: it counts mixtures as they run."""
    names = list(layers)
    context = create_forward_context(
        dict.fromkeys(names, metadata), vllm_config, slot_mapping=dict.fromkeys(names, slots)
    )
    return _Reentered(context)


class _Reentered:
    """``override_forward_context`` of one context, entered stage by stage."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._stack: list[Any] = []

    def __enter__(self) -> None:
        entered = override_forward_context(self._context)
        entered.__enter__()
        self._stack.append(entered)

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().__exit__(*error)


def stock_context(
    metadata: dict[str, Any], vllm_config: Any, rows: int, slots: dict[str, torch.Tensor], mode: Any
) -> AbstractContextManager[None]:
    """vLLM's forward context of a step that it launches kernel by kernel or replays piece by piece, by ``mode``."""
    return set_forward_context(
        metadata,
        vllm_config,
        num_tokens=rows,
        slot_mapping=slots,
        cudagraph_runtime_mode=mode,
        batch_descriptor=BatchDescriptor(num_tokens=rows, has_lora=False),
    )


def metadata_problem(metadata: Any, layer: Any) -> str | None:
    """Why a step's attention metadata cannot be cut, or None."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    if not isinstance(metadata, FlashAttentionMetadata):
        return f"it is {type(metadata).__name__}, and FlashAttention's is needed"
    if getattr(metadata, "use_cascade", False):
        return "cascade attention"
    return None


def flash_version(layer: Any) -> int:
    """Which FlashAttention an attention layer calls; 0 for another backend."""
    return getattr(layer.impl, "vllm_flash_attn_version", None) or 0


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
    """A copy of a step's metadata for some of its rows.

    One split of K/V: more would need scratch memory sized by the heuristics of the call. FlashAttention-3's schedule is made
    here, on the device, once for all layers; the builder's own buffer, which stock steps use, is not touched.

    Args:
        attention: any of the model's attention layers. block_size: positions in a block of the cache.
    """
    schedule = None
    if flash_version(attention) == 3:
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        schedule = get_scheduler_metadata(
            batch_size=seq_lens.shape[0],
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_seq_len,
            num_heads_q=attention.num_heads,
            num_heads_kv=attention.num_kv_heads,
            headdim=attention.head_size,
            cache_seqlens=seq_lens,
            qkv_dtype=attention.kv_cache_torch_dtype,
            cu_seqlens_q=query_start_loc,
            page_size=block_size,
            causal=True,
            num_splits=1,
        )
    return dataclasses.replace(
        metadata,
        num_actual_tokens=tokens,
        max_query_len=max_query_len,
        query_start_loc=query_start_loc,
        max_seq_len=max_seq_len,
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=slot_mapping,
        scheduler_metadata=schedule,
        max_num_splits=1,
    )
