"""float32 weights, post-norms and biases of 16-bit rows keep their precision: the ``torch`` transport."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import rounding_cases
from collective_cases import Case, bits, call, fresh_seed, open_workspace
from ranks import run_ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _calls(cases: list[Case], seed: int, spoilt: str | None = None) -> list[torch.Tensor]:
    """``spoilt``: a vector that is rounded to 16 bits on its way, which the check has to notice."""
    found = []
    for number, case in enumerate(cases):
        with open_workspace(case) as workspace:
            data = rounding_cases.make(case, workspace.world_size, seed + number)
            short = torch.bfloat16 if case.dtype == torch.float32 else case.dtype
            given = data if spoilt is None else rounding_cases.rounded(data, spoilt, short)
            residual, rows = call(case, given, workspace)
            if spoilt is None:
                rounding_cases.check(case, data, residual, rows, workspace)
            else:
                what = "rows" if spoilt == "weight" else "residual"
                with pytest.raises(AssertionError, match=rf"{what}: \d+\.\d% of the elements are off"):
                    rounding_cases.check(case, data, residual, rows, workspace)
            found.append(rows.clone())
    return found


def _cases(dtype: torch.dtype) -> list[Case]:
    """All combinations of options, with rows enough for each of three ranks."""
    flags = itertools.product([True, False], repeat=4)
    return [
        Case(
            random.randrange(8, 20),
            random.choice([72, 576]),
            dtype,
            has_residual=has_residual,
            post_norm=post_norm,
            bias=bias,
            replicated=replicated,
            weight_offset=random.choice([0.0, 1.0]),
        )
        for has_residual, post_norm, bias, replicated in flags
    ]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_rounded_once(world_size, dtype):
    first, *others = run_ranks(world_size, _calls, _cases(dtype), fresh_seed())
    for other in others:
        assert all(torch.equal(bits(one), bits(two)) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("vector", rounding_cases.VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_vector_rounded_to_16_bits_is_noticed(dtype, vector):
    cases = [
        case for case in _cases(dtype) if (case.post_norm or vector != "post_norm") and (case.bias or vector != "bias")
    ]
    run_ranks(2, _calls, cases, fresh_seed(), vector)
