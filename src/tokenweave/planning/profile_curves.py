"""Measured times between and beyond the points where they were measured: without noise, and in steps where the model has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Shape = Callable[[Any], Any]
"""int64 [n] -> float64 [n] that never falls: how time runs between two measured points."""


def never_falling(values: Sequence[float], noise: float = math.inf) -> np.ndarray:
    """The closest sequence that never falls, in least squares: neighbours in the wrong order share their mean.

    Args:
        noise: falls by a larger share than this are kept: they are no noise.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(float(value))
        counts.append(1)
        while len(means) > 1 and means[-1] < means[-2] <= means[-1] * (1 + noise):
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
        noise: falls by a smaller share are smoothed out, as :func:`never_falling` does; by default all are.

    Attributes:
        x, us: the points, in order, smoothed.
    """

    def __init__(self, points: Mapping[float, float], shape: Shape | None = None, noise: float = math.inf) -> None:
        if not points:
            raise ValueError("a curve without points")
        order = sorted(points)
        self.x = np.array(order, dtype=np.float64)
        self.us = never_falling([points[x] for x in order], noise)
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
        table = self._table
        left, right, along = _between(self._x, x)
        low, high, up = _between(self._y, y)
        first, second = table[left, low], table[right, low]
        first = first + (table[left, high] - first) * up
        second = second + (table[right, high] - second) * up
        if np.any(over := np.maximum(np.asarray(y) - self._y[-1], 0.0)):
            first, second = first + self._tails[left] * over, second + self._tails[right] * over
        return (first + (second - first) * along) * np.maximum(1.0, np.asarray(x) / self._x[-1])


def _between(grid: np.ndarray, x: Any) -> tuple[Any, Any, Any]:
    """Indices of the neighbours of ``x`` in an ascending grid, and where between them it is, 0 to 1."""
    last = len(grid) - 1
    high = np.minimum(np.maximum(np.searchsorted(grid, x), min(1, last)), last)
    low = np.maximum(high - 1, 0)
    start = grid[low]
    span = grid[high] - start
    share = (np.asarray(x) - start) / np.where(span > 0, span, 1.0)
    return low, high, np.minimum(np.maximum(share, 0.0), 1.0)
