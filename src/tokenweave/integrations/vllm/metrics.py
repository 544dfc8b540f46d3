"""What ran, and why it ran so: counted in every rank, told by the first one, in vLLM's log and to Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter

from tokenweave.integrations.vllm.prometheus import FALLBACKS, ON, REPLAYS, STATE, STEPS, TOKENS, Sink
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.planning import Mode

log = logging.getLogger("vllm.tokenweave")

INTERVAL = 60.0  # seconds between two lines

QUIET = {
    Reason.WHOLE_GRAPH,
    Reason.DUMMY,
    Reason.DECODES,
    Reason.LONG_CONTEXT,
    Reason.PLANNER,
    Reason.NEW_BUCKET,
    Reason.EAGER_SLOWER,
}
"""Reasons that every healthy server has all the time: counted, said at debug level."""


class Steps:
    """Counters of one rank.

    Args:
        first_rank: whether it writes the log.
        sink: where the counters go besides; the first rank's alone.

    Attributes:
        modes: steps that TokenWeave ran, by mode.
        reasons: steps that ran as stock (or, for PREFIX_HAZARD, uncut), by reason.
        rows: of the steps by mode.
        graphs: steps of ``modes`` that were replayed as a graph.
    """

    def __init__(self, *, first_rank: bool = True, sink: Sink | None = None) -> None:
        self.modes: Counter[Mode] = Counter()
        self.rows: Counter[Mode] = Counter()
        self.reasons: Counter[Reason] = Counter()
        self.graphs = 0
        self.first_rank = first_rank
        self._sink, self._state = sink, ""
        self._said: set[Reason] = set()
        self._last, self._written = time.monotonic(), ""

    def ran(self, mode: Mode, rows: int, *, graph: bool = False) -> None:
        """A step of TokenWeave's."""
        self.modes[mode] += 1
        self.rows[mode] += rows
        self.graphs += graph
        if self._sink is not None:
            self._sink.add(STEPS, str(mode), 1)
            self._sink.add(TOKENS, str(mode), rows)
            self._sink.add(REPLAYS, str(mode), graph)
        self._maybe_write()

    def count(self, reason: Reason, detail: str = "") -> None:
        """A step that falls back; the reason's first is said."""
        self.reasons[reason] += 1
        if self._sink is not None:
            self._sink.add(FALLBACKS, str(reason), 1)
        self.say(reason, detail)
        self._maybe_write()

    def engine(self, off: Reason | None) -> None:
        """What the engine is from now on: on, or off for a reason."""
        if self._sink is not None:
            if self._state:
                self._sink.set(STATE, self._state, 0)
            self._state = ON if off is None else str(off)
            self._sink.set(STATE, self._state, 1)

    def say(self, reason: Reason, detail: str = "", *, warn: bool = False) -> None:
        """Once a reason."""
        if reason in self._said or not self.first_rank:
            return
        self._said.add(reason)
        level = logging.WARNING if warn else logging.DEBUG if reason in QUIET else logging.INFO
        what = "a step is not woven" if reason is Reason.PREFIX_HAZARD else "stock vLLM runs"
        log.log(level, "TokenWeave: %s (%s): %s%s", what, reason, reason.value, f": {detail}" if detail else "")

    def line(self) -> str:
        """All counters, for a log."""
        ran = ", ".join(f"{mode} {self.modes[mode]} steps / {self.rows[mode]} tokens" for mode in self.modes) or "none"
        counts = sorted((str(r), n) for r, n in self.reasons.items() if r is not Reason.PREFIX_HAZARD)
        stock = ", ".join(f"{reason} {count}" for reason, count in counts) or "none"
        uncut = self.reasons[Reason.PREFIX_HAZARD]
        also = f"; not woven: {Reason.PREFIX_HAZARD} {uncut}" if uncut else ""
        return f"steps by mode: {ran} ({self.graphs} as graphs); as stock, by reason: {stock}{also}"

    def _maybe_write(self) -> None:
        now = time.monotonic()
        if self.first_rank and now - self._last >= INTERVAL:
            self._last = now
            if (line := self.line()) != self._written:
                self._written = line
                log.info("TokenWeave: %s", line)
