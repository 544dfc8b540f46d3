"""The kernel benchmark's picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenweave.errors import RequestError
from tokenweave.files import require_matplotlib, write_picture

OURS = "this package"
FAMILIES = {
    "FlashInfer, fused": "flashinfer",
    "PyTorch symmetric memory, then norm": "torch",
    "NCCL all-reduce, then norm": "nccl all-reduce + ",
    "NCCL reduce-scatter, norm, all-gather": "nccl reduce-scatter + ",
}
"""Lines of baselines: label -> how the names of their variants begin. At each size a line shows its fastest variant."""


def plot_kernel(result: dict[str, Any], path: Path) -> None:
    """Writes two pictures a hidden size, over tokens: how often our time a baseline takes, and every one's share of the link.

    Ours and each baseline's line are of the fastest variant at a size. The format is the file name's.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row["hidden"] for row in result["rows"]))
    if not sizes:
        raise RequestError("nothing was measured: there is nothing to plot")
    figure = Figure(figsize=(12, 4.5 * len(sizes)), layout="constrained")
    for (ratios, wire), hidden in zip(figure.subplots(len(sizes), 2, squeeze=False), sizes, strict=True):
        rows = [row for row in result["rows"] if row["hidden"] == hidden]
        lines = {OURS: _fastest([row for row in rows if row["kind"] == "ours"])}
        for label, begin in FAMILIES.items():
            lines[label] = _fastest([row for row in rows if row["kind"] == "rival" and row["impl"].startswith(begin)])
        ours = lines[OURS]
        for index, (label, line) in enumerate((label, line) for label, line in lines.items() if line):
            style = {"color": f"C{index}", "marker": "osD^v"[index], "markersize": 4, "label": label}
            shared = [tokens for tokens in line if tokens in ours]
            ratios.plot(shared, [line[tokens]["us"] / ours[tokens]["us"] for tokens in shared], **style)
            known = {
                tokens: row["percent_of_wire"] for tokens, row in line.items() if row["percent_of_wire"] is not None
            }
            wire.plot(list(known), list(known.values()), **style)
        title = f"hidden {hidden}, {rows[0]['dtype']}, {rows[0]['ranks']} ranks"
        ratios.set(title=title, ylabel="time / this package's", yscale="log")
        lowest, highest = ratios.get_ylim()
        ratios.set_yticks([tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 16) if lowest < tick < highest])
        ratios.minorticks_off()
        ratios.yaxis.set_major_formatter("{x:g}")
        wire.set(title=title, ylabel="% of the link", ylim=(0, 100))
        for axes in (ratios, wire):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("tokens")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
        wire.legend(fontsize="small", loc="upper left")
    figure.suptitle(result["machine"], fontsize="small")
    write_picture(path, figure, dpi=120)


def _fastest(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Tokens -> the row of the fastest variant, in the order of tokens."""
    return {
        tokens: min((row for row in rows if row["tokens"] == tokens), key=lambda row: row["us"])
        for tokens in sorted({row["tokens"] for row in rows})
    }
