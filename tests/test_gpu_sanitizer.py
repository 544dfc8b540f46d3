"""compute-sanitizer's memcheck and racecheck over every kernel and option, all ranks in one process on one GPU.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_sanitizer.py

Every allocation is its own here (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memcheck knows its end; between the parts of a
rank's memory the cases have gaps of their own. Two planted mistakes show that the tools see what they are here for.
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
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer")
PROGRAM = Path(__file__).with_name("alone_cases.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the PATH"),
]
PLANTED = {"memcheck": "memory", "racecheck": "race"}  # what each tool has to find
PARTS = {"memcheck": 2, "racecheck": 4}  # processes that share the cases
KERNELS = ("twoshot", "oneshot", "add_rmsnorm")  # torch's own are not looked at, which takes most of the time


def _start(*arguments: str, tool: str | None = None, count: int = 1, log: Path | None = None) -> subprocess.Popen[str]:
    """Its output, also that of a run that is killed later, goes to ``log`` if that is given."""
    command = [sys.executable, str(PROGRAM), *arguments]
    if tool is not None:
        ours = [word for name in KERNELS for word in ("--kernel-name", f"kernel_substring={name}")]
        options = ["--target-processes", "application-only", "--print-limit", "20"]
        command = [TOOL, "--tool", tool, *options, *ours, *command]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    path = os.pathsep.join([str(PROGRAM.parents[1] / "src"), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(visible[:count]),
    }
    with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )


def _end(run: subprocess.Popen[str]) -> None:
    """The tool and the program that it runs, which would go on by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def _compile_all() -> None:
    """A plain run of all cases compiles the kernels, which the sanitized runs then find in the cache."""
    plain = _start()
    try:
        output, _ = plain.communicate(timeout=120)
    finally:
        _end(plain)
    assert plain.returncode == 0, output[-5000:]


def _findings(output: str) -> int:
    """What the tool counted, memcheck's errors or racecheck's hazards of all kinds."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    assert summary, f"no summary:\n{output[-5000:]}"
    return int(summary[1] or summary[2])


@pytest.mark.parametrize("tool", PLANTED)
def test_kernels_under(tool, tmp_path):
    _compile_all()
    parts = [("--part", f"{part}/{PARTS[tool]}") for part in range(PARTS[tool])]
    runs = {of: _start(*of, tool=tool, log=tmp_path / str(n)) for n, of in enumerate(parts)}
    planted = _start("--plant", PLANTED[tool], tool=tool, log=tmp_path / "planted")
    end = time.monotonic() + 240
    try:
        for run in (*runs.values(), planted):
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(max(0.0, end - time.monotonic()))
    finally:
        for run in (*runs.values(), planted):
            _end(run)
    found = _findings((tmp_path / "planted").read_text())
    assert found > 0, f"{tool} does not see a planted mistake:\n{(tmp_path / 'planted').read_text()[-5000:]}"
    for n, (of, run) in enumerate(runs.items()):
        output = (tmp_path / str(n)).read_text()
        print(f"{tool} {of[1]}:", *re.findall(r"^.* s  Alone.*$", output, re.M), sep="\n  ")
        assert _findings(output) == 0, output[:10000]  # the first finding may cause all others
        assert run.returncode == 0, output[-5000:]
    print(f"{tool}: nothing found; of a planted mistake, {found} findings")


@pytest.mark.gpu(count=2)
def test_two_ranks_under_memcheck(tmp_path):
    """Two processes as always, each under the tool: memory of the peer that is mapped, kernels that do wait."""
    _compile_all()
    arguments = [("--rank", str(rank), "--store", str(tmp_path / "store")) for rank in range(2)]
    runs = [_start(*of, tool="memcheck", count=2) for of in arguments]
    try:
        outputs = [run.communicate(timeout=150)[0] for run in runs]
    finally:
        for run in runs:
            _end(run)
    for run, output in zip(runs, outputs, strict=True):
        assert _findings(output) == 0, output[-10000:]
        assert run.returncode == 0, output[-5000:]
