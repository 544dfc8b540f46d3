"""The wave model against 3840 GEMMs measured on an H200 and 4096 traced kernels (benchmarks/gemm_waves), and cuts on those times."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenweave.models import read_config
from tokenweave.planning import GPUS, Machine, Planner
from tokenweave.planning.gemms import gemm_us, library_kernel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "gemm_waves"))

import compare  # noqa: E402
import measure  # noqa: E402

H200 = GPUS["h200"]


@lru_cache
def result() -> dict[str, Any]:
    return json.loads(compare.RESULT.read_text())


def test_predicted_gemms_are_close_to_measured() -> None:
    within = {(0, 1, None): 0.02, (8, 1, 124): 0.03, (4, 4, 128): 0.03, (0, 1, 124): 0.03, (8, 1, None): 0.06}
    found = compare.errors(result())
    for condition, limit in within.items():
        assert np.median(abs(found[condition])) < limit, condition
    free = found[0, 1, None]
    assert len(free) == 1024
    assert np.quantile(abs(free), 0.9) < 0.06
    assert abs(np.median(free)) < 0.01


def test_expected_kernels_are_those_that_were_traced() -> None:
    traced, tiles, blocks = compare.same_kernels(result())
    assert traced == 4096
    assert tiles > 0.6 * traced
    assert blocks > 0.9 * traced


def test_tiles_are_counted_from_three_waves_on() -> None:
    """A memset of the counter tells; and without a target, held SMs double the times of the others alone."""
    for name, traces in result()["kernels"].items():
        shape = result()["shapes"][name]
        for trace in traces:
            for rows, memset in zip(trace["rows"], trace["memset"], strict=True):
                if rows % 512 or trace["target"] is not None:
                    continue
                kernel = library_kernel(rows, shape["n"], shape["k"], H200)
                if kernel.waves <= 1 or kernel.waves > 4:
                    assert memset == (kernel.waves > 4), (name, rows)
    for rows, slower in ((2048, 2), (8192, 1.3)):  # qkv: two waves; six
        free, beside = (float(gemm_us(rows, 3072, 4096, H200, held=held)) for held in (0, 8))
        told = float(gemm_us(rows, 3072, 4096, H200, held=8, sms=124))
        assert beside / free == pytest.approx(slower, rel=0.1)
        assert told / free < 1.16
        assert told == pytest.approx(float(gemm_us(rows, 3072, 4096, H200, sms=124)))


def test_sums_are_split_where_rows_are_few_and_sums_long() -> None:
    assert library_kernel(64, 2048, 14336, H200).split == 2
    assert library_kernel(4096, 8192, 14336, H200).split == 1


def test_a_profilers_events_are_told_apart_at_the_marks() -> None:
    def event(at: int, name: str, cat: str = "kernel", grid: tuple[int, ...] = (2, 66, 1)) -> dict[str, Any]:
        return {"ts": at, "name": name, "cat": cat, "args": {"grid": list(grid)}}

    events = [
        event(5, "void FillFunctor<int>()"),
        event(1, "void FillFunctor<int>()"),
        event(0, "nvjet_sm90_tst_64x32(int)", grid=(8, 12, 1)),
        event(3, "Memset (Device)", "gpu_memset"),
        event(4, "nvjet_sm90_tst_192x192"),
        {"ts": 2, "name": "on the host", "cat": "cpu_op"},
    ]
    found = measure.kernels_of(measure.split_at_marks(events, 2))
    assert found == {
        "kernel": ["nvjet_sm90_tst_64x32", "nvjet_sm90_tst_192x192"],
        "blocks": [96, 132],
        "memset": [0, 1],
    }
    with pytest.raises(RuntimeError, match="2 of 3 GEMMs"):
        measure.split_at_marks(events, 3)


# --- cuts on measured times


@dataclasses.dataclass(frozen=True)
class Measured(Machine):
    """The H200 with GEMM times looked up in the result: rows in between take as long as the next that were measured."""

    measured = True

    @property
    def ctas(self) -> tuple[int | None, ...]:
        return (4, 8)

    def gemm_us(self, m: Any, n: int, k: int, *, sms: int | None = None, held: int = 0, experts: int = 1) -> Any:
        held = {124: 8, 128: 4}.get(sms or 0, held)
        if (times := measured_times().get((n, k, held, sms))) is None:
            return super().gemm_us(m, n, k, sms=sms, held=held, experts=experts)
        rows, us = times
        index = np.searchsorted(rows, m)
        return np.where(index < len(us), us[np.minimum(index, len(us) - 1)], us[-1] * np.asarray(m) / rows[-1])


@lru_cache
def measured_times() -> dict[tuple[int, int, int, int | None], tuple[np.ndarray, np.ndarray]]:
    shapes = result()["shapes"]
    return {
        (shapes[row["shape"]]["n"], shapes[row["shape"]]["k"], row["held"], row["target"]): (
            np.array(row["rows"]),
            np.array(row["us"]),
        )
        for row in result()["times"]
        if (row["held"], row["cluster"]) != (4, 1)
    }


def test_cuts_cost_measured_gemms_half_of_what_equal_ones_do() -> None:
    """Both halves against the whole, no communication, 512 to 2048 tokens in steps of 64."""
    equal, chosen = [], []
    for name in ("Llama-3.1-8B", "Llama-3.3-70B"):
        machine = Measured(H200, 2, "p2p")
        planner = Planner(read_config(name), mode="auto", costs=machine)

        def layer_us(rows: int, machine: Machine = machine, planner: Planner = planner) -> float:
            return sum(float(machine.gemm_us(rows, gemm.n, gemm.k)) for gemm in planner.model.gemms)

        for tokens in range(512, 2049, 64):
            split = planner.plan(tokens, mode="woven").split
            assert split is not None
            half, whole = -(-tokens // 128) * 64, layer_us(tokens)
            costs = [layer_us(cut) + layer_us(tokens - cut) - whole for cut in (half, split)]
            assert costs[1] <= costs[0] + 1e-6, (name, tokens, split)
            equal.append(costs[0] / whole)
            chosen.append(costs[1] / whole)
    assert np.mean(chosen) <= np.mean(equal) / 2
