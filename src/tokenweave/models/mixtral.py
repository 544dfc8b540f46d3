"""Mixtral's mixture of experts: every expert cut along its intermediate dimension, the router on every rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from tokenweave.models.config import ModelConfig
from tokenweave.models.inputs import Inputs
from tokenweave.models.llama import GatedMLP, gated, load_mlp
from tokenweave.models.loading import Part, Tensors
from tokenweave.models.sharding import ModelShard, Segment, Shard


@dataclass(frozen=True)
class MixtureMLP:
    """One rank's share of all experts.

    Attributes:
        router: [experts, hidden]. Ranks hold the same rows and the same router, so they choose the same experts.
        gate_up: [experts, 2 * rows, hidden], each expert's gate above up.
        down: [experts, hidden, rows].
        experts_per_token: experts that a row goes to.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    experts_per_token: int

    def compute(self, x: torch.Tensor, inputs: Inputs, out: torch.Tensor) -> None:
        """Normalised rows ``x`` [tokens, hidden] -> partial sums ``out`` [tokens, hidden], other memory than ``x``."""
        weights, chosen = route(linear(x, self.router), self.experts_per_token)
        if groups_on_device(x.device, x.dtype):
            self._compute_grouped(x, weights, chosen, inputs, out)
        else:
            self._compute_one_by_one(x, weights, chosen, out)

    def _compute_grouped(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, inputs: Inputs, out: torch.Tensor
    ) -> None:
        """Rows in the order of their experts, one grouped GEMM for all experts; the host learns nothing."""
        order, ends = by_expert(chosen, self.router.shape[0])
        rows = x.index_select(0, order // self.experts_per_token)
        with inputs.gemm("gate_up"):
            gate_up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        inputs.reached("activation")
        activations = gated(gate_up)
        with inputs.gemm("down"):
            parts = torch._grouped_mm(activations, self.down.transpose(1, 2), offs=ends)
        add_weighted(parts, order, weights, out)

    def _compute_one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The rows of each expert are found on the host, which waits for the router: right for a CPU."""
        out.zero_()
        for index in range(self.router.shape[0]):
            expert = GatedMLP(self.gate_up[index], None, self.down[index], None)
            rows, choice = torch.where(chosen == index)  # a row names an expert at most once
            if rows.numel():
                part = expert.activations(x[rows]) @ expert.down.t()
                out.index_add_(0, rows, (part * weights[rows, choice, None]).to(out.dtype))


@functools.cache
def groups_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the experts of all rows are computed without the host: torch's grouped GEMM, bf16 on Hopper or newer."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


def route(logits: torch.Tensor, experts_per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> (weights float32, experts int64), [tokens, experts_per_token] each.

    The softmax over all experts, in float32; the largest are kept and scaled to sum to 1.
    """
    weights, chosen = logits.float().softmax(dim=-1).topk(experts_per_token, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen [tokens, experts_per_token] -> (order, ends): the choices, flattened, in the order of their experts, int64, and
    the end of each expert's run in it, int32 [experts]; found without the host."""
    # A radix sort goes over every bit of its keys: few of them.
    flat = chosen.flatten().to(torch.uint8 if experts <= 256 else torch.int16)
    order = flat.argsort(stable=True)
    every = torch.arange(experts, dtype=flat.dtype, device=chosen.device)
    return order, (flat.unsqueeze(1) == every).sum(0).cumsum(0).to(torch.int32)


def places_of(order: torch.Tensor) -> torch.Tensor:
    """Where each choice stands in ``order`` of :func:`by_expert`: int64, as long."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def add_weighted(parts: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Adds what a row's experts gave for it, in the order of its choices, in float32.

    Args:
        parts: [tokens * experts_per_token, hidden], in ``order`` of :func:`by_expert`.
        weights: float32 [tokens, experts_per_token]. out: [tokens, hidden].
    """
    places = places_of(order).view(weights.shape)

    def weighted(choice: int) -> tuple[torch.Tensor, torch.Tensor]:
        return parts.index_select(0, places[:, choice]), weights[:, choice, None]

    last = weights.shape[1] - 1
    total = weights.new_zeros(1, 1)
    for choice in range(last):
        total = torch.addcmul(total, *weighted(choice))
    torch.addcmul(total, *weighted(last), out=out)


def load_mixture(loader: Tensors, prefix: str, config: ModelConfig, shard: ModelShard) -> MixtureMLP:
    """Reads ``prefix``.gate and ``prefix``.experts.N.w1 (gate), w3 (up), w2 (down)."""
    every = Shard(config.experts, (Segment(0, 0, config.experts),))
    names = [f"{prefix}.experts.{expert}." for expert in range(config.experts)]
    experts = [load_mlp(loader, (name + "w1", name + "w3", name + "w2"), config, shard.intermediate) for name in names]
    return MixtureMLP(
        router=loader.rows([Part(f"{prefix}.gate.weight", (config.experts, config.hidden), every)]),
        gate_up=torch.stack([expert.gate_up for expert in experts]),
        down=torch.stack([expert.down for expert in experts]),
        experts_per_token=config.experts_per_token,
    )
