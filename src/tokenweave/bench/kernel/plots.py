"""The kernel benchmark's picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenweave.bench.kernel.report import short_name
from tokenweave.bench.plots import require_matplotlib
from tokenweave.errors import RequestError


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
