"""What a stage's compute gets as ``inputs``: the batch description of one split's rows, the same for every model family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tokenweave.cuda.sm_budget import sm_budget


def _nobody_asks(point: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What a split's compute has to know of the collective that may run beside it.

    Attributes:
        gemm_sms: GEMM name -> SMs that it should plan for, because a collective holds the others; all of them if absent.
        held: SMs that the collective holds, for attention kernels that place their blocks themselves; 0 if there is none or
            attention is not told.
        reached: told of each of :data:`tokenweave.planning.plan.POINTS` when the compute comes to it.
    """

    gemm_sms: Mapping[str, int] = field(default_factory=dict)
    held: int = 0
    reached: Callable[[str], None] = _nobody_asks

    @contextmanager
    def gemm(self, name: str) -> Iterator[None]:
        """A GEMM is launched inside: says so, and limits it to its SMs."""
        self.reached(name)
        with sm_budget(self.gemm_sms.get(name)):
            yield


@dataclass(frozen=True)
class SequenceRows:
    """Query rows of a split that belong to one sequence: a prefill chunk, a part of one, or a decode step's single row.

    The sequence owns a contiguous run of cache rows: position ``p`` has its key and value in row ``cache_start + p``.

    Attributes:
        first: first of these rows within the split.
        tokens: number of rows, at least 1.
        cache_start: cache row of the sequence's position 0.
        context: positions that precede these rows. They are in the cache before these rows attend.
    """

    first: int
    tokens: int
    cache_start: int
    context: int

    @property
    def length(self) -> int:
        """Positions up to and including the last of these rows: what the last row attends to."""
        return self.context + self.tokens


@dataclass(frozen=True)
class PackedSequences:
    """The same as a tuple of :class:`SequenceRows`, on the GPU: what one launch of attention for all of them reads.

    A captured graph keeps the tensors and sees their new values; sequences that a step doesn't have are empty.

    Attributes:
        query_starts: int32 [n + 1], first row of each sequence within the split, and the end of the last.
        cache_starts: int32 [n + 1], cache row of each sequence's position 0; the last element means nothing.
        lengths: int32 [n], positions that each sequence's last row attends to; 0 for an empty sequence.
        max_queries, max_length: of any sequence, or more; 1 only if every row is a sequence of its own.
    """

    query_starts: torch.Tensor
    cache_starts: torch.Tensor
    lengths: torch.Tensor
    max_queries: int
    max_length: int


@dataclass(frozen=True)
class Inputs(Launches):
    """One split's rows.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens], each row's position in its sequence.
        cache_rows: int64 [tokens], the cache row that takes each row's key and value; no row twice. Negative (only with
            ``packed``): a row of padding, which is computed and means nothing.
        sequences: cover rows 0..tokens in order, without gaps. With ``packed`` it need not be given.
        packed: the sequences for attention in one launch, on GPUs where that is available.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cache_rows: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    packed: PackedSequences | None = None
