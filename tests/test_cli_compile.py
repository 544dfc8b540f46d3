"""``tokenweave compile``: what it prints of each kernel, and when it fails."""

from __future__ import annotations

import json

import pytest

from tokenweave.cli import compile as command
from tokenweave.cli.main import main


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_command_prints_json(cache, capsys):
    assert main(["compile", "--arch", "sm_90a", "--ranks", "2", "--hidden", "64", "--dtype", "bf16", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["arch"] == "sm_90a"
    assert printed["spilling_main_variants"] == 0
    names = [kernel["kernel"] for kernel in printed["kernels"]]
    assert names == ["add_rmsnorm", "twoshot_ring", "twoshot_registers", "twoshot_multimem", "oneshot"]
    assert {"registers", "spills", "static", "dynamic", "threads", "options"} <= printed["kernels"][0].keys()
    assert len(list(cache.iterdir())) == 5


def test_command_compiles_the_models_kernels_too(monkeypatch, capsys):
    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (40, 8 * (kernel.name == "silu_mul"), 0))
    assert main(["compile", "--ranks", "2,8", "--hidden", "4096", "--dtype", "bf16"]) == 2
    out, err = capsys.readouterr()
    shown = [line.split() for line in out.splitlines()]
    assert ["rope_cache", "-", "-", "-", "bfloat16", "16+4", "heads", "of", "128", "256", "40", "0", "0", "0"] in shown
    assert sum(line[0] == "rope_cache" for line in shown) == 2, "Llama's and Mixtral's are the same"
    assert sum(line[0] == "silu_mul" for line in shown) == 1
    assert "most of all silu_mul" in err


def test_command_with_several_jobs_prints_a_table(cache, capsys):
    assert (
        main(["compile", "--arch", "sm_80", "--ranks", "2,3", "--hidden", "64", "--dtype", "fp16,fp32", "--jobs", "2"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 10
    assert lines[-1].startswith("10 kernels for sm_80")


def test_command_fails_on_spills_in_main_variants(monkeypatch, capsys):
    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (255, 8 * (kernel.name == "oneshot"), 0))
    assert main(["compile", "--ranks", "2", "--hidden", "64", "--dtype", "bf16"]) == 2
    assert "1 main variants spill registers, most of all oneshot with 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", ["--arch sm_70", "--ranks 1", "--ranks x", "--hidden 12", "--hidden 32768", "--dtype fp8", "--jobs 0"]
)
def test_command_refuses_what_there_is_not(arguments, capsys):
    assert main(["compile", *arguments.split()]) == 2
    assert "expected" in capsys.readouterr().err
