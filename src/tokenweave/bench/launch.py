"""Runs a benchmark on a rank a GPU: under torchrun as one of its ranks, else on processes of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenweave.errors import RequestError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_GRACE = 5.0  # seconds between the first rank's failure and the end of the others
_ORDERLY = 3.0  # seconds that rank 0, when it is told to end, has for what it wants to keep
_PARENT = "TOKENWEAVE_PARENT"  # in the environment of a rank: the process that started it, and with which it ends


def launched() -> bool:
    """Whether this process is a rank already: torchrun, or :func:`run_ranks`, set its variables."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def on_ranks(
    run_rank: Callable[[], int], arguments: Sequence[str], world_size: int, time_limit: float, device: str = "cuda"
) -> int:
    """Runs ``run_rank`` if this process is a rank; else the command ``arguments`` on ranks of its own.

    Args:
        device: "cuda": a GPU a rank; "cpu".

    Raises:
        RequestError: there are fewer GPUs than ranks.
    """
    if launched():
        from tokenweave.peers import end_with

        if (parent := os.environ.pop(_PARENT, None)) is not None:
            end_with(int(parent))
        return _until_told_to_end(run_rank)
    import torch

    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise RequestError(
            f"--tp {world_size} needs as many GPUs; torch sees {torch.cuda.device_count()} on this machine (`tokenweave "
            f"doctor` says what it has)"
        )
    return run_ranks(arguments, world_size, time_limit)


@dataclass(frozen=True)
class Rank:
    """This process among the ranks: its number, its GPU's, how many there are, its device, the group of all."""

    rank: int
    local: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup

    def say(self, line: str) -> None:
        """A line of progress on stderr, from rank 0 alone."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def joined(device_type: str = "cuda") -> Iterator[Rank]:
    """Joins the ranks that the environment names, over NCCL, or gloo on ``"cpu"``. CUDA graphs are to be dropped before
    the block ends.

    Raises:
        RequestError: not 2 to 8 ranks, no GPU for this one, or an environment without numbers.
        CollectiveError: another rank never came, or is gone.
    """
    import torch
    import torch.distributed as dist

    from tokenweave.peers import environment_number, join, lost_peer_is_told

    rank, local, ranks = (environment_number(name, -1) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    gpu = device_type == "cuda"
    if not 2 <= ranks <= 8 or (gpu and torch.cuda.device_count() <= local):
        raise RequestError(
            f"rank {rank}: {ranks} ranks and {torch.cuda.device_count()} GPUs; expected 2 to 8 ranks of one machine, a GPU each"
        )
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    join("nccl" if gpu else "gloo", device if gpu else None)
    group = dist.group.WORLD
    assert group is not None
    with lost_peer_is_told(rank):
        yield Rank(rank, local, ranks, device, group)
        # Live graphs that hold NCCL kernels would block the group's end: the caller has dropped them, this their cycles.
        gc.collect()
        if gpu:
            torch.cuda.synchronize()
        dist.barrier()
    dist.destroy_process_group()


def run_ranks(arguments: Sequence[str], world_size: int, time_limit: float) -> int:
    """``python -m tokenweave ARGUMENTS`` on ``world_size`` processes of this machine, their output passed through.

    Returns:
        0, or the exit code of the first rank that failed; one that was killed is named. The others are ended, as all are
        after ``time_limit`` seconds (code 124): a rank that waits for another on its GPU would wait for ever. They end with
        this process too, however it ends (on Linux).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenweave", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + time_limit
    before = {told: signal.getsignal(told) for told in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    for told, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(told, lambda number, frame: sys.exit(128 + number))  # through the finally below
    try:
        for number in range(world_size):
            numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            numbers[_PARENT] = os.getpid()
            where = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in numbers.items()}}
            # In a session of its own: Ctrl-C reaches this process alone, which tells the ranks once.
            ranks.append(
                subprocess.Popen(command, env={**os.environ, **where}, stdin=subprocess.DEVNULL, start_new_session=True)
            )
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = min((code for code in codes if code), default=None)  # one that was killed first: the others' cause
            if failed is not None:
                _wait(ranks, time.monotonic() + _GRACE)
                _tell_killed(ranks)
                return failed if failed > 0 else 128 - failed  # killed by a signal
            if None not in codes:
                return 0
            if time.monotonic() > deadline:
                print(f"tokenweave: not done after {time_limit:.0f} seconds: the ranks are ended", file=sys.stderr)
                return 124
            time.sleep(0.05)
    finally:
        _end(ranks)
        for told, handler in before.items():
            signal.signal(told, handler)


def _tell_killed(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Names the ranks that a signal has ended: they could not say so themselves, and the others know of a lost peer alone."""
    for number, rank in enumerate(ranks):
        if (code := rank.poll()) is not None and code < 0:
            why = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
            told = f"rank {number} was killed by {signal.Signals(-code).name}{why}; the others are ended"
            print(f"tokenweave: {told}", file=sys.stderr, flush=True)


def _until_told_to_end(run_rank: Callable[[], int]) -> int:
    """``run_rank()``; SIGTERM is a KeyboardInterrupt in it, once, after which this process ends without a word.

    On rank 0 at once. The others go on for a while: it has things to keep, and may need their answers to get that far.
    """
    told = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if number == signal.SIGTERM and os.environ["RANK"] != "0":
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, _ORDERLY)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return run_rank()
    except BaseException as error:
        if not (told or isinstance(error, KeyboardInterrupt)):
            raise
        # What else was raised is the echo of other ranks' ends. Not through torch's teardown, which may wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    finally:
        if told:
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Tells all ranks to end, gives rank 0 a moment, kills those that are left, and reaps them all."""
    try:
        for rank in ranks:
            rank.terminate()
        _wait(ranks[:1], time.monotonic() + _ORDERLY)
    finally:  # a second Ctrl-C too
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
