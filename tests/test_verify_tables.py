"""What the published tuned tables predict of the steps that were measured beside them (scripts/verify_tables.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenweave.models import read_config
from tokenweave.planning import Planner, machine_of
from tokenweave.planning.batch import Batch, runs_of
from tokenweave.planning.cost import FINE_ROWS, FINE_STEP
from tokenweave.planning.planner import STEPS_TIE
from tokenweave.planning.profile import Profile
from tokenweave.planning.profile_table import read_table

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


def _planner(name: str) -> Planner:
    table, config = read_table(RESULTS / f"h200x2-tune-{name.lower()}.json"), read_config(name)
    return Planner(config, mode="auto", costs=Profile(table, config, machine_of("h200", 2, "p2p")))


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3.3-70B"])
def test_a_cut_near_the_middle_wins_where_the_tables_hardly_tell(name: str) -> None:
    """Whole steps were measured cut in the middle; what another cut takes is inferred, and was wrong by more than that."""
    planner = _planner(name)
    for tokens in range(512, 4097, 64):
        candidates = planner._candidates(Batch(runs_of([(tokens, 0)])))
        assert candidates is not None
        cuts, _, times = candidates
        split = planner.plan(tokens, mode="woven").split
        assert split is not None
        near = times <= times.min() * (1 + STEPS_TIE)
        assert abs(2 * split - tokens) == abs(2 * cuts[near] - tokens).min()
        assert times[cuts == split].min() <= times.min() * (1 + STEPS_TIE)
    assert planner.plan(1024, mode="woven").split == 512


def test_few_rows_take_what_was_measured_and_straight_lines_between() -> None:
    planner = _planner("Llama-3.3-70B")
    assert planner.model.costs.measured

    def mlp_us(rows: int) -> float:
        return float(planner.model.stage_us(rows, (0, 0))[1][0])

    for low in range(64, FINE_ROWS, FINE_STEP):
        for share in (0, 8, 16, 31):
            straight = mlp_us(low) + (mlp_us(low + FINE_STEP) - mlp_us(low)) * share / FINE_STEP
            assert mlp_us(low + share) == pytest.approx(straight)
    assert mlp_us(160) < 0.9 * mlp_us(192), "two of its GEMMs were measured 15 % faster"
