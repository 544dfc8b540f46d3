"""Prefill steps of one prompt on one rank: embedding, all layers, the final norm of the last row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.collective import Workspace
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.collective.torch_backend import normalised, reduced_rows
from tokenweave.cuda.launch import available
from tokenweave.engine.batch import Chunk, splits_of
from tokenweave.engine.kv_cache import KVCache
from tokenweave.execution import collective_of, overlap_of
from tokenweave.models import Model
from tokenweave.overlap import CpuThread, CudaStream, Overlap
from tokenweave.planning import Mode, Plan
from tokenweave.stages import Epilogue, Split, Stage
from tokenweave.weave import Collective, run_stages

Wrap = Callable[[Sequence[Stage], Sequence[Split], Collective], tuple[Sequence[Stage], Collective]]

BOUNDS = ("no_comm", "compute")
"""Modes that leave something out, so that their rows mean nothing: collectives; collectives and norms."""


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        mode: of :data:`tokenweave.bench.latency.bench.MODES`, or "compute". name: within the mode.
        plan: None where the planner knows no such thing.
        walk: all of its launches; gives the final rows, [1, hidden].
    """

    mode: str
    name: str
    plan: Plan | None
    walk: Callable[[], torch.Tensor]

    @property
    def key(self) -> str:
        return f"{self.mode} {self.name}"


class PrefillSteps:
    """A model with what its steps need beside it.

    Args:
        model: this rank's part. most: tokens of the longest prompt.
        group, device: of the ranks.
        seed: of the prompt's tokens.
        wrap: what walks take in place of their stages and their collective; None: just these.

    Attributes:
        workspace: of the partial sums.
    """

    def __init__(
        self,
        model: Model,
        most: int,
        group: dist.ProcessGroup,
        device: torch.device,
        seed: int = 0,
        wrap: Wrap | None = None,
    ) -> None:
        shape = model.config
        self.workspace = Workspace(group, max_tokens=most, hidden=shape.hidden, dtype=model.dtype, device=device)
        cache = KVCache(shape.layers, most, model.kv_heads_local, shape.head_dim, model.dtype, device)
        self._model, self._seed, self._wrap = model, seed, wrap
        self._stages = model.stages(cache)
        self._residual = torch.empty(most, shape.hidden, dtype=model.dtype, device=device)
        self._overlap: Overlap = CudaStream(device) if device.type == "cuda" else CpuThread()

    def of_plan(self, mode: str, name: str, plan: Plan, tokens: int) -> Variant:
        """The step as the engine runs it."""
        return self.of_collective(mode, name, plan, tokens, collective_of(plan, tokens, self.workspace))

    def of_collective(
        self, mode: str, name: str, plan: Plan | None, tokens: int, collective: Collective, memory: Any = None
    ) -> Variant:
        """The step with another collective.

        Args:
            plan: None: not cut.
            memory: gives the partial sums' ``buffer``; default: the workspace.
        """
        generator = torch.Generator().manual_seed(self._seed)
        ids = torch.randint(self._model.config.vocab, (tokens,), generator=generator)
        chunk = Chunk(0, 0, tuple(ids.tolist()), 0, True)
        cut = plan or Plan(Mode.SEQUENTIAL)
        overlap = overlap_of(cut, self._overlap)
        splits = splits_of([chunk], cut, self._residual, self._model.packs, overlap.reached)
        memory = self.workspace if memory is None else memory
        stages: Sequence[Stage] = self._stages
        if self._wrap is not None:
            stages, collective = self._wrap(stages, splits, collective)

        def walk() -> torch.Tensor:
            fresh = [dataclasses.replace(split) for split in splits]
            return run_stages(stages, fresh, collective, memory, overlap)[-1]

        return Variant(mode, name, plan, walk)

    def compute_alone(self, tokens: int) -> Variant:
        """Neither collectives nor norms: every stage reads the same normal rows, so that GEMMs multiply what is as large,
        and draws as much power, as in a real step."""
        rows = torch.randn_like(self._residual[:tokens])

        def ready(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, sampled: Any) -> torch.Tensor:
            return rows if sampled is None else rows[sampled]

        return self.of_collective("compute", "alone", None, tokens, ready)

    def close(self) -> None:
        """Gives back the workspace; idempotent."""
        self._overlap.close()
        self.workspace.close()


def norm_alone(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
    """A collective of :func:`tokenweave.weave.run_stages` without communication: the epilogue of this rank's own sums."""
    if available(partial.device):
        add_rmsnorm(partial, residual, epilogue)
    else:
        residual.copy_(reduced_rows([partial], residual if epilogue.has_residual else None, epilogue))
        partial.copy_(normalised(residual, epilogue))
    return partial if rows is None else partial[rows]
