"""Pictures of benchmark results. Needs matplotlib: ``pip install 'tokenweave[plot]'``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenweave.bench.report import short_name
from tokenweave.errors import RequestError


def require_matplotlib() -> None:
    """Raises RequestError where there is none, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(f"--plot needs matplotlib ({error}): pip install 'tokenweave[plot]'") from None


def plot_kernel(result: dict[str, Any], path: Path) -> None:
    """Writes time and share of the wire over tokens, a row of axes a hidden size; the format is the file name's."""
    require_matplotlib()
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row["hidden"] for row in result["rows"]))
    if not sizes:
        raise RequestError("nothing was measured: there is nothing to plot")
    figure = Figure(figsize=(12, 4.5 * len(sizes)), layout="constrained")
    for (times, wire), hidden in zip(figure.subplots(len(sizes), 2, squeeze=False), sizes, strict=True):
        rows = [row for row in result["rows"] if row["hidden"] == hidden]
        for name in dict.fromkeys(short_name(row) for row in rows):
            line = [row for row in rows if short_name(row) == name]
            style = {"ours": "-o", "rival": "--s", "part": ":"}[line[0]["kind"]]
            tokens = [row["tokens"] for row in line]
            (drawn,) = times.plot(tokens, [row["us"] for row in line], style, markersize=3, label=name)
            low, high = ([row[key] for row in line] for key in ("us_low", "us_high"))
            times.fill_between(tokens, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
            if line[0]["percent_of_wire"] is not None:
                share = [row["percent_of_wire"] for row in line]
                wire.plot(tokens, share, style, markersize=3, color=drawn.get_color(), label=name)
        for axes, label in ((times, "us"), (wire, "% of wire")):
            axes.set(xscale="log", xlabel="tokens", ylabel=label, title=f"hidden {hidden}, {rows[0]['dtype']}")
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
        times.set_yscale("log")
        wire.set_ylim(0, 100)
        times.legend(fontsize="x-small")
    figure.suptitle(result["machine"], fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
