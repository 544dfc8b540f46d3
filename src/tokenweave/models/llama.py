"""The two halves of a Llama layer: attention and the gated MLP. Mistral, Qwen2 and Qwen3 differ in options alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, silu

from tokenweave.models import kernels
from tokenweave.models.attention import attend
from tokenweave.models.attention_cuda import attend_packed
from tokenweave.models.config import ModelConfig
from tokenweave.models.inputs import Inputs
from tokenweave.models.loading import Part, Tensors
from tokenweave.models.rotary import Rotary
from tokenweave.models.sharding import ModelShard, Shard

if TYPE_CHECKING:  # the engine imports the models
    from tokenweave.engine.kv_cache import KVCache


@dataclass(frozen=True)
class Attention:
    """One rank's share of a layer's attention. Slots are heads of this rank, padded ones included.

    Attributes:
        qkv: [(query slots + 2 kv slots) * head_dim, hidden], and its bias.
        qk_norm: float32 [query slots + kv slots, head_dim], each slot's norm weight, or None.
        norm_eps: of qk_norm.
        output: [hidden, query slots * head_dim].
        output_bias: [hidden], added once, by the epilogue; or None.
        query_slots, kv_slots, head_dim: sizes.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    norm_eps: float
    output: torch.Tensor
    output_bias: torch.Tensor | None
    query_slots: int
    kv_slots: int
    head_dim: int

    def compute(
        self, layer: int, kv: KVCache, rotary: Rotary, x: torch.Tensor, inputs: Inputs, out: torch.Tensor
    ) -> None:
        """Normalised rows ``x`` [tokens, hidden] -> partial sums ``out`` [tokens, hidden]; writes the rows' K and V."""
        tokens = x.shape[0]
        with inputs.gemm("qkv"):
            qkv = linear(x, self.qkv, self.qkv_bias).view(tokens, -1, self.head_dim)
        keys, values = kv.keys[layer], kv.values[layer]
        if kernels.available(x) and self.head_dim % 4 == 0:
            tables, positions = (rotary.cosines, rotary.sines), inputs.positions
            kernels.rope_cache(
                qkv, keys, values, self.query_slots, tables, self.qk_norm, self.norm_eps, positions, inputs.cache_rows
            )
            queries = qkv[:, : self.query_slots]
        else:
            queries = self._rope_cache(qkv, keys, values, rotary, inputs)
        inputs.reached("attention")
        if inputs.packed is not None:
            heads = attend_packed(queries, keys, values, inputs.packed, inputs.held)
        else:
            heads = attend(queries, keys, values, inputs.sequences)
        with inputs.gemm("o"):
            torch.mm(heads.reshape(tokens, -1), self.output.t(), out=out)

    def _rope_cache(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rotary: Rotary, inputs: Inputs
    ) -> torch.Tensor:
        """As :func:`tokenweave.models.kernels.rope_cache`, for rows that are all real; returns the queries."""
        queries_keys = qkv[:, : self.query_slots + self.kv_slots].float()
        if self.qk_norm is not None:
            scale = torch.rsqrt(queries_keys.square().mean(-1, keepdim=True) + self.norm_eps)
            queries_keys = queries_keys * scale * self.qk_norm
        queries_keys = rotary.rotate(queries_keys, inputs.positions).to(qkv.dtype)
        queries, new_keys = queries_keys.split([self.query_slots, self.kv_slots], dim=1)
        new_values = qkv[:, self.query_slots + self.kv_slots :]
        lost = ~new_values.isfinite().all(-1, keepdim=True)  # the key says so: cached values are finite
        keys.index_copy_(0, inputs.cache_rows, new_keys.masked_fill(lost, torch.nan))
        values.index_copy_(0, inputs.cache_rows, new_values.nan_to_num(0.0, 0.0, 0.0))
        return queries


def load_attention(loader: Tensors, prefix: str, config: ModelConfig, shard: ModelShard) -> Attention:
    """Reads ``prefix``.q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm)."""
    hidden, head_dim = config.hidden, config.head_dim
    full = {"q": config.heads * head_dim, "k": config.kv_heads * head_dim, "v": config.kv_heads * head_dim}
    mine = {"q": shard.query, "k": shard.kv, "v": shard.kv}
    query_slots, kv_slots = len(shard.heads.queries), len(shard.heads.kv)
    qk_norm = None
    if config.qk_norm:
        q_norm = loader.vector(f"{prefix}.q_norm.weight", head_dim).float().expand(query_slots, -1)
        k_norm = loader.vector(f"{prefix}.k_norm.weight", head_dim).float().expand(kv_slots, -1)
        qk_norm = torch.cat([q_norm, k_norm])
    return Attention(
        qkv=loader.rows([Part(f"{prefix}.{x}_proj.weight", (full[x], hidden), mine[x]) for x in "qkv"]),
        qkv_bias=loader.rows([Part(f"{prefix}.{x}_proj.bias", (full[x],), mine[x]) for x in "qkv"])
        if config.qkv_bias
        else None,
        qk_norm=qk_norm,
        norm_eps=config.norm_eps,
        output=loader.columns(f"{prefix}.o_proj.weight", (hidden, full["q"]), shard.query),
        output_bias=loader.vector(f"{prefix}.o_proj.bias", hidden) if config.output_bias else None,
        query_slots=query_slots,
        kv_slots=kv_slots,
        head_dim=head_dim,
    )


@dataclass(frozen=True)
class GatedMLP:
    """One rank's share of ``down(silu(gate(x)) * up(x))``; also one expert of a mixture.

    Attributes:
        gate_up: [2 * rows, hidden], gate above up, and its bias.
        down: [hidden, rows].
        down_bias: [hidden], added once, by the epilogue; or None.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, rows], what ``down`` multiplies."""
        return gated(linear(x, self.gate_up, self.gate_up_bias))

    def compute(self, x: torch.Tensor, inputs: Inputs, out: torch.Tensor) -> None:
        """Normalised rows ``x`` [tokens, hidden] -> partial sums ``out`` [tokens, hidden]."""
        with inputs.gemm("gate_up"):
            gate_up = linear(x, self.gate_up, self.gate_up_bias)
        inputs.reached("activation")
        activations = gated(gate_up)
        with inputs.gemm("down"):
            torch.mm(activations, self.down.t(), out=out)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [tokens, 2 * columns], gate before up -> [tokens, columns]."""
    if kernels.available(gate_up) and gate_up.shape[1] % 16 == 0:
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def load_mlp(
    loader: Tensors, names: tuple[str, str, str], config: ModelConfig, rows: Shard, bias: bool = False
) -> GatedMLP:
    """Reads the matrices whose names without ``.weight`` are ``names``: gate, up, down."""
    gate, up, down = names
    full = config.intermediate
    return GatedMLP(
        gate_up=loader.rows([Part(f"{name}.weight", (full, config.hidden), rows) for name in (gate, up)]),
        gate_up_bias=loader.rows([Part(f"{name}.bias", (full,), rows) for name in (gate, up)]) if bias else None,
        down=loader.columns(f"{down}.weight", (config.hidden, full), rows),
        down_bias=loader.vector(f"{down}.bias", config.hidden) if bias else None,
    )
