"""The vLLM benchmark's picture. Needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenweave.bench.vllm.report import STOCK, UNITS
from tokenweave.errors import RequestError
from tokenweave.files import require_matplotlib, write_picture


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes speed-ups of prefill and decoding over the stock engines, and the trace's throughput, as one picture."""
    require_matplotlib()
    from matplotlib.figure import Figure

    if not result["rows"]:
        raise RequestError("nothing was measured: there is nothing to plot")
    names = list(result["config"]["configurations"])
    panels = [phase for phase in ("prefill", "decode", "trace") if any(r["phase"] == phase for r in result["rows"])]
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    for axes, phase in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = [row for row in result["rows"] if row["phase"] == phase]
        if phase == "trace":
            _draw_throughput(axes, rows, names)
        else:
            _draw_times(axes, phase, rows, names)
    figure.suptitle(result["machine"], fontsize="small")
    write_picture(path, figure, dpi=120)


def _draw_throughput(axes: Any, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Requests/s, a group of bars a trace; the mean where an engine was started several times."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        for place, trace in enumerate(traces):
            found = [r["requests_per_s"] for r in rows if (r["trace"], r["configuration"]) == (trace, name)]
            if found:
                label = name if place == 0 else None
                bars = axes.bar(
                    place + (number - (len(names) - 1) / 2) * width,
                    np.mean(found),
                    width,
                    color=f"C{number}",
                    label=label,
                )
                axes.bar_label(bars, fmt="%.2f", fontsize="small")
    axes.set_xticks(range(len(traces)), traces)
    axes.set(title=f"{rows[0]['requests']} requests", ylabel="requests/s")
    axes.legend(fontsize="small")


def _draw_times(axes: Any, phase: str, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Speed-ups with their intervals, where there is something to compare with; else milliseconds."""
    unit = UNITS[phase]
    lines = [
        (f"{name} over {stock}", key, [row for row in rows if row["configuration"] == name and key in row])
        for name, stock in itertools.product(names, STOCK)
        for key in (f"speedup_over_{stock}",)
        if (name, stock) != ("default", "best")
    ]
    lines = [line for line in lines if line[2]] or [
        (name, "ms", [row for row in rows if row["configuration"] == name]) for name in names
    ]
    for label, key, line in lines:
        sizes = [row[unit] for row in line]
        (drawn,) = axes.plot(sizes, [row[key] for row in line], "-o", markersize=4, label=label)
        low, high = ([row[f"{key}_{end}"] for row in line] for end in ("low", "high"))
        axes.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    speedups = lines[0][1] != "ms"
    if speedups:
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row[unit] for row in rows}), [str(size) for size in sorted({row[unit] for row in rows})])
    title = {"prefill": "prefill of one prompt", "decode": "decoding"}[phase]
    axes.set(xlabel=unit, ylabel="speed-up" if speedups else "ms", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
