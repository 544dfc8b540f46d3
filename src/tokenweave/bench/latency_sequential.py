"""The baselines of the sequential step: every all-reduce at hand, each with a fused add-RMSNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.latency_steps import PrefillSteps, Variant, norm_alone
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.models import Model
from tokenweave.planning import Mode, Plan
from tokenweave.stages import Epilogue

_ONESHOT_TOKENS = 512  # beyond, a one-shot, which sends the whole batch to every peer, is not competitive


class SymmetricRows:
    """Memory for torch's symmetric all-reduces, with a workspace's ``buffer``."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def buffer(self, tokens: int, *, start: int = 0, region: int = 0) -> torch.Tensor:
        return self._data[region, start : start + tokens]


def symmetric_rows(
    model: Model, most: int, group: dist.ProcessGroup, device: torch.device, say: Callable[[str], None]
) -> SymmetricRows | None:
    """None, with a word why, where the GPUs share no memory: the same on all of them."""
    import torch.distributed._symmetric_memory as symm

    try:
        data = symm.empty(2, most, model.config.hidden, dtype=model.dtype, device=device)
        symm.rendezvous(data, group)
        tried = data.fill_(1)[1, :8]
        torch.ops.symm_mem.two_shot_all_reduce_(tried, "sum", group.group_name)
        ones = torch.ops.symm_mem.one_shot_all_reduce(data[0, :8], "sum", group.group_name)
        sums = {float(value) for x in (tried, ones) for value in (x.min(), x.max())}
        if sums != {float(dist.get_world_size(group))}:
            raise RuntimeError(f"sums of ones are {sums}")
    except RuntimeError as error:
        say(f"torch's symmetric-memory all-reduce is not measured: {error}")
        return None
    return SymmetricRows(data)


def sequential_variants(
    steps: PrefillSteps, symmetric: SymmetricRows | None, group: dist.ProcessGroup, tokens: int
) -> Iterator[Variant]:
    """The sequential step with each all-reduce; NCCL's is the first."""
    plan = Plan(Mode.SEQUENTIAL)
    yield steps.of_plan("sequential", "nccl", plan, tokens)
    if symmetric is None:
        return
    ops, name = torch.ops.symm_mem, group.group_name

    def two_shot(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
        ops.two_shot_all_reduce_(partial, "sum", name)
        return norm_alone(partial, residual, epilogue, rows)

    def one_shot(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
        add_rmsnorm(ops.one_shot_all_reduce(partial, "sum", name), residual, epilogue, out=partial)
        return partial if rows is None else partial[rows]

    yield steps.of_collective("sequential", "torch two-shot", plan, tokens, two_shot, symmetric)
    if tokens <= _ONESHOT_TOKENS:
        yield steps.of_collective("sequential", "torch one-shot", plan, tokens, one_shot, symmetric)
