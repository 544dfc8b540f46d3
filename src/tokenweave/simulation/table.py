"""Step times by interpolation: the predictor is asked at grid points alone, and each of those once.

A million requests make millions of steps, and no two are alike. What a step costs depends on four numbers: its rows, how
many of them are decodes, how much attention its prompts' rows and its decodes have to do. Time is nearly linear in all of
these but the rows, whose tiles make stairs; so grid points double in the linear ones, and lie close in rows.
"""

from __future__ import annotations

from collections.abc import Callable

Chunks = tuple[tuple[int, int], ...]
"""(rows, positions before them) of each prompt's part of a step."""

ExactUs = Callable[[Chunks, int, int], float]
"""(chunks, decodes, positions before each decode on average) -> us of the step."""

_FIRST_SPAN, _FIRST_CONTEXT = 16, 64  # the lowest grid points above 0
_ROW_STEP = 64  # of GEMM tiles: a step of up to so many rows more costs hardly more
_FEW, _MANY = 8, 1024  # grid points lie so close up to a row step; both ends of each stair are some up to here


class StepTable:
    """Seconds of steps, each a cheap function of what the step holds.

    Args:
        exact_us: the predictor. Called with grid points as they are needed.
        max_batch_tokens: most rows of a step; a grid point whatever it is.
        overhead_us: of the host, added to every step.
    """

    def __init__(self, exact_us: ExactUs, max_batch_tokens: int, overhead_us: float = 0.0) -> None:
        self._exact_us = exact_us
        self._most = max_batch_tokens
        self._overhead_us = overhead_us
        self._points: dict[tuple[int, int, int, int], float] = {}
        self._cells: dict[int, tuple[float, ...]] = {}
        self._lines: dict[int, tuple[float, float]] = {}

    @property
    def points(self) -> int:
        """Grid points at which the predictor has been asked."""
        return len(self._points)

    def mixed(self, rows: int, decodes: int, pairs: float, positions: int) -> float:
        """Seconds of a step with prompts in it.

        Args:
            rows: all of them.
            decodes: how many of them are decodes, < rows.
            pairs: (query, key) pairs of the others.
            positions: that precede the decodes, summed over them.
        """
        context = positions / decodes if decodes else 0.0
        low, high, weight = self._between(rows)
        if low <= decodes:  # that few rows would be decodes alone
            low, weight = high, 0.0
        time = self._in_cell(low, decodes, pairs / (low - decodes), context)
        if weight:
            time += weight * (self._in_cell(high, decodes, pairs / (high - decodes), context) - time)
        return time

    def decode(self, decodes: int, positions: int) -> tuple[float, float, int]:
        """Steps of decodes alone, whose sequences grow by one position a step.

        Args:
            decodes: >= 1.
            positions: that precede them, summed over them.

        Returns:
            (first, growth, steps): the n-th of the next ``steps`` >= 1 steps takes first + n * growth seconds, n from 0.
        """
        cell = _cell_of(positions // decodes, _FIRST_CONTEXT)
        key = decodes << 8 | cell
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._line(decodes, cell)
        base, slope = line
        # Up to the next grid point, where the line has its kink.
        steps = (_FIRST_CONTEXT << 2 * cell) - positions // decodes
        return base + slope * (positions / decodes), slope, steps

    def _line(self, decodes: int, cell: int) -> tuple[float, float]:
        """(seconds at context 0, seconds per position of context) between two grid points of the context."""
        low, high, weight = self._between(decodes)
        start, stop = _ends(cell, _FIRST_CONTEXT)
        first, last = (
            (1 - weight) * self._point(low, low, 0, context) + weight * self._point(high, high, 0, context)
            for context in (start, stop)
        )
        slope = (last - first) / (stop - start)
        return first - slope * start, slope

    def _between(self, rows: int) -> tuple[int, int, float]:
        """Grid points around, and the weight of the second: 0 where they are one."""
        if rows <= _ROW_STEP:
            low = rows // _FEW * _FEW or 1
            high = min(low + _FEW if low > 1 else _FEW, self._most)
        elif rows <= _MANY:  # the first and the last row of a stair
            low = (rows - 1) // _ROW_STEP * _ROW_STEP + 1
            high = min(low + _ROW_STEP - 1, self._most)
        else:
            rows = min(self._most, -(-rows // _ROW_STEP) * _ROW_STEP)
            unit = 1 << (rows - 1).bit_length() - 5
            low = rows // unit * unit
            high = min(self._most, low + unit)
        return low, high, (rows - low) / (high - low) if high > low else 0.0

    def _in_cell(self, rows: int, decodes: int, span: float, context: float) -> float:
        """Seconds with rows at a grid point; linear in each of the others. ``span``: pairs of a prompt's row, a mean."""
        d, s, c = _cell_of(decodes, 1), _cell_of(int(span), _FIRST_SPAN), _cell_of(int(context), _FIRST_CONTEXT)
        key = ((rows << 5 | d) << 5 | s) << 5 | c
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = self._cell(rows, d, s, c)
        k0, kd, ks, kds, kc, kdc, ksc, kdsc = cell
        return (
            k0
            + kd * decodes
            + (ks + kds * decodes) * span
            + (kc + kdc * decodes + (ksc + kdsc * decodes) * span) * context
        )

    def _cell(self, rows: int, d: int, s: int, c: int) -> tuple[float, ...]:
        """Coefficients of 1, d, s, ds, c, dc, sc, dsc from the cell's eight corners."""
        low, high = _ends(d, 1)
        axes = ((low, max(low, min(high, rows - 1))), _ends(s, _FIRST_SPAN), _ends(c, _FIRST_CONTEXT))
        values = [
            self._point(rows, decodes, span, context if decodes else 0)
            for context in axes[2]
            for span in axes[1]
            for decodes in axes[0]
        ]
        for axis, (start, stop) in enumerate(axes):  # values at two ends -> value at 0 and slope, an axis at a time
            stride = 1 << axis
            for place in range(8):
                if not place & stride:
                    first, last = values[place], values[place | stride]
                    slope = (last - first) / (stop - start) if stop > start else 0.0
                    values[place], values[place | stride] = first - slope * start, slope
        return tuple(values)

    def _point(self, rows: int, decodes: int, span: int, context: int) -> float:
        key = (rows, decodes, span, context)
        seconds = self._points.get(key)
        if seconds is None:
            us = self._exact_us(chunks_of(rows - decodes, span), decodes, context) + self._overhead_us
            seconds = self._points[key] = us / 1e6
        return seconds


def chunks_of(rows: int, span: float) -> Chunks:
    """Prompts' parts of a step: ``rows`` rows that attend to ``span`` positions each on average, themselves included.

    One chunk, later in its prompt the longer the span; if even a chunk at the start of a prompt has a longer one, so many
    whole prompts of equal length.
    """
    if rows == 0:
        return ()
    context = round(span - (rows + 1) / 2)
    if context >= 0:
        return ((rows, context),)
    length = max(1, min(rows, round(2 * span - 1)))
    whole, rest = divmod(rows, length)
    return ((length, 0),) * whole + (((rest, 0),) if rest else ())


def _cell_of(value: int, first: int) -> int:
    """Between which points of the grid 0, first, 4 first, 16 first, ... it lies."""
    return ((value // first).bit_length() + 1) >> 1


def _ends(cell: int, first: int) -> tuple[int, int]:
    return (first << 2 * cell - 2 if cell else 0), first << 2 * cell
