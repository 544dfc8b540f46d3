"""Measures which SM targets leave a GEMM room beside a collective's blocks, by their number and cluster. One GPU, seconds.

PYTHONPATH=src python3 benchmarks/gemm_waves/fits.py OUT.json

A GEMM told of ``target`` SMs is timed alone and beside ``held`` blocks that hold an SM each. Where all of its clusters find
a place both times are alike; where some don't, they wait for another wave. The shapes are such that a wave is most of the
time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import SHAPES, Bench, Condition

from tokenweave.bench.environment import describe

GEMMS = (("8B qkv", 2048), ("8B qkv", 3072), ("8B down", 2048), ("8B down", 1280), ("8B gate_up", 1024), ("8B o", 2048))
HELD = (2, 4, 6, 8, 12, 16, 24)
CLUSTERS = (1, 2, 4, 8)
FEWER = (0, 2, 4, 8, 12)  # than all SMs less the held ones


def main() -> None:
    out = Path(sys.argv[1])
    start = time.monotonic()
    bench = Bench()
    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
    operands = {name: bench.operands(*SHAPES[name]) for name in dict.fromkeys(name for name, _ in GEMMS)}

    def us(name: str, rows: int, how: Condition) -> float:
        x, weights, y = operands[name]
        return bench.gemm_us(x[:rows], weights, y[:rows], how)

    free = {(name, rows): us(name, rows, Condition(0, 1, None, 0)) for name, rows in GEMMS}
    told: dict[tuple[str, int, int], float] = {}
    rows_out: list[dict[str, Any]] = []
    for held in HELD:
        for target in (sms - held - fewer for fewer in FEWER):
            for name, rows in GEMMS:
                if (name, rows, target) not in told:
                    told[name, rows, target] = us(name, rows, Condition(0, 1, target, 0))
            for cluster in (size for size in CLUSTERS if held % size == 0):
                for name, rows in GEMMS:
                    row = {"held": held, "cluster": cluster, "target": target, "gemm": name, "rows": rows}
                    beside = us(name, rows, Condition(held, cluster, target, 0))
                    rows_out.append(
                        row
                        | {"us": round(beside, 2), "told_us": round(told[name, rows, target], 2)}
                        | {"free_us": round(free[name, rows], 2)}
                    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"environment": describe(), "rows": rows_out}, indent=1) + "\n")
    print("held cluster target   beside/told: median, worst   beside/free: median")
    for held, cluster, target in dict.fromkeys((r["held"], r["cluster"], r["target"]) for r in rows_out):
        some = [r for r in rows_out if (r["held"], r["cluster"], r["target"]) == (held, cluster, target)]
        waits = [r["us"] / r["told_us"] for r in some]
        slower = median(r["us"] / r["free_us"] for r in some)
        print(f"{held:4d} {cluster:7d} {target:6d}   {median(waits):6.2f} {max(waits):6.2f}   {slower:6.2f}")
    print(f"{time.monotonic() - start:.1f} s -> {out}")


if __name__ == "__main__":
    main()
