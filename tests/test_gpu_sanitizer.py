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

Under racecheck that ring at times stands still for good: with one block, vectors in float32 and a bias 3 of 21 processes, beside each
other and alone, and none of 12 of the ring as it is shipped, which is reported but ends (docs/collective.md). Its warps have met again (BSYNC, WARPSYNC in its
SASS) wherever they wait for others, so what holds it is taken to be the tool, and a process that is not done in time is started once more.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer")
PROGRAM = Path(__file__).with_name("alone_cases.py")
LIMIT = 180  # seconds for all processes of a test; without hazards a case of the ring takes racecheck 10 to 15
AGAIN = 90  # seconds for those that are started once more, with the GPU almost to themselves
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(LIMIT + AGAIN + 60),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the PATH"),
]
KERNELS = ("twoshot", "oneshot", "add_rmsnorm")  # torch's own are not looked at, which takes most of the time


@dataclass(frozen=True)
class Check:
    """A tool, how many processes share the cases, their further arguments, and the planted mistakes that it has to find.

    ``limits``: seconds for all processes, and then for those that are started once more.
    """

    tool: str
    processes: int
    arguments: tuple[str, ...]
    mistakes: tuple[str, ...]
    limits: tuple[int, ...] = (LIMIT,)


CHECKS = (
    Check("memcheck", 4, (), ("memory",)),
    # a case of the ring at most in each
    Check("racecheck", 11, ("--each-reader-frees",), ("sum", "refill"), (LIMIT, AGAIN)),
)


@dataclass(frozen=True)
class Command:
    """The program's arguments, the tool that it runs under, and the file for what both print."""

    log: Path
    tool: str
    arguments: tuple[str, ...]
    gpus: int = 1


@dataclass(frozen=True)
class Run:
    """A process of a command, and what it prints."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def late(self) -> bool:
        """Whether a limit ended it."""
        return self.process.returncode == -signal.SIGKILL


def _run(commands: Sequence[Command], limits: Sequence[int] = (LIMIT,)) -> list[Run]:
    """All at once; one that a limit ended is started again, with a file of its own, while there is a further limit."""
    runs: dict[Command, Run] = {}
    for number, limit in enumerate(limits):
        again = [command for command in commands if command not in runs or runs[command].late]
        if number and again:
            print(f"started again: {[command.log.name for command in again]}, which were not done in {limits[0]} s")
        started = {command: _start(command, command.log.with_suffix(f".{number}.log")) for command in again}
        _wait(list(started.values()), limit)
        runs |= started
    return [runs[command] for command in commands]


def _start(command: Command, log: Path) -> Run:
    ours = [word for name in KERNELS for word in ("--kernel-name", f"kernel_substring={name}")]
    options = ["--tool", command.tool, "--target-processes", "application-only", "--print-limit", "20"]
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
        "CUDA_VISIBLE_DEVICES": ",".join(visible[: command.gpus]),
    }
    words = [TOOL, *options, *ours, sys.executable, str(PROGRAM), *command.arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    return Run(process, log)


def _wait(runs: list[Run], limit: int) -> None:
    """Until all have ended, or the limit ends them: the tools, and the programs under them, which would go on alone."""
    end = time.monotonic() + limit
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
    late = [run for run in runs if run.late]
    last = "\n".join(f"{run.log}:\n{run.log.read_text()[-3000:]}" for run in late)
    assert not late, f"{len(late)} of {len(runs)} processes were not done in time:\n{last}"


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
    parts = [("--part", f"{part}/{check.processes}", *check.arguments) for part in range(check.processes)]
    planted = [("--plant", name) for name in check.mistakes]
    commands = [Command(tmp_path / str(n), check.tool, part) for n, part in enumerate(parts)]
    commands += [Command(tmp_path / name, check.tool, (word, name)) for word, name in planted]
    runs = _run(commands, check.limits)
    _expect_ends(runs)
    found = {name: _findings(run) for name, run in zip(check.mistakes, runs[len(parts) :], strict=True)}
    assert all(found.values()), f"{check.tool} does not see a planted mistake: {found}, {tmp_path}"
    for run in runs[: len(parts)]:
        _expect_nothing(run)
    print(f"{check.tool}: nothing found; of planted mistakes, {found}")


@pytest.mark.gpu(count=2)
def test_two_ranks_under_memcheck(tmp_path):
    """Two processes as always, each under the tool: memory of the peer that is mapped, kernels that do wait."""
    store = str(tmp_path / "store")
    arguments = [("--rank", str(rank), "--store", store) for rank in range(2)]
    runs = _run([Command(tmp_path / f"rank{rank}", "memcheck", words, 2) for rank, words in enumerate(arguments)])
    _expect_ends(runs)
    for run in runs:
        _expect_nothing(run)
