"""Real weights: SmolLM2-135M-Instruct against transformers, both reading the same GGUF file in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import Piece, Runner, load_on_rank
from ranks import run_ranks
from tokenweave.models import load_tokenizer

TEXT = "<|im_start|>user\nWrite a haiku about the sea, please.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path, transformers_smollm2: Any) -> tuple[list[int], torch.Tensor]:
    ids = load_tokenizer(smollm2_gguf).encode(TEXT)
    with torch.inference_mode():
        return ids, transformers_smollm2(torch.tensor([ids])).logits[0]


def logits_in_two_chunks(path: Path, ids: list[int]) -> torch.Tensor:
    runner = Runner(load_on_rank(path), [ids])
    first = runner.step([Piece(0, 0, 10)], "fused")
    return torch.cat([first, runner.step([Piece(0, 10, len(ids))], "fused")])


# The weights are the same fp32 numbers on both sides (dequantised by different code, in exact arithmetic up to one
# rounding), so what differs is the order of fp32 sums: 61 of them in a row, each with a relative error of some 1e-7.
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_logits_equal_transformers(
    smollm2_gguf: Path, reference: tuple[list[int], torch.Tensor], world_size: int
) -> None:
    ids, expected = reference
    for logits in run_ranks(world_size, logits_in_two_chunks, smollm2_gguf, ids):
        assert ((logits - expected).norm() / expected.norm()).item() < 2e-5
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
