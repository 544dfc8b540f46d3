"""Planned steps as private CUDA graphs: one a size and plan, replayed with what vLLM's runner writes into its buffers.

vLLM's graphs of whole steps are left alone: a replay of theirs runs no Python, so that neither planner nor veto could act in
it. Ours are made for steps that stock vLLM launches kernel by kernel, or piece by piece. A graph reads the runner's
persistent buffers (token ids, positions, request starts, lengths, block table, cache slots) and computes at its head what
the splits need of them, so that a replay refreshes itself. Each has room for so many requests (:data:`ROOMS`); those that a
step does not have are empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenweave.cuda.graph import capturing
from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.measured import (
    LONG_MS,
    MOST_MS,
    REPEATS,
    SCHEME_SIZES,
    SIZES,
    WOVEN_ROWS,
    milliseconds,
)
from tokenweave.integrations.vllm.step import Cut
from tokenweave.planning import Mode, Plan
from tokenweave.planning.batch import Batch, runs_of

if TYPE_CHECKING:
    from tokenweave.integrations.vllm.runtime import Runtime

log = logging.getLogger("vllm.tokenweave")

TILE = 128  # rows: GEMMs compute a multiple of it anyway
SMALL_ROWS = (16, 32, 64)
"""Below a tile what a GEMM takes is the reading of its weights, but attention and norms are shorter."""
MAX_ROWS = 8192  # of a captured step: above, the host keeps up with the GPU
ROOMS = (16, 128, 992)
"""Requests. FlashAttention-3 schedules at most 992 on the device, and looks at each in every call."""
MAX_GRAPHS = 128
LAYERS_AT_START = 1600  # layers of all graphs that are made at the start, at some 3 to 5 ms each

Key = tuple[object, ...]


@dataclass
class _Graph:
    """``uses``: steps that asked for it. ``warm``: it has run launch by launch once."""

    cut: Cut
    addresses: tuple[int, ...]
    uses: int = 0
    warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None


class Graphs:
    """The private graphs of one rank.

    Args:
        runtime: whose steps they are.
        least_rows: of a step that gets one.

    Attributes:
        rooms: requests that graphs are made for, ascending.
    """

    def __init__(self, runtime: Runtime, least_rows: int) -> None:
        self._runtime = runtime
        self.least_rows = least_rows
        self.rooms = tuple(sorted({min(room, runtime.max_requests) for room in ROOMS}))
        self._graphs: dict[Key, _Graph] = {}
        self._stream = torch.cuda.Stream(runtime.device)
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return sum(graph.graph is not None for graph in self._graphs.values())

    def rows_of(self, rows: int) -> int | None:
        """Rows of the graph for a step of ``rows``, or None where there is none."""
        if rows < self.least_rows or rows > MAX_ROWS:
            return None
        small = next((size for size in SMALL_ROWS if size >= rows), None)
        return min(small or -(-rows // TILE) * TILE, self._runtime.max_rows)

    def find(self, cut: Cut, capacity: int, requests: int) -> _Graph | None:
        """The graph of a step, or what will become one: its first use runs as stock, its second eagerly in the graph's
        shape, its third is captured. None: this step cannot have one."""
        rooms = [room for room in self.rooms if room >= requests]
        if not rooms:
            return None
        keys = [_key(capacity, room, cut.plan) for room in rooms]
        # Room for more requests costs a little in each attention call; to make another graph would cost a request its time.
        key, room = next(
            (pair for pair in zip(keys, rooms, strict=True) if self._is_made(pair[0])), (keys[0], rooms[0])
        )
        tables = cut.tables.grown(capacity, room)
        addresses = (*tables.addresses(), *self._runtime.addresses())
        found = self._graphs.get(key)
        if found is not None and found.addresses != addresses:
            log.warning("TokenWeave: vLLM moved its cache or weights: graphs are made anew")
            self.drop()
            found = None
        if found is None:
            if len(self._graphs) >= MAX_GRAPHS:
                torch.cuda.synchronize(self._runtime.device)  # the one that was not used for longest may still run
                del self._graphs[next(iter(self._graphs))]
            found = self._new(cut.plan, tables, capacity, addresses)
        self._graphs.pop(key, None)
        self._graphs[key] = found  # as the last one
        return found

    def _is_made(self, key: Key) -> bool:
        return key in self._graphs and self._graphs[key].graph is not None

    def run(self, found: _Graph, metadata: Any) -> bool:
        """Runs a found step on the runner's buffers; whether it was a replay.

        Args:
            metadata: of this step; a pattern for the splits' if something is still to be launched.
        """
        if found.graph is None:
            found.cut = dataclasses.replace(found.cut, tables=dataclasses.replace(found.cut.tables, metadata=metadata))
            if not found.warm:
                self._eagerly(found)
                return False
            self._capture(found)
        assert found.graph is not None
        found.graph.replay()
        return True

    def time_modes(self, tables: Tables, stock: Callable[[int], Callable[[], object]]) -> list[list[float]]:
        """This rank's ms of a step of each of :attr:`sizes`: as stock, fused and woven. Every rank calls it.

        Args:
            tables: of any dummy step; their contents are overwritten and restored.
            stock: rows -> vLLM's own step of as many, to be called with the buffers filled.
        """
        runtime, choice, times = self._runtime, self._runtime.choice, []
        with self._kept(tables):
            for size in sorted(self.sizes, reverse=True):  # small ones fit into large ones' memory
                row = [milliseconds(stock(size), runtime.device, self._repeats(size))]
                for mode in (Mode.FUSED, Mode.WOVEN):
                    if mode is Mode.WOVEN and size < WOVEN_ROWS:
                        row.append(math.inf)
                        continue
                    plan = choice.planner.plan(size, mode=mode, scheme=choice.scheme(size))
                    row.append(self._time(plan, size, tables))
                times.append(row)
        return times[::-1]

    def time_schemes(self, tables: Tables) -> list[list[float]]:
        """This rank's ms of a woven step of each of :attr:`scheme_sizes`, in each of ``runtime.choice.tried``; as
        :meth:`time_modes`."""
        choice, times = self._runtime.choice, []
        with self._kept(tables):
            for size in reversed(self.scheme_sizes):
                plans = [choice.planner.plan(size, mode=Mode.WOVEN, scheme=scheme) for scheme in choice.tried]
                times.append([self._time(plan, size, tables) for plan in plans])
        return times[::-1]

    def _time(self, plan: Plan, size: int, tables: Tables) -> float:
        found = self._make(plan, size, self._least_room(size), tables)
        assert found.graph is not None
        return milliseconds(found.graph.replay, self._runtime.device, self._repeats(size))

    def _repeats(self, size: int) -> int:
        return max(1, min(REPEATS, int(REPEATS * LONG_MS / self._predicted_ms(size))))

    def _predicted_ms(self, size: int) -> float:
        """Of a stock step; the same on all ranks."""
        return self._runtime.choice.planner.model.unsplit_us(Batch(runs_of([(size, 0)])), "sequential") / 1e3

    def make_at_start(self, tables: Tables, layers: int) -> None:
        """Makes the graphs of the sizes that matter most, and drops those that only were measured; every rank calls it.

        Args:
            tables: as :meth:`time_modes`. layers: of the model.
        """
        runtime, most = self._runtime, max(4, LAYERS_AT_START // max(layers, 1))
        wanted = [(size, room) for size in self._by_importance() for room in self._rooms_at_start(size)]
        plans = {size: runtime.plan([], size) for size, _ in wanted}
        made = [(size, room, plan) for size, room in wanted if (plan := plans[size]) is not None][:most]
        needed = {_key(*graph) for graph in made}
        self._graphs = {key: found for key, found in self._graphs.items() if key in needed}
        with self._kept(tables):
            # Small ones fit into the memory of large ones.
            for size, room, plan in sorted(made, key=lambda graph: graph[:2], reverse=True):
                self._make(plan, size, room, tables)
        torch.cuda.synchronize(runtime.device)
        torch.cuda.empty_cache()  # what ran launch by launch is not needed again

    @property
    def sizes(self) -> list[int]:
        """Rows of the steps that are measured, ascending."""
        return [n for n in SIZES if self.least_rows <= n <= self._most_rows and self._predicted_ms(n) <= MOST_MS]

    @property
    def measures_modes(self) -> bool:
        """Whether modes are to be measured at the start: none was given, and there are sizes."""
        return self._runtime.choice.mode is None and bool(self.sizes)

    @property
    def scheme_sizes(self) -> list[int]:
        """Rows of the steps in which schemes are compared, ascending; none where there is one scheme."""
        sizes = self.sizes if len(self._runtime.choice.tried) > 1 else []
        return [size for size in SCHEME_SIZES if size in sizes]

    def _make(self, plan: Plan, capacity: int, room: int, tables: Tables) -> _Graph:
        key = _key(capacity, room, plan)
        if key not in self._graphs:
            grown = tables.grown(capacity, room)
            found = self._new(plan, grown, capacity, (*grown.addresses(), *self._runtime.addresses()))
            _fill(grown, capacity, self._runtime.max_length)
            self._eagerly(
                found, layers=2 if self._runtime.dense else None
            )  # so that a capture finds all kernels loaded
            self._capture(found)
            self._graphs[key] = found
        return self._graphs[key]

    def drop(self) -> None:
        """Drops all graphs and their memory, once the GPU is done with them."""
        torch.cuda.synchronize(self._runtime.device)
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _by_importance(self) -> list[int]:
        """Sizes of graphs: full steps, powers of two, and then what lies between, the coarser the sooner."""
        most = self.rows_of(self._most_rows)
        if most is None:
            return []
        units = (2048, 1024, 512, 256, TILE)
        wanted = [
            *(TILE * 2**n for n in range(6, -1, -1)),
            *reversed(SMALL_ROWS),
            *(size for unit in units for size in range(unit, most, unit)),
        ]
        return list(dict.fromkeys([most, *(n for n in wanted if n < most and self.rows_of(n) == n)]))

    def _rooms_at_start(self, size: int) -> list[int]:
        """One prompt, or a few, is what a latency is made of; under load the steps are full, with many requests."""
        return sorted({self._least_room(size), self._room(size)})

    def _least_room(self, size: int) -> int:
        """For the fewest requests that fill a step."""
        return self._room(-(-size // self._runtime.max_length))

    def _room(self, requests: int) -> int:
        """For so many requests, or for the most that there is."""
        return next((room for room in self.rooms if room >= requests), self.rooms[-1])

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

    def _new(self, plan: Plan, tables: Tables, capacity: int, addresses: tuple[int, ...]) -> _Graph:
        cut = Cut(plan, capacity, tables, longest_query=capacity, longest_sequence=self._runtime.max_length)
        return _Graph(cut, addresses)

    def _walk(self, found: _Graph, layers: int | None = None) -> None:
        self._runtime.walk(found.cut, found.cut.tables.query_start_loc[-1:], layers=layers)

    def _eagerly(self, found: _Graph, layers: int | None = None) -> None:
        """On the stream that captures, so that kernels, libraries and their scratch memory are there.

        Args:
            layers: how many to run of the first ones; None for all.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._walk(found, layers)
        current.wait_stream(self._stream)
        found.warm = True

    def _capture(self, found: _Graph) -> None:
        torch.cuda.synchronize(self._runtime.device)
        with capturing(self._stream, self._pool) as graph:
            self._walk(found)
        found.graph = graph


def _key(capacity: int, room: int, plan: Plan) -> Key:
    return capacity, room, *plan.launch, plan.split


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
