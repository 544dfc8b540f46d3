"""Steps as CUDA graphs: captured per bucket of rows and plan, replayed with every step's own tokens, lengths and rows.

A layer is some ten launches, and a woven one twice as many; below a few thousand tokens the host cannot issue them as
fast as the GPU runs them. A graph costs one launch. What varies between steps is in memory that the graph reads: one
buffer with the rows of all splits (see :mod:`tokenweave.engine.split_buffer`). GEMMs compute a bucket's rows of padding,
less than one 128-row tile beyond 128 rows; collectives take the real row count from the buffer and send nothing else.

The first step of a bucket runs eagerly, on the stream that captures and in the buffers that a graph would use, so that
libraries and kernels are loaded; the second is captured. Both are the same launches in the same order, so ranks need not
agree on which of them have a graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenweave.collective.workspace import Workspace
from tokenweave.cuda.graph import capturing
from tokenweave.engine.batch import Chunk, beside, row_range_of, rows_of
from tokenweave.engine.buckets import Bucket, bucket_of
from tokenweave.engine.split_buffer import RowRange, packed_inputs
from tokenweave.execution import collective_of, layout_of, overlap_of
from tokenweave.overlap import Overlap
from tokenweave.planning.plan import Mode, Plan
from tokenweave.stages import Split, Stage
from tokenweave.weave import Collective, run_stages

log = logging.getLogger(__name__)

MAX_GRAPHS = 128
MAX_BYTES = 4 << 30


@dataclass
class _Step:
    """A bucket's buffers, and its graph once it has one.

    Attributes:
        buffer: int64, the splits' buffers one after the other.
        splits: over the buffer; copied for every walk.
        overlap: runs the collectives.
        outputs: per split, [sampled, hidden] of the graph.
        bytes: of GPU memory that the graph's launches take.
        warm: it has run once. refused: it gets no graph, because one does not fit into the memory.
        collectives, bytes_sent: of one replay.
    """

    bucket: Bucket
    buffer: torch.Tensor
    splits: list[Split]
    gather: list[torch.Tensor] | None
    collective: Collective
    overlap: Overlap
    graph: torch.cuda.CUDAGraph | None = None
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    bytes: int = 0
    warm: bool = False
    refused: bool = False
    collectives: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True)
class GraphRecord:
    """What one rank's step graphs take.

    Attributes:
        count: graphs that are held. mib: of GPU memory that they take.
        capture_s: seconds of all captures, also of graphs that gave way since.
    """

    count: int
    mib: float
    capture_s: float

    def __str__(self) -> str:
        return f"{self.count} in {self.mib:,.0f} MiB, captured in {self.capture_s:.1f} s"


class StepGraphs:
    """The graphs of one rank's engine.

    Args:
        stages: over packed inputs; they must not wait for the GPU.
        workspace: of the group. residual: [most rows of a step, hidden].
        overlap: runs the collectives of woven steps.
        max_length: of any sequence.

    Attributes:
        replays, eager: steps that ran as a graph, and launch by launch in a bucket's buffers.
        captures, capture_seconds: graphs that were ever made, and the time that took.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        workspace: Workspace,
        residual: torch.Tensor,
        overlap: Overlap,
        max_length: int,
        max_graphs: int = MAX_GRAPHS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.replays = 0
        self.eager = 0
        self.captures = 0
        self.capture_seconds = 0.0
        self._stages, self._workspace, self._residual = stages, workspace, residual
        self._overlap = overlap
        self._max_length, self._max_graphs, self._max_bytes = max_length, max_graphs, max_bytes
        self._steps: OrderedDict[Bucket, _Step] = OrderedDict()
        self._stream = torch.cuda.Stream(workspace.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0
        self._told_full = self._told_sequential = False
        self._told_captures = 0

    @property
    def graphs(self) -> int:
        """Graphs that are held."""
        return sum(step.graph is not None for step in self._steps.values())

    @property
    def bytes(self) -> int:
        """GPU memory of the pool that their activations share, and of their launches."""
        return self._pool_bytes + sum(step.bytes for step in self._steps.values())

    @property
    def record(self) -> GraphRecord:
        return GraphRecord(self.graphs, self.bytes / 2**20, self.capture_seconds)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], plan: Plan) -> torch.Tensor | None:
        """Runs a step.

        Returns:
            as :meth:`tokenweave.engine.engine.Engine.forward`; None, with nothing done, for a step that has no bucket.
        """
        if self._workspace.transport == "torch" and self._workspace.world_size > 1:
            return None  # it splits rows on the host
        if plan.mode is Mode.SEQUENTIAL and self._workspace.world_size > 1:
            self._tell_of_sequential()
            return None
        edges = [0, rows_of(chunks)] if plan.split is None else [0, plan.split, rows_of(chunks)]
        ranges = [row_range_of(chunks, *pair) for pair in itertools.pairwise(edges)]
        bucket = bucket_of(ranges, plan, self._residual.shape[0], self._max_length)
        if bucket is None:
            return None
        step = self._steps.get(bucket)
        if step is None:
            if len(self._steps) >= self._max_graphs:
                self._drop(next(iter(self._steps)))
            step = self._steps[bucket] = self._new(bucket, plan)
        self._steps.move_to_end(bucket)
        self._fill(step, ranges)
        if step.warm and step.graph is None and not step.refused:
            self._capture_in_bounds(step)
        if step.graph is not None:
            step.graph.replay()
            self._workspace.collectives += step.collectives
            self._workspace.bytes_sent += step.bytes_sent
            self.replays += 1
            outputs = step.outputs
        else:
            outputs = self._launched(step)
        return torch.cat([out[: len(given.sampled)] for out, given in zip(outputs, ranges, strict=True)])

    def close(self) -> None:
        """Drops all graphs and their memory, once the GPU is done with them; idempotent."""
        self._tell()
        if self._steps:
            torch.cuda.synchronize(self._workspace.device)
            self._steps.clear()
        self._new_pool()

    def _new(self, bucket: Bucket, plan: Plan) -> _Step:
        workspace, device = self._workspace, self._workspace.device
        shapes = [split.shape for split in bucket.splits]
        buffer = torch.zeros(sum(shape.words for shape in shapes), dtype=torch.int64, device=device)
        # Rows that nobody owns are skipped by the collectives of sampled rows; not by one-shot and sequential ones, whose
        # final rows are therefore all computed and then picked.
        layout = layout_of(plan, bucket.rows, workspace)
        pick = workspace.transport == "torch" or plan.mode is Mode.SEQUENTIAL or layout == "replicated"
        overlap = overlap_of(plan, self._overlap)
        splits, gather, start = [], [], 0
        names = ("prefix", "suffix")
        for part, captured, name in zip(
            buffer.split([shape.words for shape in shapes]), bucket.splits, names, strict=False
        ):
            tensors, rows = captured.shape.views(part), captured.shape.rows
            inputs = packed_inputs(tensors, captured.max_queries, bucket.max_length)
            inputs = dataclasses.replace(beside(inputs, plan, name), reached=overlap.reached)
            residual = self._residual[start : start + rows]
            sampled = None if pick else tensors.sampled
            row_count = None if workspace.transport == "torch" else tensors.row_count
            splits.append(Split(start, rows, inputs, residual, sampled, row_count))
            gather.append(tensors.sampled)
            start += rows
        collective = collective_of(plan, bucket.rows, workspace)
        return _Step(bucket, buffer, splits, gather if pick else None, collective, overlap)

    def _fill(self, step: _Step, ranges: Sequence[RowRange]) -> None:
        """Copies the step's rows into its buffer; the host does not wait."""
        host = torch.empty(step.buffer.shape, dtype=torch.int64, pin_memory=step.buffer.is_cuda)
        shapes = [split.shape for split in step.bucket.splits]
        for part, shape, given in zip(host.split([s.words for s in shapes]), shapes, ranges, strict=True):
            shape.fill(part, given, past=0 if step.gather is not None else shape.rows)
        step.buffer.copy_(host, non_blocking=True)

    def _walk(self, step: _Step) -> list[torch.Tensor]:
        """All of the step's launches, on the current stream and the overlap's."""
        splits = [dataclasses.replace(split) for split in step.splits]
        rows = run_stages(self._stages, splits, step.collective, self._workspace, step.overlap)
        if step.gather is None:
            return rows
        return [final.index_select(0, sampled) for final, sampled in zip(rows, step.gather, strict=True)]

    def _launched(self, step: _Step) -> list[torch.Tensor]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        before = self._workspace.collectives, self._workspace.bytes_sent
        with torch.cuda.stream(self._stream):
            outputs = self._walk(step)
        current.wait_stream(self._stream)
        step.collectives = self._workspace.collectives - before[0]
        step.bytes_sent = self._workspace.bytes_sent - before[1]
        step.warm = True
        self.eager += 1
        return outputs

    def _capture_in_bounds(self, step: _Step) -> None:
        """Captures the step, if that leaves the memory within its bound; graphs that were not used for longest give way.

        What a graph takes is known only once it is there: beforehand, room is made for as much as the largest one took. Where
        it does not fit although all others are gone, it goes too, with the pool that they left behind. The step has another
        try at its next run, in a pool of its own; if it does not fit then, it runs launch by launch for good.
        """
        torch.cuda.synchronize(self._workspace.device)
        self._make_room(max(each.bytes for each in self._steps.values()), step)
        if alone := not self.graphs:
            self._new_pool()
        began = time.perf_counter()
        self._capture(step)
        self.capture_seconds += time.perf_counter() - began
        self.captures += 1
        self._make_room(0, step)
        if self.bytes <= self._max_bytes:
            if self.captures >= 2 * self._told_captures:  # each doubling: not a line a graph
                self._tell()
            return
        if alone:
            log.warning(
                "a %s step of %d rows runs launch by launch: its graph takes %d MiB, more than all may (%d MiB)",
                step.bucket.mode,
                step.bucket.rows,
                self.bytes >> 20,
                self._max_bytes >> 20,
            )
        step.graph, step.outputs, step.bytes, step.refused = None, [], 0, alone
        self._new_pool()

    def _tell_of_sequential(self) -> None:
        if not self._told_sequential and self._workspace.rank == 0:
            log.warning(
                "sequential steps of several ranks run launch by launch, with NCCL's all-reduce: a graph that holds its kernels "
                "keeps a process group from ending. `tokenweave bench latency` compares with sequential steps in graphs"
            )
        self._told_sequential = True

    def _tell(self) -> None:
        if self.captures > self._told_captures:
            log.info("step graphs: %s", self.record)
            self._told_captures = self.captures

    def _capture(self, step: _Step) -> None:
        workspace = self._workspace
        free, reserved = torch.cuda.mem_get_info(workspace.device)[0], torch.cuda.memory_reserved(workspace.device)
        counted = workspace.collectives, workspace.bytes_sent
        with capturing(self._stream, self._pool) as graph:
            step.outputs = self._walk(step)
        workspace.collectives, workspace.bytes_sent = counted  # nothing has run yet
        step.graph = graph
        pool = torch.cuda.memory_reserved(workspace.device) - reserved
        self._pool_bytes += pool
        step.bytes = max(0, free - torch.cuda.mem_get_info(workspace.device)[0] - pool)

    def _make_room(self, room: int, keep: _Step) -> None:
        """Drops buckets with graphs, but not ``keep``, until ``room`` bytes are left; the least recently used first."""
        for bucket, step in list(self._steps.items()):
            if self.bytes + room <= self._max_bytes:
                return
            if step.graph is not None and step is not keep:
                if not self._told_full:
                    log.warning("step graphs take %d MiB: those not used for longest give way", self.bytes >> 20)
                    self._told_full = True
                self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        torch.cuda.synchronize(self._workspace.device)  # it may still run
        del self._steps[bucket]

    def _new_pool(self) -> None:
        """Gives back the pool that the graphs' activations shared, which shrinks only when none of them is left."""
        torch.cuda.empty_cache()
        self._pool, self._pool_bytes = torch.cuda.graph_pool_handle(), 0
