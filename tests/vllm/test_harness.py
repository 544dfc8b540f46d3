"""The harness itself, with a stock vLLM: its greedy tokens are transformers', results come from every rank, errors surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import saved_models
import torch

PROMPTS = [[5, 6, 7], [9, 8, 7, 6] * 30, list(range(3, 40)), [11]]
TOKENS = 12


def rank(llm: Any) -> int:
    return torch.distributed.get_rank()


def layers(llm: Any) -> list[str]:
    return [type(layer).__name__ for layer in harness.model_of(llm).model.layers]


def wrong(llm: Any) -> None:
    raise ValueError("this scenario is wrong")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def stock(model: Path) -> harness.Run:
    return harness.run(
        model,
        {
            "rank": harness.Scenario(rank),
            "wrong": harness.Scenario(wrong),
            "layers": harness.Scenario(layers),
            "batch": harness.Scenario(harness.generate, {"prompts": PROMPTS, "max_tokens": TOKENS}),
            "alone": harness.Scenario(harness.generate, {"prompts": PROMPTS, "max_tokens": TOKENS, "one_by_one": True}),
            "aborted": harness.Scenario(
                harness.generate_with_aborts, {"prompts": PROMPTS, "max_tokens": TOKENS, "abort_after": {"1": 5}}
            ),
        },
    )


def test_scenarios_run_on_every_rank_with_the_model_at_hand(stock: harness.Run) -> None:
    assert stock.ranks("rank") == [0, 1]
    assert stock["layers"] == ["LlamaDecoderLayer"] * 3


def test_greedy_tokens_are_those_of_transformers(stock: harness.Run, model: Path) -> None:
    assert stock["batch"] == stock["alone"] == saved_models.transformers_tokens(model, PROMPTS, TOKENS)
    assert stock.ranks("batch")[1] == stock["batch"]


def test_an_aborted_request_keeps_the_tokens_it_had(stock: harness.Run) -> None:
    whole, aborted = stock["batch"], stock["aborted"]
    assert 0 < len(aborted[1]) < TOKENS
    assert aborted[1] == whole[1][: len(aborted[1])]
    assert [tokens for i, tokens in enumerate(aborted) if i != 1] == [t for i, t in enumerate(whole) if i != 1]


def test_a_scenario_that_raises_says_so_and_the_next_ones_run(stock: harness.Run) -> None:
    with pytest.raises(AssertionError, match=r"raised on rank 0(.|\n)*this scenario is wrong"):
        stock["wrong"]
    assert "this scenario is wrong" in stock.error("wrong")


def test_an_engine_that_is_not_done_in_time_is_ended(model: Path) -> None:
    with pytest.raises(harness.EngineFailed, match="time limit of 1 s"):
        harness.run(model, {"rank": harness.Scenario(rank)}, time_limit=1)
