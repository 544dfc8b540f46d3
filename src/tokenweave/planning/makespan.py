"""When a stage list is done that two streams walk: compute, and communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Part(NamedTuple):
    """What a stage does for one split. Any unit of time; floats, or float64 [n] for n alternatives at once.

    Attributes:
        work: the compute (what follows ``lead``), while nothing else runs.
        held: the same, while the communication stream holds SMs; never less than ``work``.
        send: the collective that follows.
        lead: what the compute does first, before the other split's last collective starts; 0: that starts at once.
    """

    work: Any
    held: Any
    send: Any
    lead: Any = 0.0


Block = tuple[Sequence[Sequence[Part]], int]
"""Stages (each a part per split), and how many times they are walked."""


def makespan(blocks: Sequence[Block]) -> Any:
    """The end of the last collective, from 0.

    Two streams, each in order. A stage's compute of a split waits for the compute stream and for that split's previous
    collective; its collective waits for the communication stream and for its compute. With one split that is the sum of
    all times; with two, attention(prefix) runs beside collective(suffix, previous stage), and so on. Compute that runs
    partly beside collectives does so much of itself at the slower pace, and the rest at the faster one: whatever is on
    the communication stream when a compute starts is in flight until that stream is done, since the next collective to
    be issued is this compute's own. A compute's ``lead`` runs alone: the collective before it starts only then.

    Args:
        blocks: e.g. ``[([embedding], 1), ([attention, mlp], layers)]``; every stage has the same number of splits.

    Returns:
        float, or float64 [n]: exact. Once a walk of a block has moved every clock by the same time, so will all others
        of that block, and they are not walked one by one.
    """
    splits = max((len(stages[0]) for stages, _ in blocks if stages), default=0)
    vector = any(isinstance(t, np.ndarray) for stages, _ in blocks for stage in stages for part in stage for t in part)
    later: Any = np.maximum if vector else max
    compute: Any = 0.0
    comm_end: Any = 0.0
    ready: list[Any] = [0.0] * splits
    issued: tuple[int, Any] | None = None  # the last collective, whose start the next compute may delay: (split, send)
    for stages, count in blocks:
        # Slowed[i]: the share by which time beside a collective exceeds the same work's without one.
        paces = [[_pace(part, vector) for part in stage] for stage in stages]
        for walk in range(count):
            before = (compute, comm_end, *ready)
            for stage, of_stage in zip(stages, paces, strict=True):
                for index, ((work, held, send, lead), slowed) in enumerate(zip(stage, of_stage, strict=True)):
                    if issued is not None and splits == 1:
                        ready[0] = comm_end = later(comm_end, compute) + issued[1]
                        issued = None
                    free = compute
                    compute = later(compute, ready[index]) + lead
                    if issued is not None:
                        # Delayed it finds the stream idle: this compute has waited for the collective before it.
                        begin = later(
                            comm_end, np.where(lead > 0, compute, free) if vector else compute if lead else free
                        )
                        ready[issued[0]] = comm_end = begin + issued[1]
                    if slowed is not None:
                        beside = later(comm_end - compute, 0.0)
                        beside = np.minimum(beside, held) if vector else min(beside, held)
                        compute = compute + work + beside * slowed
                    else:
                        compute = compute + work
                    issued = index, send
            moved = [now - then for now, then in zip((compute, comm_end, *ready), before, strict=True)]
            if 0 < walk < count - 1 and _equal(moved, comm_end, vector):
                jump = moved[0] * (count - walk - 1)
                compute, comm_end, ready = compute + jump, comm_end + jump, [r + jump for r in ready]
                break
    return comm_end if issued is None else later(comm_end, compute) + issued[1]


def _pace(part: Part, vector: bool) -> Any:
    """Extra time per time beside a collective: 1 - work / held. None where there is none."""
    work, held = part[:2]
    if held is work:
        return None
    if not vector:
        return 1 - work / held if held > work else None
    extra = held - work
    return extra / np.maximum(held, 1e-300) if np.any(extra) else None


def _equal(moved: list[Any], scale: Any, vector: bool) -> bool:
    if vector:
        return all(bool((abs(m - moved[0]) <= 1e-12 * scale).all()) for m in moved[1:])
    return max(moved) - min(moved) <= 1e-12 * scale
