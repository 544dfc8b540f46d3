"""The two passes of ``tokenweave bench latency``: who is chosen, and by which times it is shown."""

import pytest
import torch

from tokenweave.bench.latency.bench import LatencyBench
from tokenweave.bench.latency.finals import decided, finalists
from tokenweave.bench.latency.report import Measured, rows_of
from tokenweave.bench.steps import Variant


def _variants(*keys):
    return [Variant(*key.split(" ", 1), None, lambda: torch.ones(1)) for key in keys]


def _noisy(us, rounds=20, by=0.5):
    return [us + by * (-1) ** i for i in range(rounds)]


def test_the_first_pass_chooses_and_the_second_gives_the_figures():
    variants = _variants("sequential nccl", "sequential torch", "sequential odd", "fused planned", "auto planned")
    first = {
        "sequential nccl": [100.0] * 10,
        "sequential torch": [90.0] * 10,  # by chance
        "sequential odd": [91.0] * 10,
        "fused planned": [95.0] * 10,
    }
    among = finalists(variants, first)
    assert [variant.name for variant in among] == ["torch", "odd", "planned", "planned"]
    second = {
        "sequential torch": _noisy(101),
        "sequential odd": _noisy(101.1),
        "fused planned": _noisy(95.2),
        "auto planned": _noisy(95),
    }
    finals = decided(among, first, second)
    assert finals.chosen["sequential"].name == "torch"
    assert list(finals.chosen) == ["sequential", "fused", "auto"]
    assert finals.best_single == "fused", "it is better by more than chance: the first pass was wrong of sequential"
    measured = Measured(
        64, 1, 1, finals, _Any({}), _Any(None), _Any({}), dict.fromkeys(("power_w", "sm_mhz")), _Any(None)
    )
    rows = {row["mode"]: row for row in rows_of(measured)}
    assert rows["sequential"]["ms"] == pytest.approx(0.101)
    assert rows["fused"]["speedup"]["value"] == pytest.approx(101 / 95.2, abs=0.01)
    assert rows["auto"]["best_single"]["mode"] == "fused"
    assert rows["auto"]["best_single"]["ratio"]["value"] == pytest.approx(95.2 / 95, abs=0.01)
    assert rows["fused"]["best_single"] is None


class _Any(dict):
    def __init__(self, value):
        self._value = value

    def __missing__(self, key):
        return self._value


def test_a_finalist_that_leads_by_chance_does_not_replace_the_chosen_one():
    variants = _variants("sequential a", "sequential b")
    first = {"sequential a": [90.0] * 10, "sequential b": [91.0] * 10}
    for b, chosen in (([89.9, 91] * 10, "a"), ([88.0, 88.5] * 10, "b")):
        finals = decided(variants, first, {"sequential a": [90.0] * 20, "sequential b": b})
        assert finals.chosen["sequential"].name == chosen
    assert decided([], {}, {}).best_single is None


def test_a_sweep_hands_on_what_is_near_its_fastest():
    bench_of = object.__new__(LatencyBench)
    bench_of._result, bench_of._say = {"sweep": []}, lambda line: None
    variants = _variants(*(f"fused {name}" for name in "abcde"))
    bench_of._quick = lambda candidates: {"a": 103.0, "b": 100.0, "c": 101.0, "d": 101.5, "e": 101.6}
    assert [variant.name for variant in bench_of._best(variants)] == ["b", "c", "d"]
    assert len(bench_of._result["sweep"]) == 5
    bench_of._quick = lambda candidates: {"a": 103.0, "b": 90.0, "c": 101.0, "d": 101.5, "e": 101.6}
    assert [variant.name for variant in bench_of._best(variants)] == ["b"]
