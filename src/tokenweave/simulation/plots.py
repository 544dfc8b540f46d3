"""Pictures of simulated runs. Needs matplotlib: ``pip install '.[plot]'`` in TokenWeave's checkout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.files import write_picture
from tokenweave.simulation.report import CURVE, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(about: dict[str, Any], runs: Sequence[Run], path: Path) -> None:
    """Writes waiting times by mode: over rates or replicas if there are several, else how they are distributed.

    Args:
        about: what was simulated, as :func:`tokenweave.simulation.report.header` takes it.
        path: the format is the file name's.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    axes = figure.subplots(1, 3)
    rates, fleets = {run.rate for run in runs}, {run.replicas for run in runs}
    if len(rates) > 1:
        _sweep(axes, runs, "requests a second", lambda run: run.rate, _with_replicas)
    elif len(fleets) > 1:
        _sweep(axes, runs, "replicas", lambda run: run.replicas, lambda run: run.mode)
    else:
        _distributions(axes, runs)
    for each in axes:
        each.grid(alpha=0.3)
    figure.suptitle(
        f"{about['model']}, tp {about['tp']} on {about['gpu']} ({about['transport']}), {about['requests']:,} requests of "
        f"{Path(about['trace']).stem}, {about['max_batch_tokens']} tokens a step; simulated",
        fontsize="small",
    )
    write_picture(path, figure, dpi=120)


def _with_replicas(run: Run) -> str:
    return f"{run.mode}, {run.replicas} replica" + ("s" if run.replicas > 1 else "")


def _sweep(
    axes: Sequence[Axes], runs: Sequence[Run], label: str, x: Callable[[Run], Any], name: Callable[[Run], str]
) -> None:
    for series in dict.fromkeys(map(name, runs)):
        line = sorted((run for run in runs if name(run) == series), key=x)
        at = [x(run) for run in line]
        (drawn,) = axes[0].plot(at, [run.metrics.output_tokens_per_s for run in line], "-o", markersize=3, label=series)
        color = drawn.get_color()
        for quantile, style in (("p50", "--"), ("p99", "-o")):
            first = [getattr(run.metrics.ttft_ms, quantile) for run in line]
            each = [getattr(run.metrics.tpot_ms, quantile, float("nan")) for run in line]  # none: a gap
            axes[1].plot(at, first, style, markersize=3, color=color)
            axes[2].plot(at, each, style, markersize=3, color=color)
    axes[0].set(ylabel="output tokens a second", xlabel=label, ylim=(0, None))
    axes[0].legend(fontsize="small")
    axes[1].set(ylabel="time to first token, ms: p50 dashed, p99 solid", xlabel=label, yscale="log")
    axes[2].set(ylabel="time per output token, ms: p50 dashed, p99 solid", xlabel=label, ylim=(0, None))


def _distributions(axes: Sequence[Axes], runs: Sequence[Run]) -> None:
    names = [run.mode for run in runs]
    axes[0].bar(names, [run.metrics.output_tokens_per_s for run in runs])
    axes[0].set(ylabel="output tokens a second, all replicas together")
    for run in runs:
        axes[1].plot(run.ttft_ms, CURVE, label=run.mode)
        if len(run.tpot_ms):
            axes[2].plot(run.tpot_ms, CURVE, label=run.mode)
    axes[1].set(xlabel="time to first token, ms", ylabel="% of requests")
    axes[2].set(xlabel="time per output token, ms", ylabel="% of requests")
    axes[1].legend(fontsize="small")
