"""Subcommands that run on a rank a GPU: from the command line to this rank's part of the work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokenweave.cli.arguments import check_time_limit, command_line
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.bench.environment import Monitor
    from tokenweave.bench.launch import Rank
    from tokenweave.bench.timing import GraphClock


def settle_ranks(args: argparse.Namespace) -> None:
    """Makes ``args.tp`` the number of ranks: torchrun's, else what was asked for, else 2. Checks ``--time-limit`` too.

    Raises:
        RequestError: ``--tp`` is not the number that torchrun started, or one that no group of ranks could have.
    """
    from tokenweave.bench.launch import launched

    check_time_limit(args.time_limit)
    if launched():
        from tokenweave.peers import environment_number

        started = environment_number("WORLD_SIZE", 0)
        if args.tp not in (None, started):
            raise RequestError(
                f"--tp {args.tp}, but this process was started as one of WORLD_SIZE={started} ranks: leave --tp out, or start "
                f"{args.tp} processes, or one alone, which starts its own"
            )
        if not 2 <= started <= 8:
            raise RequestError(f"WORLD_SIZE={started} in the environment; expected 2 to 8 ranks")
        args.tp = started
    elif args.tp is None:
        args.tp = 2
    elif not 2 <= args.tp <= 8:
        raise RequestError(f"--tp {args.tp}; expected 2 to 8")


def run_on_ranks(
    command: Sequence[str],
    args: argparse.Namespace,
    options: Iterable[str],
    run_rank: Callable[[argparse.Namespace, Rank], int],
    device: str = "cuda",
) -> int:
    """Runs ``run_rank(args, me)`` as one rank of torchrun's, or the command once more on ranks of its own.

    Args:
        command, options: as of :func:`tokenweave.cli.arguments.command_line`.
        run_rank: this rank's part, to the exit code. CUDA graphs are locals of it: they are gone when the ranks part.
        device: ``"cuda"``: a GPU a rank; ``"cpu"``.
    """
    from tokenweave.bench import launch

    def joined() -> int:
        with launch.joined(device) as me:
            return run_rank(args, me)

    return launch.on_ranks(joined, command_line(command, args, options), args.tp, args.time_limit, device)


def instruments(me: Rank) -> tuple[GraphClock, Monitor, dict[str, Any], Callable[[str], None]]:
    """What a bench takes to measure with: a clock, a monitor of the GPU, the machine for rank 0's result, and how it tells
    of progress."""
    from tokenweave.bench import environment
    from tokenweave.bench.timing import GraphClock

    machine = environment.describe() if me.rank == 0 else {}
    return GraphClock(me.group, me.device), environment.Monitor(me.local), machine, me.say
