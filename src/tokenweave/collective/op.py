"""``fused_allreduce_rmsnorm``: the contract, its checks, and which transport runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tokenweave.collective import fp8 as quantisation
from tokenweave.collective import torch_backend
from tokenweave.collective.fp8 import Fp8
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
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    unquantised: torch.Tensor | None = None,
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
            With fp8 output: e4m3, default ``workspace.fp8(tokens or n)``, its first rows; where several splits are in
            flight each needs rows of its own, ``workspace.fp8(tokens, start=...)``. Peers write it, so with layout
            ``"sharded"`` on a GPU transport it must be in ``workspace.fp8``: nothing is copied behind your back.
        out_dtype: ``torch.float8_e4m3fn`` for quantised rows (on GPUs: compute capability 8.9 or newer), else None.
            ``partial`` is then only read.
        scale: float32 [1] on the device, the static scale: what is stored is y / scale, rounded and saturated
            (:mod:`tokenweave.collective.fp8`). None: each row gets its own, max|y| / 448.
        out_scales: float32 [tokens or n], to receive the rows' own scales; default ``workspace.scales(tokens or n)``.
            What is said of ``out`` goes for it too.
        unquantised: [tokens or n, hidden] in the workspace's dtype, to receive the rows unquantised as well (may be
            ``partial``), or None.
        has_residual: False: nothing is added, ``residual`` only receives the sum (after an embedding).
        layout: of ``residual``.
        post_norm: [hidden], an RMSNorm of the sum before the residual add, or None.
        weight_offset: added to both norm weights (Gemma: 1.0).
        bias: [hidden], added once to the sum, or None.

    Returns:
        (rows, scales): the normalised rows [tokens or n, hidden], the same bits on every rank. scales is None unless
        the output is quantised: then it is ``scale``, or float32 [tokens or n], also the same on every rank.

    Raises:
        CollectiveError: an argument breaks this contract.
    """
    epilogue = Epilogue(weight, eps, has_residual, post_norm, weight_offset, bias)
    launch = Launch(channel, ctas, cluster, layout)
    fp8 = None
    if out_dtype is None:
        given = {"scale": scale, "out_scales": out_scales, "unquantised": unquantised}
        for name, tensor in given.items():
            if tensor is not None:
                raise CollectiveError(
                    f"fused_allreduce_rmsnorm: {name} is of quantised output; give out_dtype=torch.float8_e4m3fn too"
                )
    elif out_dtype != quantisation.DTYPE:
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: out_dtype={out_dtype}; expected torch.float8_e4m3fn, or None for the workspace's dtype"
        )
    elif scale is not None and out_scales is not None:
        raise CollectiveError("fused_allreduce_rmsnorm: scale and out_scales; rows have one static scale or their own")
    else:
        n = partial.shape[0] if rows is None else rows.shape[0]
        if scale is None and out_scales is None:
            out_scales = workspace.scales(n)
        fp8 = Fp8(workspace.fp8(n) if out is None else out, out_scales, scale)
        out = unquantised
    if torch.compiler.is_compiling():
        from tokenweave.collective import library

        result = library.traced(partial, residual, epilogue, workspace, launch, rows, row_count, out, fp8)
    else:
        result = run(partial, residual, epilogue, workspace, launch, rows, row_count, out, fp8)
    return result, None if fp8 is None else fp8.scale if fp8.scales is None else fp8.scales


def run(
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    launch: Launch,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    out: torch.Tensor | None,
    fp8: Fp8 | None = None,
) -> torch.Tensor:
    """:func:`fused_allreduce_rmsnorm` behind its argument list: checks, then the workspace's transport.

    With ``fp8``, ``out`` is where the rows go unquantised as well, or None.
    """
    _check("fused_allreduce_rmsnorm", partial, residual, epilogue, workspace, launch, rows, row_count, out, fp8)
    if workspace.transport != "torch":
        from tokenweave.collective import cuda_backend

        return cuda_backend.fused(partial, residual, epilogue, workspace, launch, rows, row_count, out, fp8)
    if out is None and fp8 is None:
        out = partial if rows is None else partial.new_empty(rows.numel(), workspace.hidden)
    whole, written = out, fp8
    if row_count is not None:  # this transport splits the rows on the host
        real = min(partial.shape[0], max(0, int(row_count)))
        if rows is not None and rows.numel() and int(rows[-1]) >= real:
            raise CollectiveError(f"fused_allreduce_rmsnorm: rows={rows.tolist()}; row_count leaves rows below {real}")
        partial, residual = partial[:real], residual[:real]
        if rows is None:
            written = None if fp8 is None else fp8.first(real)
            out = None if out is None else out[:real]
    torch_backend.fused(partial, residual, epilogue, workspace, rows, out, launch.layout == "replicated", written)
    result = whole if fp8 is None else fp8.rows
    assert result is not None
    return result


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
    fp8: Fp8 | None = None,
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
            if not vector.is_floating_point() or vector.device != partial.device:
                expect(False, f"{name} is {vector.dtype} on {vector.device}; expected floats on {partial.device}")
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
    n = partial.shape[0] if rows is None else rows.numel()
    outputs: list[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype]]
    outputs = [("out" if fp8 is None else "unquantised", out, (n, hidden), dtype)]
    if fp8 is not None:
        outputs += [
            ("out", fp8.rows, (n, hidden), quantisation.DTYPE),
            ("out_scales", fp8.scales, (n,), torch.float32),
            ("scale", fp8.scale, (1,), torch.float32),
        ]
    for name, tensor, shape, kind in outputs:
        if tensor is not None:
            expect(
                tuple(tensor.shape) == shape and tensor.dtype == kind and tensor.device == partial.device,
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; expected {list(shape)} {kind} on "
                f"{partial.device}",
            )
            expect(
                tensor.stride(-1) == 1 or tensor.numel() <= 1,
                f"{name} has strides {tensor.stride()}; its rows must be contiguous",
            )
    for name, tensor in (("partial", partial), ("residual", residual), (outputs[0][0], out)):
        if tensor is None:
            continue
        if tensor.shape[0] > 1 and tensor.stride(0) < hidden:
            expect(False, f"{name} has strides {tensor.stride()}; its rows must not overlap")
        if tensor.requires_grad and torch.is_grad_enabled():
            expect(False, f"{name} requires grad, and this has no backward: call it under torch.no_grad()")
        if name != "residual" and tensor.numel() and tensor.data_ptr() == residual.data_ptr():
            expect(False, f"residual and {name} are the same memory; each is written with its own result")
