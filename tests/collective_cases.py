"""Random cases of the collective with their float64 reference; every rank makes the same ones from (case, seed)."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.collective import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows

EPS = 1e-5
_POISON = {torch.bfloat16: 0x7FA5, torch.float16: 0x7DA5, torch.float32: 0x7FA5A5A5}
_WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Case:
    """Arguments of one call. ``rows``: None for all, else the sampled rows. ``ctas``, ``cluster``: of GPU kernels."""

    tokens: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    has_residual: bool = True
    post_norm: bool = False
    weight_offset: float = 0.0
    bias: bool = False
    replicated: bool = False
    rows: tuple[int, ...] | None = None
    use_out: bool = False
    ctas: int | None = None
    cluster: int | None = None


@dataclass(frozen=True)
class Data:
    """Inputs of all ranks: ``partials`` [world, tokens, hidden], ``residual`` [tokens, hidden], vectors [hidden]."""

    partials: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    post_norm: torch.Tensor | None
    bias: torch.Tensor | None


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fills what a collective must overwrite, must not read, or must leave alone; returns ``x``, whose rows are contiguous.

    With signalling NaNs: nothing that is computed, from them or from others, has their bits.
    """
    x.view(_WORDS[x.element_size()]).fill_(_POISON[x.dtype])
    return x


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """New memory of that shape, dtype and device, filled so."""
    return poison(torch.empty(like.shape, dtype=like.dtype, device=like.device))


def is_poison(x: torch.Tensor) -> bool:
    """Whether every element is as :func:`poison` left it."""
    return bool((bits(x) == _POISON[x.dtype]).all())


def fresh_seed() -> int:
    """A new one each time, printed so that a failure can be run again."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def make(case: Case, world_size: int, seed: int) -> Data:
    g = torch.Generator().manual_seed(seed)
    h = case.hidden
    # Rows of very different size: a norm or a sum that mixes rows shows.
    scale = torch.exp(torch.randn(1, case.tokens, 1, generator=g))
    return Data(
        partials=(torch.randn(world_size, case.tokens, h, generator=g) * scale).to(case.dtype),
        residual=torch.randn(case.tokens, h, generator=g).to(case.dtype),
        weight=torch.randn(h, generator=g).to(case.dtype),
        post_norm=torch.randn(h, generator=g).to(case.dtype) if case.post_norm else None,
        bias=torch.randn(h, generator=g).to(case.dtype) if case.bias else None,
    )


def reference(case: Case, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual, normalised rows), float64, written from the definition and sharing no code with the package."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x**2).sum(1, keepdim=True) / case.hidden + EPS) * (weight.double() + case.weight_offset)

    total = data.partials.double().sum(0)
    if data.bias is not None:
        total = total + data.bias.double()
    if data.post_norm is not None:
        total = norm(total, data.post_norm)
    if case.has_residual:
        total = total + data.residual.double()
    return total, norm(total, data.weight)[slice(None) if case.rows is None else list(case.rows)]


def on(data: Data, device: torch.device) -> Data:
    """The same inputs on a device."""
    return Data(
        *(None if x is None else x.to(device) for x in (getattr(data, f.name) for f in dataclasses.fields(data)))
    )


def call(case: Case, data: Data, workspace: Workspace, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the fused collective on this rank; returns (residual after it, rows). What it must not read is poison."""
    data = on(data, workspace.device)
    partial = workspace.buffer(case.tokens, start=start)
    partial.copy_(data.partials[workspace.rank])
    residual = poisoned(data.residual)
    mine = range(case.tokens) if case.replicated else owned_rows(case.tokens, workspace.rank, workspace.world_size)
    if case.has_residual:
        residual[mine.start : mine.stop] = data.residual[mine.start : mine.stop]
    rows = None if case.rows is None else torch.tensor(case.rows, dtype=torch.int64, device=workspace.device)
    n = case.tokens if case.rows is None else len(case.rows)
    out = poison(torch.empty(n, case.hidden, dtype=case.dtype, device=workspace.device)) if case.use_out else None
    result, scales = fused_allreduce_rmsnorm(
        partial,
        residual,
        data.weight,
        EPS,
        workspace,
        rows=rows,
        out=out,
        ctas=case.ctas,
        cluster=case.cluster,
        has_residual=case.has_residual,
        layout="replicated" if case.replicated else "sharded",
        post_norm=data.post_norm,
        weight_offset=case.weight_offset,
        bias=data.bias,
    )
    assert scales is None
    if case.use_out:
        assert result.data_ptr() == out.data_ptr()
    elif case.rows is None:
        assert result.data_ptr() == partial.data_ptr()  # in place
    return residual, result


def call_sequential(case: Case, data: Data, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`call`, for the baseline."""
    partial = workspace.buffer(case.tokens)
    partial.copy_(data.partials[workspace.rank])
    residual = data.residual.clone() if case.has_residual else poisoned(data.residual)
    rows = None if case.rows is None else torch.tensor(case.rows, dtype=torch.int64)
    result = allreduce_rmsnorm(
        partial,
        residual,
        data.weight,
        EPS,
        workspace,
        rows=rows,
        has_residual=case.has_residual,
        post_norm=data.post_norm,
        weight_offset=case.weight_offset,
        bias=data.bias,
    )
    return residual, result


def check(
    case: Case,
    data: Data,
    residual: torch.Tensor,
    rows: torch.Tensor,
    workspace: Workspace,
    sequential: bool = False,
    rounded_sum: bool = False,
) -> None:
    """Compares one rank's results with float64; where it owns no row, the residual must be untouched poison.

    ``rounded_sum``: the ranks' sum was rounded to the dtype before anything was added, as a switch does it.
    """
    expected_residual, expected_rows = reference(case, data)
    assert rows.dtype == residual.dtype == case.dtype
    # The residual is rounded once; the norm reads the rounded residual and rounds again. fp32 sums add a little.
    ulp = torch.finfo(case.dtype).eps
    mine = range(case.tokens) if case.replicated else owned_rows(case.tokens, workspace.rank, workspace.world_size)
    updated = [row for row in mine if sequential or case.rows is None or row in case.rows]
    # A sum that cancels keeps the absolute error of what it was made from.
    size = float(data.partials.abs().max()) if data.partials.numel() else 1.0
    residual, rows = residual.cpu(), rows.cpu()
    most = float(expected_residual.abs().max()) if expected_residual.numel() else 1.0
    atol = ulp * (most + size * len(data.partials)) if rounded_sum else 1e-6 * size
    torch.testing.assert_close(residual[updated].double(), expected_residual[updated], rtol=ulp, atol=atol)
    spread = float(expected_rows.abs().max()) if expected_rows.numel() else 1.0
    atol = max(ulp, 1e-5) * spread * (1 if rounded_sum else 0.02)
    torch.testing.assert_close(rows.double(), expected_rows, rtol=2 * ulp, atol=atol)
    untouched = data.residual.clone() if case.has_residual else poisoned(data.residual)
    if not case.replicated:
        poison(untouched[: mine.start])
        poison(untouched[mine.stop :])
    others = [row for row in range(case.tokens) if row not in updated]
    assert torch.equal(bits(residual[others]), bits(untouched[others])), (
        "a row of the residual that is not this rank's was written"
    )


def open_workspace(case: Case, group: dist.ProcessGroup | None = None, **options: Any) -> Workspace:
    return Workspace(group, max_tokens=max(1, case.tokens), hidden=case.hidden, dtype=case.dtype, **options)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: equal only if every bit is, NaNs and signed zeros included."""
    return x.contiguous().view(_WORDS[x.element_size()])
