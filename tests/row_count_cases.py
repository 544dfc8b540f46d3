"""Calls whose number of rows is in device memory, captured once and replayed with other counts, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import fp8_cases
from collective_cases import EPS, Case, Data, check, is_poison, make, on, poison
from fp8_cases import E4M3, Quantised, Result
from gpu_cases import gathered, opened
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows
from tokenweave.collective.symmetric import oneshot_rows


@dataclass(frozen=True)
class Counted:
    """A call of ``case.tokens`` rows at most. ``fp8``: e4m3 rows with a scale each, and the rows unquantised too."""

    case: Case
    fp8: bool = False

    def __str__(self) -> str:
        case = self.case
        layout, dtype = "replicated" if case.replicated else "sharded", str(case.dtype).removeprefix("torch.")
        return f"{case.tokens}x{case.hidden}-{dtype}-{layout}" + "-fp8" * self.fp8


COUNTED = tuple(
    Counted(dataclasses.replace(case, replicated=replicated), fp8)
    for case, fp8 in (
        (Case(512, 4096), False),
        (Case(384, 2880, torch.float16, post_norm=True, weight_offset=1.0), False),
        (Case(192, 7168, bias=True, ctas=2), False),  # the ring
        (Case(256, 5120), True),
        (Case(130, 4096, torch.float16, post_norm=True, ctas=1), True),
    )
    for replicated in (False, True)
)


def check_row_count(counted: Counted, seed: int) -> None:
    """Every count's call: right by float64, the bits of a call of so many rows, and nothing behind them is touched."""
    case = counted.case
    if case.replicated:  # with a count, one kernel has to take all rows
        rows = oneshot_rows(dist.get_world_size(), case.hidden * case.dtype.itemsize)
        case = dataclasses.replace(case, tokens=min(case.tokens, rows))
        counted = dataclasses.replace(counted, case=case)
    with opened(case.tokens, case.hidden, case.dtype, fp8_regions=int(counted.fp8)) as workspace:
        count = torch.zeros(1, dtype=torch.int32, device=workspace.device)
        residual = torch.empty(case.tokens, case.hidden, dtype=case.dtype, device=workspace.device)
        vectors = on(make(case, workspace.world_size, seed), workspace.device)

        def run() -> None:
            _call(counted, vectors, workspace, case.tokens, residual, count)

        run()  # compiles; a graph cannot
        graph = captured(run)
        for real in (0, 1, 3, case.tokens // 2 + 1, case.tokens - 1, case.tokens):
            data = make(case, workspace.world_size, seed + real)
            _fill(counted, data, vectors, workspace, real, residual)
            count.fill_(real)
            graph()
            torch.cuda.synchronize()
            workspace.check()
            _check(counted, data, workspace, real, residual, seed)
            found = [_bytes(part).clone() for part in _outputs(counted, workspace, real)]
            for part in filter(torch.Tensor.numel, found):
                assert all(torch.equal(other, part) for other in gathered(part)), f"ranks differ: {counted}"
            _fill(counted, data, vectors, workspace, real, residual)
            _call(counted, vectors, workspace, real, residual[:real], None)
            for part, alone in zip(found, _outputs(counted, workspace, real), strict=True):
                assert torch.equal(part, _bytes(alone)), f"{real} rows of {counted} and {real} rows alone differ"
        del graph


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """``run`` as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _call(
    counted: Counted, data: Data, workspace: Workspace, tokens: int, residual: torch.Tensor, count: torch.Tensor | None
) -> None:
    case, partial = counted.case, workspace.buffer(tokens)
    fused_allreduce_rmsnorm(
        partial,
        residual,
        data.weight,
        EPS,
        workspace,
        row_count=count,
        out_dtype=E4M3 if counted.fp8 else None,
        unquantised=partial if counted.fp8 else None,
        ctas=case.ctas,
        layout="replicated" if case.replicated else "sharded",
        post_norm=data.post_norm,
        weight_offset=case.weight_offset,
        bias=data.bias,
    )


def _fill(counted: Counted, data: Data, vectors: Data, workspace: Workspace, real: int, residual: torch.Tensor) -> None:
    """The inputs of a call of ``real`` rows, where the graph has them; everything else is poison."""
    for there, given in ((vectors.weight, data.weight), (vectors.post_norm, data.post_norm), (vectors.bias, data.bias)):
        if there is not None and given is not None:
            there.copy_(given)
    mine = range(real) if counted.case.replicated else owned_rows(real, workspace.rank, workspace.world_size)
    poison(workspace.buffer(counted.case.tokens))
    workspace.buffer(real).copy_(data.partials[workspace.rank, :real])
    poison(residual)
    residual[mine.start : mine.stop] = data.residual[mine.start : mine.stop].to(residual.device)
    if counted.fp8:
        workspace.fp8(counted.case.tokens).view(torch.uint8).fill_(fp8_cases.NAN)
        poison(workspace.scales(counted.case.tokens))


def _outputs(counted: Counted, workspace: Workspace, real: int) -> list[torch.Tensor]:
    quantised = [workspace.fp8(real), workspace.scales(real)] if counted.fp8 else []
    return [workspace.buffer(real), *quantised]


def _check(counted: Counted, data: Data, workspace: Workspace, real: int, residual: torch.Tensor, seed: int) -> None:
    case = dataclasses.replace(counted.case, tokens=real)
    first = dataclasses.replace(data, partials=data.partials[:, :real], residual=data.residual[:real])
    rounded = workspace.transport.startswith("multimem")
    rows = workspace.buffer(real)
    check(case, first, residual[:real], rows, workspace, rounded_sum=rounded)
    assert is_poison(residual[real:]), "a row of the residual behind the real ones was written"
    assert is_poison(workspace.buffer(counted.case.tokens)[real:]), "a row behind the real ones was written"
    if counted.fp8:
        result = Result(residual[:real], workspace.fp8(real), workspace.scales(real), rows)
        fp8_cases.check(Quantised(case, both=True), result, workspace, seed, first)
        assert (workspace.fp8(counted.case.tokens)[real:].view(torch.uint8) == fp8_cases.NAN).all()
        assert is_poison(workspace.scales(counted.case.tokens)[real:])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
