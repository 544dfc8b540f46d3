"""A rank in this very process: the only one, or one of torchrun's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.distributed as dist

from tokenweave.engine.build import EngineArgs, build_engine
from tokenweave.engine.engine import StepRecord, TokenEvent
from tokenweave.engine.scheduler import NewRequest
from tokenweave.errors import RequestError


class Ranks(Protocol):
    """All ranks of an engine, wherever they run."""

    @property
    def steps(self) -> list[StepRecord]:
        """Rank 0's records of the steps of the last :meth:`generate`; complete once that is exhausted."""

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
        RequestError: it is one of another number of ranks.
    """
    world_size = environment_number("WORLD_SIZE", 1)
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


def environment_number(name: str, default: int) -> int:
    """A variable that torchrun sets. Raises RequestError if it is no whole number."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise RequestError(
            f"{name}={text!r} in the environment; expected a whole number, as torchrun sets it"
        ) from None


class LocalRank:
    """This process is the rank.

    Args:
        args: of the engine. With more than one rank, torch.distributed is initialised from the environment, unless it
            is already, and its WORLD is the tensor-parallel group.
        show_progress: a bar on stderr while the weights load (on rank 0).

    Raises:
        ModelError, RequestError: as :func:`tokenweave.engine.build.build_engine`.
    """

    def __init__(self, args: EngineArgs, show_progress: bool = True) -> None:
        from tokenweave.models.loading import progress_bar

        self._started_group = False
        rank, group = 0, None
        if args.tensor_parallel_size > 1:
            if not dist.is_initialized():
                try:
                    dist.init_process_group(args.backend)
                except ValueError as error:  # a variable is missing
                    raise RequestError(
                        f"{error}; start the ranks with torchrun, or unset RANK and WORLD_SIZE"
                    ) from None
                self._started_group = True
            rank, group = dist.get_rank(), dist.group.WORLD
        elif dist.is_initialized():  # for something else of the user's: WORLD is not ours
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        try:
            with progress_bar(show_progress and rank == 0) as progress:
                self._engine = build_engine(args, rank=rank, group=group, progress=progress)
        except BaseException:
            self._end_group()
            raise

    @property
    def steps(self) -> list[StepRecord]:
        return self._engine.steps

    def generate(self, requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        return self._engine.run(requests)

    def close(self) -> None:
        self._engine.close()
        self._end_group()

    def _end_group(self) -> None:
        if self._started_group:
            self._started_group = False
            dist.destroy_process_group()
