"""vLLM's row-parallel layers without their all-reduce: partial sums, straight into the workspace where the kernel can."""

from __future__ import annotations

from typing import Any

import torch

from tokenweave.models.embedding import vocabulary_rows


def partial_linear(layer: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    """This rank's partial sums of a ``RowParallelLinear``, without the bias that :func:`row_bias` gives.

    Args:
        layer: its ``quant_method`` computes, whatever the quantisation.
        x: [tokens, input columns of this rank].
        out: [tokens, hidden], in the workspace.
    """
    if writes_in_place(layer):
        torch.mm(x, layer.weight.t(), out=out)
    else:
        with_bias = not _plain(layer) and not layer.skip_bias_add and layer.tp_rank == 0  # as the layer's own forward
        out.copy_(layer.quant_method.apply(layer, x, layer.bias if with_bias else None))


def writes_in_place(layer: Any) -> bool:
    """Whether the layer's product needs no copy into the workspace: plain weights on a GPU. vLLM's CPU build packs them."""
    return _plain(layer) and layer.weight.is_cuda


def row_bias(layer: Any) -> torch.Tensor | None:
    """The bias that a row-parallel layer's reduced sum still needs, or None.

    A quantised layer's is its kernel's business: some keep it permuted (Marlin) or padded.
    """
    return layer.bias.data if _plain(layer) and layer.bias is not None and not layer.skip_bias_add else None


def _plain(layer: Any) -> bool:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return isinstance(layer.quant_method, UnquantizedLinearMethod)


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
