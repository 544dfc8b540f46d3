"""Row-parallel layers without their all-reduce: what the ranks' parts and the epilogue's bias come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tokenweave.integrations.vllm.linear import partial_linear, row_bias

RANKS, ROWS, INNER, HIDDEN = 2, 5, 6, 64


class Reordered:
    """A quantised method that keeps the bias in its kernel's order, as Marlin's do."""

    def process(self, layer: Any) -> None:
        layer.bias.data = layer.bias.data.flip(0)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = x @ layer.weight.t()
        return product if bias is None else product + bias.flip(0)


class Plain(UnquantizedLinearMethod):
    """Without vLLM's choice of a kernel."""

    def process(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


@pytest.mark.parametrize("method", [Plain, Reordered])
@pytest.mark.parametrize("skip", [False, True])
def test_a_bias_is_added_once(method: Any, skip: bool) -> None:
    x, weight, bias = torch.randn(ROWS, INNER), torch.randn(HIDDEN, INNER), torch.randn(HIDDEN)
    part = INNER // RANKS
    total = torch.zeros(ROWS, HIDDEN)
    for rank in range(RANKS):
        columns = slice(rank * part, (rank + 1) * part)
        layer = SimpleNamespace(
            weight=weight[:, columns],
            bias=torch.nn.Parameter(bias.clone(), requires_grad=False),
            skip_bias_add=skip,
            tp_rank=rank,
            quant_method=method(),
        )
        layer.quant_method.process(layer)
        out = torch.full((ROWS, HIDDEN), float("nan"))
        partial_linear(layer, x[:, columns], out)
        total += out
        added = row_bias(layer)
    if added is not None:
        total += added
    expected = x.double() @ weight.double().t() + (0 if skip else bias.double())
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_layer_without_bias_gets_none() -> None:
    layer = SimpleNamespace(bias=None, skip_bias_add=False, quant_method=Plain())
    assert row_bias(layer) is None
