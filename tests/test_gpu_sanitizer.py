"""compute-sanitizer's memcheck and racecheck over every kernel and option, all ranks in one process on one GPU.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_sanitizer.py

Every allocation is its own here (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memcheck knows its end; between the parts of a
rank's memory the cases have gaps of their own. Two planted mistakes show that the tools see what they are here for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer")
PROGRAM = Path(__file__).with_name("alone_cases.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the PATH"),
]
PLANTED = {"memcheck": "memory", "racecheck": "race"}  # what each tool has to find


def _start(*arguments: str, tool: str | None = None, count: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    if tool is not None:
        command = [TOOL, "--tool", tool, "--target-processes", "application-only", "--print-limit", "20", *command]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    path = os.pathsep.join([str(PROGRAM.parents[1] / "src"), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": ",".join(visible[:count]),
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def _findings(output: str) -> int:
    """What the tool counted, memcheck's errors or racecheck's hazards of all kinds."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    assert summary, f"no summary:\n{output[-5000:]}"
    return int(summary[1] or summary[2])


def test_kernels_under_memcheck_and_racecheck():
    plain = _start()  # compiles all kernels, which the sanitized runs then find in the cache
    output, _ = plain.communicate(timeout=120)
    assert plain.returncode == 0, output[-5000:]
    runs = {(tool, False): _start(tool=tool) for tool in PLANTED}
    runs |= {(tool, True): _start("--plant", what, tool=tool) for tool, what in PLANTED.items()}
    try:
        outputs = {key: run.communicate(timeout=200)[0] for key, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()
    for (tool, planted), output in outputs.items():
        print(f"{tool}, planted mistake: {planted}: {_findings(output)} findings")
        if planted:
            assert _findings(output) > 0, f"{tool} does not see a planted mistake:\n{output[-5000:]}"
        else:
            assert _findings(output) == 0, output[:10000]  # the first finding may cause all others
            assert runs[tool, planted].returncode == 0, output[-5000:]


@pytest.mark.gpu(count=2)
def test_two_ranks_under_memcheck(tmp_path):
    """Two processes as always, each under the tool: memory of the peer that is mapped, kernels that do wait."""
    plain = _start()
    output, _ = plain.communicate(timeout=120)
    assert plain.returncode == 0, output[-5000:]
    arguments = [("--rank", str(rank), "--store", str(tmp_path / "store")) for rank in range(2)]
    runs = [_start(*of, tool="memcheck", count=2) for of in arguments]
    try:
        outputs = [run.communicate(timeout=150)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, output in zip(runs, outputs, strict=True):
        assert _findings(output) == 0, output[-10000:]
        assert run.returncode == 0, output[-5000:]
