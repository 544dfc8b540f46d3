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


class Requests:
    """The live requests of one rank. All ranks hear of them in the same order and know the same."""

    def __init__(self) -> None:
        self._prompts: dict[str, Sequence[int]] = {}
        self._cached: dict[str, int] = {}  # tokens found in the prefix cache, until the first step is planned

    def add(self, request: str, prompt: Sequence[int], cached: int) -> None:
        """A request starts, or starts again after a preemption.

        Args:
            prompt: all token ids known so far.
            cached: how many of them the prefix cache holds (or will, by the end of this step).
        """
        self._prompts[request] = prompt
        if cached:
            self._cached[request] = cached
        else:
            self._cached.pop(request, None)

    def remove(self, request: str) -> None:
        """It ended; unknown names are ignored."""
        self._prompts.pop(request, None)
        self._cached.pop(request, None)

    def known(self, request: str) -> bool:
        """Whether it was added; vLLM's dummy runs have names that were not."""
        return request in self._prompts

    def hazard(self, step: Sequence[Rows], cut: int) -> bool:
        """Whether a row before ``cut`` may read a cache block that a row behind it writes.

        vLLM enters blocks into its prefix cache when they are scheduled, not when they are written, so a request can hit
        blocks of the same step. Uncut that is harmless: a layer writes all rows before any attends. With a cut the prefix
        attends first.
        """
        first, readers, writers = 0, [], []
        for rows in step:
            if rows.request in self._cached and first < cut:
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
        if begin >= min(writer.context + writer.tokens, self._cached[reader.request]):
            return False
        mine, other = self._prompts[reader.request], self._prompts.get(writer.request)
        if other is None:
            return True
        # Blocks are shared only where everything up to their end is equal. Tokens past a prompt are not known here.
        known = min(begin + 1, len(other))
        return list(other[:known]) == list(mine[:known])

    def planned(self, requests: Iterable[str]) -> None:
        """A step of these is on its way: what they found cached is written by now, or in it."""
        if self._cached:  # not so in most steps, of which decoding makes hundreds a second
            for request in requests:
                self._cached.pop(request, None)
