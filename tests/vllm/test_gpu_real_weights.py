"""The plugin in vLLM on GPUs with real weights: what it says is stock's but where rounding breaks a tie, and it lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import saved_models

CHECK = Path(__file__).parents[2] / "benchmarks" / "vllm_check" / "check.py"
ENGINE = {"dtype": "bfloat16", "max_num_batched_tokens": 2048, "max_num_seqs": 32}
TIE = 0.15  # of log-probabilities: logits of about 20 are bf16 numbers 0.125 apart
MOST = 400.0  # seconds

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(MOST + 60)]


@pytest.fixture(scope="module")
def result(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of ``benchmarks/vllm_check``: batches in all modes, and twice 500 requests that take some 1,000 steps."""
    folder = tmp_path_factory.mktemp("smollm2")
    saved_models.smollm2_model(smollm2_gguf, folder)
    file, log = folder / "check.json", folder / "log.txt"
    words = ["--model", str(folder), "--layouts", "15", "--tokens", "", "--requests", "500", "--output", "64"]
    words += ["--max-model-len", "4096", "--engine", json.dumps(ENGINE), "--json", str(file)]
    env = {**os.environ, **harness.NO_MULTICAST, "TOKENWEAVE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, str(CHECK), *words], stdout=out, stderr=subprocess.STDOUT, env=env, timeout=MOST
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    return json.loads(file.read_text())


def test_it_says_what_stock_says_but_for_ties(result: dict[str, Any]) -> None:
    stock = result["layouts"]["stock"]
    for mode in ("fused", "woven"):
        found = result["layouts"][mode]
        print(mode, found)
        assert found["largest_logprob_difference"] <= 2 * stock["largest_logprob_difference"] + 0.1
        assert found["largest_tie_broken"] <= TIE
        assert found["equal_tokens"] >= 0.9


def test_a_thousand_requests_leave_nothing_behind(result: dict[str, Any]) -> None:
    first, second = result["requests_0"], result["requests_1"]
    assert first["count"] == second["count"] == 500
    assert first["off"] == second["off"] == "None"
    counted = [sum(turn["modes"].values()) + sum(turn["reasons"].values()) for turn in (first, second)]
    print(f"steps so far {counted}, {second['allocated_gib']} GiB")
    assert counted[1] - counted[0] > 900
    assert second["allocated_gib"] <= first["allocated_gib"] + 0.05
    assert second["reserved_gib"] <= first["reserved_gib"] + 0.5
