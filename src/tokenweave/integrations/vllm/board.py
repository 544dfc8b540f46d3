"""One page of counters that engines write and the server's process reads: how a worker's counters reach its endpoint.

The page is an anonymous file (memfd) of the server's process. Workers find it as ``/proc/PID/fd/N``, whose name they get in
an environment variable; it is gone with the last process that has it open, however that ends. A counter is an aligned
64-bit number with one writer, so that adding to it is one store, and reading it needs no lock.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

VARIABLE = "TOKENWEAVE_BOARD"

_NUMBERS = struct.Struct("=256q")
_NAME = struct.Struct("=H1024s")  # its length in bytes, and it
_SLOT = max(4096, mmap.ALLOCATIONGRANULARITY)  # bytes of an engine: its numbers, then its model's name
MAX_ENGINES = 4096


@dataclass(frozen=True)
class Slot:
    """What an engine has written: ``engine`` is its data-parallel index, ``model`` as it is served."""

    engine: int
    model: str
    numbers: tuple[int, ...]


def create() -> int:
    """A page for engines that this process and its children start; its file descriptor. Sets :data:`VARIABLE`."""
    page = os.memfd_create("tokenweave")
    os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{page}"
    return page


class Writer:
    """An engine's slot of the page that :data:`VARIABLE` names.

    Args:
        engine: data-parallel index, below :data:`MAX_ENGINES`. model: as it is served.

    Attributes:
        numbers: int64 [256]; to be added to by one thread.

    Raises:
        OSError: there is no such page: its process is gone, or on another machine.
    """

    def __init__(self, engine: int, model: str) -> None:
        if not 0 <= engine < MAX_ENGINES:
            raise OSError(f"engine {engine} of {MAX_ENGINES}")
        page = os.open(os.environ.get(VARIABLE, ""), os.O_RDWR)
        try:
            os.posix_fallocate(page, engine * _SLOT, _SLOT)  # grows the file, never shrinks it
            shared = memoryview(mmap.mmap(page, _SLOT, offset=engine * _SLOT))
        finally:
            os.close(page)
        shared[: _NUMBERS.size] = bytes(_NUMBERS.size)
        name = model.encode()[:1024].decode(errors="ignore").encode()
        _NAME.pack_into(shared, _NUMBERS.size, len(name), name)
        self.numbers = shared[: _NUMBERS.size].cast("q")


def read(page: int) -> Iterator[Slot]:
    """All slots of a page that this process created; those without a model are still empty."""
    for engine in range(os.fstat(page).st_size // _SLOT):
        slot = os.pread(page, _NUMBERS.size + _NAME.size, engine * _SLOT)
        length, name = _NAME.unpack_from(slot, _NUMBERS.size)
        if length:
            yield Slot(engine, name[:length].decode(), _NUMBERS.unpack_from(slot))
