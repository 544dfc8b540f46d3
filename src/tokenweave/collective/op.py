"""``fused_allreduce_rmsnorm``: the contract, its checks, and which transport runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tokenweave.collective import torch_backend
from tokenweave.collective.workspace import Workspace
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue

Layout = Literal["sharded", "replicated"]


@dataclass(frozen=True)
class Launch:
    """How a call is launched; the fields are documented at :func:`fused_allreduce_rmsnorm`."""

    channel: int = 0
    ctas: int | None = None
    cluster: int | None = None
    layout: Layout = "sharded"


def fused_allreduce_rmsnorm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    workspace: Workspace,
    *,
    channel: int = 0,
    ctas: int | None = None,
    cluster: int | None = None,
    rows: torch.Tensor | None = None,
    row_count: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    has_residual: bool = True,
    layout: Layout = "sharded",
    post_norm: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All-reduce of ``partial`` over the workspace's group, residual add and RMSNorm, in one collective.

    Every rank calls it in the same order with the same shapes and launch arguments.

    Args:
        partial: [tokens, hidden], this rank's partial sums; any tokens >= 0. In the workspace
            (``workspace.buffer``) peers read it in place.
        residual: [tokens, hidden], updated in place with the sum. With layout ``"sharded"`` only the owner's rows
            (:func:`tokenweave.collective.rows.owned_rows`) are read and written; with ``"replicated"`` all rows on
            every rank.
        weight: [hidden], of the RMSNorm.
        eps: added to the mean square.
        workspace: of the tensor-parallel group.
        channel: 0 <= channel < workspace.channels; collectives that may be in flight together need different ones.
        ctas: thread blocks of the kernel (GPU transports), None for the default.
        cluster: thread blocks per cluster (GPU transports), None for none.
        rows: int64 [n], ascending: only these rows are reduced, normalised and sent, and only their residual is updated
            (the sampled rows of a last stage).
        row_count: int32 [1], the number of real rows, at most tokens, read on the device when the kernel runs, so that a
            captured graph sends only real rows; rows behind it are not touched. None: all rows are real.
        out: [tokens or n, hidden] to write to; default: in place of ``partial``, or a new tensor if ``rows`` is given.
        has_residual: False: nothing is added, ``residual`` only receives the sum (after an embedding).
        layout: of ``residual``.
        post_norm: [hidden], an RMSNorm of the sum before the residual add, or None.
        weight_offset: added to both norm weights (Gemma: 1.0).
        bias: [hidden], added once to the sum, or None.

    Returns:
        (rows, scales): the normalised rows [tokens or n, hidden], the same bits on every rank; scales is None unless
        the output is quantised.

    Raises:
        CollectiveError: an argument breaks this contract.
    """
    epilogue = Epilogue(weight, eps, has_residual, post_norm, weight_offset, bias)
    launch = Launch(channel, ctas, cluster, layout)
    if torch.compiler.is_compiling():
        from tokenweave.collective import library

        return library.traced(partial, residual, epilogue, workspace, launch, rows, row_count, out), None
    return run(partial, residual, epilogue, workspace, launch, rows, row_count, out), None


def run(
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    launch: Launch,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`fused_allreduce_rmsnorm` behind its argument list: checks, then the workspace's transport."""
    _check("fused_allreduce_rmsnorm", partial, residual, epilogue, workspace, launch, rows, row_count, out)
    if workspace.transport == "p2p":
        from tokenweave.collective import cuda_backend

        return cuda_backend.fused(partial, residual, epilogue, workspace, launch, rows, row_count, out)
    replicated = launch.layout == "replicated"
    if row_count is not None:  # this transport splits the rows on the host
        real = min(partial.shape[0], max(0, int(row_count)))
        if rows is None:
            whole = partial if out is None else out
            torch_backend.fused(partial[:real], residual[:real], epilogue, workspace, None, whole[:real], replicated)
            return whole
        partial, residual = partial[:real], residual[:real]
    if out is None:
        out = partial if rows is None else partial.new_empty(rows.numel(), workspace.hidden)
    return torch_backend.fused(partial, residual, epilogue, workspace, rows, out, replicated)


def allreduce_rmsnorm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    workspace: Workspace,
    *,
    rows: torch.Tensor | None = None,
    has_residual: bool = True,
    post_norm: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sequential baseline: all-reduce, then residual add and RMSNorm of every row on every rank.

    Arguments as :func:`fused_allreduce_rmsnorm`, with a replicated residual. ``partial`` is overwritten.

    Returns:
        [tokens or n, hidden], the normalised rows.
    """
    epilogue = Epilogue(weight, eps, has_residual, post_norm, weight_offset, bias)
    _check("allreduce_rmsnorm", partial, residual, epilogue, workspace, Launch(), rows, None, None)
    return torch_backend.sequential(partial, residual, epilogue, workspace, rows)


def _check(
    op: str,
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    launch: Launch,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    def expect(ok: bool, what: str) -> None:
        if not ok:
            raise CollectiveError(f"{op}: {what}")

    hidden, dtype = workspace.hidden, workspace.dtype
    expect(not workspace.closed, f"{workspace.handle} is closed; create a new workspace")
    expect(
        partial.dim() == 2 and partial.shape[1] == hidden and partial.dtype == dtype,
        f"partial is {list(partial.shape)} {partial.dtype}; this workspace takes [tokens, {hidden}] {dtype}",
    )
    expect(
        partial.shape[0] <= workspace.max_tokens,
        f"partial has {partial.shape[0]} rows; this workspace holds {workspace.max_tokens}: raise max_tokens",
    )
    expect(partial.stride(1) == 1, f"partial has strides {partial.stride()}; its rows must be contiguous")
    expect(
        partial.device == workspace.device, f"partial is on {partial.device}; this workspace is on {workspace.device}"
    )
    expect(
        residual.shape == partial.shape and residual.dtype == dtype and residual.device == partial.device,
        f"residual is {list(residual.shape)} {residual.dtype} on {residual.device}; expected partial's "
        f"{list(partial.shape)} {dtype} on {partial.device}",
    )
    expect(residual.stride(1) == 1, f"residual has strides {residual.stride()}; its rows must be contiguous")
    for name, vector in (("weight", epilogue.weight), ("post_norm", epilogue.post_norm), ("bias", epilogue.bias)):
        if vector is not None:
            expect(tuple(vector.shape) == (hidden,), f"{name} has shape {list(vector.shape)}; expected [{hidden}]")
    expect(epilogue.eps >= 0, f"eps={epilogue.eps}; expected a number >= 0")
    expect(
        0 <= launch.channel < workspace.channels,
        f"channel={launch.channel}; this workspace has channels 0..{workspace.channels - 1}",
    )
    expect(launch.layout in ("sharded", "replicated"), f"layout={launch.layout!r}; expected 'sharded' or 'replicated'")
    if rows is not None:
        expect(
            rows.dim() == 1 and rows.dtype == torch.int64 and rows.device == partial.device,
            f"rows is {list(rows.shape)} {rows.dtype} on {rows.device}; expected [n] int64 on {partial.device}",
        )
        if rows.device.type == "cpu" and rows.numel():  # elsewhere a look at the values would stall the stream
            expect(
                int(rows[0]) >= 0 and int(rows[-1]) < partial.shape[0] and bool((rows[1:] >= rows[:-1]).all()),
                f"rows={rows.tolist()}; expected ascending rows from 0 to {partial.shape[0] - 1}",
            )
    if row_count is not None:
        expect(
            row_count.numel() == 1 and row_count.dtype == torch.int32 and row_count.device == partial.device,
            f"row_count is {list(row_count.shape)} {row_count.dtype} on {row_count.device}; expected [1] int32 on "
            f"{partial.device}",
        )
    if out is not None:
        n = partial.shape[0] if rows is None else rows.numel()
        expect(
            tuple(out.shape) == (n, hidden) and out.dtype == dtype and out.device == partial.device,
            f"out is {list(out.shape)} {out.dtype} on {out.device}; expected [{n}, {hidden}] {dtype} on {partial.device}",
        )
        expect(out.stride(1) == 1, f"out has strides {out.stride()}; its rows must be contiguous")
