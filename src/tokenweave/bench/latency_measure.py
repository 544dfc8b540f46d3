"""What is measured of a step beside its time in paired rounds: the host's share, power, and whether its rows are right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.environment import Monitor
from tokenweave.bench.latency_steps import Variant

_HOST_SAMPLES = 5
# Of final rows against sequential's, in the Euclidean norm: bf16 with sums in another order drifts by some percent over
# many layers of random weights; rows of a broken step are unrelated, 1 or more away.
_TOLERANCE = 0.25


def host_ms(variant: Variant, graph: torch.cuda.CUDAGraph, group: dist.ProcessGroup) -> dict[str, float]:
    """Milliseconds that the host needs to issue the step, by launches and as a graph; the GPU idles before."""

    def median(call: Callable[[], object]) -> float:
        samples = []
        for _ in range(_HOST_SAMPLES):
            torch.cuda.synchronize()
            dist.barrier(group)
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            samples.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        return sorted(samples)[_HOST_SAMPLES // 2]

    return {"eager": median(variant.walk), "graph": median(graph.replay)}


def final_rows(variants: Sequence[Variant]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Runs every variant once, eagerly.

    Returns:
        key -> relative difference of the final row to that of the first sequential variant, on this rank (None for
        no_comm, and without a sequential variant); and, of rows that are not finite or differ by more than rounding,
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
        elif reference is not None and variant.mode != "no_comm":
            error = float((got - reference).norm() / reference.norm())
            if error > _TOLERANCE:
                wrong[variant.key] = f"{error:.3f} away from sequential's"
        errors[variant.key] = error
    return errors, wrong


def sustained(
    graph: torch.cuda.CUDAGraph, us: float, seconds: float, group: dist.ProcessGroup, monitor: Monitor
) -> dict[str, Any]:
    """Power and clocks over the second half of back-to-back replays, and a replay's mean time.

    Args:
        us: about what a replay takes. seconds: of replays.
    """
    replays = max(8, math.ceil(seconds * 1e6 / us))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier(group)
    monitor.take()
    start.record()
    ends: list[torch.cuda.Event] = []
    for index in range(replays):
        graph.replay()
        if index % max(1, replays // 16) == 0:
            if len(ends) > 1:
                ends[-2].synchronize()  # so that a sample is of what runs now
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if index > replays // 2:
                monitor.sample()
    end.record()
    torch.cuda.synchronize()
    return {"ms": start.elapsed_time(end) / replays, **monitor.take()}
