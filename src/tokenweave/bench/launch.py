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
        return run_rank()
    import torch

    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise RequestError(
            f"--tp {world_size} needs as many GPUs; torch sees {torch.cuda.device_count()} on this machine"
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
    """
    import torch
    import torch.distributed as dist

    from tokenweave.engine.local import environment_number

    rank, local, ranks = (environment_number(name, -1) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    gpu = device_type == "cuda"
    if not 2 <= ranks <= 8 or (gpu and torch.cuda.device_count() <= local):
        raise RequestError(
            f"rank {rank}: {ranks} ranks and {torch.cuda.device_count()} GPUs; expected 2 to 8 ranks of one machine, a GPU each"
        )
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
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
        0, or the exit code of the first rank that failed. The others are ended, as all are after ``time_limit`` seconds
        (code 124): a rank that waits for another on its GPU would wait for ever.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenweave", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + time_limit
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # through the finally below
    try:
        for number in range(world_size):
            numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            where = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in numbers.items()}}
            ranks.append(subprocess.Popen(command, env={**os.environ, **where}, stdin=subprocess.DEVNULL))
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = next((code for code in codes if code), None)
            if failed is not None:
                _wait(ranks, time.monotonic() + _GRACE)
                return failed if failed > 0 else 128 - failed  # killed by a signal
            if None not in codes:
                return 0
            if time.monotonic() > deadline:
                print(f"tokenweave: not done after {time_limit:.0f} seconds: the ranks are ended", file=sys.stderr)
                return 124
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        signal.signal(signal.SIGTERM, before)


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
