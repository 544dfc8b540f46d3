"""What the published tuned tables predict of the steps that were measured beside them (scripts/verify_tables.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(path for path in RESULTS.glob("*-verify-*.json") if "by-parts" not in path.name)


def test_the_published_comparison_is_of_the_planner_as_it_is() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "verify_tables.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sequential_and_woven_steps_are_predicted_within_8_percent(path: Path) -> None:
    result = json.loads(path.read_text("utf-8"))
    assert len(result["checks"]) == 12
    for mode in ("sequential", "woven"):
        assert result["summary"][mode]["largest"] < 0.08
        assert result["summary"][mode]["median"] < 0.04
    assert result["summary"]["choice"]["median"] < 0.01  # slower than the fastest plan that a sweep found
    assert result["summary"]["choice"]["largest"] < 0.04


def test_there_are_such_files() -> None:
    assert {path.name for path in FILES} >= {"h200x2-verify-llama-3.1-8b.json", "h200x2-verify-llama-3.3-70b.json"}
