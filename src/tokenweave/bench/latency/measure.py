"""What is measured of a step beside its time in paired rounds: the host's share, power, and whether its rows are right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.energy import LEAST_CHANGES, RankPower, rank_power, refused
from tokenweave.bench.environment import Monitor
from tokenweave.bench.steps import BOUNDS, Variant
from tokenweave.bench.timing import host_seconds
from tokenweave.models import Model
from tokenweave.models.mixtral import MixtureMLP

_HOST_SAMPLES = 5
_LONGEST_SECONDS = 4.0  # of a window: a counter that changes less often than ten times in it is not waited for
# Of final rows against sequential's, in the Euclidean norm: bf16 with sums in another order drifts by some percent over
# many layers of random weights; rows of a broken step are unrelated, 1 or more away.
_TOLERANCE = 0.25


def host_ms(variant: Variant, graph: torch.cuda.CUDAGraph, group: dist.ProcessGroup) -> dict[str, float]:
    """Milliseconds that the host needs to issue the step, by launches and as a graph; the GPU idles before."""
    calls = {"eager": variant.walk, "graph": graph.replay}
    return {name: 1e3 * median(host_seconds(call, _HOST_SAMPLES, group)) for name, call in calls.items()}


def comparable(model: Model) -> bool:
    """Whether two right steps have nearly the same rows. Not so where experts differ: rounding sends a row to another one."""
    experts = [layer.mlp.down for layer in model.layers if isinstance(layer.mlp, MixtureMLP)]
    return all(torch.equal(one, of[0]) for of in experts for one in of[1:])


def final_rows(variants: Sequence[Variant], near: bool) -> tuple[dict[str, float | None], dict[str, str]]:
    """Runs every variant once, eagerly.

    Args:
        near: rows that are not near each other are wrong (:func:`comparable`).

    Returns:
        key -> relative difference of the final row to that of the first sequential variant, on this rank (None for
        the bounds, and without a sequential variant); and, of rows that are not finite or differ by more than rounding,
        key -> what is wrong.
    """
    rows = {variant.key: variant.walk().float() for variant in variants}
    torch.cuda.synchronize()
    reference = next((rows[v.key] for v in variants if v.mode == "sequential"), None)
    errors: dict[str, float | None] = {}
    wrong = {}
    for variant in variants:
        got, error = rows[variant.key], None
        if not bool(torch.isfinite(got).all()):
            wrong[variant.key] = "not finite"
        elif reference is not None and variant.mode not in BOUNDS:
            error = float((got - reference).norm() / reference.norm())
            if near and error > _TOLERANCE:
                wrong[variant.key] = f"{error:.3f} away from sequential's"
        errors[variant.key] = error
    return errors, wrong


def sustained(
    graph: torch.cuda.CUDAGraph, us: float, seconds: float, group: dist.ProcessGroup, monitor: Monitor
) -> dict[str, Any]:
    """Time, power, clocks and energy of back-to-back replays, after a first quarter that warms the GPU up.

    Where that is too short for enough changes of every GPU's energy counter, it is done once more, for longer.

    Args:
        us: about what a replay takes. seconds: of replays, the first quarter included.

    Returns:
        ``ms`` of a replay; ``joules`` of one, of all ranks' GPUs together, each its average power by its own counter times
        its ms; ``energy``: by rank the ``watts`` and the ``seconds`` that they are of, the fewest ``changes`` of a counter,
        and ``refused``: None, or why joules are None (:func:`tokenweave.bench.energy.refused`); and the monitor's samples.
    """
    replays = max(8, math.ceil(0.75 * seconds * 1e6 / us))
    longest = max(replays, math.ceil(_LONGEST_SECONDS * 1e6 / us))
    _replayed(graph, max(2, replays // 3), lambda: None)
    while True:
        ms, ranks, samples = _window(graph, replays, group, monitor)
        fewest = min(one.changes for _, one in ranks)
        if fewest >= LEAST_CHANGES or replays >= longest or any(one.failure for _, one in ranks):
            break
        replays = min(longest, math.ceil(1.25 * replays * LEAST_CHANGES / fewest)) if fewest > 1 else longest
    powers = [one for _, one in ranks]
    why = refused(powers)
    joules = None if why else sum(one.watts * its_ms / 1e3 for its_ms, one in ranks if one.watts is not None)
    energy = {
        "watts": [one.watts for one in powers],
        "seconds": [one.seconds for one in powers],
        "changes": fewest,
        "refused": why,
    }
    return {"ms": ms, "joules": joules, "energy": energy, **samples}


def _window(
    graph: torch.cuda.CUDAGraph, replays: int, group: dist.ProcessGroup, monitor: Monitor
) -> tuple[float, list[tuple[float, RankPower]], dict[str, Any]]:
    """ms of a replay; by rank its ms and its power, the same on all ranks; and the monitor's samples."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier(group)
    torch.cuda.synchronize()
    monitor.take()
    watch = monitor.energy()
    with watch or contextlib.nullcontext():
        start.record()
        _replayed(graph, replays, monitor.sample)
        end.record()
        torch.cuda.synchronize()
    ms = start.elapsed_time(end) / replays
    ranks: list[tuple[float, RankPower]] = [(0.0, RankPower(0, 0.0, None, None))] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (ms, rank_power(watch, monitor.limit_w())), group=group)
    return ms, ranks, monitor.take()


def _replayed(graph: torch.cuda.CUDAGraph, replays: int, sample: Callable[[], None]) -> None:
    """Replays, a few of them ahead of the GPU, so that a sample is of what runs now; sampled 16 times."""
    ends: list[torch.cuda.Event] = []
    for index in range(replays):
        graph.replay()
        if index % max(1, replays // 16) == 0:
            if len(ends) > 1:
                ends[-2].synchronize()
                sample()
            ends.append(torch.cuda.Event())
            ends[-1].record()
