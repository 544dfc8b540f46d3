"""Planned steps as private CUDA graphs: one a size and plan, replayed with what vLLM's runner writes into its buffers.

vLLM's graphs of whole steps are left alone: a replay of theirs runs no Python, so that neither planner nor veto could act in
it. Ours are made for steps that stock vLLM launches kernel by kernel, or piece by piece. A graph reads the runner's
persistent buffers (token ids, positions, request starts, lengths, block table, cache slots) and computes at its head what
the splits need of them, so that a replay refreshes itself. Each has room for so many requests (:data:`ROOMS`); those that a
step does not have are empty.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenweave.cuda.graph import capturing
from tokenweave.errors import TokenWeaveError
from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.step import Cut
from tokenweave.planning import Plan

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

Key = tuple[object, ...]


class CaptureError(TokenWeaveError):
    """A step's graph could not be made on some rank, and none has it. Nothing was used of what ran for it."""


@dataclass
class Graph:
    """A step's graph, by what it was made for.

    Attributes:
        cut: its step. addresses: of all that it reads and vLLM may move.
        graph: None until it is captured, and from a move on until it is captured anew.
        loaded: whether its kernels have run.
    """

    cut: Cut
    addresses: tuple[int, ...]
    graph: torch.cuda.CUDAGraph | None = None
    loaded: bool = False

    @property
    def capacity(self) -> int:
        """Rows that it computes."""
        return self.cut.tables.token_ids.shape[0]

    @property
    def room(self) -> int:
        """Requests that it has room for."""
        return self.cut.tables.seq_lens.shape[0]

    @property
    def key(self) -> Key:
        return key_of(self.cut.plan, self.capacity, self.room)


class Graphs:
    """The private graphs of one rank. Which there are is the same on all ranks; whether vLLM moved what they read is asked of
    each rank's addresses, and decides nothing but whether that rank captures a graph anew before it replays it.

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
        self._graphs: dict[Key, Graph] = {}
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

    def has_room(self, requests: int) -> bool:
        """Whether a graph can be made for so many."""
        return requests <= self.rooms[-1]

    def room_of(self, requests: int) -> int:
        """Of a graph for so many requests, or for the most that there is."""
        return next((room for room in self.rooms if room >= requests), self.rooms[-1])

    def find(self, plan: Plan, capacity: int, requests: int) -> Graph | None:
        """One that is made, or None. Room for more requests costs a little in each attention call; to make another graph would
        cost a request its time."""
        keys = (key_of(plan, capacity, room) for room in self.rooms if room >= requests)
        return next((self._graphs[key] for key in keys if key in self._graphs), None)

    def get(self, key: Key) -> Graph | None:
        """Exactly that one, or None."""
        return self._graphs.get(key)

    def larger(self, capacity: int, requests: int) -> Iterator[Graph]:
        """Made ones of more rows, the smallest first. None where a row of padding may not be just anything: only the last
        :data:`TILE` rows of a graph are cleared there."""
        if not self._runtime.dense:
            return
        fits = [found for found in self._graphs.values() if found.capacity > capacity and found.room >= requests]
        yield from sorted(fits, key=lambda found: (found.capacity, found.room))

    def add(self, plan: Plan, tables: Tables, capacity: int, requests: int) -> Graph:
        """One that is captured when it first runs."""
        if len(self._graphs) >= MAX_GRAPHS:
            torch.cuda.synchronize(self._runtime.device)  # the one that was not used for longest may still run
            del self._graphs[next(iter(self._graphs))]
        found = self.new(plan, tables, capacity, self.room_of(requests))
        self._graphs[found.key] = found
        return found

    def new(self, plan: Plan, tables: Tables, capacity: int, room: int) -> Graph:
        """One that is not kept."""
        grown = tables.grown(capacity, room)
        cut = Cut(plan, capacity, grown, longest_query=capacity, longest_sequence=self._runtime.max_length)
        return Graph(cut, self._addresses(grown))

    def keep_only(self, keys: Collection[Key]) -> None:
        """Drops all others, which nothing may be replaying."""
        self._graphs = {key: found for key, found in self._graphs.items() if key in keys}

    def run(self, found: Graph, tables: Tables) -> None:
        """Replays a graph on the runner's buffers, and captures it before if it is new.

        Args:
            tables: of this step; their metadata are a pattern for the splits' if something is still to be launched.

        Raises:
            CaptureError: it is new, and could not be captured on some rank. Raised on all of them, or one that has it would wait
                for one that goes on without.
            CollectiveError: an earlier step's collective has failed.
        """
        if found.addresses != self._addresses(tables):
            self._follow(tables)
        if found.graph is None:
            metadata = tables.metadata
            found.cut = dataclasses.replace(found.cut, tables=dataclasses.replace(found.cut.tables, metadata=metadata))
            if found.loaded:  # here something moved: other ranks may not capture now, so that nothing can be agreed on
                self._expect_intact()
                self.capture(found)
            else:
                self._capture_together(found)
        assert found.graph is not None
        key = found.key
        self._graphs[key] = self._graphs.pop(key)  # as the last one
        found.graph.replay()

    def capture(self, found: Graph) -> None:
        """Where it is new some layers run before, so that a capture finds all kernels loaded: all of them where they are not
        alike. Every rank takes part in that."""
        if not found.loaded:
            self.launch(found, layers=2 if self._runtime.dense else None)
            torch.cuda.synchronize(self._runtime.device)
            found.loaded = True
        with capturing(self._stream, self._pool) as graph:
            self._walk(found)
        found.graph = graph

    def launch(self, found: Graph, layers: int | None = None) -> None:
        """Runs its step kernel by kernel, on the stream that captures, so that kernels, libraries and their scratch memory are
        there.

        Args:
            layers: how many to run of the first ones; None for all.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._walk(found, layers)
        current.wait_stream(self._stream)

    def drop(self) -> None:
        """Drops all graphs and their memory, once the GPU is done with them."""
        torch.cuda.synchronize(self._runtime.device)
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _expect_intact(self) -> None:
        torch.cuda.synchronize(self._runtime.device)
        self._runtime.expect_intact()  # a collective that fails from here on is of no step that was used

    def _capture_together(self, found: Graph) -> None:
        self._expect_intact()
        try:
            self._runtime.together(lambda: self.capture(found))
        except Exception as error:
            raise CaptureError(f"a step's graph could not be captured: {error}") from error

    def _follow(self, tables: Tables) -> None:
        """All graphs will read what they read from where it is by now: what was captured is dropped."""
        log.warning("TokenWeave: vLLM moved its cache or weights: graphs are captured anew")
        torch.cuda.synchronize(self._runtime.device)
        for found in self._graphs.values():
            found.graph, grown = None, tables.grown(found.capacity, found.room)
            found.cut, found.addresses = dataclasses.replace(found.cut, tables=grown), self._addresses(grown)
        self._pool = torch.cuda.graph_pool_handle()

    def _addresses(self, tables: Tables) -> tuple[int, ...]:
        """Of all that a graph reads and vLLM may move."""
        return *tables.addresses(), *self._runtime.addresses()

    def _walk(self, found: Graph, layers: int | None = None) -> None:
        self._runtime.walk(found.cut, found.cut.tables.query_start_loc[-1:], layers=layers)


def key_of(plan: Plan, capacity: int, room: int) -> Key:
    """What tells graphs apart."""
    return capacity, room, *plan.launch, plan.split
