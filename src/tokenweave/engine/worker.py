"""A rank's process, started by :mod:`tokenweave.engine.processes`.

What it says and hears is in :mod:`tokenweave.engine.messages`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch.distributed as dist

from tokenweave.engine.build import build_engine
from tokenweave.engine.engine import Engine
from tokenweave.engine.messages import Failure, WorkerArgs
from tokenweave.engine.scheduler import NewRequest
from tokenweave.errors import RequestError
from tokenweave.peers import PEER_TIMEOUT, end_with, lost_peer_is_told


def main(fd: int) -> NoReturn:
    """Serves the parent at the socket ``fd`` until it says None, or goes away; then ends this process."""
    code = _serve(Connection(fd))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through torch's teardown, which may wait for ranks that are gone


def _serve(connection: Connection) -> int:
    args: WorkerArgs = connection.recv()
    if args.parent is not None:
        end_with(args.parent)
    inbox: queue.SimpleQueue[list[NewRequest] | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        with lost_peer_is_told(args.rank):
            engine = _start(args, connection)
            connection.send(("ready",))
            while (requests := inbox.get()) is not None:
                _generate(engine, requests, connection, args.rank)
            engine.close()
            dist.destroy_process_group()
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(("failed", Failure.of(error)))
        return 1
    return 0


def _start(args: WorkerArgs, connection: Connection) -> Engine:
    world_size = args.engine.tensor_parallel_size
    store = dist.TCPStore("127.0.0.1", args.port, world_size, is_master=False)
    dist.init_process_group(
        args.engine.backend, store=store, rank=args.rank, world_size=world_size, timeout=PEER_TIMEOUT
    )

    def progress(done: int, total: int) -> None:
        connection.send(("progress", done, total))

    return build_engine(
        args.engine, rank=args.rank, group=dist.group.WORLD, progress=progress if args.rank == 0 else None
    )


def _generate(engine: Engine, requests: list[NewRequest], connection: Connection, rank: int) -> None:
    try:
        for events in engine.run(requests):
            if rank == 0 and events:
                connection.send(("events", events))
    except RequestError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("done", engine.steps if rank == 0 else [], engine.graph_record))


def _receive(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Reads in a thread of its own, so that the parent's end is noticed in the middle of a step too."""
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to hear anything
