"""The baselines of the sequential step: every all-reduce at hand, each with a fused add-RMSNorm."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.flashinfer_fusion import FlashInferFusion
from tokenweave.bench.steps import PrefillSteps, Variant, norm_alone
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.models import Model
from tokenweave.planning import Mode, Plan
from tokenweave.stages import Epilogue
from tokenweave.weave import Collective

BASELINES = ("nccl", "torch", "flashinfer")
_ONESHOT_TOKENS = 512  # beyond, a one-shot, which sends the whole batch to every peer, is not competitive


class _SymmetricRows:
    """Memory for torch's symmetric all-reduces, with a workspace's ``buffer``."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def buffer(self, tokens: int, *, start: int = 0, region: int = 0) -> torch.Tensor:
        return self._data[region, start : start + tokens]


class SequentialSteps:
    """The sequential step with NCCL's all-reduce, and with torch's symmetric-memory and FlashInfer's ones where they run.

    Args:
        steps: of ``model``. most: tokens of the longest prompt.
        baselines: some of :data:`BASELINES`.
        say: told what is not measured, and why. All ranks measure the same.
    """

    def __init__(
        self,
        steps: PrefillSteps,
        model: Model,
        most: int,
        group: dist.ProcessGroup,
        device: torch.device,
        baselines: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._steps, self._group, self._nccl = steps, group, "nccl" in baselines
        self._symmetric = _symmetric_rows(model, most, group, device, say) if "torch" in baselines else None
        self._fusion = _fusion(model, most, group, device, say) if "flashinfer" in baselines else None
        self._zeros = None
        if self._fusion is not None:
            self._zeros = torch.zeros(most, model.config.hidden, dtype=model.dtype, device=device)

    def variants(self, tokens: int) -> Iterator[Variant]:
        """One an all-reduce; NCCL's is the first."""
        plan = Plan(Mode.SEQUENTIAL)
        if self._nccl:
            yield self._steps.of_plan("sequential", "nccl", plan, tokens)
        one_shots = tokens <= _ONESHOT_TOKENS
        if self._symmetric is not None:
            group, memory = self._group.group_name, self._symmetric
            yield self._steps.of_collective("sequential", "torch two-shot", plan, tokens, _two_shot(group), memory)
            if one_shots:
                yield self._steps.of_collective("sequential", "torch one-shot", plan, tokens, _one_shot(group), memory)
        if self._fusion is not None:
            for one_shot in (True, False) if one_shots else (False,):
                if self._fusion.takes(tokens, one_shot):
                    name = f"flashinfer {'one' if one_shot else 'two'}-shot"
                    yield self._steps.of_collective("sequential", name, plan, tokens, self._flashinfer(one_shot))

    def close(self) -> None:
        """Frees what the baselines hold; collective, idempotent."""
        self._symmetric = None
        if self._fusion is not None:
            self._fusion.close()
            self._fusion = None

    def _flashinfer(self, one_shot: bool) -> Collective:
        fusion, zeros = self._fusion, self._zeros
        assert fusion is not None
        assert zeros is not None

        def fused(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
            before = residual if epilogue.has_residual else zeros[: residual.shape[0]]
            fusion.run(partial, before, residual, epilogue.weight, epilogue.eps, one_shot)
            return partial if rows is None else partial[rows]

        return fused


def _two_shot(group_name: str) -> Collective:
    def two_shot(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
        torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", group_name)
        return norm_alone(partial, residual, epilogue, rows)

    return two_shot


def _one_shot(group_name: str) -> Collective:
    def one_shot(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
        reduced = torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", group_name)
        add_rmsnorm(reduced, residual, epilogue, out=partial)
        return partial if rows is None else partial[rows]

    return one_shot


def _symmetric_rows(
    model: Model, most: int, group: dist.ProcessGroup, device: torch.device, say: Callable[[str], None]
) -> _SymmetricRows | None:
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
    return _SymmetricRows(data)


def _fusion(
    model: Model, most: int, group: dist.ProcessGroup, device: torch.device, say: Callable[[str], None]
) -> FlashInferFusion | None:
    """None, with a word why, where a rank lacks FlashInfer or its kernel can't do the model's epilogue."""
    missing = ""
    try:
        importlib.import_module("flashinfer.comm")
    except Exception as error:  # it looks for compilers and GPUs as it is imported
        missing = str(error) or repr(error)
    if model.config.output_bias or model.config.mlp_bias:
        missing = "its kernel adds no bias, which this model has"
    lacking = torch.tensor([float(bool(missing))], device=device)
    dist.all_reduce(lacking, group=group)
    if float(lacking):
        say(f"FlashInfer's fused all-reduce is not measured: {missing or 'another rank lacks it'}")
        return None
    try:
        fusion = FlashInferFusion(group, most, model.config.hidden)
        rows = torch.ones(8, model.config.hidden, dtype=model.dtype, device=device)
        residual = torch.zeros_like(rows)
        fusion.run(rows, residual, residual, torch.ones_like(rows[0]), 1e-5, True)  # compiles, where it must
        if float(residual.min()) != dist.get_world_size(group) or float(residual.max()) != float(residual.min()):
            with contextlib.suppress(RuntimeError):
                fusion.close()
            raise RuntimeError(f"sums of ones are {float(residual.min())} to {float(residual.max())}")
    except (RuntimeError, ValueError) as error:
        say(f"FlashInfer's fused all-reduce is not measured: {error}")
        return None
    return fusion
