"""A few layers of a model of random weights on a GPU, with the rows, caches and buffers that its parts work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tokenweave.errors import RequestError
from tokenweave.models import Model, ModelConfig
from tokenweave.models.dummy import dummy_model
from tokenweave.planning.waves import Gemm, attention_gemms, mlp_gemms

LAYERS = 4
"""As many as memory allows up to this: weights that take turns come from memory and not from L2, and of a whole step's
collectives all but the last are hidden, as in a model of many layers."""
MAX_POSITIONS = 1 << 19  # of the K/V cache that attention is measured over
_MEMORY_SHARE = 0.6  # of the free memory that the weights and buffers may take


@dataclass(frozen=True)
class Rig:
    """One rank's.

    Attributes:
        model: of :data:`LAYERS` layers, or as many as fit.
        max_tokens: rows of the longest step. device: of everything.
        gemms: name -> a layer's GEMM.
        x: [max_tokens * experts per token, hidden], normalised rows. heads: [max_tokens, query columns].
        gate_up, activations: [max_tokens * experts per token, 2 * intermediate or intermediate] of this rank.
        qkv: [max_tokens, slots, head_dim]. residual: [max_tokens, hidden].
        keys, values: [MAX_POSITIONS, kv slots, head_dim].
    """

    model: Model
    max_tokens: int
    device: torch.device
    gemms: dict[str, Gemm]
    x: torch.Tensor
    heads: torch.Tensor
    gate_up: torch.Tensor
    activations: torch.Tensor
    qkv: torch.Tensor
    residual: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def query_slots(self) -> int:
        """Query heads of this rank, padded ones included; the slots of ``qkv`` behind them are keys, then values."""
        return self.model.layers[0].attention.query_slots

    def rows(self, name: str, tokens: int) -> int:
        """Rows of a GEMM, of each expert's, in a step of so many tokens."""
        return int(self.gemms[name].rows(tokens))


def rig_of(config: ModelConfig, max_tokens: int, group: dist.ProcessGroup, device: torch.device) -> Rig:
    """Makes this rank's; every rank makes its own.

    Raises:
        RequestError: the model does not run without the host, or does not fit.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model = dummy_model(
        config,
        rank=rank,
        world_size=ranks,
        group=group,
        dtype=torch.bfloat16,
        device=device,
        layers=min(_layers(config, ranks, max_tokens, device), config.layers),
    )
    if not model.capturable:
        raise RequestError(
            "tune: this model's steps cannot be captured as CUDA graphs on this GPU (the log says what is missing), and "
            "everything is measured as such"
        )
    attention, inner = model.layers[0].attention, model.shard.intermediate.size
    routed = max_tokens * max(1, config.experts_per_token)
    generator = torch.Generator(device).manual_seed(rank)

    def normal(scale: float, *size: int) -> torch.Tensor:
        out = torch.empty(size, dtype=torch.bfloat16, device=device)
        return out.normal_(0, scale, generator=generator)

    return Rig(
        model=model,
        max_tokens=max_tokens,
        device=device,
        gemms={gemm.name: gemm for gemm in (*attention_gemms(config, ranks), *mlp_gemms(config, ranks))},
        x=normal(1.0, routed, config.hidden),
        heads=normal(0.3, max_tokens, attention.query_slots * config.head_dim),
        gate_up=normal(1.0, routed, 2 * inner),
        activations=normal(0.3, routed, inner),
        qkv=normal(1.0, max_tokens, attention.query_slots + 2 * attention.kv_slots, config.head_dim),
        residual=normal(1.0, max_tokens, config.hidden),
        keys=normal(1.0, MAX_POSITIONS, model.kv_heads_local, config.head_dim),
        values=normal(1.0, MAX_POSITIONS, model.kv_heads_local, config.head_dim),
    )


def _layers(config: ModelConfig, ranks: int, max_tokens: int, device: torch.device) -> int:
    """:data:`LAYERS`, or as many as there is memory for.

    Raises:
        RequestError: there is none for a single layer.
    """
    gemms = (*attention_gemms(config, ranks), *mlp_gemms(config, ranks))
    weights = [2 * g.n * g.k * g.experts for g in gemms]
    routed = max(1, config.experts_per_token)
    buffers = 2 * max_tokens * (8 * config.hidden + routed * sum(g.n + g.k for g in gemms))
    buffers += 2 * 2 * config.vocab * config.hidden // ranks + 2 * 2 * MAX_POSITIONS * gemms[0].n
    free = _MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] - buffers
    possible = int(free // sum(weights))
    if possible < 1:
        raise RequestError(
            f"tune: one layer and its buffers take {(buffers + sum(weights)) / 2**30:.1f} GiB, of which there is no room; "
            "take a smaller --max-tokens, or end what else uses the GPU"
        )
    return min(possible, LAYERS)
