"""How a planned step runs whose own graph is not made, and when one is made for it.

To make a graph costs some hundred milliseconds, in which the engine stands still, and a server sees many sizes of which most
come rarely. So such a step goes the fastest other way, and what that loses against a graph of its own is added up. When it
has come to what the graph would cost, the graph is made: whatever sizes come, that costs at most twice what it would if they
had been known (the rule for renting or buying skis).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

CAPTURE_MS = 3.0  # of a graph, a layer: measured 2.5 (H200, 32 layers woven)
LAUNCH_MS = 2.0  # a layer that runs before the capture, woven, kernel by kernel (the same machine's host)


class Way(Enum):
    """Of a step without a graph of its own."""

    LARGER = "the graph of a larger step, whose last rows are padding"
    LAUNCHED = "launch by launch"
    STOCK = "stock vLLM"


@dataclass(frozen=True)
class Times:
    """Expected ms of a step by way, infinite where there is no such way.

    Attributes:
        own: with a graph of its own.
        larger, launched, stock: as in :class:`Way`.
    """

    own: float
    larger: float = math.inf
    launched: float = math.inf
    stock: float = math.inf

    def fastest(self) -> tuple[Way, float]:
        """Without a graph of its own, and its ms."""
        ways = {Way.LARGER: self.larger, Way.LAUNCHED: self.launched, Way.STOCK: self.stock}
        way = min(ways, key=lambda way: ways[way])
        return way, ways[way]


class Ways:
    """Decides; with the same times alike on all ranks.

    Args:
        layers: of the model. alike: whether they are, so that few of them run before a capture.

    Attributes:
        price_ms: of a graph: by prediction, until it is set to what one has taken on this machine.
    """

    def __init__(self, layers: int, *, alike: bool = True) -> None:
        self.price_ms = layers * (CAPTURE_MS if alike else CAPTURE_MS + LAUNCH_MS)
        self._lost_ms: defaultdict[Hashable, float] = defaultdict(float)

    def choose(self, key: Hashable, times: Times) -> Way | None:
        """For a step without a graph of its own; None: it is to be made now.

        Args:
            key: of that graph.
        """
        way, ms = times.fastest()
        if math.isinf(ms):  # there is none; of a mode that was asked for not even the graph's time may be known
            return None
        self._lost_ms[key] += max(0.0, ms - times.own)
        if self._lost_ms[key] < self.price_ms:
            return way
        del self._lost_ms[key]
        return None
