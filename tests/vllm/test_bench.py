"""``tokenweave bench vllm`` and ``doctor --vllm`` with the real vLLM: one engine, started as the benchmark starts it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import harness
import pytest

from tokenweave.cli.main import main


def test_a_stock_engine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in harness.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = harness.tiny_model(tmp_path / "model")
    file = tmp_path / "result.json"
    engine = {"enforce_eager": True, "dtype": "float32"}
    words = [f"--model={model}", "--tp=1", "--configs=default", "--tokens=16,200", "--rounds=3", "--decode=2"]
    words += ["--decode-context=20", "--decode-steps=5", "--trace=sharegpt", "--requests=3", "--max-output=4"]
    words += ["--max-batched-tokens=128", "--kv-gib=0.1", "--memory=0.2", f"--engine-args={json.dumps(engine)}"]
    code = main(["bench", "vllm", *words, f"--json={file}", f"--logs={tmp_path}"])
    err = capsys.readouterr().err
    assert code == 0, err
    result = json.loads(file.read_text())
    (found,) = result["engines"]
    assert found["vllm"].startswith("0.32.0")
    assert found["kv_tokens"] > 256
    assert found["model_class"] == "vllm.model_executor.models.llama:LlamaForCausalLM"
    phases = {row["phase"]: row for row in result["rows"]}
    assert set(phases) == {"prefill", "decode", "trace"}
    assert phases["decode"]["ms"] > 0
    assert phases["trace"]["requests"] == 3
    (compared,) = result["compared"]
    assert compared["equal"] == compared["requests"] == 4  # fp32: a batch changes nothing
    assert not process_mentions(str(tmp_path))


def process_mentions(word: str) -> bool:
    """Whether a process is left whose command line has this word."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


def test_doctor_reads_this_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWEAVE", "force")
    assert main(["doctor", "--vllm", "Llama-3.1-8B", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["vllm"] == {"version": "0.32.0", "cpu": True}
    assert shown["plugin"]["value"] == "on"
    assert shown["visible"]
    assert shown["model"]["value"] == "taken"
    assert {step["mode"] for step in shown["steps"]} & {"fused", "woven"}
