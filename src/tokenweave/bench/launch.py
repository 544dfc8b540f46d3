"""Runs this command again as one process a rank, where no launcher such as torchrun did."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_GRACE = 5.0  # seconds between the first rank's failure and the end of the others


def launched() -> bool:
    """Whether this process is a rank already: torchrun, or :func:`run_ranks`, set its variables."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


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
