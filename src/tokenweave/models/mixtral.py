"""Mixtral's mixture of experts: every expert cut along its intermediate dimension, the router on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from tokenweave.models.config import ModelConfig
from tokenweave.models.inputs import Inputs
from tokenweave.models.llama import GatedMLP, load_mlp
from tokenweave.models.loading import Loader, Part
from tokenweave.models.sharding import ModelShard, Segment, Shard


@dataclass(frozen=True)
class MixtureMLP:
    """One rank's share of all experts.

    Attributes:
        router: [experts, hidden]. Ranks hold the same rows and the same router, so they choose the same experts.
        experts: each [its share of the intermediate dimension].
        experts_per_token: experts that a row goes to.
    """

    router: torch.Tensor
    experts: tuple[GatedMLP, ...]
    experts_per_token: int

    def compute(self, x: torch.Tensor, inputs: Inputs, out: torch.Tensor) -> None:
        """Normalised rows ``x`` [tokens, hidden] -> partial sums ``out`` [tokens, hidden], other memory than ``x``.

        The rows of each expert are found on the host, which waits for the router: right for a CPU.
        """
        weights, chosen = route(linear(x, self.router), self.experts_per_token)
        out.zero_()
        for index, expert in enumerate(self.experts):
            rows, choice = torch.where(chosen == index)  # a row names an expert at most once
            if rows.numel():
                part = expert.activations(x[rows]) @ expert.down.t()
                out.index_add_(0, rows, (part * weights[rows, choice, None]).to(out.dtype))


def route(logits: torch.Tensor, experts_per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> (weights float32, experts int64), [tokens, experts_per_token] each.

    The softmax over all experts, in float32; the largest are kept and scaled to sum to 1.
    """
    weights, chosen = logits.float().softmax(dim=-1).topk(experts_per_token, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def load_mixture(loader: Loader, prefix: str, config: ModelConfig, shard: ModelShard) -> MixtureMLP:
    """Reads ``prefix``.gate and ``prefix``.experts.N.w1 (gate), w3 (up), w2 (down)."""
    every = Shard(config.experts, (Segment(0, 0, config.experts),))
    names = [f"{prefix}.experts.{expert}." for expert in range(config.experts)]
    return MixtureMLP(
        router=loader.rows([Part(f"{prefix}.gate.weight", (config.experts, config.hidden), every)]),
        experts=tuple(
            load_mlp(loader, (name + "w1", name + "w3", name + "w2"), config, shard.intermediate) for name in names
        ),
        experts_per_token=config.experts_per_token,
    )
