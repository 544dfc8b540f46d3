"""Measured times between and beyond the points where they were measured: never falling, and in steps where the model has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Shape = Callable[[Any], Any]
"""int64 [n] -> float64 [n] that never falls: how time runs between two measured points."""


def never_falling(values: Sequence[float]) -> np.ndarray:
    """The closest sequence that never falls, in least squares: neighbours in the wrong order share their mean.

    A measured time that falls with more work is noise, or a kernel that the library had better not chosen; a cut that was
    placed by either would be luck.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(float(value))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, count = means.pop(), counts.pop()
            means[-1] = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count)
            counts[-1] += count
    return np.repeat(means, counts)


class Curve:
    """Time over one number (rows, tokens, bytes).

    Args:
        points: x >= 0 -> us, at least one.
        shape: how time runs between two points: their difference is passed through as this function's is, in a straight line
            where it is flat between points that differ. Before the first point and beyond the last time is in proportion to
            it. None: straight lines; before the first point its time, beyond the last the line from 0 or from the last but
            one point, whichever is steeper.

    Attributes:
        x, us: the points, in order, never falling.
    """

    def __init__(self, points: Mapping[float, float], shape: Shape | None = None) -> None:
        if not points:
            raise ValueError("a curve without points")
        order = sorted(points)
        self.x = np.array(order, dtype=np.float64)
        self.us = never_falling([points[x] for x in order])
        self._shape = shape
        if shape is None:
            self._tail = self.us[-1] / self.x[-1] if self.x[-1] > 0 else 0.0
            if len(order) > 1:
                self._tail = max(self._tail, (self.us[-1] - self.us[-2]) / (self.x[-1] - self.x[-2]))
        else:
            self._at = np.asarray(shape(np.array(order, dtype=np.int64)), dtype=np.float64)

    @property
    def tail(self) -> float:
        """us a unit of x beyond the last point, of a curve without a shape."""
        return float(self._tail)

    def __call__(self, x: Any) -> Any:
        """us at ``x``, a number or an array; float64 of the same shape."""
        given = np.asarray(x)
        if self._shape is None:
            return (np.interp(given, self.x, self.us) + self._tail * np.maximum(given - self.x[-1], 0.0))[()]
        at = np.asarray(self._shape(np.maximum(given, 1)), dtype=np.float64)
        high = np.clip(np.searchsorted(self.x, given), min(1, len(self.x) - 1), len(self.x) - 1)
        low = np.maximum(high - 1, 0)
        span, rise = self.x[high] - self.x[low], self._at[high] - self._at[low]
        straight = (given - self.x[low]) / np.where(span > 0, span, 1.0)
        stepped = (at - self._at[low]) / np.where(rise > 0, rise, 1.0)
        share = np.clip(np.where(rise > 0, stepped, straight), 0.0, 1.0)
        inside = self.us[low] + (self.us[high] - self.us[low]) * share
        before, beyond = (
            self.us[0] * np.minimum(at / self._at[0], 1.0),
            self.us[-1] * np.maximum(at / self._at[-1], 1.0),
        )
        return np.where(given < self.x[0], before, np.where(given > self.x[-1], beyond, inside))[()]


class Surface:
    """Time over two numbers, bilinear: e.g. attention over its rows and the keys that each of them sees on average.

    Args:
        points: (x, y) -> us, at least one; any y for each x. start: us at y = 0.
    """

    def __init__(self, points: Mapping[tuple[float, float], float], start: float) -> None:
        if not points:
            raise ValueError("a surface without points")
        self._x = np.array(sorted({x for x, _ in points}), dtype=np.float64)
        self._y = np.unique([0.0, *(y for _, y in points)])
        lines = [Curve({0.0: start, **{y: us for (x, y), us in points.items() if x == at}}) for at in self._x]
        # On one grid of y, and so that no line crosses the next one: more rows never take less time.
        table = np.stack([line(self._y) for line in lines])
        self._table = np.stack([never_falling(column) for column in table.T]).T
        self._tails = never_falling([line.tail for line in lines])

    def __call__(self, x: Any, y: Any) -> Any:
        """us at (x, y), numbers or arrays that broadcast. Before the first x the first's time, beyond the last in
        proportion to x."""
        x, y = np.broadcast_arrays(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
        last = len(self._x) - 1
        high = np.clip(np.searchsorted(self._x, x), min(1, last), last)
        low = np.maximum(high - 1, 0)
        span = self._x[high] - self._x[low]
        share = np.clip((x - self._x[low]) / np.where(span > 0, span, 1.0), 0.0, 1.0)
        at_low, at_high = self._line(low, y), self._line(high, y)
        return ((at_low + (at_high - at_low) * share) * np.maximum(1.0, x / self._x[-1]))[()]

    def _line(self, which: np.ndarray, y: np.ndarray) -> np.ndarray:
        """us on the lines at the ``which``-th x."""
        last = len(self._y) - 1
        high = np.clip(np.searchsorted(self._y, y), min(1, last), last)
        low = np.maximum(high - 1, 0)
        span = self._y[high] - self._y[low]
        share = np.clip((y - self._y[low]) / np.where(span > 0, span, 1.0), 0.0, 1.0)
        inside = self._table[which, low] + (self._table[which, high] - self._table[which, low]) * share
        return np.asarray(inside + self._tails[which] * np.maximum(y - self._y[-1], 0.0))
