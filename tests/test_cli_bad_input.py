"""Numbers, files and names that nobody can mean: exit code 2 and one line that names them, before any work is done."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.bench.vllm.configurations import model_folder
from tokenweave.cli.arguments import PICTURES, check_folder, check_output
from tokenweave.cli.main import main
from tokenweave.cli.ranks import settle_ranks
from tokenweave.errors import ModelError, ProfileError, RequestError
from tokenweave.planning.profile_table import parse_table
from tokenweave.simulation import read_trace
from tokenweave.tuning.find import profile_path
from tuning_cases import LLAMA, identity_of

SIMULATE = "simulate --model Llama-3.1-8B --gpu h100 --tp 2 --trace sharegpt --requests 3"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 1000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused writes here."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of it: one line."""
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("tokenweave: error: ")
    assert err.count("\n") == 1
    assert out == ""
    return err


@pytest.mark.parametrize(
    "option",
    [
        "--replicas 1000000000", "--requests 100000000000", "--memory-gib 1e300", "--overhead-us 1e300",
        "--ttft-target nan", "--ttft-target -1", "--ttft-target inf", "--tpot-target inf", "--tpot-target 0", "--seed -1", "--plot picture.foo", "--plot picture",
        "--json /proc/none.json", "--json /dev/null/x.json", "--json /", "--plot /proc/none.svg",
    ],
)  # fmt: skip
def test_simulate_refuses(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert option.split()[0].removeprefix("--").partition("-")[0] in refused(f"{SIMULATE} {option}", capsys).casefold()


def test_simulate_writes_json_to_what_is_no_file_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE.split(), "--json", "/dev/stdout"]) == 0
    out = capfd.readouterr().out
    assert json.loads(out[out.index("\n{") :])["runs"]
    assert "sequential" in out[: out.index("\n{")], "what was printed before is still there"


def test_rates_at_which_requests_never_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("1e-308", "5e-324"):
        assert main([*SIMULATE.split(), "--rate", rate]) == 2
        assert "raise the rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "bench kernel --seed -1", "bench kernel --json /proc/none.json", "bench kernel --plot x.foo",
        "bench kernel --time-limit nan", "bench kernel --time-limit -1", "bench kernel --only=",
        "bench latency --model Llama-3.1-8B --sustain -1", "bench latency --model Llama-3.1-8B --time-limit 0",
        "bench latency --model Llama-3.1-8B --plot x.zz", "bench latency --model Llama-3.1-8B --json /proc/none.json",
        "tune --model Llama-3.1-8B --seconds nan", "tune --model Llama-3.1-8B --seconds inf",
        "tune --model Llama-3.1-8B --time-limit -1", "tune --model Llama-3.1-8B --max-tokens 99999999999",
        "tune --model Llama-3.1-8B --json x.json", "tune --model Llama-3.1-8B --sweep",
        "tune --model Llama-3.1-8B --json /proc/none.json --verify",
        "tune --model Llama-3.1-8B --layers 8", "tune --model Llama-3.1-8B --tokens 64",
        "tune --model Llama-3.1-8B --verify --max-tokens 1024", "tune --model Llama-3.1-8B --verify --seconds 9",
        "tune --model Llama-3.1-8B --verify --layers 99", "tune --model Llama-3.1-8B --verify --out none.json",
        "tune --model Llama-3.1-8B --out /proc/none.json", "tune --model Llama-3.1-8B --out /dev/null",
        "tune --model Llama-3.1-8B --out .",
        "trace --model Llama-3.1-8B --out /proc/none", "trace --model Llama-3.1-8B --out /dev/null",
        "trace --model Llama-3.1-8B --out /dev/null/x", "trace --model Llama-3.1-8B --out x --seed -1",
        "trace --model Llama-3.1-8B --out x --time-limit nan",
        "trace --model . --out x --dummy",
        "bench latency --model Llama-3.1-8B --layers 99", "bench latency --model SmolLM2-135M --tokens 9 --tp 8 --layers 99",
        "doctor --tp 4", "doctor --gpu h100", "plan --model /dev/null --gpu h200 --tokens 5",
        "plan --model Llama-3.1-8B --gpu h100 --tp 2 --tokens 5 --context 99999999999999999999",
        "predict --model Llama-3.1-8B --gpu h100 --tp 2 --tokens 1 --context 99999999999999999999",
    ],
)  # fmt: skip
def test_the_others_refuse(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "as many GPUs" not in refused(words, capsys)  # what is wrong is said first, wherever it runs


@pytest.mark.parametrize("command", ["plan --gpu h200 --tokens 5 --model", "trace --out x --model", "doctor --vllm"])
def test_a_model_without_a_name_is_not_the_current_folder(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(CONFIG))
    assert main([*command.split(), ""]) == 2
    assert "no model is named: '' was given; expected a folder" in capsys.readouterr().err


COMMANDS_ON_RANKS = ("trace --model Llama-3.1-8B --out x", "tune --model Llama-3.1-8B", "bench kernel",
                     "bench latency --model Llama-3.1-8B")  # fmt: skip


def _as_torchrun_starts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "::1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("words", COMMANDS_ON_RANKS)
def test_ranks_are_as_many_as_torchrun_started(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_torchrun_starts(2, monkeypatch)
    err = refused(f"{words} --tp 4", capsys)
    assert "--tp 4, but this process was started as one of WORLD_SIZE=2 ranks" in err
    _as_torchrun_starts(9, monkeypatch)
    assert "WORLD_SIZE=9 in the environment; expected 2 to 8" in refused(words, capsys)


def test_without_tp_there_are_as_many_ranks_as_torchrun_started_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(tp: int | None) -> int:
        args = argparse.Namespace(tp=tp, time_limit=1.0)
        settle_ranks(args)
        return args.tp

    assert [settled(None), settled(4)] == [2, 4]
    _as_torchrun_starts(4, monkeypatch)
    assert [settled(None), settled(4)] == [4, 4]


@pytest.mark.parametrize("folder", ["/dev/null", "/proc/none/x"])
def test_logs_that_cannot_be_kept(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(f"bench vllm --model Llama-3.1-8B --logs {folder}", capsys)
    assert f"--logs {folder}: no files can be written to it" in err


@pytest.mark.parametrize("words", [words for words in COMMANDS_ON_RANKS if "--model" in words])
def test_an_attention_kernel_that_is_none_is_told_before_any_rank_starts(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "foo")
    assert "TOKENWEAVE_ATTENTION='foo'; expected one of auto, " in refused(words, capsys)


def _planned() -> str:
    """What a command on ranks plans with, where TOKENWEAVE_MODE names no mode."""
    from tokenweave.bench.launch import Rank
    from tokenweave.cli.model import planner_of

    os.environ["TOKENWEAVE_MODE"] = "foo"
    try:
        me = Rank(dist.get_rank(), dist.get_rank(), 2, torch.device("cpu"), dist.group.WORLD)
        return str(planner_of(LLAMA, me, "torch").plan(2048, mode="fused").mode)
    finally:
        del os.environ["TOKENWEAVE_MODE"]


def test_commands_that_name_their_modes_do_not_ask_the_environment() -> None:
    assert run_ranks(2, _planned) == ["fused"] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", None), ("hidden_size", "4096"), ("num_attention_heads", 0), ("num_hidden_layers", -1),
     ("num_key_value_heads", 0), ("head_dim", "x"), ("vocab_size", 1.5)],
)  # fmt: skip
def test_doctor_of_a_model_whose_sizes_are_none(
    tmp_path: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {name: kept for name, kept in {**CONFIG, key: value}.items() if kept is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{key} is {value!r}" in refused(f"doctor --vllm {tmp_path}", capsys)


def test_names_that_no_file_can_have(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a" * 5000
    assert "looked up" in refused(f"doctor --vllm {long}", capsys)
    assert "too long" in refused(f"{SIMULATE} --json {long}", capsys)
    with pytest.raises(ModelError, match="looked up"):
        model_folder(long, Path())
    for setting in (long, "~nobody-of-that-name/profiles", "/dev/null/profiles"):
        monkeypatch.setenv("TOKENWEAVE_PROFILE", setting)
        assert profile_path(identity_of()) == Path(setting)
    with pytest.raises(ProfileError, match="damaged or cut off"):
        parse_table("[" * 100_000, "deep.json")


@pytest.mark.parametrize(
    "command", ["trace --out x --tokens 64 --device cpu --model", "bench latency --tokens 9 --model"]
)
def test_missing_weights_are_told_once_and_not_by_every_rank(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "no weights" in refused(f"{command} {tmp_path}", capsys)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 4, "num_key_value_heads": 4}))
    assert "more than the model's 4 query heads" in refused(f"{command} {tmp_path} --tp 8 --dummy", capsys)


def test_a_torchrun_environment_without_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "a",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "y",
    }.items():
        monkeypatch.setenv(name, value)
    assert "RANK='a' in the environment" in refused(
        "trace --model SmolLM2-135M --tokens 9 --device cpu --out here", capsys
    )


def test_doctor_of_a_quantisation_that_is_no_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": "awq"}))
    assert main(["doctor", "--vllm", str(tmp_path)]) in (0, 1)
    assert capsys.readouterr().err == ""


def test_dates_have_time_zones_and_any_year(tmp_path: Path) -> None:
    def arrivals(*times: str) -> list[float]:
        file = tmp_path / "trace.csv"
        file.write_text("arrived_at,prompt_tokens,output_tokens\n" + "".join(f"{time},1,1\n" for time in times))
        found = read_trace(file).arrivals
        assert found is not None
        return found.tolist()

    assert arrivals("2024-05-10 12:00:00+02:00", "2024-05-10T10:00:01.5Z", "2024-05-10 06:30:02-0330") == [0, 1.5, 2]
    assert arrivals("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47.6805900") == pytest.approx([0, 1])
    assert arrivals("0001-01-01", "0002-01-01") == [0, 365 * 86400]  # beyond what 64 bits of nanoseconds hold
    assert arrivals("2024-05-10", "2024-05-11") == [0, 86400]


def test_an_output_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    check_output("--json", None)
    check_output("--json", tmp_path / "deep" / "result.json")
    assert list((tmp_path / "deep").iterdir()) == []
    kept = tmp_path / "picture.SVG"
    kept.write_text("before")
    check_output("--plot", kept, PICTURES)
    assert kept.read_text() == "before"
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to(tmp_path / "further" / "result.json")
    for path in (tmp_path / "null", tmp_path / "link"):
        check_output("--json", path)
        assert path.is_symlink()
    assert list((tmp_path / "further").iterdir()) == []
    with pytest.raises(RequestError, match=r"--out .*null: it is no regular file; expected a file"):
        check_output("--out", tmp_path / "null", streams=False)
    with pytest.raises(RequestError, match="no files can be written"):
        check_folder("--out", kept)
