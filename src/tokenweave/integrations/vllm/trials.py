"""Dummy steps as the engine starts: to measure schemes, modes and the host, and so that graphs are there before they are needed.

They run on the runner's own buffers, in the step in which all this happens, and leave them as they were.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.decide import plan_of
from tokenweave.integrations.vllm.graphs import MAX_GRAPHS, MAX_ROWS, SMALL_ROWS, TILE, Graph, Graphs, key_of
from tokenweave.integrations.vllm.measured import (
    MOST_MS,
    REPEATS,
    SCHEME_MS,
    SCHEME_SIZES,
    SIZE_MS,
    SIZES,
    WOVEN_ROWS,
    launching_ms,
    milliseconds,
)
from tokenweave.integrations.vllm.ways import CAPTURE_MS
from tokenweave.planning import Mode, Plan
from tokenweave.planning.batch import Batch, runs_of

if TYPE_CHECKING:
    from tokenweave.integrations.vllm.runtime import Runtime

LAYERS_TIMED = 4  # of a model, to know how long the host takes for all: few enough that no launch waits for the GPU


class Trials:
    """Of one rank.

    Args:
        runtime: whose steps they are. graphs: its graphs.
    """

    def __init__(self, runtime: Runtime, graphs: Graphs) -> None:
        self._runtime, self._graphs = runtime, graphs
        self._captures: list[float] = []  # ms

    @property
    def sizes(self) -> list[int]:
        """Rows of the steps that are measured, ascending."""
        least = self._graphs.least_rows
        return [n for n in SIZES if least <= n <= self._most_rows and self._predicted_ms(n) <= MOST_MS]

    @property
    def scheme_sizes(self) -> list[int]:
        """Rows of the steps in which schemes are compared, ascending; none where there is one scheme."""
        sizes = self.sizes if len(self._runtime.choice.tried) > 1 else []
        return [size for size in SCHEME_SIZES if size in sizes and self._predicted_ms(size) <= SCHEME_MS]

    @property
    def measures_modes(self) -> bool:
        """Whether modes are to be measured at the start: none was given, and there are sizes."""
        return self._runtime.choice.mode is None and bool(self.sizes)

    @property
    def captured(self) -> bool:
        """Whether any graph was made."""
        return bool(self._captures)

    @property
    def capture_ms(self) -> float:
        """What a graph takes to be made, by those that were; by prediction before the first."""
        layers = len(self._runtime.model.layers)
        return statistics.median(self._captures) if self._captures else CAPTURE_MS * layers

    def time_schemes(self, tables: Tables) -> list[list[float]]:
        """This rank's ms of a woven step of each of :attr:`scheme_sizes`, in each of ``runtime.choice.tried``. Every rank calls
        it.

        Args:
            tables: of any dummy step; their contents are overwritten and restored.
        """
        choice, times = self._runtime.choice, []
        with self._kept(tables):
            for size in reversed(self.scheme_sizes):
                plans = [choice.planner.plan(size, mode=Mode.WOVEN, scheme=scheme) for scheme in choice.tried]
                times.append(self._time(size, self._ready(size, plans, tables)))
        return times[::-1]

    def time_modes(self, tables: Tables, stock: Callable[[int], Callable[[], object]]) -> list[list[float]]:
        """This rank's ms of a step of each of :attr:`sizes`: as stock, fused and woven; as :meth:`time_schemes`.

        Args:
            stock: rows -> vLLM's own step of as many, to be called with the buffers filled.
        """
        times = []
        with self._kept(tables):
            for size in sorted(self.sizes, reverse=True):  # small ones fit into large ones' memory
                modes = (Mode.FUSED, Mode.WOVEN) if size >= WOVEN_ROWS else (Mode.FUSED,)
                *ours, stocks = self._ready(size, [self._plan(mode, size) for mode in modes], tables, stock)
                row = self._time(size, [stocks, *ours])
                times.append([*row, *[math.inf] * (3 - len(row))])
        return times[::-1]

    def time_launching(self, tables: Tables) -> list[float]:
        """The host's ms for a fused and a woven step that are launched kernel by kernel, by some of their layers; as
        :meth:`time_schemes`."""
        graphs, device, size = self._graphs, self._runtime.device, self.sizes[-1]
        layers = len(self._runtime.model.layers)
        timed, times = min(LAYERS_TIMED, layers), []
        with self._kept(tables):
            for mode in (Mode.FUSED, Mode.WOVEN):
                found = graphs.new(self._plan(mode, size), tables, size, self._least_room(size))
                _fill(found.cut.tables, size, self._runtime.max_length)
                times.append(launching_ms(partial(graphs.launch, found, timed), device) * layers / timed)
        return times

    def make_graphs(self, tables: Tables, most: int) -> None:
        """Makes the graphs of the sizes that matter most, and drops those that only were measured; every rank calls it.

        Args:
            tables: as of :meth:`time_schemes`. most: how many to capture; there are more where some were measured.
        """
        runtime, graphs = self._runtime, self._graphs
        wanted = self._by_importance()
        plans = {size: plan_of(runtime, [], size) for size, _ in wanted}
        made: list[tuple[int, int, Plan]] = []
        for size, room in wanted[:MAX_GRAPHS]:
            if (plan := plans[size]) is None:
                continue
            there = graphs.get(key_of(plan, size, room)) is not None
            if there or most > 0:
                made.append((size, room, plan))
                most -= not there
        graphs.keep_only({key_of(plan, size, room) for size, room, plan in made})
        with self._kept(tables):
            # Small ones fit into the memory of large ones.
            for size, room, plan in sorted(made, key=lambda graph: graph[:2], reverse=True):
                self._make(plan, size, room, tables)
        torch.cuda.synchronize(runtime.device)
        torch.cuda.empty_cache()  # what ran launch by launch is not needed again

    def _ready(
        self,
        size: int,
        plans: Sequence[Plan],
        tables: Tables,
        stock: Callable[[int], Callable[[], object]] | None = None,
    ) -> list[Callable[[], object]]:
        """Steps to be timed, of each plan and last of ``stock``, which fills the buffers too; a replay does with whatever is there.
        All ranks have theirs, or all raise: vLLM's collectives wait for a rank without end."""

        def make() -> list[Callable[[], object]]:
            ours = [self._replay(plan, size, tables) for plan in plans]
            return ours if stock is None else [*ours, stock(size)]

        return self._runtime.together(make)

    def _replay(self, plan: Plan, size: int, tables: Tables) -> Callable[[], object]:
        graph = self._make(plan, size, self._least_room(size), tables).graph
        assert graph is not None
        return graph.replay

    def _time(self, size: int, calls: Sequence[Callable[[], object]]) -> list[float]:
        return milliseconds(calls, self._runtime.device, self._repeats(size))

    def _make(self, plan: Plan, size: int, room: int, tables: Tables) -> Graph:
        if found := self._graphs.get(key_of(plan, size, room)):
            return found
        found = self._graphs.add(plan, tables, size, room)
        _fill(found.cut.tables, size, self._runtime.max_length)
        began = time.perf_counter()
        self._graphs.capture(found)
        self._captures.append((time.perf_counter() - began) * 1e3)
        return found

    def _plan(self, mode: Mode, size: int) -> Plan:
        choice = self._runtime.choice
        return choice.planner.plan(size, mode=mode, scheme=choice.scheme(size))

    def _repeats(self, size: int) -> int:
        return max(1, min(REPEATS, int(SIZE_MS / self._predicted_ms(size))))

    def _predicted_ms(self, size: int) -> float:
        """Of a stock step; the same on all ranks."""
        return self._runtime.choice.planner.model.unsplit_us(Batch(runs_of([(size, 0)])), "sequential") / 1e3

    def _by_importance(self) -> list[tuple[int, int]]:
        """(rows, room) of graphs, the most important first: full steps; then powers of two, and what lies between them in halves,
        quarters and so on, so that a step without a graph of its own finds one that is not much larger. One prompt, or a
        few, is what a latency is made of; graphs for many requests, which serve a server's mixed steps, come a level later."""
        rows_of = self._graphs.rows_of
        most = rows_of(self._most_rows)
        if most is None:
            return []

        def importance(graph: tuple[int, int]) -> tuple[bool, int, bool, int]:
            size, room = graph
            many = room > self._least_room(size)
            return size != most, _level(size) + many, many, -size

        between = [size for size in (*SMALL_ROWS, *range(TILE, most, TILE)) if size < most and rows_of(size) == size]
        return sorted(((size, room) for size in (most, *between) for room in self._rooms(size)), key=importance)

    def _rooms(self, size: int) -> list[int]:
        return sorted({self._least_room(size), self._graphs.room_of(size)})

    def _least_room(self, size: int) -> int:
        """For the fewest requests that fill a step."""
        return self._graphs.room_of(-(-size // self._runtime.max_length))

    @property
    def _most_rows(self) -> int:
        """Of any step that a graph is made for."""
        runtime = self._runtime
        return min(MAX_ROWS, runtime.max_rows, runtime.max_requests * runtime.max_length)

    @contextlib.contextmanager
    def _kept(self, tables: Tables) -> Iterator[None]:
        """The buffers end as they were, all of them and not only what graphs read: vLLM's dummy steps write to their ends, and
        the step in which this happens is a real one."""
        whole = tables.grown(self._runtime.max_rows, self._runtime.max_requests)
        buffers = (whole.token_ids, whole.positions, whole.query_start_loc, whole.seq_lens, whole.slots)
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)


def _level(rows: int) -> int:
    """How often the way from one power of two to the next is halved to come to so many rows."""
    tiles = max(1, rows // TILE)
    return (tiles // (tiles & -tiles)).bit_length() - 1


def _fill(tables: Tables, rows: int, max_length: int) -> None:
    """A dummy step of as few requests as fill it. It writes no key or value: all slots are -1."""
    lengths = [min(max_length, rows - first) for first in range(0, rows, max_length)]
    count = min(len(lengths), tables.seq_lens.shape[0])
    ends = torch.tensor(lengths[:count]).cumsum(0).to(tables.query_start_loc)
    tables.query_start_loc.fill_(int(ends[-1]))
    tables.query_start_loc[0] = 0
    tables.query_start_loc[1 : count + 1] = ends
    tables.seq_lens.zero_()
    tables.seq_lens[:count] = torch.tensor(lengths[:count]).to(tables.seq_lens)
    tables.positions.zero_()
    tables.slots.fill_(-1)
