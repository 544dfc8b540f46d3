"""benchmarks/vllm_check: what it takes from the workers of an engine; the engine itself needs GPUs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tokenweave.integrations.vllm.measured import Measured

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "vllm_check"))

import check
import compared


def _worker(measured: Measured | None) -> SimpleNamespace:
    choice = SimpleNamespace(measured=measured)
    return SimpleNamespace(
        model_runner=SimpleNamespace(model=SimpleNamespace(tokenweave=SimpleNamespace(choice=choice)))
    )


def test_what_the_engine_measured_at_its_start_is_recorded():
    """Under the names of the published file; a mode that was not measured at a size has none."""
    times = [(14.678, 12.5, math.inf), (38.0, 23.01, 22.17)]
    assert check._measured(_worker(Measured.of([256, 2048], times, (1.0, 2.0)))) == {
        "256": {"stock": 14.68, "fused": 12.5},
        "2048": {"stock": 38.0, "fused": 23.01, "woven": 22.17},
    }
    assert check._measured(_worker(None)) == {}


def _answer(tokens: list[int], *logprobs: dict[int, float]) -> SimpleNamespace:
    named = [{token: SimpleNamespace(logprob=value) for token, value in each.items()} for each in logprobs]
    return SimpleNamespace(token_ids=tokens, logprobs=named)


def test_tokens_that_part_are_weighed_by_what_stock_preferred():
    stock = _answer([1, 2, 3], {1: -0.5, 9: -2.0}, {2: -1.0, 7: -1.03}, {3: -0.1})
    same = _answer([1, 2, 3], {1: -0.52, 9: -2.1}, {2: -1.0}, {3: -0.1})
    other = _answer([1, 7, 3], {1: -0.5, 9: -1.9}, {7: -1.0}, {3: -0.1})
    near = pytest.approx(0.1)
    assert compared.compare([stock], [same]) == compared.Compared(near, equal=3, tokens=3, parted=0, requests=1)
    parted = compared.Compared(near, equal=1, tokens=3, tie=pytest.approx(0.03), parted=1, requests=1)
    assert compared.compare([stock], [other]) == parted
    both = compared.compare([stock, stock], [same, other])
    assert both == compared.compare([stock], [same]) + compared.compare([stock], [other])
    assert both.figures() == {
        "largest_logprob_difference": 0.1,
        "equal_tokens": 0.6667,  # the third one of the request that parted is not counted, though it is the same
        "parted": 0.5,
        "largest_tie_broken": 0.03,
    }
    far = _answer([1, 5, 3], {1: -0.5}, {5: -0.2}, {3: -0.1})
    assert compared.compare([stock], [far]).tie == math.inf, "stock did not even name it among its best"


def test_a_token_that_only_one_run_names_counts():
    """By how far it is at least from what the other run may have given it."""
    stock = _answer([1], {1: -0.5, 2: -1.0})
    other = _answer([1], {1: -0.5, 3: -0.75})
    assert compared.compare([stock], [other]).difference == 0.25
    assert compared.compare([other], [stock]).difference == 0.25
    assert compared.compare([stock], [_answer([3], {3: -0.5, 4: -1.0})]).difference == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1])
def test_log_probabilities_that_are_not_finite_are_no_answer(value: float, position: int):
    named = [{1: -0.5, 2: -1.0}, {3: -0.5, 4: -1.0}]
    compared.check_answers([[5]], [_answer([1, 3], *named)], "")
    named[position] = {**named[position], 9: value}
    found = f"mode woven, batch 7, request 0, token {position}: log-probabilities are {{9: {value}}}"
    with pytest.raises(compared.NothingCompared, match=found):
        compared.check_answers([[5]], [_answer([1, 3], *named)], "mode woven, batch 7")


def test_prompts_that_all_get_the_same_are_no_answers():
    one, other = _answer([1], {1: -0.5, 2: -1.0}), _answer([1], {1: -0.5, 2: -1.25})
    compared.check_answers([[5], [6], [5]], [one, other, one], "")
    with pytest.raises(compared.NothingCompared, match="batch 2: requests 0 and 2 have the same log-probabilities"):
        compared.check_answers([[5], [6], [7]], [one, other, one], "mode fused, batch 2")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"stock": {"fused": 1}, "fused": {"fused": 9}, "woven": {"woven": 3}}, "mode stock ran steps of another"),
        ({"stock": {}, "fused": {}, "woven": {"woven": 3}}, "mode fused ran no fused step, but {}"),
        ({"stock": {}, "fused": {"fused": 9}, "woven": {"fused": 9}}, "mode woven ran no woven step, but {'fused': 9}"),
    ],
)
def test_a_mode_of_which_no_step_ran_is_not_compared(steps: dict[str, dict[str, int]], said: str):
    compared.check_steps({"stock": Counter(), "fused": Counter(fused=9), "woven": Counter(fused=2, woven=3)})
    with pytest.raises(compared.NothingCompared, match=said):
        compared.check_steps({mode: Counter(ran) for mode, ran in steps.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_random_weights_are_numbers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """fp8's too, though some of a normal distribution with a deviation of 100 are past its largest number."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.empty(2048, 1024, dtype=dtype), requires_grad=False))
    check._randomise(SimpleNamespace(model_runner=SimpleNamespace(model=model)))
    weight = model.weight.float()
    assert weight.isfinite().all()
    assert weight.std().item() == pytest.approx(100 if dtype == torch.float8_e4m3fn else 1024**-0.5, rel=0.02)
    numbers = check._fp8_numbers((2048, 1024), torch.Generator().manual_seed(1))  # newer torch would clamp them itself
    assert numbers.abs().max().item() == torch.finfo(torch.float8_e4m3fn).max == 448


@pytest.mark.parametrize("kernel", ["marlin", "machete"])
def test_random_4_bit_weights_have_no_mean(monkeypatch: pytest.MonkeyPatch, kernel: str):
    """As vLLM's kernels take them after loading: with zero points packed, or scaled, negative, to be added."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    packed, groups = torch.zeros(1024, 128, dtype=torch.int32), torch.zeros(32, 1024, dtype=torch.float16)
    zeros = torch.zeros(32, 128, dtype=torch.int32) if kernel == "marlin" else groups.clone()
    model = torch.nn.Module()
    for name, data in (("qweight", packed), ("scales", groups), ("qzeros", zeros)):
        model.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
    check._randomise(SimpleNamespace(model_runner=SimpleNamespace(model=model)))

    def codes(words: torch.Tensor) -> torch.Tensor:
        return torch.stack([words >> shift & 15 for shift in range(0, 32, 4)]).double()

    scale = model.scales.double().mean()
    zero = scale * codes(model.qzeros) if kernel == "marlin" else -model.qzeros.double()
    weight = scale * codes(model.qweight)
    assert abs(weight.mean() - zero.mean()) < 0.05 * weight.std()
