"""``fused_allreduce_rmsnorm``: the contract, its checks, and which transport runs."""

from __future__ import annotations

import torch

from tokenweave.collective import fp8 as quantisation
from tokenweave.collective import torch_backend
from tokenweave.collective.call import Call, Launch, Layout, check, check_shapes
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.workspace import Workspace
from tokenweave.errors import CollectiveError
from tokenweave.peers import lost_peer_is_told
from tokenweave.stages import Epilogue


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

    Every rank calls it in the same order with the same shapes, rows, row count, options and launch arguments. Shapes, options,
    ``ctas``, ``layout`` and places in the workspace that differ are an error of the GPU transports at the first barrier; another
    ``channel`` is one after the time limit, another ``cluster`` none, and the contents of ``rows`` and ``row_count`` are not
    compared. A kernel that meets such an error, or waits in vain, ends with rows that are worth nothing, and cannot raise: the
    next call of the workspace does, and ``workspace.check()``. The ``torch`` transport compares nothing: torch.distributed may
    end the process (gloo, where a rank gets more bytes than it expects), wait until the group's timeout (another layout, or no
    rows on one rank), or go on with wrong rows (as many, but other ``rows``; fp8 results or a bias on one rank alone).

    ``residual``, and a result that is not ``partial`` itself, share no memory with ``partial`` or each other.

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
        ctas: thread blocks of the kernel, 1 to 256; None for the default. Of GPU transports and layout ``"sharded"``: with
            ``"replicated"`` each row has a block, on the ``torch`` transport there are none.
        cluster: thread blocks per cluster, where ``ctas`` means something: a divisor of it; None for none.
        rows: int64 [n], ascending, none of them twice: only these rows are reduced, normalised and sent, and only their
            residual is updated (the sampled rows of a last stage).
        row_count: int32 [1], the number of real rows, at most tokens, read on the device when the kernel runs, so that a
            captured graph sends only real rows; rows behind it are not touched. None: all rows are real. With ``rows``,
            all of those are real ones; the GPU transports do not look.
        out: [tokens or n, hidden] to write to, apart from ``partial``, or ``partial`` itself if ``rows`` is not given;
            default: in place of ``partial``, or a new tensor if ``rows`` is given.
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
            ``partial`` if ``rows`` is not given), or None.
        has_residual: False: nothing is added, ``residual`` only receives the sum (after an embedding).
        layout: of ``residual``.
        post_norm: [hidden], an RMSNorm of the sum before the residual add, or None.
        weight_offset: added to both norm weights (Gemma: 1.0).
        bias: [hidden], added once to the sum, or None.

    Returns:
        (rows, scales): the normalised rows [tokens or n, hidden], the same bits on every rank. scales is None unless
        the output is quantised: then it is ``scale``, or float32 [tokens or n], also the same on every rank.

    Raises:
        CollectiveError: an argument breaks this contract, or an earlier collective of the workspace has failed.
        CudaError: a kernel cannot be compiled, loaded or launched.
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
        if not torch.compiler.is_compiling():
            check_shapes(
                "fused_allreduce_rmsnorm", Call(partial, residual, epilogue, workspace, launch, rows, row_count)
            )
        n = partial.shape[0] if rows is None else rows.shape[0]
        if scale is None and out_scales is None:
            out_scales = workspace.scales(n)
        fp8 = Fp8(workspace.fp8(n) if out is None else out, out_scales, scale)
        out = unquantised
    call = Call(partial, residual, epilogue, workspace, launch, rows, row_count, out, fp8)
    if torch.compiler.is_compiling():
        from tokenweave.collective import library

        result = library.traced(call)
    else:
        result = run(call)
    return result, None if fp8 is None else fp8.scale if fp8.scales is None else fp8.scales


def run(call: Call) -> torch.Tensor:
    """:func:`fused_allreduce_rmsnorm` behind its argument list: checks, then the workspace's transport."""
    check("fused_allreduce_rmsnorm", call)
    if call.workspace.transport == "torch":
        with lost_peer_is_told(call.workspace.rank):
            return torch_backend.fused(call)
    from tokenweave.collective import cuda_backend

    return cuda_backend.fused(call)


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
    check("allreduce_rmsnorm", Call(partial, residual, epilogue, workspace, Launch(), rows))
    with lost_peer_is_told(workspace.rank):
        return torch_backend.sequential(partial, residual, epilogue, workspace, rows)
