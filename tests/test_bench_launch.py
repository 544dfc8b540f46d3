"""Ranks of a benchmark or a tuning run end together, without noise, and keep what they have."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenweave.errors import ProfileError
from tokenweave.planning.profile_table import read_table

TESTS = Path(__file__).parent

# In place of GPUs: times of an analytical machine, some milliseconds each, exchanged over gloo.
TUNE_WITHOUT_GPUS = """
import functools, sys, time
if "-c" not in sys.orig_argv[1:2]:
    import tokenweave.cli.tune as cli

    def tune_here(args, me, began):
        from tokenweave.tuning.run import tune
        from tuning_cases import FakePieces, h200, identity_of, setting_of

        class Slow(FakePieces):
            def measure(self, point):
                if me.rank == 0 and len(self.asked) == 20:
                    print("measuring", flush=True)
                time.sleep(0.005)
                return super().measure(point)

        machine = h200()
        tune(setting_of(machine), Slow(machine), identity_of(), args.out, me.group, me.device, time.monotonic, 1e9,
             lambda *_: None, lambda tuner: {})
        return 0

    cli._tune = tune_here
    cli.run_on_ranks = functools.partial(cli.run_on_ranks, device="cpu")
"""


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts ``tokenweave tune``, on ranks of its own and without GPUs; returns when it measures."""
    (tmp_path / "sitecustomize.py").write_text(TUNE_WITHOUT_GPUS)
    src = TESTS.parent / "src"  # where the package is not installed
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, TESTS, src))))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokenweave", "tune", "--model", "Llama-3.1-8B", *words]
        # Tests that a script runs in the background are started with what keyboards send ignored, and processes inherit that.
        before = {
            number: signal.signal(number, handler)
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL))
        }
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n", process.communicate()[1]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "SIGQUIT"])
def test_an_interrupted_tuning_run_says_where_it_keeps_what_it_has_and_nothing_else(
    tmp_path: Path, tune, how: str
) -> None:
    process = tune("--out", str(tmp_path / "table.json"))
    began = time.monotonic()
    if how == "Ctrl-C":  # as a terminal does it
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[how])
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == {"Ctrl-C": 130, "SIGTERM": 143, "SIGQUIT": 131}[how], err
    partial = tmp_path / "table.json.partial"
    said = re.fullmatch(rf"tune: interrupted; (\d+) points are in {re.escape(str(partial))}\n", err)
    assert said, err
    with pytest.raises(ProfileError, match=f"interrupted after {said[1]} points"):
        read_table(partial)
    assert [path.name for path in tmp_path.glob("*table*")] == ["table.json.partial"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends a process with its parent")
def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path, tune) -> None:
    process = tune("--out", str(tmp_path / "table.json"))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.kill()
    deadline = time.monotonic() + 10
    while any(
        Path(f"/proc/{rank}/cmdline").exists() and Path(f"/proc/{rank}/cmdline").read_bytes() for rank in children
    ):
        assert time.monotonic() < deadline, "they outlive it"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends a process with its parent")
def test_a_rank_whose_parent_is_gone_before_it_could_ask_for_its_end_ends_too() -> None:
    code = "from tokenweave.peers import end_with\nend_with({})\nprint('goes on')"
    for parent, goes_on in ((os.getpid(), True), (os.getppid(), False)):
        command = [sys.executable, "-c", code.format(parent)]
        done = subprocess.run(command, timeout=60, capture_output=True, text=True)
        assert (done.stdout == "goes on\n") == goes_on == (done.returncode == 0), done.stderr


def run_ranks_of(code: str, tmp_path: Path, time_limit: float, grace: float) -> subprocess.CompletedProcess[str]:
    """``launch.run_ranks`` of three ranks that run ``code``, with the path of a file as their argument."""
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{code}")
    fake.chmod(0o755)
    program = (
        f"import sys\nfrom tokenweave.bench import launch\nlaunch.sys.executable, launch._GRACE = sys.argv[1], {grace}\n"
        f"sys.exit(launch.run_ranks([{str(tmp_path / 'pid')!r}], 3, {time_limit}))"
    )
    return subprocess.run([sys.executable, "-c", program, str(fake)], timeout=60, capture_output=True, text=True)


def test_a_rank_that_was_killed_is_named_since_it_could_not_speak_for_itself(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ['RANK'] == '2':\n    time.sleep(60)\ntime.sleep(0.5)\nsys.exit(2)\n"
    )
    done = run_ranks_of(code, tmp_path, 30, grace=1.5)
    assert done.returncode == 128 + signal.SIGKILL
    killed = "rank 1 was killed by SIGKILL, as the kernel does where memory runs out"
    assert done.stderr == f"tokenweave: {killed}; the others are ended\n"


def test_ranks_that_do_not_listen_are_ended_too(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[-1] + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    began = time.monotonic()
    done = run_ranks_of(code, tmp_path, 1.5, grace=5)
    assert done.returncode == 124
    assert time.monotonic() - began < 20, "they are waited for together, not one by one"
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads((tmp_path / f"pid{rank}").read_text()), 0)
