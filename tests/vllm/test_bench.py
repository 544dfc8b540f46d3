"""The engine process of ``tokenweave bench vllm``, and ``doctor --vllm``, with the real vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import harness
import pytest
import saved_models

from tokenweave.bench.vllm.engine import prompt
from tokenweave.cli.main import main

ENGINE = {**harness.ENGINE, "tensor_parallel_size": 2}
REQUESTS = [{"prompt": 20, "output": 5, "seed": 1, "at": 0.0}, {"prompt": 200, "output": 3, "seed": 2, "at": 0.1}]


def served(folder: str, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the engine process answers to commands on its standard input; ``folder``/engine.json has its arguments."""
    import vllm.v1.engine.utils as engine
    import vllm.v1.executor.multiproc_executor as executor

    from tokenweave.bench.vllm import engine as served

    # vLLM would spawn its processes, and each would import vLLM: here they can be forked.
    engine.get_mp_context = executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    commands_in, commands_out = os.pipe()
    os.write(commands_out, "".join(json.dumps(command) + "\n" for command in commands).encode())
    os.close(commands_out)
    os.dup2(commands_in, 0)
    answers, theirs = os.pipe()
    served.main(str(Path(folder) / "engine.json"), str(theirs))
    return [json.loads(line) for line in os.read(answers, 1 << 16).splitlines()]


def test_the_benchmarks_engine_answers_with_times_and_tokens(tmp_path: Path) -> None:
    model = saved_models.tiny_model(tmp_path / "model")
    (tmp_path / "engine.json").write_text(json.dumps({**ENGINE, "model": str(model)}))
    commands = [{"do": "reset"}, {"do": "replay", "requests": REQUESTS, "keep_tokens": True}]
    env = {"TOKENWEAVE": "force", "TOKENWEAVE_MODE": "fused"}
    ready, reset, replayed = harness.call(served, {"folder": str(tmp_path), "commands": commands}, env=env)[""]
    assert ready["vllm"].startswith("0.32.0")
    assert ready["kv_tokens"] > 256
    assert (ready["max_num_seqs"], ready["max_num_batched_tokens"], ready["cudagraph_mode"]) == (16, 128, "NONE")
    assert ready["chunked_prefill"]
    assert ready["prefix_caching"]
    assert ready["model_class"] == "tokenweave.integrations.vllm.models:LlamaForCausalLM"
    assert reset == {}
    prompts = [prompt(request["prompt"], 160, request["seed"]) for request in REQUESTS]
    for request, found, ids in zip(REQUESTS, replayed["requests"], prompts, strict=True):
        (expected,) = saved_models.transformers_tokens(model, [ids], request["output"])
        assert found["tokens"] == expected
        assert request["at"] <= found["sent"] < found["first"] < found["last"]
    assert replayed["plugin"]["steps mode=fused"] >= 2
    assert replayed["plugin"]["tokens mode=fused"] == 220 + 4 + 2  # the last tokens are not fed back


def test_doctor_reads_this_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWEAVE", "force")
    assert main(["doctor", "--vllm", "Llama-3.1-8B", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["vllm"] == {"version": "0.32.0", "cpu": True}
    assert shown["plugin"]["value"] == "on"
    assert shown["visible"]
    assert shown["model"]["value"] == "taken"
    assert {step["mode"] for step in shown["steps"]} & {"fused", "woven"}
