"""What the host knows of a step's requests, and when a cut would let one read cache blocks before another writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """One request's rows in a step, in the order in which the step has them.

    Attributes:
        request: its name.
        tokens: number of rows, at least 1.
        context: positions that precede them (those that the cache is said to hold).
    """

    request: str
    tokens: int
    context: int


@dataclass
class _Request:
    prompt: Sequence[int]
    cached: int  # tokens found in the prefix cache; 0 once its first step is planned


class Requests:
    """The live requests of one rank. All ranks hear of them in the same order and know the same."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def add(self, request: str, prompt: Sequence[int], cached: int) -> None:
        """A request starts, or starts again after a preemption.

        Args:
            prompt: all token ids known so far.
            cached: how many of them the prefix cache holds (or will, by the end of this step).
        """
        self._requests[request] = _Request(prompt, cached)

    def remove(self, request: str) -> None:
        """It ended; unknown names are ignored."""
        self._requests.pop(request, None)

    def known(self, request: str) -> bool:
        """Whether it was added; vLLM's dummy runs have names that were not."""
        return request in self._requests

    def hazard(self, step: Sequence[Rows], cut: int) -> bool:
        """Whether a row before ``cut`` may read a cache block that a row behind it writes.

        vLLM enters blocks into its prefix cache when they are scheduled, not when they are written, so a request can hit
        blocks of the same step. Uncut that is harmless: a layer writes all rows before any attends. With a cut the prefix
        attends first.
        """
        first, readers, writers = 0, [], []
        for rows in step:
            if rows.request in self._requests and self._requests[rows.request].cached and first < cut:
                readers.append(rows)
            written = min(rows.tokens, first + rows.tokens - cut)
            if written > 0:
                writers.append((rows, rows.context + rows.tokens - written))
            first += rows.tokens
        return any(self._meets(reader, writer, begin) for reader in readers for writer, begin in writers)

    def _meets(self, reader: Rows, writer: Rows, begin: int) -> bool:
        """Whether the positions from ``begin`` on that ``writer`` writes may be ones that ``reader`` found cached."""
        if reader.request == writer.request:
            return False
        mine = self._requests[reader.request]
        if begin >= min(writer.context + writer.tokens, mine.cached):
            return False
        other = self._requests.get(writer.request)
        if other is None:
            return True
        # Blocks are shared only where everything up to their end is equal. Tokens past a prompt are not known here.
        known = min(begin + 1, len(other.prompt))
        return list(other.prompt[:known]) == list(mine.prompt[:known])

    def planned(self, step: Iterable[Rows]) -> None:
        """The step is on its way: what its requests found cached is written by now, or in it."""
        for rows in step:
            if (request := self._requests.get(rows.request)) is not None:
                request.cached = 0
