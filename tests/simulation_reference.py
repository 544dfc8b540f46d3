"""The reference that the simulation is tested against: the engine's own scheduler, step by step, under a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest, Scheduler
from tokenweave.simulation import Limits, Outcome, Trace

Cost = Callable[[int, int, float, int], float]
"""(rows, decodes, pairs of the prompts' rows, positions before the decodes) -> seconds of a step."""


class CountedRows:
    """A paged cache in the place of the engine's contiguous runs."""

    def __init__(self, rows: int) -> None:
        self.rows = self.free_rows = rows
        self._held: dict[int, int] = {}
        self._next = 0

    def allocate(self, length: int) -> int | None:
        if length > self.free_rows:
            return None
        self.free_rows -= length
        self._next += 1
        self._held[self._next] = length
        return self._next

    def free(self, start: int) -> None:
        self.free_rows += self._held.pop(start)


@dataclass
class Step:
    start: float
    end: float
    decodes: int
    chunks: tuple[tuple[int, int, int], ...]
    sampled: list[int] = field(repr=False)


class Replica:
    """The scheduler under a clock, one step at a time."""

    def __init__(self, limits: Limits, cost: Cost) -> None:
        self.scheduler = Scheduler(
            cache_rows=limits.kv_tokens,
            context=10**9,
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_requests_running,
            vocab=1,
        )
        self.scheduler._rows = CountedRows(limits.kv_tokens)
        self.cost = cost
        self.now = 0.0
        self.step: Step | None = None
        self.steps: list[Step] = []
        self.started: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self.finished: dict[int, float] = {}
        self.received = 0

    @property
    def unfinished(self) -> int:
        return self.received - len(self.finished)

    def receive(self, number: int, prompt: int, output: int, arrival: float) -> None:
        if not self.scheduler.requests:
            self.now = max(self.now, arrival)
        self.scheduler.add([NewRequest(number, (0,) * prompt, SamplingParams(temperature=0, max_tokens=output), 0)])
        self.received += 1

    def advance(self, limit: float) -> None:
        """Everything that happens before ``limit``."""
        while True:
            if self.step is None:
                if not self.scheduler.requests or self.now >= limit:
                    return
                self._begin()
            if self.step.end >= limit:
                return
            self._end()

    def _begin(self) -> None:
        requests = self.scheduler.requests
        decodes = positions = pairs = 0
        prompts = []
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            size = len(chunk.token_ids)
            if chunk.first >= requests[chunk.request].prompt_tokens:
                decodes += 1
                positions += chunk.first
            else:
                prompts.append((chunk.request, chunk.first, size))
                pairs += sum(chunk.first + row + 1 for row in range(size))
                self.started.setdefault(chunk.request, self.now)
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        end = self.now + self.cost(rows, decodes, pairs, positions)
        self.step = Step(self.now, end, decodes, tuple(prompts), [c.request for c in chunks if c.sampled])

    def _end(self) -> None:
        assert self.step is not None
        self.now = self.step.end
        for number in self.step.sampled:
            request = self.scheduler.requests[number]
            request.token_ids.append(0)
            self.first_token.setdefault(number, self.now)
            if request.generated == request.max_tokens:
                self.finished[number] = self.now
                self.scheduler.finish(request)
        self.steps.append(self.step)
        self.step = None


def reference(
    trace: Trace, cost: Cost, limits: Limits, replicas: int = 1, routing: str = "least-loaded"
) -> list[Replica]:
    """Serves a trace the slow way."""
    fleet = [Replica(limits, cost) for _ in range(replicas)]
    arrivals = np.zeros(len(trace)) if trace.arrivals is None else trace.arrivals
    for number, (prompt, output, arrival) in enumerate(zip(trace.prompts, trace.outputs, arrivals, strict=True)):
        for replica in fleet:
            replica.advance(arrival)
        chosen = min(fleet, key=lambda r: r.unfinished) if routing == "least-loaded" else fleet[number % replicas]
        chosen.receive(number, int(prompt), int(output), float(arrival))
    for replica in fleet:
        replica.advance(float("inf"))
    return fleet


def steps_of(outcome: Outcome, replica: int) -> list[tuple[int, tuple[tuple[int, int, int], ...]]]:
    """(decodes, chunks) of every step of a replica."""
    assert outcome.records is not None
    return [(s.decodes, s.chunks) for s in outcome.records[replica] for _ in range(s.steps)]
