"""A layer as it ran: the compute and the communication stream over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenweave.bench.trace.events import Kind, Span
from tokenweave.files import require_matplotlib, write_picture

_COLOURS: dict[Kind, str] = {
    "GEMM": "#4477aa",
    "attention": "#ccbb44",
    "collective": "#ee6677",
    "norm": "#aa3377",
    "other": "#bbbbbb",
}
_LANES = {"compute": 1, "communication": 0}
_SUFFIX = 0.5  # opacity
_SHARE = 0.035  # of the width: shorter spans are not labelled


def draw_layer(spans: Sequence[Span], title: str, paths: Sequence[Path]) -> None:
    """Writes the picture once for each path; the format is the file name's.

    Args:
        spans: as :func:`tokenweave.bench.trace.events.layer_of` gives them.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(14, 3.4), layout="constrained")
    axes = figure.subplots()
    origin = min(span.start for span in spans)
    width = max(span.end for span in spans) - origin
    for span in spans:
        lane = _LANES[span.lane]
        box = [(span.start - origin, span.us)]
        alpha = _SUFFIX if span.split == "suffix" else 1.0
        axes.broken_barh(
            box, (lane - 0.4, 0.8), facecolor=_COLOURS[span.kind], edgecolor="white", linewidth=0.4, alpha=alpha
        )
        if span.us >= _SHARE * width:
            label = span.kind if span.stage is None else f"{span.kind}\n{span.stage}\n{span.split}"
            axes.text(
                span.start - origin + span.us / 2, lane, label, ha="center", va="center", fontsize=6, clip_on=True
            )
    axes.set_yticks(list(_LANES.values()), list(_LANES))
    axes.set_ylim(-0.5, 1.5)
    axes.set_xlim(0, width)
    axes.set_xlabel("us")
    axes.set_title(title, fontsize="small")
    kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in kinds]
    if any(span.split == "suffix" for span in spans):
        handles.append(Patch(facecolor="black", alpha=_SUFFIX, label="paler: suffix"))
    figure.legend(handles=handles, loc="outside right upper", fontsize="x-small")
    for path in paths:
        write_picture(path, figure, dpi=150)
