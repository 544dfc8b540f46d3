"""One replica's continuous batching, event by event.

The rules are the engine's scheduler's: decodes come first, one row each; then prompts in the order of their arrival, in
chunks, until the step is full. A request starts when the cache has room for its prompt and its whole answer, nobody
overtakes it, and it keeps that room until it ends. Rows of the cache are counted, not placed: it is paged.

Steps of decodes alone are not walked one by one: up to the next finish or the next arrival they differ only in how long
their sequences are, so their times are an arithmetic series.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

IDLE = float("inf")


class Steps(Protocol):
    """What steps take: :class:`tokenweave.simulation.table.StepTable`."""

    def mixed(self, rows: int, decodes: int, pairs: float, positions: int) -> float: ...

    def decode(self, decodes: int, positions: int) -> tuple[float, float, int]: ...


@dataclass(frozen=True)
class Limits:
    """Of one replica.

    Attributes:
        max_batch_tokens: most rows of a step.
        max_requests_running: most requests that have started and not ended. Never more than ``max_batch_tokens`` do: all
            of them have a row in each step.
        kv_tokens: positions that the cache holds.
    """

    max_batch_tokens: int
    max_requests_running: int
    kv_tokens: int


@dataclass
class Counts:
    """What a replica has done, up to when it last ran dry.

    Attributes:
        steps, mixed_steps: all, and those with prompts in them.
        prompt_tokens, decode_tokens: rows computed.
        busy: seconds in steps.
        most_kv_tokens, most_running: the peaks.
    """

    steps: int = 0
    mixed_steps: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    busy: float = 0.0
    most_kv_tokens: int = 0
    most_running: int = 0


class Stretch(NamedTuple):
    """Equal steps in a row, as they are recorded for tests and pictures.

    Attributes:
        start, end: seconds.
        steps: how many.
        decodes: rows of each that are decodes.
        chunks: (request, positions before, rows) of each prompt; a step that has any is alone.
    """

    start: float
    end: float
    steps: int
    decodes: int
    chunks: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Requests:
    """All replicas' requests by number, and what becomes of them.

    Attributes:
        prompts, outputs: tokens.
        arrivals: seconds, ascending.
        started, first_token, finished: seconds, written by the replicas.
    """

    prompts: Sequence[int]
    outputs: Sequence[int]
    arrivals: Sequence[float]
    started: list[float]
    first_token: list[float]
    finished: list[float]


def replica(
    requests: Requests,
    queue: deque[int],
    steps: Steps,
    limits: Limits,
    unfinished: list[int],
    number: int,
    counts: Counts,
    record: list[Stretch] | None = None,
) -> Generator[float, float, None]:
    """Runs one replica for ever. A generator, so that its state is local variables.

    Send it a time: it runs every event before that time, and yields the time of its next one (:data:`IDLE` if nothing is
    to do). An event at exactly that time waits, so that requests that arrive then are part of it. After putting a request
    on an empty queue send it the time of that arrival: a stretch of steps may have to end earlier.

    Args:
        queue: numbers of the requests that have arrived here; the replica takes them from its left.
        unfinished: by replica: the router adds the requests that it sends here, the replica takes off what has ended.
        number: this replica's place there.
        counts: added to.
        record: every stretch of steps is appended, if given.
    """
    prompts, outputs, arrivals = requests.prompts, requests.outputs, requests.arrivals
    started, first_token, finished = requests.started, requests.first_token, requests.finished
    mixed, decode = steps.mixed, steps.decode
    most_rows, most_running = limits.max_batch_tokens, limits.max_requests_running
    free = limits.kv_tokens
    now = busy = 0.0
    ticks = 0  # steps so far: a running request's last token falls on a known tick
    endings: list[tuple[int, int]] = []  # heap of (tick, request)
    running = decodes = positions = 0  # positions: that precede the decodes, summed
    partial, done = -1, 0  # the prompt that is in the middle of its chunks, and how far it is
    mixed_steps = prompt_rows = decode_rows = peak_running = 0
    least_free = free
    limit = 0.0
    while True:
        left = most_rows - decodes
        if left and (
            partial >= 0 or (queue and running < most_running and prompts[queue[0]] + outputs[queue[0]] <= free)
        ):
            twice_pairs = 0
            ready: list[int] = []
            chunks: list[tuple[int, int, int]] = []
            while left:
                if partial >= 0:
                    request = partial
                elif queue and running < most_running:
                    request = queue[0]
                    need = prompts[request] + outputs[request]
                    if need > free:
                        break
                    queue.popleft()
                    started[request] = now
                    running += 1
                    free -= need
                    done = 0
                else:
                    break
                size = prompts[request] - done
                if size > left:
                    size = left
                    partial = request
                else:
                    ready.append(request)
                    partial = -1
                if record is not None:
                    chunks.append((request, done, size))
                twice_pairs += size * (2 * done + size + 1)
                done += size
                left -= size
            if free < least_free:
                least_free = free
            if running > peak_running:
                peak_running = running
            end = now + mixed(most_rows - left, decodes, twice_pairs / 2, positions)
            while end >= limit:
                limit = yield end
            if record is not None:
                record.append(Stretch(now, end, 1, decodes, tuple(chunks)))
            busy += end - now
            now = end
            ticks += 1
            mixed_steps += 1
            prompt_rows += most_rows - left - decodes
            decode_rows += decodes
            positions += decodes
            for request in ready:
                first_token[request] = now
                heapq.heappush(endings, (ticks + outputs[request] - 1, request))
                decodes += 1
                positions += prompts[request]
        elif decodes:
            first, growth, count = decode(decodes, positions)
            if count > endings[0][0] - ticks:
                count = endings[0][0] - ticks
            end = now + _lasting(count, first, growth)
            watching = not queue  # else nobody can start before somebody ends
            while end >= limit:
                limit = yield end
                if watching and queue:
                    watching = False
                    request = queue[0]
                    if running < most_running and prompts[request] + outputs[request] <= free:
                        count = _until(arrivals[request], now, count, first, growth)
                        end = now + _lasting(count, first, growth)
            if record is not None:
                record.append(Stretch(now, end, count, decodes, ()))
            busy += end - now
            now = end
            ticks += count
            decode_rows += count * decodes
            positions += count * decodes
        else:
            counts.steps, counts.mixed_steps, counts.busy = ticks, mixed_steps, busy
            counts.prompt_tokens, counts.decode_tokens = prompt_rows, decode_rows
            counts.most_kv_tokens, counts.most_running = limits.kv_tokens - least_free, peak_running
            while not queue:
                limit = yield IDLE
            now = max(now, arrivals[queue[0]])
            while now >= limit:
                limit = yield now
            continue
        while endings and endings[0][0] == ticks:
            request = heapq.heappop(endings)[1]
            finished[request] = now
            running -= 1
            free += prompts[request] + outputs[request]
            decodes -= 1
            positions -= prompts[request] + outputs[request] - 1
            unfinished[number] -= 1


def _lasting(count: int, first: float, growth: float) -> float:
    """Seconds of ``count`` steps, each ``growth`` longer than the one before."""
    return count * first + growth * (count * (count - 1) / 2)


def _until(time: float, start: float, most: int, first: float, growth: float) -> int:
    """How many of ``most`` steps there are until the first end of a step at or after ``time`` > ``start``."""
    wait = time - start
    # As if all steps took what the middle one of wait / first steps takes: never too many, and seldom more than one too few.
    count = min(most, max(1, int(wait / (first + growth * wait / first / 2))))
    while count < most and start + _lasting(count, first, growth) < time:
        count += 1
    return count
