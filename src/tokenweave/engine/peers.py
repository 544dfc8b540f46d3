"""How ranks that something else has started meet, make sure that they were started alike, and say that one is missing."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from tokenweave.errors import CollectiveError, CudaError, RequestError, TokenWeaveError

log = logging.getLogger(__name__)

PEER_TIMEOUT = datetime.timedelta(minutes=5)
"""So long a rank waits for another: until it comes, and in each collective of torch.distributed."""

_SILENT = 20.0  # seconds that a rank waits for the others before it says so


def environment_number(name: str, default: int) -> int:
    """A variable that torchrun sets. Raises RequestError if it is no whole number."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise RequestError(
            f"{name}={text!r} in the environment; expected a whole number, as torchrun sets it"
        ) from None


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
    where = f"{os.environ.get('MASTER_ADDR')}:{port}"
    waits = f"rank {rank} waits for the others of {ranks} ranks at {where}; it gives up after {_minutes()}"
    timer = threading.Timer(_SILENT, log.warning, (waits,))
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(backend, timeout=PEER_TIMEOUT, device_id=device)
    except ValueError as error:  # a variable is missing
        raise RequestError(f"{error}; start the ranks with torchrun, or unset RANK and WORLD_SIZE") from None
    except (RuntimeError, OSError) as error:
        raise CollectiveError(
            f"rank {rank} did not meet the others of {ranks} ranks at {where} within {_minutes()}: {_gist(error)}; "
            "start all ranks, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
        ) from error
    finally:
        timer.cancel()


def may_be_an_echo(error: BaseException) -> bool:
    """Whether an error may be no more than the echo of another rank's end, such as a broken connection."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, (CollectiveError, CudaError, dist.DistError)) or any(
        word in text for word in ("gloo", "NCCL", "Connection")
    )


@contextlib.contextmanager
def lost_peer_is_told(rank: int) -> Iterator[None]:
    """What a broken connection raises in the block becomes a CollectiveError: the cause is in the other rank's output."""
    try:
        yield
    except TokenWeaveError:
        raise
    except (RuntimeError, OSError) as error:
        if not may_be_an_echo(error):
            raise
        late = "timed out" in str(error).casefold() or "timeout" in str(error).casefold()
        what = f"waited {_minutes()} for a peer that did not come" if late else "lost a peer"
        raise CollectiveError(
            f"rank {rank} {what} ({_gist(error)}); the peer's own output says why; start all ranks again"
        ) from error


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


def _minutes() -> str:
    return f"{PEER_TIMEOUT.total_seconds() / 60:.3g} minutes"


def _gist(error: BaseException) -> str:
    """The first sentence, without the place in torch's sources that it begins with."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S*:\d+\] ", "", lines[0]).partition(". ")[0].rstrip(".")[:200]
