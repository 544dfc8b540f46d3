"""The latency benchmark's picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenweave.errors import RequestError
from tokenweave.files import require_matplotlib, write_picture

_MODE_COLOURS = {"sequential": "C7", "fused": "C0", "woven": "C2", "auto": "C3", "no_comm": "black"}


def plot_latency(result: dict[str, Any], path: Path) -> None:
    """Writes, over tokens: the time of a layer and token, and the two ratios with their intervals; the format is the file
    name's."""
    require_matplotlib()
    from matplotlib.figure import Figure

    if not result["rows"]:
        raise RequestError("nothing was measured: there is nothing to plot")
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    times, speedups, bounds = figure.subplots(1, 3)
    for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        style: dict[str, Any] = {"color": _MODE_COLOURS.get(mode), "marker": "o", "markersize": 3, "label": mode}
        per_token = [1e3 * row["ms_per_layer"] / row["tokens"] for row in rows]
        times.plot([row["tokens"] for row in rows], per_token, linestyle=":" if mode == "no_comm" else "-", **style)
        for axes, name, itself in ((speedups, "speedup", "sequential"), (bounds, "no_comm_ratio", "no_comm")):
            known = [row for row in rows if row[name] is not None]
            if mode == itself or not known:
                continue
            ratios = [row[name]["value"] for row in known]
            tokens = [row["tokens"] for row in known]
            axes.plot(tokens, ratios, **style)
            low, high = ([row[name][end] for row in known] for end in ("low", "high"))
            axes.fill_between(tokens, low, high, color=style["color"], alpha=0.15, linewidth=0)
    sizes = list(dict.fromkeys(row["tokens"] for row in result["rows"]))
    for axes, label in ((times, "us a layer and token"), (speedups, "sequential / it"), (bounds, "no_comm / it")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axes.set(xlabel="tokens", ylabel=label)
        axes.grid(alpha=0.3)
    for axes in (speedups, bounds):
        axes.axhline(1, color="black", linewidth=0.8)
    times.legend(fontsize="small")
    settings = result["config"]
    title = f"{settings['model']}, {settings['layers']} layers, {settings['ranks']} GPUs, {settings['dtype']}"
    figure.suptitle(f"{title}\n{result.get('machine', '')}", fontsize="small")
    write_picture(path, figure, dpi=120)
