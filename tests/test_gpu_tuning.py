"""The tuner on real GPUs: a model's table in seconds, and what it says is what GPUs do.

Two ranks by default; TOKENWEAVE_TEST_RANKS=4 runs the same on four.
"""

import subprocess
import sys
import time

import pytest
import torch

from gpu_cases import RANKS
from tokenweave.planning.profile_points import CollectivePoint, GemmPoint, OverheadPoint, StagePoint, StreamPoint
from tokenweave.planning.profile_table import read_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} NVIDIA GPUs"),
]


def test_a_table_is_whole_and_plausible(tmp_path):
    path = tmp_path / "table.json"
    command = ["tune", "--model", "Llama-3.1-8B", "--tp", str(RANKS), "--max-tokens", "2048", "--seconds", "30"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tokenweave", *command, "--out", str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 80 + 5 * RANKS  # each rank is a process that has to start
    table = read_table(path)
    assert table.info["uncovered"] < 0.02 * len(table.times)
    times = table.times
    for name, columns in (("qkv", 6144), ("gate_up", 28672), ("down", 14336)):
        rate = 2 * 4096 * columns / RANKS * 2048 / times[GemmPoint(name, 2048)] / 1e6  # TFLOP/s
        peak = 1000 if torch.cuda.get_device_capability() == (9, 0) else 3000
        assert 100 < rate < peak, (name, rate)
    assert 0.5 < times[OverheadPoint("kernel")] < 10
    assert times[OverheadPoint("fork")] > times[OverheadPoint("kernel")]
    assert times[CollectivePoint("oneshot", 1)] < times[CollectivePoint("default", 2048)]
    for name, gemms in (("attention", ("qkv", "o")), ("mlp", ("gate_up", "down"))):
        parts = sum(times[GemmPoint(gemm, 2048)] for gemm in gemms)
        assert parts * 0.9 < times[StagePoint(name, 2048)] < parts * 1.6
    assert times[StreamPoint("norm", 2048)] < times[StreamPoint("activation", 2048)] * 2
