r"""The plugin in vLLM on GPUs with real weights: what it says is stock's but where rounding breaks a tie, and it lasts.

The prompts are pieces of the documents here: after random tokens most that may follow are about as probable, so that ties are
frequent and faults small. The bounds lie between what rounding and what faults did to SmolLM2 with either, in bf16 on a CPU, over
2,400 tokens (rounding: torch's two ways to compute attention) and 700 (faults, in the cache of the 600 tokens before each 100):

==========================================  ================  ==================  ============
\                                           tokens that part  largest tie broken  ties > ``TIE``
==========================================  ================  ==================  ============
rounding                                    3.0 %             0.25                none
the same, random tokens                     7.8 %             0.375               none
last 16 rows are another request's          19.9 %            12.3                50 %
the same, random tokens                     17.3 %            2.1                 7 %
last row is another request's               4.6 %             12.3                19 %
the same, random tokens                     8.0 %             1.1                 4 %
==========================================  ================  ==================  ============

One such row, or 16, in the middle of the 600 are lost in rounding (2.1 and 3.6 %, ties of up to 0.25): that is seen by the tests
in fp32 on CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import one_gpu
import pytest
import saved_models

from tokenweave.models import load_tokenizer

ROOT = Path(__file__).parents[2]
CHECK, DOCUMENTS = ROOT / "benchmarks" / "vllm_check" / "check.py", ROOT / "docs"
ENGINE = {"dtype": "bfloat16", "max_num_batched_tokens": 2048, "max_num_seqs": 32}
TIE = 0.5  # of log-probabilities: logits of 32 to 64 are bf16 numbers 0.25 apart, and either may be rounded a step away
DIFFERENCE = 0.75  # of a first token's log-probability: 0.25 was the 99th percentile of rounding and 0.62 its largest
EQUAL = 0.75  # tokens before the first different one, of 8: 0.87 where 3 % part, 0.76 where 6 % do, 0.42 where 20 % do
MOST = 400.0  # seconds

pytestmark = [pytest.mark.gpu(count=harness.GPU_RANKS), pytest.mark.timeout(MOST + 60)]


@pytest.fixture(scope="module")
def result(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of ``benchmarks/vllm_check``: batches in all modes, and twice 500 requests that take some 1,000 steps."""
    folder = tmp_path_factory.mktemp("smollm2")
    saved_models.smollm2_model(smollm2_gguf, folder, harness.GPU_RANKS)
    text, file, log = folder / "text.json", folder / "check.json", folder / "log.txt"
    documents = "".join(document.read_text("utf-8") for document in sorted(DOCUMENTS.glob("*.md")))
    text.write_text(json.dumps(load_tokenizer(smollm2_gguf).encode(documents)))
    words = [
        "--model",
        str(folder),
        "--tp",
        str(harness.GPU_RANKS),
        "--text",
        str(text),
        "--layouts",
        "15",
        "--tokens",
        "",
    ]
    words += ["--requests", "500", "--output", "64", "--max-model-len", "4096", "--json", str(file)]
    env = {**os.environ, **harness.NO_MULTICAST, "TOKENWEAVE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it would want a compiler
    with one_gpu.sharing(harness.GPU_RANKS) as sharing, log.open("wb") as out:
        words += ["--engine", json.dumps({**ENGINE, **sharing.engine})]
        env |= sharing.environment
        done = subprocess.run(
            [sys.executable, str(CHECK), *words], stdout=out, stderr=subprocess.STDOUT, env=env, timeout=MOST
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    return json.loads(file.read_text())


def test_it_says_what_stock_says_but_for_ties(result: dict[str, Any]) -> None:
    for mode in ("stock", "fused", "woven"):
        found = result["layouts"][mode]
        print(mode, found)
        assert found["largest_logprob_difference"] <= DIFFERENCE
        assert found["largest_tie_broken"] is not None
        assert found["largest_tie_broken"] <= TIE
        assert found["equal_tokens"] >= EQUAL


def test_a_thousand_requests_leave_nothing_behind(result: dict[str, Any]) -> None:
    first, second = result["requests_0"], result["requests_1"]
    assert first["count"] == second["count"] == 500
    assert first["off"] == second["off"] == "None"
    counted = [sum(turn["modes"].values()) + sum(turn["reasons"].values()) for turn in (first, second)]
    print(f"steps so far {counted}, {second['allocated_gib']} GiB")
    assert counted[1] - counted[0] > 900
    assert second["allocated_gib"] <= first["allocated_gib"] + 0.05
    assert second["reserved_gib"] <= first["reserved_gib"] + 0.5
