"""A vLLM model as TokenWeave's flat list of stages. The layers stay vLLM's; only who reduces and normalises changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from tokenweave.integrations.vllm.linear import partial_embedding, partial_linear, row_bias
from tokenweave.models.inputs import Launches
from tokenweave.stages import Epilogue, Stage


class Compat(Protocol):
    """What differs between versions of vLLM; the modules of :mod:`tokenweave.integrations.vllm.compat` have these."""

    normalise_queries_keys: Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rotate: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    activate: Callable[[Any, torch.Tensor], torch.Tensor]
    partial_experts: Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Inputs(Launches):
    """A split's rows, as the stages see them.

    Attributes:
        token_ids, positions: [tokens].
        context: vLLM's forward context of these rows (their attention metadata and cache slots); entered and left again.
        padding: bool [n, 1], which of the last n rows are padding, where that must hold finite numbers because rows meet
            (routing, per-tensor scales); None where it does not matter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    context: AbstractContextManager[None]
    padding: torch.Tensor | None = None


def stages_of(model: Any, compat: Compat) -> list[Stage]:
    """[embedding, attention_0, mlp_0, ..., mlp_last] of a ``LlamaModel`` or one that has its attributes.

    ``Stage.compute`` takes :class:`Inputs`. The last epilogue is the final norm.
    """
    layers = list(model.layers)
    norms = [layer.input_layernorm for layer in layers] + [model.norm]

    def embed(x: torch.Tensor | None, inputs: Inputs, out: torch.Tensor) -> None:
        partial_embedding(model.embed_tokens, inputs.token_ids, out)

    stages = [Stage("embedding", embed, _epilogue(norms[0], has_residual=False))]
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        compute: Any = partial(_attention, attention, compat)  # Any: the embedding alone gets x = None
        after = _epilogue(layer.post_attention_layernorm, row_bias(attention.o_proj))
        stages.append(Stage(f"attention_{index}", compute, after))
        if (experts := getattr(layer, "block_sparse_moe", None)) is not None:
            compute, bias = partial(_experts, experts, compat), None
        else:
            compute, bias = partial(_mlp, layer.mlp, compat), row_bias(layer.mlp.down_proj)
        stages.append(Stage(f"mlp_{index}", compute, _epilogue(norms[index + 1], bias)))
    return stages


def attentions(model: Any) -> Iterator[Any]:
    """vLLM's ``Attention`` layers, in order."""
    for layer in model.layers:
        yield layer.self_attn.attn


def _epilogue(norm: Any, bias: torch.Tensor | None = None, *, has_residual: bool = True) -> Epilogue:
    return Epilogue(norm.weight.data, norm.variance_epsilon, has_residual=has_residual, bias=bias)


def _attention(attention: Any, compat: Compat, x: torch.Tensor, inputs: Inputs, out: torch.Tensor) -> None:
    with inputs.gemm("qkv"):
        qkv, _ = attention.qkv_proj(x)
    q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    q, k = compat.normalise_queries_keys(attention, q, k)
    q, k = compat.rotate(attention.rotary_emb, inputs.positions, q, k)
    inputs.reached("attention")
    with inputs.context:
        heads = attention.attn(q, k, v)
    if inputs.padding is not None:  # attention leaves these rows as the allocator had them
        heads[-inputs.padding.shape[0] :].masked_fill_(inputs.padding, 0)
    with inputs.gemm("o"):
        partial_linear(attention.o_proj, heads, out)


def _mlp(mlp: Any, compat: Compat, x: torch.Tensor, inputs: Inputs, out: torch.Tensor) -> None:
    with inputs.gemm("gate_up"):
        gate_up, _ = mlp.gate_up_proj(x)
    inputs.reached("activation")
    activations = compat.activate(mlp, gate_up)
    with inputs.gemm("down"):
        partial_linear(mlp.down_proj, activations, out)


def _experts(block: Any, compat: Compat, x: torch.Tensor, inputs: Inputs, out: torch.Tensor) -> None:
    """``out`` may be ``x``: the experts' sum is made elsewhere, or in place, and copied when nobody reads rows any more."""
    for point in ("gate_up", "activation", "down"):  # one call of vLLM's: whatever waits starts beside all of it
        inputs.reached(point)
    with inputs.context:
        rows = compat.partial_experts(block, x)
    if rows.data_ptr() != out.data_ptr():
        out.copy_(rows)
