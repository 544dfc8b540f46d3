"""The ranks as processes of their own: starts, watches and ends them.

They are programs of their own, not started by ``multiprocessing``: a user's script needs no ``__main__`` guard.
If one of them dies the others are ended at once, because they would wait for it forever.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import IO, Any, NoReturn

import torch.distributed as dist

from tokenweave import errors
from tokenweave.engine.build import EngineArgs
from tokenweave.engine.engine import StepRecord, TokenEvent
from tokenweave.engine.graphs import GraphRecord
from tokenweave.engine.messages import Failure, WorkerArgs
from tokenweave.engine.scheduler import NewRequest
from tokenweave.errors import RankDied, RequestError

# A rank imports from where this process does, and from nowhere else (not from its working directory).
_PROGRAM = "import sys; fd, *sys.path = sys.argv[1:]; from tokenweave.engine.worker import main; main(int(fd))"

# Seconds. When a rank fails its peers' connections break as well, and theirs may be heard first: so long the ranks have
# to name the cause. An orderly end gets longer than a killed process needs.
_GRACE = 2.0
_ORDERLY = 5.0


class RankTraceback(Exception):
    """A rank's traceback, as text: the cause of what is raised here."""


class RankProcesses:
    """``args.tensor_parallel_size`` rank processes on this machine.

    Args:
        args: of the engine.
        show_progress: a bar on stderr while the weights load.

    Attributes:
        processes: by rank.
        steps, graph_record: as :class:`tokenweave.engine.local.Ranks`.

    Raises:
        TokenWeaveError: what a rank raised while it loaded, once.
        RankDied: a rank's process ended.
        CollectiveError: a rank's process lives, and the others waited for it in vain.
    """

    def __init__(self, args: EngineArgs, show_progress: bool = True) -> None:
        from tokenweave.models.loading import progress_bar

        self.steps: list[StepRecord] = []
        self.graph_record: GraphRecord | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[connection.Connection] = []
        self._stderr: list[_Stderr] = []
        world_size = args.tensor_parallel_size
        # The ranks meet here. A port of the kernel's choice, held from the start: nobody can take it in between.
        self._store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        self._finalizer = weakref.finalize(self, _end, self.processes, self._connections, os.getpid())
        try:
            parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
            for rank in range(world_size):
                self._start(WorkerArgs(args, rank, self._store.port, parent))
            with progress_bar(show_progress) as progress:
                for _, message in self._until("ready"):
                    if message[0] == "progress":
                        progress(*message[1:])
        except BaseException:
            self.kill()
            raise

    def generate(self, requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        """As :meth:`tokenweave.engine.local.Ranks.generate`. Abandoned half-way, it ends the ranks."""
        if not self._finalizer.alive:
            raise RequestError("the ranks have ended; create a new LLM")
        try:
            for rank, ours in enumerate(self._connections):
                try:
                    ours.send(list(requests))
                except OSError:
                    self._fail(rank, None)
            for rank, message in self._until("done"):
                if message[0] == "events":
                    yield message[1]
                elif rank == 0:
                    self.steps, self.graph_record = message[1:]
        except RequestError:
            raise
        except BaseException:  # also Ctrl-C and GeneratorExit: the ranks are in the middle of something
            self.kill()
            raise

    def close(self) -> None:
        """Ends the ranks in order, or by force after some seconds; idempotent."""
        self._finalizer()
        self._join()

    def kill(self) -> None:
        """Ends the ranks now; idempotent."""
        for stderr in self._stderr:
            stderr.quiet = True
        for process in self.processes:
            process.kill()
        self._finalizer()
        self._join()

    def _start(self, args: WorkerArgs) -> None:
        ours, theirs = connection.Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**_defaults(args.engine.tensor_parallel_size), **os.environ},
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends its ranks
        )
        theirs.close()  # the rank holds the only other end: its death is our EOF
        self.processes.append(process)
        self._connections.append(ours)
        assert process.stdout is not None
        self._stderr.append(_Stderr(args.rank, process.stdout))
        try:
            ours.send(args)
        except OSError:
            self._fail(args.rank, None)

    def _until(self, last: str) -> Iterator[tuple[int, Any]]:
        """Messages as (rank, message), until every rank has sent a ``last`` one.

        Raises:
            RequestError: the ranks refused the requests; they are ready for others.
        """
        waiting = set(range(len(self._connections)))
        refused = ""
        while waiting:
            for rank, message in self._receive():
                if message is None or message[0] == "failed":
                    self._fail(rank, message and message[1])
                elif message[0] == "refused":
                    refused = message[1]
                    waiting.discard(rank)
                else:
                    if message[0] == last:
                        waiting.discard(rank)
                    yield rank, message
        if refused:
            raise RequestError(refused)

    def _receive(self, timeout: float | None = None, ignore: Sequence[int] = ()) -> Iterator[tuple[int, Any]]:
        """Waits for messages; yields (rank, message), with None for a rank whose process is gone."""
        ranks = {ours: rank for rank, ours in enumerate(self._connections) if rank not in ignore}
        for ours in connection.wait(list(ranks), timeout):
            assert isinstance(ours, connection.Connection)
            try:
                message = ours.recv()
            except (EOFError, OSError):
                message = None
            yield ranks[ours], message

    def _fail(self, rank: int, failure: Failure | None) -> NoReturn:
        """Ends all ranks and raises what went wrong first, given the first sign of it."""
        for stderr in self._stderr:
            stderr.quiet = True
        heard: dict[int, Failure | None] = {rank: failure}
        deadline = time.monotonic() + _GRACE
        while (
            (cause := _primary(heard)) is None
            and len(heard) < len(self._connections)
            and (left := deadline - time.monotonic()) > 0
        ):
            for other, message in self._receive(left, ignore=list(heard)):
                if message is None or message[0] == "failed":
                    heard[other] = message and message[1]
        rank, failure = cause if cause is not None else (rank, failure)
        if failure is None:  # the process is gone, or about to be: its own exit code, not that of our kill
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[rank].wait(_GRACE)
            reason = _exit_reason(self.processes[rank].poll())
            self.kill()
            raise RankDied(rank, reason + self._stderr[rank].quoted())
        self.kill()
        trace = RankTraceback(f"on rank {rank}:\n{failure.trace}")
        if failure.error is not None:
            silent = [str(other) for other in range(len(self._connections)) if other not in heard]
            where = f"; nothing was heard of rank {', '.join(silent)}" if silent and failure.secondary else ""
            raise getattr(errors, failure.error)(failure.message + where) from trace
        raise RankDied(rank, failure.message) from trace

    def _join(self) -> None:
        for stderr in self._stderr:
            stderr.join()


class _Stderr:
    """Passes on what a rank prints, line by line, and keeps the last lines."""

    def __init__(self, rank: int, pipe: IO[bytes]) -> None:
        self.quiet = False
        self._lines: collections.deque[str] = collections.deque(maxlen=5)
        self._thread = threading.Thread(target=self._read, args=(rank, pipe), daemon=True)
        self._thread.start()

    def quoted(self) -> str:
        """The last lines, for the end of a message."""
        self.join()
        return "".join(f"\n    {line}" for line in self._lines)

    def join(self) -> None:
        self._thread.join(1.0)

    def _read(self, rank: int, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip()
                if line:
                    self._lines.append(line)
                    if not self.quiet:
                        print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


def _primary(heard: dict[int, Failure | None]) -> tuple[int, Failure | None] | None:
    """The first failure that is not an echo of another: a process that is gone, or an error of a rank's own."""
    return next(((r, f) for r, f in heard.items() if f is None or not f.secondary), None)


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "its connection closed, though its process still ran"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _end(processes: list[subprocess.Popen[bytes]], connections: list[connection.Connection], owner: int) -> None:
    """Asks the ranks to end, waits, kills what is left, and reaps them all."""
    if os.getpid() != owner:
        return  # a fork of the user's: the ranks are not its own
    for ours in connections:
        with contextlib.suppress(OSError):
            ours.send(None)
    deadline = time.monotonic() + _ORDERLY
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for ours in connections:
        ours.close()


def _defaults(world_size: int) -> dict[str, str]:
    """Environment of the ranks where the user's says nothing: an equal share of the cores each, loopback only."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // world_size)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
