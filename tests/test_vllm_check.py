"""benchmarks/vllm_check: what it takes from the workers of an engine; the engine itself needs GPUs."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenweave.integrations.vllm.measured import Measured

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "vllm_check"))

import check


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
    assert check._compare([stock], [same]) == (pytest.approx(0.1), 3, 0.0)
    assert check._compare([stock], [other]) == (pytest.approx(0.1), 1, pytest.approx(0.03))
    assert check._compare([stock, stock], [same, other])[1] == 4
    far = _answer([1, 5, 3], {1: -0.5}, {5: -0.2}, {3: -0.1})
    assert check._compare([stock], [far])[2] == math.inf, "stock did not even name it among its best"
