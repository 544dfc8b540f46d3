"""fp8 cases of the collective against float64; every rank makes the same ones from (case, seed)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collective_cases import EPS, Case, Data, is_poison, make, on, poison, poisoned, reference
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows

E4M3 = torch.float8_e4m3fn
NAN = 0xFF  # in e4m3; what is converted to it has no sign, 0x7F


@dataclass(frozen=True)
class Quantised:
    """``static``: the scale of all rows, or None for one a row. ``start``: of the rows in the workspace's region."""

    case: Case
    static: float | None = None
    both: bool = False
    start: int = 0


@dataclass(frozen=True)
class Result:
    residual: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor
    unquantised: torch.Tensor | None


def call(q: Quantised, workspace: Workspace, seed: int, data: Data | None = None) -> Result:
    """Runs it on this rank, in the workspace. What must be overwritten is poison, and what must not be read is too."""
    case = q.case
    data = on(data or make(case, workspace.world_size, seed), workspace.device)
    partial = workspace.buffer(case.tokens)
    partial.copy_(data.partials[workspace.rank])
    residual = poisoned(data.residual)
    mine = range(case.tokens) if case.replicated else owned_rows(case.tokens, workspace.rank, workspace.world_size)
    if case.has_residual:
        residual[mine.start : mine.stop] = data.residual[mine.start : mine.stop]
    rows = None if case.rows is None else torch.tensor(case.rows, dtype=torch.int64, device=workspace.device)
    n = case.tokens if case.rows is None else len(case.rows)
    workspace.fp8(workspace.max_tokens).view(torch.uint8).fill_(NAN)
    poison(workspace.scales(workspace.max_tokens))
    out, scales = workspace.fp8(n, start=q.start), workspace.scales(n, start=q.start)
    scale = None if q.static is None else torch.tensor([q.static], device=workspace.device)
    unquantised = poison(torch.empty(n, case.hidden, dtype=case.dtype, device=workspace.device)) if q.both else None
    got, got_scales = fused_allreduce_rmsnorm(
        partial,
        residual,
        data.weight,
        EPS,
        workspace,
        rows=rows,
        out=out,
        out_dtype=E4M3,
        scale=scale,
        out_scales=scales if scale is None else None,
        unquantised=unquantised,
        has_residual=case.has_residual,
        layout="replicated" if case.replicated else "sharded",
        post_norm=data.post_norm,
        weight_offset=case.weight_offset,
        bias=data.bias,
    )
    assert got.data_ptr() == out.data_ptr()
    assert got.dtype == E4M3
    assert got_scales is not None
    assert got_scales.data_ptr() == (scales if scale is None else scale).data_ptr()
    assert torch.equal(partial, data.partials[workspace.rank]), "partial is only read"
    around = workspace.fp8(workspace.max_tokens).view(torch.uint8)
    assert (around[: q.start] == NAN).all()
    assert (around[q.start + n :] == NAN).all()
    if scale is None:
        around = workspace.scales(workspace.max_tokens)
        assert is_poison(around[: q.start])
        assert is_poison(around[q.start + n :])
    return Result(residual, got, got_scales, unquantised)


def check(q: Quantised, result: Result, workspace: Workspace, seed: int, data: Data | None = None) -> None:
    """Against float64, from the definition. ``data``: None for what ``seed`` makes."""
    rounded = workspace.transport.startswith("multimem")  # the sum, before anything is added
    _, expected = reference(q.case, data or make(q.case, workspace.world_size, seed))
    if not expected.numel():
        return
    scales = result.scales.cpu().double()
    if q.static is None:
        most = expected.abs().amax(1)
        # The norm reads a residual that was rounded to the rows' dtype, and computes in float32.
        slack = (8 if rounded else 2) * torch.finfo(q.case.dtype).eps + 8 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(scales, (most / 448).clamp_min(2.0**-40), rtol=slack, atol=1e-9)
    else:
        assert scales.tolist() == [torch.tensor(q.static).item()]
    got = result.rows.cpu().double()
    assert torch.isfinite(got).all()
    wanted = (expected / scales.expand(len(expected))[:, None]).clamp(-448, 448)
    # Half a step of e4m3, 2^-4 of a value and 2^-10 of the small ones, and what the dtype's rounding moved.
    limit = wanted.abs() * (2.0**-4 + 4 * torch.finfo(q.case.dtype).eps) + 2.0**-10
    spread = expected.abs().max() * torch.finfo(q.case.dtype).eps * (1.0 if rounded else 0.05) / scales.min()
    excess = (got - wanted).abs() - limit - spread
    assert (excess <= 0).all(), f"{q}: off by {float(excess.max()):.3g} beyond the limit"
    if result.unquantised is not None:
        ulp = torch.finfo(q.case.dtype).eps
        torch.testing.assert_close(
            result.unquantised.cpu().double(),
            expected,
            rtol=2 * ulp,
            atol=max(ulp, 1e-5) * (1.0 if rounded else 0.02) * float(expected.abs().max()),
        )


def fingerprint(result: Result) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of rows and scales, to compare ranks and runs."""
    return result.rows.view(torch.uint8).cpu().clone(), result.scales.view(torch.int32).cpu().clone()
