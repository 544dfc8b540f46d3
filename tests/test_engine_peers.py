"""Ranks that something else started: one that never comes, one that is gone, and ranks that were started differently."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_ranks
from tiny_llama import save_tiny_llama
from tokenweave.cli.main import main
from tokenweave.engine import peers
from tokenweave.engine.build import EngineArgs
from tokenweave.engine.local import LocalRank
from tokenweave.engine.peers import join, lost_peer_is_told
from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest
from tokenweave.errors import CollectiveError, ModelError, RequestError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), context=100_000)


# ---- started alike


def _start(path: str, changes: Sequence[dict[str, object]], modes: Sequence[str]) -> str:
    """What each rank says of ``LocalRank`` with its own arguments, and its own TOKENWEAVE_MODE."""
    rank = dist.get_rank()
    os.environ["TOKENWEAVE_MODE"] = modes[rank]
    try:
        args = EngineArgs(path, 2, **{"device": "cpu", "cache_tokens": 64, **changes[rank]})
        LocalRank(args, show_progress=False).close()
        return "started"
    except (RequestError, ModelError) as error:
        return str(error)
    finally:
        del os.environ["TOKENWEAVE_MODE"]


@pytest.mark.parametrize(
    ("changes", "modes", "told"),
    [
        ({}, ("auto", "auto"), None),
        ({"max_batch_tokens": 5}, ("auto", "auto"), "rank 1 has max_batch_tokens=5, rank 0 has 2048"),
        ({"dtype": "bfloat16"}, ("auto", "auto"), "rank 1 has dtype=bfloat16, rank 0 has auto"),
        ({}, ("woven", "fused"), "rank 1 has mode=fused, rank 0 has woven"),
        (
            {"max_context": 9, "graphs": False},
            ("auto", "auto"),
            "rank 1 has max_context=9, rank 0 has None; rank 1 has graphs=False, rank 0 has True",
        ),
    ],
)
def test_ranks_that_were_started_differently_say_so_before_they_load(
    model: Path, changes: dict[str, object], modes: tuple[str, str], told: str | None
) -> None:
    # The second model is not there: whoever loads says so.
    path = str(model) if told is None else "no such folder"
    answers = run_ranks(2, _start, path, [{}, changes], modes)
    assert len(set(answers)) == 1, answers
    if told is None:
        assert answers == ["started"] * 2
    else:
        assert f"the ranks were not started alike: {told}; give all of them the same" in answers[0]


def _generate(path: str, each: Sequence[Sequence[NewRequest]]) -> tuple[str, int]:
    """What each rank says of its requests, and how many tokens both make of the same ones afterwards."""
    rank = dist.get_rank()
    ranks = LocalRank(EngineArgs(path, 2, device="cpu", cache_tokens=64), show_progress=False)
    said = "done"
    try:
        for _ in ranks.generate(each[rank]):
            pass
    except RequestError as error:
        said = str(error)
    tokens = sum(len(events) for events in ranks.generate(each[0]))
    ranks.close()
    return said, tokens


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, None),
        ({"prompt_token_ids": (3, 4, 6)}, "prompts"),
        ({"params": SamplingParams(temperature=0, max_tokens=3)}, "sampling parameters"),
        ({"seed": 2}, "seeds"),
        ({"prompt_token_ids": (1,), "seed": 3}, "prompts and seeds"),
    ],
)
def test_ranks_with_different_requests_say_so_and_can_go_on(
    model: Path, other: dict[str, object], told: str | None
) -> None:
    request = {
        "number": 0,
        "prompt_token_ids": (3, 4, 5),
        "params": SamplingParams(temperature=0, max_tokens=2),
        "seed": 1,
    }
    each = [[NewRequest(**request)], [NewRequest(**{**request, **other})]]
    expected = "done" if told is None else f"the {told} of rank 1 are not rank 0's; give all ranks the same prompts"
    for said, tokens in run_ranks(2, _generate, str(model), each):
        assert said.startswith(expected)
        assert 1 <= tokens <= 2


# ---- a rank that is gone


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def two(model: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ranks of a long generation, as torchrun would start them."""
    command = [sys.executable, "-m", "tokenweave", "generate", "--model", str(model), "--tp", "2", "--prompt", "w1 w2"]
    command += ["--ignore-eos", "--max-tokens", "90000"]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_a_killed_rank_is_one_line_of_the_other(two: list[subprocess.Popen[bytes]]) -> None:
    assert two[0].stdout is not None
    assert two[0].stdout.read(1)  # it generates
    two[1].send_signal(signal.SIGKILL)
    _, err = two[0].communicate(timeout=60)
    assert two[0].returncode == 2
    assert err.startswith(b"tokenweave: error: rank 0 lost a peer (")
    assert b"the peer's own output says why; start all ranks again" in err
    assert err.count(b"\n") == 1


def test_errors_that_are_no_echo_stay_what_they_are() -> None:
    for error in (RuntimeError("shapes [3] and [4]"), ZeroDivisionError(), RequestError("Connection is no mode")):
        with pytest.raises(type(error)) as caught, lost_peer_is_told(1):
            raise error
        assert caught.value is error
    with (
        pytest.raises(CollectiveError, match=r"rank 1 lost a peer \(Connection closed by peer\); the peer's own"),
        lost_peer_is_told(1),
    ):
        raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer. This is typical.")
    with (
        pytest.raises(CollectiveError, match="rank 1 waited 5 minutes for a peer that did not come"),
        lost_peer_is_told(1),
    ):
        raise RuntimeError("[/src/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 300000ms for recv")


# ---- a rank that never comes


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """This process is rank 0 of two."""
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_never_comes_is_told_while_it_is_waited_for_and_at_the_end(
    alone: None, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert datetime.timedelta(minutes=1) < peers.PEER_TIMEOUT <= datetime.timedelta(minutes=5)
    assert 5 < peers._SILENT < 60
    monkeypatch.setattr(peers, "PEER_TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(peers, "_SILENT", 0.2)
    with pytest.raises(
        CollectiveError, match=rf"rank 0 did not meet the others of 2 ranks at 127\.0\.0\.1:{port} within"
    ):
        join("gloo")
    assert not dist.is_initialized()
    (line,) = (record.message for record in caplog.records if record.name == peers.log.name)
    assert line.startswith(f"rank 0 waits for the others of 2 ranks at 127.0.0.1:{port}; it gives up after")


@pytest.mark.parametrize(
    ("text", "told"),
    [("foo", "MASTER_PORT='foo' in the environment"), ("70000", "MASTER_PORT=70000 in the environment")],
)
def test_a_port_that_is_none_is_named(
    alone: None, model: Path, text: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_PORT", text)
    for command in (
        ["generate", "--model", str(model), "--tp", "2", "--prompt", "w1"],
        ["trace", "--model", "SmolLM2-135M", "--tokens", "9", "--device", "cpu", "--out", str(model.parent / "traces")],
    ):
        assert main(command) == 2
        assert told in capsys.readouterr().err


def test_a_name_that_is_no_attention_kernel_is_told_on_cpus_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "foo")
    for tp in ("1", "2"):
        assert main(["generate", "--model", str(model), "--tp", tp, "--prompt", "w1"]) == 2
        assert "TOKENWEAVE_ATTENTION='foo'; expected one of auto, " in capsys.readouterr().err
