"""Calls with float32 vectors, and inputs so exact that every result is the float64 one, rounded once.

Partial sums are multiples of 1/8 of which all ranks' sum is exact in every dtype, also where a switch rounds it. What is
left are the vectors: float32 numbers well between two of the rows' dtype. So a result may be off by half a step of its dtype
and what float32 adds to that, some hundredths of it, and a kernel that rounds a vector is off by more at 2 to 40 % of the elements.
"""

from __future__ import annotations

import dataclasses

import torch

from collective_cases import EPS, Case, Data
from collective_cases import make as make_any
from tokenweave.collective import Workspace
from tokenweave.collective.rows import owned_rows

_FLOAT32 = 4e-6  # of the numbers added or multiplied: a sum of 16,384 squares in a tree, and some roundings


def make(case: Case, world_size: int, seed: int) -> Data:
    """As :func:`collective_cases.make`; weight, post-norm and bias are float32."""
    g = torch.Generator().manual_seed(seed)
    most = 128 // world_size  # bf16 has 8 bits
    partials = torch.randint(-most, most + 1, (world_size, case.tokens, case.hidden), generator=g)
    residual = torch.randint(-64, 65, (case.tokens, case.hidden), generator=g)
    data = make_any(case, world_size, seed)
    vectors = {name: vector.float() for name in VECTORS if (vector := getattr(data, name)) is not None}
    return dataclasses.replace(
        data,
        partials=(partials / 8).to(case.dtype),
        residual=(residual / 8).to(case.dtype),
        **{name: _between(vector, case.dtype, g) for name, vector in vectors.items()},
    )


VECTORS = ("weight", "post_norm", "bias")


def rounded(data: Data, name: str, dtype: torch.dtype) -> Data:
    """The inputs as a kernel has them that rounds this vector."""
    return dataclasses.replace(data, **{name: getattr(data, name).to(dtype).float()})


def check(case: Case, data: Data, residual: torch.Tensor, rows: torch.Tensor, workspace: Workspace) -> None:
    """Compares this rank's own rows with float64; that ranks hold the same bits is for the caller to check.

    Args:
        residual: [tokens, hidden], after the call; rows: [tokens, hidden], of the call.
    """
    assert case.rows is None
    mine = range(case.tokens) if case.replicated else owned_rows(case.tokens, workspace.rank, workspace.world_size)
    own = slice(mine.start, mine.stop)
    total = data.partials[:, own].double().sum(0)
    size = total.abs()  # of what was added: a sum that cancels keeps the error of its terms
    if data.bias is not None:
        total, size = total + data.bias.double(), size + data.bias.double().abs()
    if data.post_norm is not None:
        factor = _factor(total, data.post_norm, case)
        total, size = total * factor, size * factor.abs()
    if case.has_residual:
        total, size = total + data.residual[own].double(), size + data.residual[own].double().abs()
    found = residual.cpu()[own]
    _expect_rounded(found, total, size, "residual")
    # From the residual as it is: where float64's is half-way, it may be rounded either way.
    expected = found.double() * _factor(found.double(), data.weight, case)
    _expect_rounded(rows.cpu()[own], expected, expected.abs(), "rows")


def _between(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """float32 numbers a quarter of a step or more away from those of ``dtype``, where that is one of 16 bits."""
    if dtype == torch.float32:
        return torch.randn(x.shape, generator=g)
    low = 23 - {torch.bfloat16: 7, torch.float16: 10}[dtype]  # bits of the mantissa that float32 has more
    part = torch.randint(1 << low - 2, 3 << low - 2, x.shape, generator=g, dtype=torch.int32)
    return (x.float().contiguous().view(torch.int32) >> low << low | part).view(torch.float32)


def _factor(x: torch.Tensor, weight: torch.Tensor, case: Case) -> torch.Tensor:
    """What RMSNorm multiplies each element with."""
    return (weight.double() + case.weight_offset) / torch.sqrt((x**2).mean(1, keepdim=True) + EPS)


def _expect_rounded(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor, what: str) -> None:
    number = torch.finfo(got.dtype)
    _, exponent = torch.frexp(wanted)  # 2^(exponent - 1) <= |wanted| < 2^exponent
    step = torch.ldexp(torch.full_like(wanted, number.eps), exponent - 1) * (wanted != 0)
    step = step.clamp_min(number.smallest_normal * number.eps)
    excess = (got.double() - wanted).abs() - step / 2 - _FLOAT32 * size
    share = float((~(excess <= 0)).double().mean()) if excess.numel() else 0.0  # NaN is not
    assert share == 0, f"{what}: {share:.1%} of the elements are off by more than one rounding"
