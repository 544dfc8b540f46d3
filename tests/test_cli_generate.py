"""``tokenweave generate``: its JSON, its text and table, its errors, and as the ranks of torchrun."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiny_llama import save_tiny_llama
from tokenweave import LLM, SamplingParams
from tokenweave.cli import generate
from tokenweave.cli.main import main
from tokenweave.engine import build as engine_build
from tokenweave.engine import local
from tokenweave.engine.graphs import GraphRecord
from tokenweave.errors import RankDied
from tokenweave.llm import Token

CLI = Path(sys.executable).parent / "tokenweave"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def run_cli(*arguments, timeout=120):
    return subprocess.run([str(CLI), "generate", *arguments], capture_output=True, text=True, timeout=timeout)


def test_cli_json_has_exactly_the_promised_keys(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w10 w11\n\n  \nw12 w13 w14\n")
    done = run_cli(
        "--model",
        str(model),
        "--tp",
        "2",
        "--prompts-file",
        str(prompts),
        "--json",
        "--max-tokens",
        "5",
        "--ignore-eos",
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert list(first) == ["prompt", "text", "token_ids", "finish_reason", "ttft_ms", "mode_counts"]
    assert [first["prompt"], second["prompt"]] == ["w10 w11", "w12 w13 w14"]
    assert len(first["token_ids"]) == 5
    assert first["finish_reason"] == "length"
    assert first["text"].startswith("w")
    assert first["ttft_ms"] > 0
    assert sum(first["mode_counts"].values()) == 5
    assert "Traceback" not in done.stderr


def test_cli_prints_the_text_and_then_a_table(model):
    done = run_cli(
        "--model",
        str(model),
        "--tp",
        "2",
        "--mode",
        "woven",
        "--prompt",
        "w10 w11",
        "--max-tokens",
        "4",
        "--ignore-eos",
    )
    assert done.returncode == 0, done.stderr
    with LLM(model, device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert done.stdout == llm.generate("w10 w11", params)[0].outputs[0].text + "\n"
    rows = dict(line.split("  ", 1) for line in done.stderr.splitlines())
    assert rows["tokens"].strip() == "2 in, 4 out"
    assert rows["prefill plan"].strip() == "woven (1 + 1 rows) x 1"
    assert rows["decode plan"].strip() == "fused x 3"
    assert set(rows) >= {"time to first token", "tokens/s", "prefill step", "decode step"}
    assert "collectives" in rows["decode step"]


def test_the_table_says_what_the_step_graphs_take():
    output = SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[1, 2])],
        prompt_token_ids=[3],
        metrics=SimpleNamespace(total_ms=100.0, ttft_ms=50.0),
    )
    shown = generate.summary([output], [], GraphRecord(12, 1340.4, 2.06))
    assert shown.splitlines()[-1] == "step graphs          12 in 1,340 MiB, captured in 2.1 s"
    assert "step graphs" not in generate.summary([output], [])


@pytest.mark.parametrize(
    ("environment", "arguments", "mode"),
    [
        ("sequential", [], "sequential"),
        ("sequential", ["--mode", "fused"], "fused"),
        ("nonsense", ["--mode", "auto"], None),
    ],
)
def test_mode_beats_the_environment(model, environment, arguments, mode, monkeypatch, capsys):
    monkeypatch.setenv("TOKENWEAVE_MODE", environment)
    assert (
        main(["generate", "--model", str(model), "--prompt", "w3 w4", "--max-tokens", "2", "--json", *arguments]) == 0
    )
    (answer,) = json.loads(capsys.readouterr().out)
    assert mode is None or set(answer["mode_counts"]) == {mode}


@pytest.mark.parametrize(("option", "graphs"), [([], True), (["--no-graphs"], False)])
def test_graphs_can_be_switched_off(model, option, graphs, monkeypatch, capsys):
    given = []
    build = engine_build.build_engine
    monkeypatch.setattr(local, "build_engine", lambda args, **more: given.append(args) or build(args, **more))
    assert main(["generate", "--model", str(model), "--prompt", "w1", "--max-tokens", "1", *option]) == 0
    assert [args.graphs for args in given] == [graphs]


def test_a_mode_of_the_environment_is_checked(model, monkeypatch, capsys):
    monkeypatch.setenv("TOKENWEAVE_MODE", "nonsense")
    assert main(["generate", "--model", str(model), "--prompt", "w3"]) == 2
    assert "TOKENWEAVE_MODE='nonsense'; expected one of auto, sequential, fused, woven" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nope", "no model '/nope': there is no such file or folder; expected a Hugging Face folder with config.json"),
        ("", "model=''; expected the path of a folder or of a GGUF file"),
        ("/dev/null", "'/dev/null' is neither a folder nor a regular file; expected a Hugging Face folder"),
        ("llama-3.1-8b", "Llama-3.1-8B is built in as numbers to plan with, without weights; expected a Hugging Face"),
    ],
)
def test_built_in_numbers_are_nothing_to_generate_from(name, message, capsys):
    assert main(["generate", "--model", name, "--prompt", "x"]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Qwen" not in shown


def test_an_error_in_the_middle_of_an_answer_is_a_line_of_its_own(model, monkeypatch, capsys):
    def dies(self, prompts, params, *, on_token):
        for text in ("half an", ""):
            on_token(Token(0, 1, text, None))
        raise RankDied(1, "killed by SIGKILL")

    monkeypatch.setattr(LLM, "generate", dies)
    assert main(["generate", "--model", str(model), "--prompt", "w3"]) == 2
    out, err = capsys.readouterr()
    assert out == "half an\n"
    assert err.startswith("tokenweave: error: rank 1 died")
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: dies(None, None, None, on_token=lambda token: None))
    assert main(["generate", "--model", str(model), "--prompt", "w3"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_a_world_without_ranks_is_told_by_its_name(model, ranks, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert main(["generate", "--model", str(model), "--prompt", "w3"]) == 2
    assert f"WORLD_SIZE={ranks} in the environment; expected at least 1" in capsys.readouterr().err


def test_a_prompts_file_is_cut_at_line_feeds_alone(tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes("\ufeffone \u2028 line\r\n\n  \ntwo\x0b\x85lines\n".encode())
    arguments = argparse.Namespace(prompt=None, prompts_file=file)
    assert generate._prompts(arguments) == ["one \u2028 line", "two\x0b\x85lines"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--model", "/no/such/model", "--prompt", "x"], "/no/such/model"),
        (["--model", "MODEL", "--prompt", "x", "--dtype", "int3"], "dtype='int3'"),
        (["--model", "MODEL", "--prompt", "x", "--mode", "quick"], "mode='quick'"),
        (["--model", "MODEL", "--prompt", "x", "--tp", "11"], "11 is more than the model's 10 query heads"),
        (["--model", "MODEL", "--prompt", "w1 " * 300, "--tp", "2"], "300 tokens; the context is 128"),
        (["--model", "MODEL", "--prompt", ""], "empty"),
        (["--model", "MODEL", "--prompts-file", "/no/such/file"], "/no/such/file"),
        (["--model", "MODEL", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
    ],
)
def test_cli_errors_are_one_message_and_exit_code_2(model, arguments, match):
    assert_one_error(run_cli(*(str(model) if a == "MODEL" else a for a in arguments)), match)


def assert_one_error(done, match):
    """One message on stderr, exit code 2, nothing else."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert match in done.stderr
    assert done.stderr.startswith("tokenweave: error: ")
    assert done.stderr.count("\n") == 1


def cut_short(path, size):
    path.write_bytes(path.read_bytes()[:size])
    return path.parent


def another_architecture(path):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    return path.parent


@pytest.mark.parametrize("tp", ["1", "2"])
@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda folder: cut_short(folder / "model.safetensors", 60_000), "model.safetensors"),
        (lambda folder: another_architecture(folder / "config.json"), "mamba"),
    ],
    ids=["truncated", "architecture"],
)
def test_cli_refuses_damaged_and_foreign_models(model, tmp_path, damage, match, tp):
    folder = damage(Path(shutil.copytree(model, tmp_path / "damaged")))
    done = run_cli("--model", str(folder), "--tp", tp, "--prompt", "w1")
    assert_one_error(done, match)


def test_cli_refuses_a_truncated_gguf_file(smollm2_gguf, tmp_path):
    with smollm2_gguf.open("rb") as whole:
        (tmp_path / "short.gguf").write_bytes(whole.read(50_000_000))
    assert_one_error(run_cli("--model", str(tmp_path / "short.gguf"), "--tp", "2", "--prompt", "x"), "short.gguf")


def test_under_torchrun_the_processes_are_the_ranks(model):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    arguments = ["--model", str(model), "--prompt", "w10 w11", "--max-tokens", "4", "--ignore-eos", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python", str(CLI), "generate"]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)  # printed once
    assert answer == {**answer, "prompt": "w10 w11", "finish_reason": "length"}
    with LLM(model, device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert llm.generate("w10 w11", params)[0].outputs[0].token_ids == answer["token_ids"]
