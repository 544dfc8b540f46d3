"""Sets the wave model beside measured GEMMs: a table of errors, and a picture of the saw-teeth. Needs no GPU.

python benchmarks/gemm_waves/compare.py [RESULT.json] [--plot docs/gemm-waves.png]

RESULT.json is what ``measure.py`` wrote; by default benchmarks/results/h200-gemm-waves.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenweave.planning import Gpu
from tokenweave.planning.gemms import gemm_us, library_kernel
from tokenweave.planning.hardware import describe

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "h200-gemm-waves.json"
BURST_TFLOPS = 834.0  # large tiles at 1980 MHz
# What the power limit allows on average, of GEMMs alone. A chain of calls begins after 0.2 ms of rest, so a short one ends
# before the clocks fall, and a long one runs at this rate.
LIMIT_TFLOPS, REST_US, CHAIN_US, MOST_CALLS = 660.0, 200.0, 250.0, 20


def predicted_us(gpu: Gpu, shape: dict[str, int], row: dict[str, Any]) -> np.ndarray:
    """us of the GEMMs of one row of the result, float64 [n]."""
    n, k, rows = shape["n"], shape["k"], np.array(row["rows"])
    held = row["held"]
    if 0 < held < 8 and row["cluster"] < gpu.gemm_cluster:
        held *= 2  # a lone block takes half a pair of SMs, and the pair is lost
    us = gemm_us(rows, n, k, gpu, sms=row["target"], held=held, tflops=BURST_TFLOPS)
    busy = (np.clip(np.round(CHAIN_US / us), 2, MOST_CALLS) + 1) * us
    return us * np.maximum(1.0, busy / (busy + REST_US) * (2e-6 * rows * n * k / us) / LIMIT_TFLOPS)


def errors(result: dict[str, Any]) -> dict[tuple[int, int, int | None], np.ndarray]:
    """(held SMs, their cluster, SM target) -> predicted / measured - 1 of all shapes and rows."""
    gpu = gpu_of(result)
    found: dict[tuple[int, int, int | None], list[np.ndarray]] = {}
    for row in result["times"]:
        error = predicted_us(gpu, result["shapes"][row["shape"]], row) / np.array(row["us"]) - 1
        found.setdefault((row["held"], row["cluster"], row["target"]), []).append(error)
    return {key: np.concatenate(each) for key, each in found.items()}


def same_kernels(result: dict[str, Any]) -> tuple[int, int, int]:
    """Of the traced Hopper kernels: how many there are, have the model's tile, launch the model's number of blocks."""
    gpu, traced, tiles, blocks = gpu_of(result), 0, 0, 0
    for name, traces in result["kernels"].items():
        shape = result["shapes"][name]
        for trace in traces if isinstance(traces, list) else ():
            for rows, kernel, launched in zip(trace["rows"], trace["kernel"], trace["blocks"], strict=True):
                if (match := re.search(r"_(\d+)x(\d+)_64x", kernel)) is None:
                    continue
                expected = library_kernel(rows, shape["n"], shape["k"], gpu, trace["target"])
                traced += 1
                tiles += (expected.tile.columns, expected.tile.rows) == (int(match[1]), int(match[2]))
                blocks += abs(expected.blocks - launched) <= 2
    return traced, tiles, blocks


def gpu_of(result: dict[str, Any]) -> Gpu:
    """The planner's entry for the GPU that was measured."""
    environment = result["environment"]
    return describe(environment["gpus"][0], "sm_90", environment["sms"])


def table(result: dict[str, Any]) -> str:
    """The errors in Markdown, with the machine."""
    lines = ["| held SMs | SM target | GEMMs | median error | 90 % within | bias |", "|---|---|---:|---:|---:|---:|"]
    for (held, cluster, target), error in errors(result).items():
        size = abs(error)
        blocks = f"{held}" if cluster == 1 else f"{held}, in clusters of {cluster}"
        lines.append(
            f"| {blocks} | {target or 'none'} | {len(error)} | {np.median(size):.1%} | {np.quantile(size, 0.9):.1%} | "
            f"{np.median(error):+.1%} |"
        )
    traced, tiles, blocks = same_kernels(result)
    lines.append("")
    lines.append(
        f"{result['machine']}. Of {traced} traced kernels {tiles / traced:.0%} have the tile that the model expects and "
        f"{blocks / traced:.0%} as many blocks."
    )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws measured and predicted TFLOP/s over rows, an axis a shape, free and beside 8 held SMs with a target."""
    from matplotlib.figure import Figure

    gpu = gpu_of(result)
    names = list(result["shapes"])
    figure = Figure(figsize=(15, 2.6 * ((len(names) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(names) + 1) // 2, 2, squeeze=False).flat
    for axis, name in zip(axes, names, strict=False):
        shape = result["shapes"][name]
        for held, cluster, target, color in ((0, 1, None, "tab:blue"), (8, 1, gpu.sms - 8, "tab:orange")):
            for row in result["times"]:
                if (row["shape"], row["held"], row["cluster"], row["target"]) != (name, held, cluster, target):
                    continue
                rows = np.array(row["rows"])
                flops = 2e-6 * rows * shape["n"] * shape["k"]
                label = "free" if not held else f"beside {held} held SMs, told of {target}"
                axis.plot(rows, flops / np.array(row["us"]), ".", ms=3, color=color, label=f"{label}: measured")
                axis.plot(rows, flops / predicted_us(gpu, shape, row), "-", lw=0.9, color=color, label="predicted")
        axis.set(title=f"{name}: [rows, {shape['k']}] x [{shape['k']}, {shape['n']}]", xlabel="rows", ylabel="TFLOP/s")
        axis.set_ylim(0, 900)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small", loc="lower right")
    figure.suptitle(f"GEMMs on two ranks of Llama-3.1-8B and 3.3-70B: {result['machine']}", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", nargs="?", type=Path, default=RESULT)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    result = json.loads(args.result.read_text())
    print(table(result))
    if args.plot:
        plot(result, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
