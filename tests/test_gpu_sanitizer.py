"""compute-sanitizer's memcheck and racecheck over every kernel and option, all ranks in one process on one GPU.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_sanitizer.py [--basetemp FOLDER]

Every allocation is its own here (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memcheck knows its end; between the parts of a
rank's memory the cases have gaps of their own. Planted mistakes show that the tools see what they are here for. What each
process printed stays in pytest's temporary folder, also where a limit or a signal ended it.

racecheck goes over one kernel as it is not shipped. In the ring, the threads that read a stage meet at a named barrier, one
of them then arrives at the stage's mbarrier, and the producer waits for that arrival before it copies the next row there.
racecheck (2025.3.1 of CUDA 13.0, 2026.4.0 of 13.5) does not take that arrival for the others' too and reports every refill. So
it gets the ring from sources in which each reader arrives for itself (``kernel_edits.EACH_READER_FREES``), the only thing
that differs. What it cannot say a word about is the one arrival for all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer")
PROGRAM = Path(__file__).with_name("alone_cases.py")
LIMIT = 180  # seconds for all processes of a test; without hazards a case of the ring takes racecheck 10 to 15
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(LIMIT + 60),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the PATH"),
]
KERNELS = ("twoshot", "oneshot", "add_rmsnorm")  # torch's own are not looked at, which takes most of the time


@dataclass(frozen=True)
class Check:
    """A tool, how many processes share the cases, their further arguments, and the planted mistakes that it has to find."""

    tool: str
    processes: int
    arguments: tuple[str, ...]
    mistakes: tuple[str, ...]


CHECKS = (
    Check("memcheck", 4, (), ("memory",)),
    Check("racecheck", 11, ("--each-reader-frees",), ("sum", "refill")),  # a case of the ring at most in each
)


@dataclass(frozen=True)
class Run:
    """A process under a tool, and what it prints."""

    process: subprocess.Popen[bytes]
    log: Path


def _start(log: Path, tool: str, *arguments: str, gpus: int = 1) -> Run:
    ours = [word for name in KERNELS for word in ("--kernel-name", f"kernel_substring={name}")]
    options = ["--tool", tool, "--target-processes", "application-only", "--print-limit", "20"]
    options += [
        "--report-api-errors",
        "no",
    ]  # torch asks for memory that it may not get (fabric handles); ours are checked
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    path = os.pathsep.join([str(PROGRAM.parents[1] / "src"), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(visible[:gpus]),
    }
    command = [TOOL, *options, *ours, sys.executable, str(PROGRAM), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return Run(process, log)


def _wait(runs: list[Run]) -> None:
    """Until all have ended, or the limit ends them: the tools, and the programs under them, which would go on alone."""
    end = time.monotonic() + LIMIT
    try:
        for run in runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(max(0.0, end - time.monotonic()))
    finally:
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


def _expect_ends(runs: list[Run]) -> None:
    """All have ended by themselves; first shows how far each has come."""
    for run in runs:
        print(f"{run.log}:", *re.findall(r"^ *[0-9.]+ s  .*$", run.log.read_text(), re.M), sep="\n  ")
    late = [run for run in runs if run.process.returncode == -signal.SIGKILL]
    last = "\n".join(f"{run.log}:\n{run.log.read_text()[-3000:]}" for run in late)
    assert not late, f"{len(late)} of {len(runs)} processes were not done after {LIMIT} s:\n{last}"


def _findings(run: Run) -> int:
    """What the tool counted, memcheck's errors or racecheck's hazards of all kinds."""
    output = run.log.read_text()
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    assert summary, f"no summary: {run.log}\n{output[-5000:]}"
    return int(summary[1] or summary[2])


def _expect_nothing(run: Run) -> None:
    assert _findings(run) == 0, run.log.read_text()[:10000]  # the first finding may cause all others
    assert run.process.returncode == 0, run.log.read_text()[-5000:]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.tool)
def test_kernels_under(check, tmp_path):
    parts = [("--part", f"{part}/{check.processes}") for part in range(check.processes)]
    runs = [_start(tmp_path / f"{n}.log", check.tool, *part, *check.arguments) for n, part in enumerate(parts)]
    planted = {name: _start(tmp_path / f"{name}.log", check.tool, "--plant", name) for name in check.mistakes}
    _wait([*runs, *planted.values()])
    _expect_ends([*runs, *planted.values()])
    found = {name: _findings(run) for name, run in planted.items()}
    assert all(found.values()), f"{check.tool} does not see a planted mistake: {found}, {tmp_path}"
    for run in runs:
        _expect_nothing(run)
    print(f"{check.tool}: nothing found; of planted mistakes, {found}")


@pytest.mark.gpu(count=2)
def test_two_ranks_under_memcheck(tmp_path):
    """Two processes as always, each under the tool: memory of the peer that is mapped, kernels that do wait."""
    store = str(tmp_path / "store")
    runs = [
        _start(tmp_path / f"rank{rank}.log", "memcheck", "--rank", str(rank), "--store", store, gpus=2)
        for rank in range(2)
    ]
    _wait(runs)
    _expect_ends(runs)
    for run in runs:
        _expect_nothing(run)
