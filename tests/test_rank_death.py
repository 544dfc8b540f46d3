"""Ranks end together: killed, failed, interrupted or orphaned, nothing hangs and nothing is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiny_llama import save_tiny_llama
from tokenweave import LLM, SamplingParams
from tokenweave.engine.messages import Failure
from tokenweave.engine.processes import RankProcesses, _primary
from tokenweave.errors import CollectiveError, ModelError, RankDied, RequestError

CLI = Path(sys.executable).parent / "tokenweave"
LIMIT = 10.0  # seconds until the other ranks are gone
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds rank processes in /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def ranks_of(parent):
    """Process ids of the living rank processes of ``parent``, in the order in which they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if int(ppid) == parent and state != "Z" and "tokenweave.engine.worker" in command:
            found.append(int(entry.name))
    return sorted(found)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=LIMIT):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return result


def assert_nothing_is_left(processes):
    assert all(process.returncode is not None for process in processes), "a process was not reaped"
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize(
    ("victim", "sent"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSEGV)]
)
def test_a_rank_that_dies_while_generating_is_named_and_the_others_end(model, victim, sent):
    llm = LLM(model, 3, device="cpu")
    processes = list(llm._ranks.processes)
    tokens, killed = [], []

    def on_token(token):
        tokens.append(token)
        if len(tokens) == 5:
            os.kill(processes[victim].pid, sent)
            killed.append(time.monotonic())

    with pytest.raises(RankDied, match=f"rank {victim} died: killed by {sent.name}") as caught:
        llm.generate(["w1 w2 w3", "w4"], LONG, on_token=on_token)
    assert time.monotonic() - killed[0] < LIMIT
    assert caught.value.rank == victim
    assert_nothing_is_left(processes)
    with pytest.raises(RequestError, match="closed"):
        llm.generate("w1", LONG)
    llm.close()


def test_a_rank_that_died_between_two_calls(model):
    with LLM(model, 2, device="cpu") as llm:
        llm.generate("w1", SamplingParams(temperature=0, max_tokens=2))
        processes = list(llm._ranks.processes)
        processes[1].kill()
        with pytest.raises(RankDied, match="rank 1 died: killed by SIGKILL"):
            llm.generate("w1", LONG)
        assert_nothing_is_left(processes)


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_a_rank_that_dies_while_loading(smollm2_gguf, delay):
    """Killed as it starts, and later on: before the ranks have met, or while they read."""
    outcome = []

    def load():
        try:
            LLM(smollm2_gguf, 2, device="cpu").close()
            outcome.append("loaded")
        except RankDied as error:
            outcome.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    second = wait_until(lambda: len(pids := ranks_of(os.getpid())) == 2 and pids[1], 60)
    time.sleep(delay)
    os.kill(second, signal.SIGKILL)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert isinstance(outcome[0], RankDied), outcome
    assert "rank 1 died: killed by SIGKILL" in str(outcome[0])
    assert not ranks_of(os.getpid())


def sabotage(tmp_path, monkeypatch, code):
    """Makes every rank process run ``code`` before it builds its engine; ``rank`` is its rank."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, os, time\n"
        "import tokenweave.engine.build as build\n"
        "original = build.build_engine\n"
        "def sabotaged(args, *, rank, **rest):\n"
        f"{body}\n"
        "    return original(args, rank=rank, **rest)\n"
        "build.build_engine = sabotaged\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_rank_that_exits_is_quoted(model, tmp_path, monkeypatch, capfd):
    sabotage(
        tmp_path, monkeypatch, "if rank == 1:\n    print('out of luck', file=sys.stderr, flush=True)\n    os._exit(7)"
    )
    with pytest.raises(RankDied, match=r"rank 1 died: exited with code 7\n    out of luck"):
        LLM(model, 2, device="cpu")
    assert not ranks_of(os.getpid())


def test_an_exception_of_a_rank_is_named_with_its_traceback(model, tmp_path, monkeypatch, capfd):
    sabotage(tmp_path, monkeypatch, "if rank == 1:\n    raise MemoryError('no room')")
    with pytest.raises(RankDied, match="rank 1 died: MemoryError: no room") as caught:
        LLM(model, 2, device="cpu")
    assert "in sabotaged" in str(caught.value.__cause__)
    assert "Traceback" not in capfd.readouterr().err
    assert not ranks_of(os.getpid())


def test_an_error_that_all_ranks_raise_is_raised_once(model, tmp_path, monkeypatch, capfd):
    sabotage(
        tmp_path, monkeypatch, "from tokenweave.errors import ModelError\nraise ModelError('nothing in this file')"
    )
    with pytest.raises(ModelError, match=r"^nothing in this file$"):
        LLM(model, 3, device="cpu")
    assert capfd.readouterr().err == ""
    assert not ranks_of(os.getpid())


LATE_PLANS = """
from tokenweave import overlap
from tokenweave.engine.batch import rows_of
from tokenweave.planning.plan import Mode, Plan
def late(chunks):
    rows = rows_of(chunks)
    return Plan(Mode.FUSED) if rows == 1 else Plan(Mode.WOVEN, split=rows // 2, start_at={'down'})
build.plan_function = lambda *args: late
"""
"""Every step's collectives wait for the other split's last GEMM."""


def test_a_rank_that_dies_while_collectives_wait_for_their_start(model, tmp_path, monkeypatch):
    sabotage(tmp_path, monkeypatch, LATE_PLANS)
    llm = LLM(model, 2, device="cpu")
    processes = list(llm._ranks.processes)
    killed = []

    def on_token(token):
        if token.index == 1 and not killed:
            os.kill(processes[1].pid, signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(RankDied, match="rank 1 died: killed by SIGKILL"):
        llm.generate(["w1 w2 w3", "w4"], LONG, on_token=on_token)
    assert time.monotonic() - killed[0] < LIMIT
    assert_nothing_is_left(processes)


def test_a_rank_that_fails_before_a_collective_has_started(model, tmp_path, monkeypatch):
    """The other rank waits for a collective that never comes."""
    code = """
import itertools
counter, reached = itertools.count(), overlap.StartAt.reached
def failing(self, point):
    if rank == 1 and point == 'attention' and next(counter) == 40:
        raise MemoryError('no room for attention')
    reached(self, point)
overlap.StartAt.reached = failing
"""
    sabotage(tmp_path, monkeypatch, LATE_PLANS + code)
    llm = LLM(model, 2, device="cpu")
    processes, began = list(llm._ranks.processes), time.monotonic()
    with pytest.raises(RankDied, match="rank 1 died: MemoryError: no room for attention"):
        llm.generate(["w1 w2 w3", "w4"], LONG)
    assert time.monotonic() - began < LIMIT
    assert_nothing_is_left(processes)


def test_a_rank_that_hangs_while_another_fails_is_ended(model, tmp_path, monkeypatch):
    sabotage(
        tmp_path, monkeypatch, "if rank == 0:\n    time.sleep(1000)\nraise RuntimeError('Connection closed by peer')"
    )
    began = time.monotonic()
    told = r"^rank 1 lost a peer \(Connection closed by peer\); .*; nothing was heard of rank 0$"
    with pytest.raises(CollectiveError, match=told):
        LLM(model, 2, device="cpu")
    assert time.monotonic() - began < 60
    assert not ranks_of(os.getpid())


def test_a_rank_that_stops_is_waited_for_and_named(model, tmp_path, monkeypatch, capfd):
    code = (
        "import datetime\nimport torch.distributed as dist\n"
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)"
    )
    sabotage(tmp_path, monkeypatch, code)
    llm = LLM(model, 2, device="cpu")
    processes = list(llm._ranks.processes)

    def on_token(token):
        os.kill(processes[1].pid, signal.SIGSTOP)

    told = r"^rank 0 waited for a peer that did not come \(.*\); .*; nothing was heard of rank 1$"
    with pytest.raises(CollectiveError, match=told):
        llm.generate("w1", LONG, on_token=on_token)
    assert_nothing_is_left(processes)
    assert capfd.readouterr().err == ""


def start_cli(model, *arguments):
    """A long generation by the command line, its text in a pipe."""
    command = [
        str(CLI),
        "generate",
        "--model",
        str(model),
        "--tp",
        "2",
        "--prompt",
        "w1 w2",
        "--ignore-eos",
        *arguments,
    ]
    # Tests that a script runs in the background are started with Ctrl-C ignored, and processes inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """Generates for as long as a test needs."""
    return save_tiny_llama(tmp_path_factory.mktemp("slow"), context=100_000)


@pytest.mark.parametrize("to_group", [False, True])
def test_ctrl_c_ends_all_ranks(slow_model, to_group):
    process = start_cli(slow_model, "--max-tokens", "90000")
    assert process.stdout.read(1)  # it generates
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    if to_group:  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert err == b""
    assert not any(map(alive, ranks))


def test_ctrl_c_while_loading(slow_model):
    process = start_cli(slow_model)
    ranks = wait_until(lambda: len(pids := ranks_of(process.pid)) == 2 and pids, 60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert not any(map(alive, ranks))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_parent(slow_model, sent):
    process = start_cli(slow_model, "--max-tokens", "90000")
    assert process.stdout.read(1)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(sent)
    process.communicate(timeout=LIMIT)
    wait_until(lambda: not any(map(alive, ranks)))


def test_a_dead_rank_is_one_message_and_exit_code_2(slow_model):
    process = start_cli(slow_model, "--max-tokens", "90000")
    assert process.stdout.read(1)
    ranks = ranks_of(process.pid)
    os.kill(ranks[0], signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert b"tokenweave: error: rank 0 died: killed by SIGKILL" in err
    assert b"Traceback" not in err
    assert not any(map(alive, ranks))


def test_an_exception_of_on_token_closes_the_llm(model):
    llm = LLM(model, 2, device="cpu")
    processes = list(llm._ranks.processes)

    def on_token(token):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate("w1", LONG, on_token=on_token)
    assert_nothing_is_left(processes)


def test_an_llm_that_nobody_closes_ends_with_its_last_reference(model):
    llm = LLM(model, 2, device="cpu")
    processes = list(llm._ranks.processes)
    del llm
    assert_nothing_is_left(processes)


def test_closing_leaves_no_file_and_no_descriptor(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with LLM(model, 2, device="cpu") as llm:  # what is opened once and kept is not counted
        llm.generate("w1", SamplingParams(max_tokens=2))
    before = len(os.listdir("/proc/self/fd"))
    with LLM(model, 2, device="cpu") as llm:
        llm.generate("w1", SamplingParams(max_tokens=2))
        assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(tmp_path.iterdir()) == []


def test_the_first_cause_is_told_from_its_echoes():
    def failure(error):
        try:
            raise error
        except Exception as caught:
            return Failure.of(caught)

    echo = failure(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"))
    peer = failure(CollectiveError("a peer did not arrive"))
    own = failure(ZeroDivisionError("division by zero"))
    assert echo.secondary
    assert peer.secondary
    assert not own.secondary
    assert own.message == "ZeroDivisionError: division by zero"
    assert failure(ModelError("bad file")).error == "ModelError"
    assert _primary({0: echo, 2: peer}) is None
    assert _primary({0: echo, 2: own}) == (2, own)
    assert _primary({0: echo, 1: None}) == (1, None)


def test_the_cause_is_told_from_its_echoes_though_all_come_at_once():
    """Rank 0's echo is looked at first; rank 1 is gone, and rank 2's echo is there, before anyone listens."""
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    ranks = object.__new__(RankProcesses)
    ranks._connections = [ours for ours, _ in pipes]
    ranks._stderr = [SimpleNamespace(quiet=False, quoted=lambda: "", join=lambda: None) for _ in pipes]
    ranks.processes = [subprocess.Popen(["sleep", "60"]) for _ in pipes]
    ranks.kill = lambda: [process.kill() for process in ranks.processes]
    echo = Failure("CollectiveError", "rank 0 lost a peer", "", True)
    ranks.processes[1].kill()
    pipes[1][1].close()
    pipes[2][1].send(("failed", echo))
    try:
        with pytest.raises(RankDied, match="rank 1 died: killed by SIGKILL"):
            ranks._fail(0, echo)
    finally:
        ranks.kill()
        for process in ranks.processes:
            process.wait()
