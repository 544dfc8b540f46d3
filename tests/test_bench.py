"""What all benchmarks share: paired rounds and their statistics, and the start of their ranks."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tokenweave.bench import launch
from tokenweave.bench.timing import median_estimate, paired_rounds, ratio_estimate
from tokenweave.errors import RequestError


def test_every_mode_runs_once_a_round_in_an_order_that_the_seed_decides():
    def run(seed: int) -> list[str]:
        order: list[str] = []
        modes = {name: functools.partial(lambda name: order.append(name) or 1.0, name) for name in "abcd"}
        times = paired_rounds(modes, 25, seed)
        assert {name: len(samples) for name, samples in times.items()} == dict.fromkeys("abcd", 25)
        assert all(set(order[i : i + 4]) == set("abcd") for i in range(0, 100, 4))
        return order

    assert run(1) == run(1) != run(2)
    assert len({tuple(run(3)[i : i + 4]) for i in range(0, 100, 4)}) > 8


def test_fewer_than_20_rounds_are_refused():
    with pytest.raises(RequestError, match="at least 20"):
        paired_rounds({"a": lambda: 1.0}, 19)


def test_the_interval_covers_the_median_about_as_often_as_it_says():
    random = np.random.default_rng(5)
    estimates = [median_estimate(random.normal(10, 1, size=25).tolist(), draws=400) for _ in range(300)]
    assert all(e.low <= e.value <= e.high for e in estimates)
    covered = sum(e.low <= 10 <= e.high for e in estimates) / 300
    assert 0.88 < covered < 0.99


def test_the_interval_leaves_out_a_fortieth_on_either_side():
    """The median of 27 draws from 1 to 27 is at most k where 14 of them or more are: a binomial distribution.

    With 27 the fortieths are far from its steps, which lie at 1.3 and 3.6 %.
    """

    def at_most(k: int) -> float:
        return sum(math.comb(27, i) * (k / 27) ** i * (1 - k / 27) ** (27 - i) for i in range(14, 28))

    low, high = (next(k for k in range(1, 28) if at_most(k) >= part) for part in (1 / 40, 39 / 40))
    estimate = median_estimate(range(1, 28), draws=20_000)
    assert (estimate.low, estimate.value, estimate.high) == (low, 14, high)


def test_a_ratio_is_taken_within_each_round():
    drift = np.linspace(1, 2, 40)  # clocks that fall over the run, by far more than the difference of the two
    ratio = ratio_estimate((9.5 * drift).tolist(), (10 * drift).tolist())
    assert ratio.value == pytest.approx(0.95)
    assert ratio.high < 0.96


def _started(folder: Path, code: str, time_limit: float = 30.0) -> int:
    """The exit code of two ranks that run ``code`` in place of this package."""
    fake = folder / "python"
    fake.write_text(f"#!{sys.executable}\nimport os, sys, time\nrank = int(os.environ['RANK'])\n{code}\n")
    fake.chmod(0o755)
    program = (
        "import sys\nfrom tokenweave.bench import launch\nlaunch.sys.executable = sys.argv[1]\n"
        f"sys.exit(launch.run_ranks([], 2, {time_limit}))"
    )
    return subprocess.run([sys.executable, "-c", program, str(fake)], timeout=60, capture_output=True).returncode


def test_ranks_are_started_watched_and_ended(tmp_path):
    assert not launch.launched()
    assert (
        _started(tmp_path, "sys.exit(0 if os.environ['WORLD_SIZE'] == '2' and os.environ['MASTER_PORT'] else 1)") == 0
    )
    assert _started(tmp_path, "sys.exit(7 * rank)") == 7
    began = time.monotonic()
    assert _started(tmp_path, "sys.exit(3) if rank else time.sleep(60)") == 3
    assert time.monotonic() - began < 30
    assert _started(tmp_path, "time.sleep(60)", time_limit=1.0) == 124
