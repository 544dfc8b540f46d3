"""A rank in this very process: the only one, or one of torchrun's."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from tokenweave.engine.build import EngineArgs, build_engine
from tokenweave.engine.engine import Engine, StepRecord, TokenEvent, close_all
from tokenweave.engine.graphs import GraphRecord
from tokenweave.engine.scheduler import NewRequest
from tokenweave.errors import RequestError
from tokenweave.models.attention_choice import ATTENTION_VARIABLE, asked_attention
from tokenweave.peers import differing, environment_number, join, lost_peer_is_told, started_ranks


class Ranks(Protocol):
    """All ranks of an engine, wherever they run."""

    @property
    def steps(self) -> list[StepRecord]:
        """Rank 0's records of the steps of the last :meth:`generate`; complete once that is exhausted."""

    @property
    def graph_record(self) -> GraphRecord | None:
        """What rank 0's step graphs took after the last :meth:`generate`; None without."""

    def generate(self, requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        """Serves requests to the end; yields each step's events.

        Raises:
            RequestError: one of the requests can never be served; none was begun.
            RankDied: a rank's process ended.
        """

    def close(self) -> None:
        """Ends the ranks; idempotent."""


def under_torchrun(tensor_parallel_size: int) -> bool:
    """True if this process is one rank of ``tensor_parallel_size`` that something else started.

    Raises:
        RequestError: it is one of another number of ranks, or WORLD_SIZE or RANK is no number of them.
    """
    world_size = started_ranks()
    if world_size == 1 or "RANK" not in os.environ or tensor_parallel_size == 1:
        return False
    if world_size != tensor_parallel_size:
        raise RequestError(
            f"tensor_parallel_size={tensor_parallel_size}, but this process was started as one of WORLD_SIZE={world_size} "
            f"ranks: start {tensor_parallel_size} processes, or one alone, which starts its own"
        )
    if not 0 <= (rank := environment_number("RANK", 0)) < world_size:
        raise RequestError(f"RANK={rank} in the environment; expected 0 to {world_size - 1}, below WORLD_SIZE")
    return True


class LocalRank:
    """This process is the rank.

    Args:
        args: of the engine. With more than one rank, torch.distributed is initialised from the environment, unless it
            is already, and its WORLD is the tensor-parallel group.
        show_progress: a bar on stderr while the weights load (on rank 0).

    Raises:
        ModelError, RequestError: as :func:`tokenweave.engine.build.build_engine`; RequestError also where the ranks were not
            started alike.
        CollectiveError: another rank never came, is gone, or could not load its part.
    """

    def __init__(self, args: EngineArgs, show_progress: bool = True) -> None:
        from tokenweave.models.loading import progress_bar

        self._started_group = False
        self._engine: Engine | None = None
        self._rank, group = 0, None
        if args.tensor_parallel_size > 1:
            if not dist.is_initialized():
                join(args.backend)
                self._started_group = True
            self._rank, group = dist.get_rank(), dist.group.WORLD
        elif dist.is_initialized():  # for something else of the user's: WORLD is not ours
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._peers = group if args.tensor_parallel_size > 1 else None
        self._gpu = self._rank if args.device_type == "cuda" else None
        try:
            with self._here(), progress_bar(show_progress and self._rank == 0) as progress:
                if self._peers is not None:
                    _check_started_alike(args, self._peers)
                self._engine = build_engine(args, rank=self._rank, group=group, progress=progress)
        except BaseException:
            with contextlib.suppress(Exception):  # what failed first is what is told
                self._end_group()
            raise

    @property
    def steps(self) -> list[StepRecord]:
        return self._open().steps

    @property
    def graph_record(self) -> GraphRecord | None:
        return self._open().graph_record

    def generate(self, requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        """As :meth:`Ranks.generate`.

        Raises:
            RequestError: also where ranks were given different requests.
            CollectiveError: another rank is gone.
        """
        with self._here():
            if self._peers is not None:
                _check_same_requests(requests, self._peers)
        steps = self._open().run(requests)
        while True:
            with self._here():  # not around the yield: what the caller does in between is its own
                events = next(steps, None)
            if events is None:
                return
            yield events

    def close(self) -> None:
        engine, self._engine = self._engine, None
        self._peers = None  # it holds the group, which must not outlive its end
        close_all(*([] if engine is None else [engine.close]), self._end_group)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """On this rank's GPU, whichever thread calls: collectives of objects and launches go to the current one. A lost peer
        is told."""
        gpu = contextlib.nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)
        with lost_peer_is_told(self._rank), gpu:
            yield

    def _open(self) -> Engine:
        if self._engine is None:
            raise RequestError("this rank is closed; create a new LLM")
        return self._engine

    def _end_group(self) -> None:
        if self._started_group:
            self._started_group = False
            dist.destroy_process_group()


def _check_started_alike(args: EngineArgs, group: dist.ProcessGroup) -> None:
    """RequestError on all ranks where they were given different arguments: they would wait for each other, or mix up text."""
    mine = {**dataclasses.asdict(args), "device": args.device_type, ATTENTION_VARIABLE: asked_attention()}
    if (found := differing(mine, group)) is not None:
        other, values = found
        told = "; ".join(
            f"rank {other} has {name}={theirs}, rank 0 has {ours}" for name, (theirs, ours) in values.items()
        )
        alike = ", and the model by the same path" if "model" in values else ""
        raise RequestError(
            f"the ranks were not started alike: {told}; give all of them the same arguments and TOKENWEAVE_ variables{alike}"
        )


def _check_same_requests(requests: Sequence[NewRequest], group: dist.ProcessGroup) -> None:
    """RequestError on all ranks where they were given different requests."""
    parts = {
        "prompts": [request.prompt_token_ids for request in requests],
        "sampling parameters": [request.params for request in requests],
        "seeds": [(request.number, request.seed) for request in requests],
    }
    mine = {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}
    if (found := differing(mine, group)) is not None:
        other, values = found
        raise RequestError(
            f"the {' and '.join(values)} of rank {other} are not rank 0's; give all ranks the same prompts, parameters and seeds, "
            "in the same order"
        )
