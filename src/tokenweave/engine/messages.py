"""What a rank's process and its parent say to each other, over the socket whose file descriptor the process is given.

From the parent: a :class:`WorkerArgs`, then lists of requests, then None to end. To the parent, tuples that begin with:

- ``"progress"``, parts of the model loaded, parts in all (rank 0);
- ``"ready"``;
- ``"events"``, a step's events (rank 0);
- ``"done"``, the steps' records (rank 0; else an empty list), the graphs' record;
- ``"refused"``, message: these requests can never be served; the rank goes on;
- ``"failed"``, a :class:`Failure`: the rank ends.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from tokenweave import errors
from tokenweave.engine.build import EngineArgs
from tokenweave.errors import TokenWeaveError
from tokenweave.peers import may_be_an_echo


@dataclass(frozen=True)
class WorkerArgs:
    """What a rank's process needs to begin.

    Attributes:
        port: of the parent's TCPStore on 127.0.0.1, where the ranks meet.
        parent: the process whose main thread started this one, with which the kernel ends it (Linux); None where another
            thread did, which may end before its process.
    """

    engine: EngineArgs
    rank: int
    port: int
    parent: int | None


@dataclass(frozen=True)
class Failure:
    """Why a rank ends.

    Attributes:
        error: name of the TokenWeaveError that it is, or None.
        message: of the error; of any other exception its type and its text.
        trace: the traceback.
        secondary: True if it may be no more than the echo of another rank's end (a broken connection).
    """

    error: str | None
    message: str
    trace: str
    secondary: bool

    @staticmethod
    def of(error: BaseException) -> Failure:
        known = isinstance(error, TokenWeaveError) and hasattr(errors, type(error).__name__)
        message = str(error) if known else "".join(traceback.format_exception_only(type(error), error)).strip()
        return Failure(type(error).__name__ if known else None, message, traceback.format_exc(), may_be_an_echo(error))
