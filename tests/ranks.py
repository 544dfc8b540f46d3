"""Runs a function on several ranks: ``run_ranks(2, function, *args)`` from any test.

The rank processes are real ones with ``torch.distributed`` initialised over loopback. Importing torch takes seconds, so
a pool of them is kept per (world size, device) over the test session. A pool is thrown away whenever a rank raised, died
or timed out: its ranks may be out of step, and the next test must not pay for that.

A test's function is sent by name, so it has to be a top-level function of an importable module (test modules are).
What a rank prints appears in the test's captured output.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from shared_gpu import shares_gpu, side_by_side, use_first_gpu

START_TIMEOUT = 120.0  # seconds; importing torch on a busy machine
GRACE = 2.0  # seconds that the other ranks get to answer once one has raised


class RankFailure(Exception):
    """The traceback of the rank, as text; set as the cause of the exception that is raised in the test."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, device: str = "cpu"
) -> list[Any]:
    """Calls ``function(*args)`` on every rank at once and returns the results, in rank order.

    Args:
        world_size: number of processes; ``dist.get_rank()`` inside the function tells them apart.
        function: a top-level function; its arguments and results are pickled (tensors are copied).
        timeout: seconds for the slowest rank, not counting the pool's start.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (gloo for CPU tensors, NCCL for CUDA ones; rank r uses GPU r, or all of them
            the first one: see :mod:`shared_gpu`).

    Raises:
        TimeoutError: a rank did not answer in time; the message has the stacks of those that did not.
        RuntimeError: a rank's process ended.
        Exception: what a rank raised (the first to raise), caused by a :class:`RankFailure` with its traceback.
    """
    key = (world_size, device)
    pool = _pools.pop(key, None) or _Pool(world_size, device)
    try:
        results = pool.run(function, args, timeout)
    except BaseException:  # also pytest-timeout's and Ctrl-C: the ranks are in the middle of something
        pool.kill()
        raise
    _pools[key] = pool
    return results


def run_fresh_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """As :func:`run_ranks`, on processes that no other call has used or will use: for what happens only once in each."""
    pool = _Pool(world_size, "cpu")
    try:
        return pool.run(function, args, timeout)
    finally:
        pool.kill()


def close_pools() -> None:
    """Ends every rank process; idempotent."""
    while _pools:
        _pools.popitem()[1].kill()


_pools: dict[tuple[int, str], _Pool] = {}
atexit.register(close_pools)


class _Pool:
    def __init__(self, world_size: int, device: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tokenweave-ranks-"))
        self.connections: list[connection.Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.printed = [0] * world_size
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "PYTHONUNBUFFERED": "1",
        }
        self._together = contextlib.ExitStack()
        if device == "cuda" and shares_gpu():
            environment |= self._together.enter_context(side_by_side(world_size))
        for rank in range(world_size):
            ours, theirs = connection.Pipe()
            with open(self.folder / f"rank{rank}.log", "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the test process alone, which ends the ranks
                )
            theirs.close()
            ours.send_bytes(pickle.dumps((sys.path, str(self.folder / "store"), rank, world_size, device)))
            self.connections.append(ours)
            self.processes.append(process)
        try:
            self._answers(START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        message = pickle.dumps((function, args))
        for rank, ours in enumerate(self.connections):
            try:
                ours.send_bytes(message)
            except OSError:
                raise self._died(rank) from None
        return self._answers(timeout)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, ours in zip(self.processes, self.connections, strict=True):
            process.wait()
            ours.close()
        self._together.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self, timeout: float) -> list[Any]:
        waiting = {ours: rank for rank, ours in enumerate(self.connections)}
        results: list[Any] = [None] * len(waiting)
        failure: BaseException | None = None
        deadline = time.monotonic() + timeout
        while waiting:
            for ours in connection.wait(list(waiting), max(0.0, deadline - time.monotonic())):
                assert isinstance(ours, connection.Connection)
                rank = waiting.pop(ours)
                try:
                    results[rank], error, text = pickle.loads(ours.recv_bytes())
                except (EOFError, OSError):
                    error, text = self._died(rank), ""
                if error is not None and failure is None:
                    failure = error
                    if text:
                        failure.__cause__ = RankFailure(f"on rank {rank}:\n{text}")
                    deadline = min(deadline, time.monotonic() + GRACE)
            if waiting and time.monotonic() >= deadline:
                if failure is None:
                    failure = self._timed_out(sorted(waiting.values()), timeout)
                break
        self._replay()
        if failure is not None:
            raise failure
        return results

    def _log(self, rank: int) -> str:
        """What the rank has printed since the last call."""
        text = (self.folder / f"rank{rank}.log").read_bytes()[self.printed[rank] :]
        self.printed[rank] += len(text)
        return text.decode(errors="replace")

    def _replay(self) -> None:
        for rank in range(len(self.processes)):
            for line in self._log(rank).splitlines():
                print(f"[rank {rank}] {line}")

    def _died(self, rank: int) -> RuntimeError:
        try:
            code: Any = self.processes[rank].wait(5)
        except subprocess.TimeoutExpired:
            code = "unknown, it still runs without its connection"
        return RuntimeError(f"rank {rank} of {len(self.processes)} died with exit code {code}:\n{self._log(rank)}")

    def _timed_out(self, ranks: list[int], timeout: float) -> TimeoutError:
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGUSR1)  # its faulthandler writes the stacks into its log
        time.sleep(0.5)
        logs = "".join(f"\n--- rank {rank}:\n{self._log(rank)}" for rank in ranks)
        return TimeoutError(f"ranks {ranks} of {len(self.processes)} did not answer within {timeout:g} s{logs}")


def _serve(theirs: connection.Connection) -> None:
    """A rank process: initialises torch.distributed, then runs what it is sent until its test process goes away."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    path, store, rank, world_size, device = pickle.loads(theirs.recv_bytes())
    sys.path[:] = path

    def started() -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if device == "cuda" and shares_gpu():
            use_first_gpu(rank, world_size)
        elif device == "cuda":
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)

    _answer(theirs, started)
    while True:
        try:
            message = theirs.recv_bytes()
        except EOFError:
            return

        def called(message: bytes = message) -> Any:
            function, args = pickle.loads(message)  # imports the test's module
            return function(*args)

        _answer(theirs, called)


def _answer(theirs: connection.Connection, call: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((call(), None, ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, text))
            pickle.loads(answer)  # an exception with an __init__ of its own may pickle and yet not load
        except Exception:
            answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text))
    theirs.send_bytes(answer)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    _serve(connection.Connection(int(sys.argv[1])))
