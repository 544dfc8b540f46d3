"""A fleet of data-parallel replicas behind a router."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from tokenweave.errors import RequestError
from tokenweave.simulation.replica import IDLE, Counts, Limits, Requests, Steps, Stretch, replica
from tokenweave.simulation.trace import Trace

ROUTINGS = ("least-loaded", "round-robin")
"""``least-loaded``: the replica with the fewest unfinished requests, the first of them if several have."""


@dataclass(frozen=True)
class Outcome:
    """What became of every request.

    Attributes:
        trace: the requests, with arrivals.
        replica: int64 [requests], who served it.
        started: float64 [requests], seconds: its first row's step began.
        first_token: its prompt's last step ended.
        finished: its last token's step ended.
        counts: of each replica.
        records: of each replica, if asked for.
    """

    trace: Trace
    replica: np.ndarray
    started: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    counts: tuple[Counts, ...]
    records: tuple[list[Stretch], ...] | None = None


def fitting(trace: Trace, most: int) -> np.ndarray:
    """bool [requests]: prompt and answer together have at most ``most`` tokens."""
    return trace.prompts + trace.outputs <= most


def refuse_unfit(trace: Trace, most: int, who: str) -> None:
    """Raises RequestError if any request can never be served, ``who`` ("the cache of a replica") having that much room."""
    fits = fitting(trace, most)
    if not fits.all():
        first = int(np.argmin(fits))
        raise RequestError(
            f"{len(fits) - int(fits.sum())} of {len(fits)} requests can never be served, the first of them request {first}: "
            f"{trace.prompts[first]} prompt tokens + {trace.outputs[first]} output tokens; {who} has room for {most}: make it "
            "larger, or leave such requests out"
        )


def simulate(
    trace: Trace,
    steps: Steps,
    limits: Limits,
    replicas: int = 1,
    routing: str = "least-loaded",
    record: bool = False,
) -> Outcome:
    """Serves a trace; every request ends.

    A request that arrives at the very end of a step can be part of the next one.

    Args:
        trace: with arrivals; None are all at 0.
        steps: what steps take, the same on all replicas.
        limits: of each replica.
        replicas: how many there are.
        routing: one of :data:`ROUTINGS`; decided once, on arrival.
        record: keep what each step was made of.

    Raises:
        RequestError: a request that can never be served, a limit or a number of replicas below 1, an unknown routing.
    """
    _check(trace, limits, replicas, routing)
    n = len(trace)
    arrivals = [0.0] * n if trace.arrivals is None else trace.arrivals.tolist()
    requests = Requests(trace.prompts.tolist(), trace.outputs.tolist(), arrivals, [0.0] * n, [0.0] * n, [0.0] * n)
    counts = tuple(Counts() for _ in range(replicas))
    records: list[list[Stretch] | None] = [[] if record else None for _ in range(replicas)]
    queues: list[deque[int]] = [deque() for _ in range(replicas)]
    unfinished = [0] * replicas
    served_by = [0] * n
    send = []
    for number in range(replicas):
        running = replica(requests, queues[number], steps, limits, unfinished, number, counts[number], records[number])
        next(running)
        send.append(running.send)
    least_loaded = routing == "least-loaded"
    wakes = [IDLE] * replicas
    events: list[
        tuple[float, int]
    ] = []  # heap of (time, replica); what a replica has since changed its mind about stays
    for request, arrival in enumerate(arrivals):
        while events and events[0][0] < arrival:
            time, number = heapq.heappop(events)
            if time == wakes[number]:
                wakes[number] = wake = send[number](arrival)
                if wake != IDLE:
                    heapq.heappush(events, (wake, number))
        number = unfinished.index(min(unfinished)) if least_loaded else request % replicas
        served_by[request] = number
        unfinished[number] += 1
        queue = queues[number]
        queue.append(request)
        if len(queue) == 1 and (wake := send[number](arrival)) != wakes[number]:
            wakes[number] = wake
            heapq.heappush(events, (wake, number))
    for finish in send:
        finish(IDLE)
    return Outcome(
        Trace(trace.name, trace.prompts, trace.outputs, np.array(arrivals)),
        np.array(served_by),
        np.array(requests.started),
        np.array(requests.first_token),
        np.array(requests.finished),
        counts,
        tuple(r for r in records if r is not None) or None,
    )


def _check(trace: Trace, limits: Limits, replicas: int, routing: str) -> None:
    if routing not in ROUTINGS:
        raise RequestError(f"routing {routing!r}; expected one of {', '.join(ROUTINGS)}")
    for name, value in (("replicas", replicas), *vars(limits).items()):
        if value < 1:
            raise RequestError(f"{name}={value}; expected at least 1")
    refuse_unfit(trace, limits.kv_tokens, "the cache of a replica")
