"""``tokenweave plan``: its JSON, its text and its errors."""

from __future__ import annotations

import json
import re

import pytest

from tokenweave.cli.main import main
from tokenweave.planning import GPUS, machine


def test_command_prints_the_documented_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--transport", "p2p", "--json"]
    assert main([*arguments, "--tokens", "4096"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["tokens", "mode", "split", "ctas", "gemm_sms", "waves", "predicted_ms"]
    assert (shown["tokens"], shown["mode"], shown["split"]) == (4096, "woven", 2048)
    assert shown["gemm_sms"]["gate_up/prefix"] == 132 - shown["ctas"]
    assert list(shown["waves"]) == ["whole", "prefix", "suffix"]
    assert list(shown["predicted_ms"]) == ["sequential", "fused", "woven", "no_comm"]
    assert main([*arguments, "--tokens", "1,4096"]) == 0
    several = json.loads(capsys.readouterr().out)
    assert several[1] == shown
    assert several[0]["waves"] == {"whole": several[0]["waves"]["whole"], "prefix": None, "suffix": None}


def test_explain_shows_waves_tiles_and_the_best_few_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--tokens", "4096", "--explain"]
    arguments += ["--transport", "p2p"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["source"] == "the h200's data sheet"
    assert shown["cluster"] == 2
    assert set(shown["waves_by_gemm"]) == set(shown["tiles"]) == {"qkv", "o", "gate_up", "down"}
    assert sum(counts[0] for counts in shown["waves_by_gemm"].values()) == shown["waves"]["whole"]
    cuts = shown["cuts"]
    assert len({cut["split"] for cut in cuts}) == len(cuts) == 5
    assert shown["predicted_ms"]["woven"] == pytest.approx(cuts[0]["ms"], rel=0.003)
    assert all(list(cut) == ["split", "ctas", "waves", "cost_us", "ms"] for cut in cuts)
    assert shown["split"] in [cut["split"] for cut in shown["cuts"]]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "tiles      rows x columns: qkv" in out
    assert out.count(" CTAs: ") == len(cuts)


def test_mode_beats_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--tokens", "4096", "--json"]
    monkeypatch.setenv("TOKENWEAVE_MODE", "sequential")
    for given, mode in [([], "sequential"), (["--mode", "auto"], "woven"), (["--mode", "fused"], "fused")]:
        assert main([*arguments, *given]) == 0
        assert json.loads(capsys.readouterr().out)["mode"] == mode


def test_command_explains_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "Llama-3.3-70B", "--gpu", "h100", "--tp", "8", "--tokens", "1,8192"]) == 0
    out = capsys.readouterr().out
    assert "8192 tokens: woven, cut" in out
    assert "one row cannot be cut" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h300", "--tokens", "5"], "no GPU 'h300'"),
        (["--tokens", "5,x"], "whole numbers separated by commas"),
        (["--tokens", "0"], "a step of 0 tokens"),
        (["--tokens", "1000000000"], "a step of 1000000000 tokens; expected at most 4194304"),
        (["--tokens", "5", "--tp", "10", "--gpu", "cpu"], "9 query heads"),
        (["--tokens", "5", "--tp", "9", "--gpu", "h200"], "tensor parallel size 9 on h200; expected at most 8"),
        (["--tokens", "5", "--tp", "9", "--gpu", "a100", "--transport", "torch"], "expected at most 8"),
        (["--tokens", "5", "--transport", "multimem", "--gpu", "l40s"], "cannot work on l40s"),
    ],
)
def test_command_refuses_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "SmolLM2-135M", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_times_are_set_against_sequentials(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--transport", "p2p", "--tokens", "4096"]
    assert main([*words, "--json"]) == 0
    ms = json.loads(capsys.readouterr().out)["predicted_ms"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "speed-up over sequential" in out
    shown = {name: float(ratio) for name, ratio in re.findall(r"^  (\w+) +[\d.]+ ms +([\d.]+)x", out, re.M)}
    assert shown == {mode: pytest.approx(ms["sequential"] / each, abs=0.006) for mode, each in ms.items()}
    assert shown["sequential"] == 1
    assert shown["woven"] > 1.1


def test_where_no_gpu_is_a_plan_says_that_it_is_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "local_gpu", lambda: GPUS["cpu"])
    words = ["plan", "--model", "SmolLM2-135M", "--tp", "3", "--tokens", "64"]
    assert main(words) == 0
    assert "no GPU here, so this is for this machine's CPU; name a GPU with --gpu (h200)" in capsys.readouterr().out
    assert main([*words, "--gpu", "cpu"]) == 0
    assert "note:" not in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_a_table_that_is_not_used_beside_a_named_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", "SmolLM2-135M", "--gpu", "h200", "--tp", "2", "--tokens", "64"]
    for setting, told in (("table.json", True), ("off", False), ("", False)):
        monkeypatch.setenv("TOKENWEAVE_PROFILE", setting)
        assert main(words) == 0
        assert ("note: TOKENWEAVE_PROFILE is not used: --gpu asks" in capsys.readouterr().out) == told


@pytest.mark.parametrize(("more", "told"), [([], True), (["--transport", "p2p"], False)])
def test_multicast_that_is_off_here_is_not_off_on_a_named_gpu(
    more: list[str], told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWEAVE_DISABLE_MULTICAST", "1")
    assert main(["plan", "--model", "SmolLM2-135M", "--gpu", "h200", "--tp", "4", "--tokens", "64", *more]) == 0
    assert ("note: TOKENWEAVE_DISABLE_MULTICAST=1 is not used: --gpu asks" in capsys.readouterr().out) is told


def test_predict_says_why_the_fastest_mode_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--gpu", "h200", "--tp", "2", "--tokens", "1,1024,2048,8192", "--model"]
    assert main([*words, "Mixtral-8x7B", "--launch", "graph"]) == 0
    out = capsys.readouterr().out
    assert "chosen" in out.splitlines()[1]
    assert "woven is the fastest at 2048, 8192 tokens, but not chosen: a mixture of experts is woven by a tuned" in out
    assert main([*words, "Llama-3.1-8B", "--launch", "graph"]) == 0
    out = capsys.readouterr().out
    assert "at 1024 tokens, but not chosen: the best cut would change fused's time by -" in out
    assert "8192 tokens, but" not in out


def test_predict_says_what_no_comm_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Woven steps can be faster than it, which looks wrong without a word."""
    words = ["predict", "--model", "Llama-3.1-8B", "--gpu", "h200", "--tokens", "2048", "--tp"]
    assert main([*words, "2"]) == 0
    *_, note = capsys.readouterr().out.splitlines()
    assert note.startswith("no_comm has no collectives, and every rank normalises all rows")
    assert "can be faster" in note
    assert main([*words, "1"]) == 0
    assert "normalises" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "gpu", "note"),
    [
        ("Llama-3.1-8B", "h200", ""),
        ("Llama-3.1-8B", "h100", "whole steps were measured on 2 h200 over p2p, not yet on 2 h100"),
        ("Mixtral-8x7B", "h200", "steps of a mixture of experts took a third longer"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "predict"])
def test_what_was_not_measured_or_took_longer_is_said(command, model, gpu, note, capsys):
    assert main([command, "--model", model, "--gpu", gpu, "--tp", "2", "--tokens", "1024"]) == 0
    out = capsys.readouterr().out
    assert note in out
    assert ("`tokenweave tune` measures a machine" in out) is bool(note)
