"""Text from tokens as they come, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that text needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """One request's text, grown token by token.

    What :meth:`push` returns is final: bytes of an unfinished character are held back, and so is what may turn out to be
    the beginning of a stop string.

    Args:
        tokenizer: decodes.
        stop: strings; the text ends before the first of them that appears, even across token borders.

    Attributes:
        text: all text so far, without what is held back.
        stopped: True once a stop string appeared.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Decoding restarts a few tokens back, because a token's text may depend on its neighbours (leading spaces,
        # characters in several tokens): ids[_window:_decoded] are already in the text, ids[_decoded:] are new.
        self._window = 0
        self._decoded = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that became final with it."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith("\ufffd"):
            return ""
        self._window, self._decoded = self._decoded, len(self._ids)
        return self._emit(new, last=False)

    def finish(self) -> str:
        """No token will follow: returns what was held back, unless a stop string ended the text."""
        return "" if self.stopped else self._emit(self._new_text(), last=True)

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._ids[self._window : self._decoded])
        return self._tokenizer.decode(self._ids[self._window :])[len(known) :]

    def _emit(self, new: str, last: bool) -> str:
        pending = self._held + new
        found = [place for place in map(pending.find, self._stop) if place >= 0]
        if found:
            self.stopped = True
            ready = pending[: min(found)]
        else:
            ready = pending if last else pending[: len(pending) - self._possible_stop(pending)]
        self._held = "" if self.stopped else pending[len(ready) :]
        self.text += ready
        return ready

    def _possible_stop(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that a stop string begins with."""
        longest = min(max(map(len, self._stop), default=0) - 1, len(pending))
        for size in range(longest, 0, -1):
            if any(s.startswith(pending[-size:]) for s in self._stop):
                return size
        return 0
