"""``tokenweave doctor --vllm``: what the plugin would do, on machines with and without vLLM, read from files alone."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from tokenweave.cli.doctor import vllm_text
from tokenweave.cli.main import main
from tokenweave.doctor import vllm as doctor_vllm
from tokenweave.doctor.vllm import Vllm, examine_vllm
from tokenweave.errors import ModelError, RequestError
from tokenweave.planning import hardware

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: None)


def folder(path: Path, **changes: object) -> str:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


def with_vllm(monkeypatch: pytest.MonkeyPatch, path: Path, version: str, registry: str, cpu: bool = False) -> None:
    """As if this vLLM were installed."""
    models = path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (path / "vllm" / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (models / "registry.py").write_text(registry)
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: Vllm(version, cpu))
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def test_a_folder_and_a_built_in_name_give_the_same_steps(tmp_path: Path) -> None:
    by_folder = examine_vllm(folder(tmp_path), tp=2, gpu="h200", environment={})
    by_name = examine_vllm("Llama-3.1-8B", tp=2, gpu="h200", environment={})
    assert by_folder.model.value == by_name.model.value == "taken"
    assert by_folder.steps == by_name.steps
    modes = {step.tokens: step.mode for step in by_name.steps}
    assert {modes[16], modes[512]} <= {"stock", "fused"}
    assert modes[2048] in ("fused", "woven")
    assert "launch by launch" in by_name.steps[-1].why
    assert by_name.vllm is None
    assert any("no vLLM is installed" in note for note in by_name.notes)


def test_where_nothing_is_measured_small_steps_stay_with_vllms_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: Vllm("0.30.1", cpu=False))
    steps = {step.tokens: step for step in examine_vllm("Llama-3.1-8B", tp=2, gpu="h200", environment={}).steps}
    assert steps[16].mode == steps[512].mode == "stock"
    assert "nothing is measured" in steps[512].why
    assert steps[2048].mode in ("fused", "woven")


@pytest.mark.parametrize(
    ("environment", "version", "value", "why"),
    [
        ({}, None, "off", r"TOKENWEAVE=1 is not set; with it: on for vLLM 0\.26\.0"),
        ({"TOKENWEAVE": "1"}, None, "on", r"on for vLLM 0\.26\.0"),
        ({"TOKENWEAVE": "1"}, "0.30.1", "off", "TOKENWEAVE=force"),
        ({"TOKENWEAVE": "force"}, "0.30.1", "on", r"on for vLLM 0\.30\.1"),
        ({"TOKENWEAVE": "force"}, "0.12.0", "off", "outside"),
        ({"TOKENWEAVE": "yes"}, "0.26.0", "off", "expected 0, 1 or force"),
        ({"TOKENWEAVE": "1", "VLLM_PLUGINS": "other"}, "0.26.0", "off", "VLLM_PLUGINS='other'"),
    ],
)
def test_whether_the_plugin_is_on(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], version: str | None, value: str, why: str
) -> None:
    if version is not None:
        monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: Vllm(version, cpu=False))
    report = examine_vllm("Llama-3.1-8B", tp=2, gpu="h200", environment=environment)
    assert report.plugin.value == value
    assert re.search(why, report.plugin.why)


@pytest.mark.parametrize(
    ("changes", "tp", "why"),
    [
        ({}, 1, "one_rank"),
        ({"architectures": ["GemmaForCausalLM"]}, 2, "GemmaForCausalLM is not touched"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, 2, "is not touched"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 2, "sliding_window"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float"}}},
            2,
            "cache",
        ),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}, 2, "runner"),
    ],
)
def test_models_that_run_as_stock(tmp_path: Path, changes: dict[str, object], tp: int, why: str) -> None:
    report = examine_vllm(folder(tmp_path, **changes), tp=tp, gpu="h200", environment={"TOKENWEAVE": "1"})
    assert report.model.value == "stock"
    assert why in report.model.why
    assert not report.steps


def test_more_ranks_than_the_transports_join_run_as_stock() -> None:
    report = examine_vllm("Llama-3.1-8B", tp=16, gpu="h200", environment={"TOKENWEAVE": "1"})
    assert report.model.value == "stock"
    assert "transport: TokenWeave's transports join 8 GPUs of one host" in report.model.why
    assert not report.steps


def test_an_assumed_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "local_gpu", lambda: hardware.GPUS["cpu"])
    report = examine_vllm("Llama-3.1-8B", tp=2, environment={})
    assert report.gpu == "h200"
    assert "no GPU here: h200 is assumed (--gpu)" in report.notes
    assert (
        "no GPU here: h200 is assumed (--gpu)"
        not in examine_vllm("Llama-3.1-8B", tp=2, gpu="h200", environment={}).notes
    )


def test_what_vllm_itself_refuses_is_said() -> None:
    report = examine_vllm("SmolLM2-135M", tp=2, gpu="h200", environment={})
    assert report.model.value == "refused"
    assert "9 query heads" in report.model.why
    assert not report.steps
    assert examine_vllm("SmolLM2-135M", tp=3, gpu="h200", environment={}).model.value == "taken"


def test_models_whose_exceptions_do_not_apply(tmp_path: Path) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    for changes, environment in (
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}, {}),
        (mixtral, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    ):
        report = examine_vllm(folder(tmp_path, **changes), tp=2, gpu="h200", environment=environment)
        assert report.model.value == "taken", report.model.why


def test_measuring_at_the_start_is_said_where_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, measures in (("0.26.0", True), ("0.30.0", False)):
        monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda version=version: Vllm(version, cpu=False))
        report = examine_vllm("Llama-3.1-8B", tp=2, gpu="h200", environment={})
        assert any("as the engine starts" in note for note in report.notes) == measures


def test_quantised_weights_are_said(tmp_path: Path) -> None:
    report = examine_vllm(
        folder(tmp_path, quantization_config={"quant_method": "fp8"}), tp=2, gpu="h200", environment={}
    )
    assert report.model.value == "taken"
    assert any("fp8" in note for note in report.notes)


def test_the_registry_of_an_installed_vllm_is_read_and_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry = """
import torch.no_such_module
_TEXT_GENERATION_MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "InternLM3ForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3_new", "Qwen3ForCausalLM"),
}
"""
    with_vllm(monkeypatch, tmp_path, "0.26.0", registry)
    (model := tmp_path / "model").mkdir()
    for architecture, value in (
        ("LlamaForCausalLM", "taken"),
        ("InternLM3ForCausalLM", "taken"),  # another name of the same class
        ("Qwen3ForCausalLM", "stock"),  # a class that was rewritten
        ("MistralForCausalLM", "stock"),
    ):
        report = examine_vllm(folder(model, architectures=[architecture]), tp=2, gpu="h200", environment={})
        assert report.model.value == value, report.model.why


def test_the_command_prints_text_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TOKENWEAVE", raising=False)
    assert main(["doctor", "--vllm", "Llama-3.3-70B", "--tp", "4", "--gpu", "h100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    report = examine_vllm("Llama-3.3-70B", tp=4, gpu="h100", environment={})
    assert shown == json.loads(json.dumps(dataclasses.asdict(report)))
    assert main(["doctor", "--vllm", "Llama-3.3-70B", "--tp", "4", "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip("\n") == vllm_text(report)
    assert "expected on 4x h100" in out


def test_errors_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="no model 'nothing'"):
        examine_vllm("nothing", tp=2, gpu="h200", environment={})
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="expected a Hugging Face folder"):
        examine_vllm(str(file), tp=2, gpu="h200", environment={})
    with pytest.raises(ModelError, match="architectures is None"):
        examine_vllm(folder(tmp_path, architectures=None), tp=2, gpu="h200", environment={})
    with pytest.raises(RequestError, match="no GPU 'h9000'"):
        examine_vllm("Llama-3.1-8B", tp=2, gpu="h9000", environment={})
    assert main(["doctor", "--vllm", "Llama-3.1-8B", "--tp", "0"]) == 2
    assert "--tp 0" in capsys.readouterr().err
