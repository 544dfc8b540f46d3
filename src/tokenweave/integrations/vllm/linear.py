"""vLLM's row-parallel layers without their all-reduce: partial sums, straight into the workspace where the kernel can."""

from __future__ import annotations

from typing import Any

import torch

from tokenweave.models.embedding import vocabulary_rows


def partial_linear(layer: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    """This rank's partial sums of a ``RowParallelLinear``, without its bias (which the epilogue adds once).

    Args:
        layer: its ``quant_method`` computes, whatever the quantisation.
        x: [tokens, input columns of this rank].
        out: [tokens, hidden], in the workspace.
    """
    if writes_in_place(layer):
        torch.mm(x, layer.weight.t(), out=out)
    else:
        out.copy_(layer.quant_method.apply(layer, x, None))


def writes_in_place(layer: Any) -> bool:
    """Whether the layer's product needs no copy into the workspace: plain weights on a GPU. vLLM's CPU build packs them."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return isinstance(layer.quant_method, UnquantizedLinearMethod) and layer.weight.is_cuda


def row_bias(layer: Any) -> torch.Tensor | None:
    """The bias that a row-parallel layer's reduced sum gets, or None."""
    return None if layer.bias is None or layer.skip_bias_add else layer.bias.data


def partial_embedding(layer: Any, token_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of the tokens in this rank's part of the vocabulary, zeros for the others; :func:`plain_vocabulary` layers.

    Args:
        layer: a ``VocabParallelEmbedding``.
        token_ids: int32 or int64 [tokens].
        out: [tokens, hidden], in the workspace.
    """
    shard = layer.shard_indices
    first, count = shard.org_vocab_start_index, shard.org_vocab_end_index - shard.org_vocab_start_index
    vocabulary_rows(layer.weight, token_ids, out, first=first, count=count)


def plain_vocabulary(layer: Any) -> bool:
    """Whether the embedding is one table of unquantised rows without added tokens."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    shard = layer.shard_indices
    added = shard.added_vocab_end_index - shard.added_vocab_start_index
    return isinstance(layer.quant_method, UnquantizedEmbeddingMethod) and not added
