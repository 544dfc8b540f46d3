"""benchmarks/vllm_check: what it takes from the workers of an engine; the engine itself needs GPUs."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

from tokenweave.integrations.vllm.measured import Measured

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "vllm_check"))

import check


def _worker(measured: Measured | None) -> SimpleNamespace:
    choice = SimpleNamespace(measured=measured)
    return SimpleNamespace(
        model_runner=SimpleNamespace(model=SimpleNamespace(tokenweave=SimpleNamespace(choice=choice)))
    )


def test_what_the_engine_measured_at_its_start_is_recorded():
    """Under the names of the published file; a mode that was not measured at a size has none."""
    times = [(14.678, 12.5, math.inf), (38.0, 23.01, 22.17)]
    assert check._measured(_worker(Measured.of([256, 2048], times))) == {
        "256": {"stock": 14.68, "fused": 12.5},
        "2048": {"stock": 38.0, "fused": 23.01, "woven": 22.17},
    }
    assert check._measured(_worker(None)) == {}
