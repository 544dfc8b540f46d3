"""What docs/collective.md says in words of figures is what the files in benchmarks/results hold."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def test_what_is_said_of_four_ranks_was_measured():
    """When NCCL's two halves are the fastest baseline, and what the links carry."""
    fastest, gbs, alone = {}, {}, {}
    for hidden in (4096, 8192):
        rows = json.loads((RESULTS / f"h200x4-kernel-{hidden}.json").read_text("utf-8"))["rows"]
        for row in rows:
            if row["hidden"] != hidden:
                continue
            key = hidden, row["tokens"]
            if row["kind"] == "rival":
                fastest[key] = min(fastest.get(key, (row["us"], row["impl"])), (row["us"], row["impl"]))
            elif row["kind"] == "ours":
                gbs[key] = max(gbs.get(key, 0), row["gb_s"])
            elif row["impl"] == "nccl all-reduce alone":
                alone[key] = row["gb_s"]
    halves = {key for key, (_, name) in fastest.items() if name.startswith("nccl reduce-scatter")}
    assert halves == {(4096, 16384), (4096, 32768), (8192, 8192), (8192, 16384), (8192, 32768)}
    assert [round(gbs[4096, tokens]) for tokens in (16384, 32768)] == [320, 322]
    assert {key for key in alone if key[0] == 4096 and alone[key] > gbs[key]} == {(4096, 16384), (4096, 32768)}
    assert round(alone[4096, 32768]) == 339


def test_what_is_said_of_freeing_a_stage_was_measured():
    """In "How it is tested": microseconds of 16,384 rows."""
    rows = json.loads((RESULTS / "h200x2-ring-freeing.json").read_text("utf-8"))["rows"]
    us = {row["ctas"]: row for row in rows if row["tokens"] == 16384}
    for way, figures in {
        "one_arrival_fenced": (1074, 545),  # as it is shipped
        "one_arrival": (1084, 550),
        "reader_arrivals": (1109, 562),
        "reader_arrivals_all_fence": (1120, 567),
    }.items():
        assert tuple(round(us[ctas][way]) for ctas in (4, 8)) == figures
    for ctas in (12, 16):
        times = [time for name, time in us[ctas].items() if name not in ("tokens", "hidden", "ctas")]
        assert len(times) == 6
        assert max(times) / min(times) < 1.004
