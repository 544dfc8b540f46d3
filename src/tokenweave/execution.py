"""How a plan is carried out: the collective that its stages end with, and the queue where that runs."""

from __future__ import annotations

import functools

import torch

from tokenweave.collective import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm
from tokenweave.collective.call import Layout
from tokenweave.overlap import Inline, Overlap, StartAt
from tokenweave.planning.plan import Mode, Plan
from tokenweave.stages import Epilogue
from tokenweave.weave import Collective


def collective_of(plan: Plan, tokens: int, workspace: Workspace) -> Collective:
    """What all stages of a step end with, for :func:`tokenweave.run_stages`: the baseline's all-reduce and norm, or the
    fused collective with the plan's blocks and clusters.

    Args:
        plan: the same on all ranks.
        tokens: rows of the step, or that a captured step has room for; the same on all ranks.
        workspace: of the tensor-parallel group.
    """
    if plan.mode is Mode.SEQUENTIAL:
        return functools.partial(_sequential, workspace)
    return functools.partial(_fused, workspace, plan, layout_of(plan, tokens, workspace))


def layout_of(plan: Plan, tokens: int, workspace: Workspace) -> Layout:
    """Where a step's residual is valid: everywhere if one shot of every rank's rows is the faster collective, which it is
    for small batches that are not cut."""
    memory = workspace.symmetric
    one_shot = plan.mode is Mode.FUSED and memory is not None and tokens <= memory.inbox_rows
    return "replicated" if one_shot else "sharded"


def overlap_of(plan: Plan, overlap: Overlap) -> Overlap:
    """What runs a step's collectives. ``overlap``: those of woven steps, when they need not wait for anything."""
    if plan.split is None:
        return Inline()
    return StartAt(overlap, plan.start_at) if plan.start_at else overlap


def _sequential(
    workspace: Workspace,
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """``row_count`` is of no use here: rows of padding are reduced like all others, and mean nothing."""
    return allreduce_rmsnorm(
        partial,
        residual,
        epilogue.weight,
        epilogue.eps,
        workspace,
        rows=rows,
        has_residual=epilogue.has_residual,
        post_norm=epilogue.post_norm,
        weight_offset=epilogue.weight_offset,
        bias=epilogue.bias,
    )


def _fused(
    workspace: Workspace,
    plan: Plan,
    layout: Layout,
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None = None,
) -> torch.Tensor:
    out, _ = fused_allreduce_rmsnorm(
        partial,
        residual,
        epilogue.weight,
        epilogue.eps,
        workspace,
        ctas=plan.ctas,
        cluster=plan.cluster,
        rows=rows,
        row_count=row_count,
        has_residual=epilogue.has_residual,
        layout=layout,
        post_norm=epilogue.post_norm,
        weight_offset=epilogue.weight_offset,
        bias=epilogue.bias,
    )
    return out
