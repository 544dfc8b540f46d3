"""The ``torch`` transport: torch.distributed on any device. The oracle of the other transports, the CPU path, the fall-back.

A row's bits depend on its own data only: ranks are summed in fp32 in order 0..N-1, then the residual, one rounding, and
one fixed reduction tree for the norm. Nothing depends on the row's owner, its neighbours or the cut.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
import torch.distributed as dist

from tokenweave.collective import norm
from tokenweave.collective.call import Call
from tokenweave.collective.fp8 import quantise
from tokenweave.collective.rows import owned_rows
from tokenweave.collective.workspace import Workspace
from tokenweave.cuda.launch import available
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """``h * rsqrt(mean(h^2) + eps) * (weight_offset + weight)`` over the last dimension.

    Args:
        h: [rows, hidden], float32.
        weight: [hidden].

    Returns:
        [rows, hidden], float32. The mean is a fixed binary tree of fp32 additions, so that its bits do not depend on
        how many rows there are (torch's own reductions may split differently by shape).
    """
    total = h * h
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        odd = total[..., 2 * half :]
        total = total[..., :half] + total[..., half : 2 * half]
        if odd.shape[-1]:
            total = torch.cat([total, odd], dim=-1)
    return h * torch.rsqrt(total / h.shape[-1] + eps) * (weight.float() + weight_offset)


def reduced_rows(parts: list[torch.Tensor], residual: torch.Tensor | None, epilogue: Epilogue) -> torch.Tensor:
    """Sum in rank order, bias, post-norm, residual; fp32 until the one rounding to the partials' dtype. [rows, hidden]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if epilogue.bias is not None:
        total = total + epilogue.bias.float()
    if epilogue.post_norm is not None:
        total = rms_norm(total, epilogue.post_norm, epilogue.eps, epilogue.weight_offset)
    if residual is not None:
        total = total + residual.float()
    return total.to(parts[0].dtype)


def normalised(h: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The epilogue's norm of rounded residual rows, in their dtype."""
    return rms_norm(h.float(), epilogue.weight, epilogue.eps, epilogue.weight_offset).to(h.dtype)


def fused(call: Call) -> torch.Tensor:
    """Reduce-scatter by rows, residual add and norm on the owned rows, all-gather. The call is checked already."""
    out, written = call.out, call.fp8
    if out is None and written is None:
        out = call.partial if call.rows is None else call.partial.new_empty(call.results, call.workspace.hidden)
    result = out if written is None else written.rows
    assert result is not None
    real = call
    if call.row_count is not None:  # this transport splits the rows on the host
        count = min(call.tokens, max(0, int(call.row_count)))
        rows = call.rows
        if rows is not None and rows.numel() and int(rows[-1]) >= count:
            raise CollectiveError(f"fused_allreduce_rmsnorm: rows={rows.tolist()}; row_count leaves rows below {count}")
        real = dataclasses.replace(call, partial=call.partial[:count], residual=call.residual[:count])
        if rows is None:
            out, written = None if out is None else out[:count], None if written is None else written.first(count)
    _run(dataclasses.replace(real, out=out, fp8=written))
    return result


def _run(call: Call) -> None:
    """Writes ``call.out``, ``call.fp8`` or both."""
    partial, residual, epilogue, workspace, rows = (
        call.partial,
        call.residual,
        call.epilogue,
        call.workspace,
        call.rows,
    )
    tokens, world = partial.shape[0], workspace.world_size
    if rows is not None:  # sampled rows keep their owner; `rows` is ascending, so each owner's share of it is one run
        partial = partial[rows]
    if call.replicated:
        mine: torch.Tensor | slice = slice(None) if rows is None else rows
        parts = _gather(partial, workspace)
    else:
        shards = [owned_rows(tokens, r, world) for r in range(world)]
        own = shards[workspace.rank]
        counts = [len(s) for s in shards]
        mine = slice(own.start, own.stop)
        if rows is not None:
            bounds = torch.searchsorted(rows, torch.tensor([s.start for s in shards] + [tokens], device=rows.device))
            edges = bounds.tolist()
            counts = [hi - lo for lo, hi in itertools.pairwise(edges)]
            mine = rows[edges[workspace.rank] : edges[workspace.rank + 1]]
        parts = _exchange(partial, counts, workspace)
    h = reduced_rows(parts, residual[mine] if epilogue.has_residual else None, epilogue)
    residual[mine] = h
    results: list[tuple[torch.Tensor, torch.Tensor]] = []  # (my rows, all rows)
    y = rms_norm(h.float(), epilogue.weight, epilogue.eps, epilogue.weight_offset)
    if call.out is not None:
        results.append((y.to(h.dtype), call.out))
    if (fp8 := call.fp8) is not None:
        quantised, scales = quantise(y, fp8.scale)
        results.append((quantised.view(torch.uint8), fp8.rows.view(torch.uint8)))  # gloo knows no e4m3
        if fp8.scales is not None:
            results.append((scales[:, None], fp8.scales[:, None]))
    for part, whole in results:
        if call.replicated:
            whole.copy_(part)
        else:
            _scatter_back(part, counts, workspace, whole)


def sequential(
    partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, workspace: Workspace, rows: torch.Tensor | None
) -> torch.Tensor:
    """The baseline: all-reduce every row, add the residual and normalise on every rank (replicated residual), in place."""
    total = partial.contiguous()
    if workspace.world_size > 1 and partial.numel():
        dist.all_reduce(total, group=workspace.group)
        _count(workspace, 2 * partial.nbytes * (workspace.world_size - 1) // workspace.world_size)
    if available(partial.device) and residual.is_contiguous():
        norm.add_rmsnorm(total, residual, epilogue)
        if total.data_ptr() != partial.data_ptr():  # its rows were apart
            partial.copy_(total)
    else:
        residual.copy_(reduced_rows([total], residual if epilogue.has_residual else None, epilogue))
        partial.copy_(normalised(residual, epilogue))
    return partial if rows is None else partial[rows]


def _exchange(partial: torch.Tensor, counts: list[int], workspace: Workspace) -> list[torch.Tensor]:
    """Every rank's partial sums of my rows, in rank order."""
    if workspace.world_size == 1:
        return [partial]
    mine = counts[workspace.rank]
    received = partial.new_empty(workspace.world_size * mine, partial.shape[1])
    if partial.numel():
        dist.all_to_all_single(
            received, partial.contiguous(), [mine] * workspace.world_size, counts, group=workspace.group
        )
        _count(workspace, partial.nbytes - mine * partial.shape[1] * partial.element_size())
    return list(received.split(mine)) if mine else [received] * workspace.world_size


def _gather(partial: torch.Tensor, workspace: Workspace) -> list[torch.Tensor]:
    """Every rank's partial sums of all rows, in rank order."""
    if workspace.world_size == 1:
        return [partial]
    received = [partial.new_empty(partial.shape) for _ in range(workspace.world_size)]
    if partial.numel():
        dist.all_gather(received, partial.contiguous(), group=workspace.group)
        _count(workspace, partial.nbytes * (workspace.world_size - 1))
    return received


def _scatter_back(own: torch.Tensor, counts: list[int], workspace: Workspace, out: torch.Tensor) -> None:
    """All-gather of unequal shards: my rows to everyone, everyone's rows into ``out``, without padding rows."""
    if workspace.world_size == 1 or not sum(counts):
        out.copy_(own)
        return
    world = workspace.world_size
    # gloo writes a tensor's memory from its first element on, whatever its strides: it must not see rows that are apart.
    received = out if out.is_contiguous() else out.new_empty(out.shape)
    counts_mine = [counts[workspace.rank]] * world
    dist.all_to_all_single(received, own.repeat(world, 1), counts, counts_mine, group=workspace.group)
    _count(workspace, own.nbytes * (world - 1))
    if received is not out:
        out.copy_(received)


def _count(workspace: Workspace, sent: int) -> None:
    workspace.collectives += 1
    workspace.bytes_sent += sent
