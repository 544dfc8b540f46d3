"""The two ways of computing a mixture of experts agree: rows grouped by expert, and expert by expert."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from tokenweave.models import mixtral
from tokenweave.models.inputs import Launches
from tokenweave.models.mixtral import MixtureMLP, add_weighted, by_expert, route


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """What torch's kernel for Hopper computes: [rows, k] x [experts, k, n], each expert's rows up to its end."""
    assert offs.dtype == torch.int32
    ends = offs.tolist()
    assert ends[-1] == rows.shape[0]
    starts = [0, *ends[:-1]]
    return torch.cat([rows[a:b] @ weights[e] for e, (a, b) in enumerate(zip(starts, ends, strict=True))])


@pytest.mark.parametrize(("experts", "each"), [(8, 2), (5, 1), (6, 4), (300, 3)])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_grouped_rows_and_one_expert_after_the_other_agree(
    monkeypatch: pytest.MonkeyPatch, experts: int, each: int, tokens: int
) -> None:
    hidden, inner = 16, 24
    random = torch.Generator().manual_seed(experts * 100 + tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * shape[-1] ** -0.5

    mlp = MixtureMLP(normal(experts, hidden), normal(experts, 2 * inner, hidden), normal(experts, hidden, inner), each)
    x = torch.randn(tokens, hidden, generator=random)
    x[-1] = x[0]  # two rows that go the same ways
    weights, chosen = route(linear(x, mlp.router), each)
    expected, found = torch.empty_like(x), torch.full_like(x, torch.nan)
    mlp._compute_one_by_one(x, weights, chosen, expected)
    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    mlp._compute_grouped(x, weights, chosen, Launches(), found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    one = torch.full_like(x[:1], torch.nan)  # nothing depends on the rest of the batch, here to rounding
    mlp._compute_grouped(x[:1], weights[:1], chosen[:1], Launches(), one)
    torch.testing.assert_close(one, found[:1], rtol=1e-5, atol=1e-6)


def test_the_sum_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 parts, float32 weights and sum: 1 + 3 * 2^-9 in three parts would be 1 if each sum were rounded."""
    experts = 4
    mlp = MixtureMLP(torch.zeros(experts, 8), torch.zeros(experts, 2, 8), torch.zeros(experts, 8, 1), experts)
    parts = torch.tensor([1.0, 2**-9, 2**-9, 2**-9]).bfloat16().view(4, 1).expand(4, 8).contiguous()
    monkeypatch.setattr(
        torch, "_grouped_mm", lambda rows, weights, offs: parts if weights.shape[2] == 8 else rows[:, :2]
    )
    monkeypatch.setattr(mixtral, "gated", lambda rows: rows)
    out = torch.empty(1, 8, dtype=torch.bfloat16)
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    mlp._compute_grouped(x, torch.ones(1, experts), torch.arange(experts).view(1, experts), Launches(), out)
    assert out.eq(torch.tensor(1 + 3 * 2**-9).bfloat16()).all()
    assert out[0, 0] > 1


def test_the_weights_of_bf16_logits_are_those_of_float32() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, chosen = route(logits, 3)
    assert weights.dtype == torch.float32
    assert torch.equal(logits.gather(1, chosen), logits.topk(3).values)
    expected = logits.double().softmax(dim=-1).gather(1, chosen)
    torch.testing.assert_close(weights.double(), expected / expected.sum(dim=-1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("each", [1, 2, 4])
def test_bf16_parts_take_float32_weights(each: int) -> None:
    """No bf16 value is nearer to the exact sum than the result, but for float32's own rounding."""
    random = torch.Generator().manual_seed(each)
    weights = torch.rand(32, each, generator=random)
    assert weights.ne(weights.bfloat16()).any()
    chosen = torch.rand(32, 8, generator=random).topk(each).indices
    parts = torch.randn(32, each, 16, generator=random).bfloat16()  # in the order of rows and their choices
    order, _ = by_expert(chosen, 8)
    out = torch.full((32, 16), torch.nan, dtype=torch.bfloat16)
    add_weighted(parts.flatten(0, 1)[order], order, weights, out)
    exact = (parts.double() * weights.double()[:, :, None]).sum(1)
    least = (exact.bfloat16().double() - exact).abs()
    assert ((out.double() - exact).abs() <= least + 1e-6).all()
