"""Ranks that something else started: one that never comes, one that is gone, and ranks that were started differently."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tiny_llama import save_tiny_llama
from tokenweave import LLM, llm, peers
from tokenweave.cli.main import main
from tokenweave.engine import local
from tokenweave.engine.build import EngineArgs
from tokenweave.engine.engine import TokenEvent
from tokenweave.engine.local import LocalRank
from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest
from tokenweave.errors import CollectiveError, ModelError, RequestError
from tokenweave.peers import join, loading, lost_peer_is_told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), context=100_000)


# ---- started alike


def _start(path: str, changes: Sequence[dict[str, object]], modes: Sequence[str]) -> str:
    """What each rank says of ``LocalRank`` with its own arguments, and its own TOKENWEAVE_MODE."""
    rank = dist.get_rank()
    os.environ["TOKENWEAVE_MODE"] = modes[rank]
    try:
        args = EngineArgs(
            **{"model": path, "tensor_parallel_size": 2, "device": "cpu", "cache_tokens": 64, **changes[rank]}
        )
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
        ({"model": "elsewhere"}, ("auto", "auto"), "rank 1 has model=elsewhere, rank 0 has no such folder"),
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
        assert answers[0].endswith("and the model by the same path") == ("model" in changes)


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


def _calls(path: str, prompts: Sequence[Sequence[Sequence[str]]]) -> list[object]:
    """What each rank's LLM answers: one call after the other, each with prompts of the rank's own."""
    rank, answers = dist.get_rank(), []
    with (
        mock.patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": "2"}),
        LLM(path, 2, device="cpu", cache_tokens=64, show_progress=False) as ranks,
    ):
        for each in prompts:
            try:
                outputs = ranks.generate(each[rank], SamplingParams(temperature=1.0, max_tokens=4))
                answers.append([output.outputs[0].token_ids for output in outputs])
            except RequestError as error:
                answers.append(str(error))
    return answers


def test_a_refused_call_does_not_count_and_an_empty_one_is_compared_too(model: Path) -> None:
    same, more, none = ["w1", "w2"], ["w1", "w2", "w3"], []
    calls = [(same, same), (same, more), (same, none), (none, same), (same, same), (none, none)]
    first, second = run_ranks(2, _calls, str(model), calls)
    assert first == second
    for refused in first[1:4]:
        assert refused.startswith("the prompts and sampling parameters and seeds of rank 1 are not rank 0's")
    expected = run_ranks(2, _calls, str(model), [(same, same), (same, same), (none, none)])[0]
    assert [first[0], *first[4:]] == expected


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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("[/src/gloo/pair.cc:547] Connection closed by peer [::1]:8. This is typically caused by a remote crash."),
            "rank 1 lost a peer (Connection closed by peer [::1]:8); the peer's own output says why; start all ranks again",
        ),
        (
            RuntimeError("[/src/gloo/unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete"),
            "rank 1 waited for a peer that did not come (Timed out waiting 300000ms for recv operation to complete); "
            "the peer's own output says why; start all ranks again",
        ),
        (
            dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes at x.hpp:6:\nframe #0: c10::Error"),
            "rank 1 lost a peer (Connection reset by peer); the peer's own output says why; start all ranks again",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: /src/NCCLUtils.cpp:93, remote process exited or there was a network error, NCCL version 2.28.9\n"
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
                "Last error:\nsocketProgress: Connection closed by remote peer host<1>"
            ),
            "rank 1 lost a peer (NCCL error in: /src/NCCLUtils.cpp:93, remote process exited or there was a network error, NCCL "
            "version 2.28.9 ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
            "prematurely. Last error: socketProgress: Connection closed by remote peer host<1>); the peer's own output says why; "
            "start all ranks again",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: /src/ProcessGroupNCCL.cpp:3699, unhandled system error (run with NCCL_DEBUG=INFO for details), "
                "NCCL version 2.28.9\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
                "device error. \nLast error:\nError while creating shared memory segment /dev/shm/nccl-a (size 33030528), error: "
                "No space left on device (28)"
            ),
            "rank 1: communication between the ranks failed: NCCL error in: /src/ProcessGroupNCCL.cpp:3699, unhandled system "
            "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9 ncclSystemError: System call (e.g. socket, malloc) "
            "or external library call failed or device error. Last error: Error while creating shared memory segment "
            "/dev/shm/nccl-a (size 33030528), error: No space left on device (28)",
        ),
    ],
)  # fmt: skip
def test_a_peer_is_blamed_for_broken_connections_alone_and_nothing_of_another_error_is_lost(
    error: RuntimeError, told: str
) -> None:
    with pytest.raises(CollectiveError) as caught, lost_peer_is_told(1):
        raise error
    assert str(caught.value) == told
    assert caught.value.__cause__ is error


# ---- a rank that loads for long, or fails


def _load(slow: int, failure: str, limit: float, silent: float) -> tuple[str, list[str]]:
    """What ``loading`` raises on each rank, and what it logs, where rank ``slow`` waits in it until the others have said
    something."""
    rank, others, lines, told = dist.get_rank(), [r for r in range(dist.get_world_size()) if r != slow], [], ""
    store = dist.PrefixStore(f"{slow}, {failure}, {limit}", dist.group.WORLD.get_group_store())

    def warning(*line: object) -> None:
        lines.append(str(line[0]) % line[1:])
        store.set(str(rank), "said")

    with (
        mock.patch.object(peers, "LOADING_TIMEOUT", datetime.timedelta(seconds=limit)),
        mock.patch.object(peers, "_SILENT", silent),
        mock.patch.object(peers.log, "warning", warning),
    ):
        try:
            with loading(dist.group.WORLD):
                if rank == slow and failure:
                    raise ModelError(failure)
                if rank == slow:
                    store.wait([str(other) for other in others])
        except (CollectiveError, ModelError) as error:
            told = str(error)
            store.set(str(rank), "raised")
    return told, lines


@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_wait_longer_for_one_that_loads_than_for_one_that_computes(slow: int) -> None:
    assert peers.LOADING_TIMEOUT >= 4 * peers.PEER_TIMEOUT
    for rank, (told, lines) in enumerate(run_ranks(3, _load, slow, "", 60.0, 0.05)):
        assert told == ""
        if rank == slow:
            assert not lines
        else:
            waits = f"rank {rank} has loaded its part of the model and waits for rank "
            assert all(line.startswith(waits) and line.endswith("; it gives up after 1 minutes") for line in lines)
            assert str(slow) in lines[-1].removeprefix(waits)


def test_a_rank_that_cannot_load_is_not_waited_for() -> None:
    (first, _), (second, _) = run_ranks(2, _load, 1, "x: damaged", 60.0, 20.0)
    assert first == "rank 0: rank 1 could not load its part of the model: ModelError: x: damaged"
    assert second == "x: damaged"
    (late, _), (in_vain, _) = run_ranks(2, _load, 1, "", 0.3, 20.0)
    assert late == (
        "rank 0 has loaded its part of the model; rank 1 has not, 0.005 minutes later: see its output, and start all ranks again"
    )
    assert in_vain == ""


# ---- one rank's own GPU, and its end


class _Engine:
    """Notes what calls it gets, and on which GPU."""

    def __init__(self) -> None:
        self.gpu, self.calls = 0, []

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.gpu = self.gpu, index
        yield
        self.gpu = before

    def run(self, requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        for number in range(2):
            self.calls.append(f"step on GPU {self.gpu}")
            yield [TokenEvent(0, number)]

    def close(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def rank_2(model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalRank, _Engine]:
    """A rank of three as it would be on a machine with GPUs."""
    engine = _Engine()

    def different(*_: object) -> None:
        engine.calls.append(f"check on GPU {engine.gpu}")

    def build(*_: object, **__: object) -> _Engine:
        engine.calls.append(f"load on GPU {engine.gpu}")
        return engine

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", engine.device)
    monkeypatch.setattr(local, "differing", different)
    monkeypatch.setattr(local, "build_engine", build)
    monkeypatch.setattr(local, "join", lambda *_: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 2)
    monkeypatch.setattr(dist, "group", mock.Mock(WORLD="all"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: engine.calls.append("end of the group"))
    return LocalRank(EngineArgs(str(model), 3), show_progress=False), engine


def test_a_rank_works_on_its_own_gpu_whoever_calls_it_and_leaves_the_caller_on_theirs(
    rank_2: tuple[LocalRank, _Engine],
) -> None:
    ranks, engine = rank_2
    for _ in ranks.generate([]):
        engine.calls.append(f"caller on GPU {engine.gpu}")
    begin = ["check on GPU 2", "load on GPU 2"]
    assert engine.calls == begin + ["check on GPU 2"] + ["step on GPU 2", "caller on GPU 0"] * 2


def test_a_rank_that_cannot_be_closed_in_order_ends_all_the_same(rank_2: tuple[LocalRank, _Engine]) -> None:
    ranks, engine = rank_2
    with pytest.raises(RuntimeError, match="CUDA error"):
        ranks.close()
    assert engine.calls[-1] == "end of the group"
    ranks.close()
    with pytest.raises(RequestError, match="this rank is closed"):
        next(ranks.generate([]))


def test_the_first_error_is_the_one_that_is_told(
    model: Path, rank_2: tuple[LocalRank, _Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, engine = rank_2

    def lost(requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        yield [TokenEvent(0, 1)]
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(engine, "run", lost)
    monkeypatch.setattr(llm, "LocalRank", lambda *_: ranks)
    with pytest.raises(CollectiveError, match="rank 2 lost a peer"), LLM(str(model)) as model_3:
        model_3.generate("w1")
    with pytest.raises(RequestError, match="this LLM is closed"):
        model_3.generate("w1")
    failing = LLM(str(model))
    failing._ranks = mock.Mock(close=mock.Mock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(ZeroDivisionError), failing:
        raise ZeroDivisionError


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
        CollectiveError,
        match=rf"rank 0 did not meet the others of 2 ranks at 127\.0\.0\.1:{port} within 0.0167 minutes: ",
    ):
        join("gloo")
    assert not dist.is_initialized()
    (line,) = (record.message for record in caplog.records if record.name == peers.log.name)
    assert line.startswith(f"rank 0 waits for the others of 2 ranks at 127.0.0.1:{port}; it gives up after")


def test_a_port_that_is_taken_is_no_rank_that_does_not_come(alone: None, port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(
            CollectiveError, match=r"rank 0 did not meet the others of 2 ranks at .*EADDRINUSE"
        ) as caught:
            join("gloo")
    assert "minutes" not in str(caught.value)


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
