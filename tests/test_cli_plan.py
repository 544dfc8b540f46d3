"""``tokenweave plan``: its JSON, its text and its errors."""

from __future__ import annotations

import json

import pytest

from tokenweave.cli.main import main


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


def test_mode_beats_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--tokens", "4096", "--json"]
    monkeypatch.setenv("TOKENWEAVE_MODE", "sequential")
    for given, mode in [([], "sequential"), (["--mode", "auto"], "woven"), (["--mode", "fused"], "fused")]:
        assert main([*arguments, *given]) == 0
        assert json.loads(capsys.readouterr().out)["mode"] == mode


def test_command_explains_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "Mixtral-8x7B", "--gpu", "h100", "--tp", "8", "--tokens", "1,8192"]) == 0
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
        (["--tokens", "5", "--tp", "10"], "9 query heads"),
        (["--tokens", "5", "--transport", "multimem", "--gpu", "l40s"], "cannot work on l40s"),
    ],
)
def test_command_refuses_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "SmolLM2-135M", *arguments]) == 2
    assert message in capsys.readouterr().err
