"""Ranks of a benchmark or a tuning run end together, quietly, and keep what they have."""

from __future__ import annotations

import json
import os
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
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{TESTS}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokenweave", "tune", "--model", "Llama-3.1-8B", *words]
        # Tests that a script runs in the background are started with Ctrl-C ignored, and processes inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        finally:
            signal.signal(signal.SIGINT, before)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n", process.communicate()[1]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_tuning_run_keeps_what_it_has_and_says_nothing(tmp_path: Path, tune, how: str) -> None:
    process = tune("--out", str(tmp_path / "table.json"))
    began = time.monotonic()
    if how == "Ctrl-C":  # as a terminal does it
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == {"Ctrl-C": 130, "SIGTERM": 143}[how], err
    assert err == ""
    with pytest.raises(ProfileError, match=r"interrupted after \d+ points"):
        read_table(tmp_path / "table.json.partial")
    assert [path.name for path in tmp_path.glob("*table*")] == ["table.json.partial"]


def test_ranks_that_do_not_listen_are_ended_too(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    code = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[-1] + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    fake.write_text(f"#!{sys.executable}\n{code}")
    fake.chmod(0o755)
    program = (
        "import sys\nfrom tokenweave.bench import launch\nlaunch.sys.executable = sys.argv[1]\n"
        f"sys.exit(launch.run_ranks([{str(tmp_path / 'pid')!r}], 3, 1.5))"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, str(fake)], timeout=60, capture_output=True)
    assert done.returncode == 124
    assert time.monotonic() - began < 20, "they are waited for together, not one by one"
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads((tmp_path / f"pid{rank}").read_text()), 0)
