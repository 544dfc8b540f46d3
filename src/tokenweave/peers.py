"""How ranks meet, wait for each other, compare what they were given, and end together; what is said where one is missing."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from tokenweave.errors import CollectiveError, CudaError, RequestError, TokenWeaveError

log = logging.getLogger(__name__)

PEER_TIMEOUT = datetime.timedelta(minutes=5)
"""So long a rank waits for another: until it comes, and in each collective of torch.distributed. Where that is over, gloo's
collectives raise; on NCCL torch's watchdog ends the process, with a message of its own."""

LOADING_TIMEOUT = datetime.timedelta(minutes=30)
"""So long a rank that has loaded its weights waits for one that still reads them, from a cold network disk perhaps."""

_SILENT = 20.0  # seconds that a rank waits for the others before it says so
_PR_SET_PDEATHSIG = 1

_LOST = re.compile(
    r"connection (was likely )?(closed|reset|refused|abort|timed out)|closed by|broken pipe|remote process",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


def end_with(parent: int) -> None:
    """From now on this process ends when its parent does, or the thread of it that started this one. On Linux; elsewhere
    nothing happens.

    Args:
        parent: process id; if it is gone already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def environment_number(name: str, default: int) -> int:
    """A variable that torchrun sets. Raises RequestError if it is no whole number."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise RequestError(
            f"{name}={text!r} in the environment; expected a whole number, as torchrun sets it"
        ) from None


def started_ranks() -> int:
    """WORLD_SIZE, how many ranks something else started; 1 where it is not set. Raises RequestError if it is none of 1, 2, ..."""
    if (ranks := environment_number("WORLD_SIZE", 1)) < 1:
        raise RequestError(f"WORLD_SIZE={ranks} in the environment; expected at least 1, as torchrun sets it")
    return ranks


def join(backend: str, device: torch.device | None = None) -> None:
    """``dist.init_process_group`` of the ranks that the environment names, as torchrun does.

    Args:
        backend, device: as its ``backend`` and ``device_id``.

    Raises:
        RequestError: a variable is missing, or is no number where it has to be one.
        CollectiveError: the other ranks cannot be reached, or did not come within :data:`PEER_TIMEOUT`.
    """
    rank, ranks, port = (environment_number(name, 0) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if "MASTER_PORT" in os.environ and not 0 < port < 65536:
        raise RequestError(f"MASTER_PORT={port} in the environment; expected 1 to 65535")
    others = f"the others of {ranks} ranks at {os.environ.get('MASTER_ADDR')}:{port}"
    waits = f"rank {rank} waits for {others}; it gives up after {_minutes(PEER_TIMEOUT)}"
    timer = threading.Timer(_SILENT, log.warning, (waits,))
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(backend, timeout=PEER_TIMEOUT, device_id=device)
    except ValueError as error:  # a variable is missing
        raise RequestError(f"{error}; start the ranks with torchrun, or unset RANK and WORLD_SIZE") from None
    except dist.DistBackendError as error:  # they have met, and NCCL cannot begin
        raise _collective_error(rank, error) from error
    except (RuntimeError, OSError) as error:
        text = _text(error)
        late = f" within {_minutes(PEER_TIMEOUT)}" if _LATE.search(text) else ""
        raise CollectiveError(
            f"rank {rank} did not meet {others}{late}: {text}; start all ranks, with the same MASTER_ADDR, WORLD_SIZE and "
            "MASTER_PORT, one that is free"
        ) from error
    finally:
        timer.cancel()


@contextlib.contextmanager
def loading(group: dist.ProcessGroup | None) -> Iterator[None]:
    """At the end of the block all ranks of ``group`` wait for all, longer than a collective would, and interruptibly.

    Every rank of the group enters it. A rank that fails in it tells the others, which do not wait for it.

    Args:
        group: None for a single rank.

    Raises:
        CollectiveError: another rank failed in the block, or did not come to its end within :data:`LOADING_TIMEOUT` of this
            one.
    """
    if group is None or dist.get_world_size(group) == 1:
        yield
        return
    store, rank = group.get_group_store(), dist.get_rank(group)
    turn = store.add(
        f"tokenweave/loading/{rank}", 1
    )  # which block of this rank's it is: of a group there may be several
    outcomes = {r: f"tokenweave/loading/{turn}/{r}" for r in range(dist.get_world_size(group))}
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store may be gone
            store.set(outcomes[rank], f"{type(error).__name__}: {error}")
        raise
    store.set(outcomes[rank], "")
    waited, silent, began = 0.0, _SILENT, time.monotonic()
    while True:
        for other in [r for r, outcome in outcomes.items() if store.check([outcome])]:
            if failure := store.get(outcomes.pop(other)).decode():
                raise CollectiveError(f"rank {rank}: rank {other} could not load its part of the model: {failure}")
        if not outcomes:
            return
        missing, waited = ", ".join(map(str, outcomes)), time.monotonic() - began
        if waited > LOADING_TIMEOUT.total_seconds():
            raise CollectiveError(
                f"rank {rank} has loaded its part of the model; rank {missing} has not, {_minutes(LOADING_TIMEOUT)} later: see "
                "its output, and start all ranks again"
            )
        if waited > silent:
            silent *= 2
            log.warning(
                "rank %d has loaded its part of the model and waits for rank %s; it gives up after %s",
                rank,
                missing,
                _minutes(LOADING_TIMEOUT),
            )
        time.sleep(0.02)


def may_be_an_echo(error: BaseException) -> bool:
    """Whether an error may be no more than the echo of another rank's end, such as a broken connection."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, (CollectiveError, CudaError, dist.DistError)) or any(
        word in text for word in ("gloo", "NCCL", "Connection")
    )


@contextlib.contextmanager
def lost_peer_is_told(rank: int) -> Iterator[None]:
    """What torch.distributed raises in the block becomes a CollectiveError of one line. One of a broken connection says that
    the cause is in another rank's output; any other has the error's whole text."""
    try:
        yield
    except TokenWeaveError:
        raise
    except (RuntimeError, OSError) as error:
        if not may_be_an_echo(error):
            raise
        raise _collective_error(rank, error) from error


def differing(
    mine: Mapping[str, object], group: dist.ProcessGroup
) -> tuple[int, dict[str, tuple[object, object]]] | None:
    """The first rank of ``group`` whose values are not rank 0's; every rank calls it, and is answered the same.

    Args:
        mine: name -> what this rank has; any values that can be pickled and compared.

    Returns:
        (rank, name -> (that rank's, rank 0's)); None where all have the same.
    """
    every: list[Mapping[str, object]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, dict(mine), group=group)
    first = every[0]
    for rank, other in enumerate(every):
        names = [name for name in {**first, **other} if other.get(name) != first.get(name)]
        if names:
            return rank, {name: (other.get(name), first.get(name)) for name in names}
    return None


def _collective_error(rank: int, error: BaseException) -> CollectiveError:
    text = _text(error)
    if _LOST.search(text):
        what = f"rank {rank} lost a peer"
    elif _LATE.search(text):
        what = f"rank {rank} waited for a peer that did not come"
    else:
        return CollectiveError(f"rank {rank}: communication between the ranks failed: {text}")
    return CollectiveError(f"{what} ({text}); the peer's own output says why; start all ranks again")


def _minutes(limit: datetime.timedelta) -> str:
    return f"{limit.total_seconds() / 60:.3g} minutes"


def _text(error: BaseException) -> str:
    """In one line: without the place in torch's sources that it begins with, frames of C++, and advice to report it."""
    text = re.sub(r"^\[\S*:\d+\] ", "", str(error).strip() or type(error).__name__)
    text = re.split(r"\s(?:Exception raised from|frame #0:|This is typically caused by)", text)[0]
    return " ".join(text.split()).rstrip(".")
