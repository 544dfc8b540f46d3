"""Ranks that share one GPU, so that a machine with one runs what needs several: ``TOKENWEAVE_TEST_SHARE_GPU=1``.

Protocols and results are those of ranks with a GPU each; what they take says nothing. They run beside each other under NVIDIA's MPS
(:func:`side_by_side`), or, where that does not start, in turns: one that waits in a kernel then keeps the GPU for its time slice of some
milliseconds.

A share is a number of SMs, none of which is a rank's own: several ranks' may be the same ones, and blocks that wait for a rank then
leave it no room. Four ranks under MPS pass the collective's tests, and not all of the engine's, in which a rank at times starts
nothing for a collective's whole time limit, and the others give up: of those that compare modes and graphs a third with shares of 32 and of
30 SMs, bf16 only, and each of the first three, fp32 too, with all 132 for everyone. ``TOKENWEAVE_TEST_TURNS=1`` lets ranks take turns
in any case, and four pass the engine's tests then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 20.0  # seconds, for MPS to start, and to end


def shares_gpu() -> bool:
    """Whether the ranks of tests are to share the first GPU."""
    return os.environ.get("TOKENWEAVE_TEST_SHARE_GPU", "0") not in ("", "0")


def seem_alone(rank: int) -> None:
    """In a rank's process, before NCCL and symmetric memory are used: ranks of one GPU are not refused."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    # NCCL takes two ranks of one host and GPU for a mistake; ranks of several hosts it connects by sockets.
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")


def use_first_gpu(rank: int, world_size: int) -> None:
    """:func:`seem_alone` for a rank of :func:`ranks.run_ranks`: its current device is the one GPU, and torch counts one a rank."""
    import torch

    seem_alone(rank)
    torch.cuda.set_device(0)
    torch.cuda.init()
    torch.cuda.device_count = functools.wraps(torch.cuda.device_count)(lambda: world_size)


@contextlib.contextmanager
def gpus_as_they_are() -> Iterator[None]:
    """torch counts the GPUs that there are, for what asks each of them: torch.compile."""
    import torch

    counted = torch.cuda.device_count
    torch.cuda.device_count = getattr(counted, "__wrapped__", counted)
    try:
        yield
    finally:
        torch.cuda.device_count = counted


@contextlib.contextmanager
def side_by_side(ranks: int) -> Iterator[dict[str, str]]:
    """Environment variables with which so many processes run on one GPU at the same time; ``{}`` where they take turns.

    That is done by an MPS daemon of this context's own, with a share of the SMs for each process: blocks that wait for another
    rank's would otherwise come to fill all SMs, and those could never start. Without MPS it is said, once, that and why they take turns.
    """
    if os.environ.get("TOKENWEAVE_TEST_TURNS", "0") not in ("", "0"):
        _take_turns("TOKENWEAVE_TEST_TURNS is set")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="tokenweave-mps-", ignore_cleanup_errors=True) as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if why := _start(environment):
            _take_turns(why)
            yield {}
            return
        try:
            yield {**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks)}
        finally:
            _end(environment)


@functools.cache
def _take_turns(why: str) -> None:
    warnings.warn(f"ranks share the GPU by time slices, which is slow: {why}", stacklevel=4)


def _start(environment: dict[str, str]) -> str:
    """Starts the daemon; why there is none, or ""."""
    if shutil.which(CONTROL) is None:
        return f"there is no {CONTROL}"
    # Clients choose among the GPUs that the daemon sees, by their own CUDA_VISIBLE_DEVICES.
    env = {name: value for name, value in {**os.environ, **environment}.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run([CONTROL, "-d"], env=env, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL} -d: {error}"
    if done.returncode:
        return f"{CONTROL} -d ended with {done.returncode}: {(done.stdout + done.stderr).strip()}"
    return ""


def _end(environment: dict[str, str]) -> None:
    """Ends the daemon and its servers; kills them where a client that was killed keeps them from it."""
    folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
    daemon = 0
    with contextlib.suppress(OSError, ValueError):
        daemon = int((folder / f"{CONTROL}.pid").read_text())
    servers = _children(daemon)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        env = {**os.environ, **environment}
        subprocess.run([CONTROL], input="quit\n", env=env, capture_output=True, text=True, timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while (left := [pid for pid in (daemon, *servers) if pid and _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
