"""Two passes over a size's variants: the first chooses, the second, of fresh rounds, gives every figure.

The fastest of several owes part of its lead to chance: its time in the rounds that it was chosen by is too short, and who is
compared with it there looks slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenweave.bench.steps import Variant
from tokenweave.bench.timing import median_estimate, ratio_estimate

SINGLE = ("sequential", "fused", "woven")
"""Modes that :mod:`tokenweave.planning` picks among: of their variants, the first pass chooses."""

_NEAR = 1.02  # of a mode's fastest time: such variants are finalists too

Times = Mapping[str, Sequence[float]]
"""A variant's key -> us of all rounds of a pass."""


@dataclass(frozen=True)
class Finals:
    """What came of both passes.

    Attributes:
        chosen: mode -> the variant that is reported, in the order of the variants.
        best_single: of :data:`SINGLE`, the mode of the fastest; None where none was measured.
        times: of the second pass.
    """

    chosen: Mapping[str, Variant]
    best_single: str | None
    times: Times


def finalists(variants: Sequence[Variant], first: Times) -> list[Variant]:
    """The fastest of each single mode in the first pass, what is near it, and every variant of the other modes."""
    found = []
    for mode, same in _by_mode(variants).items():
        if mode in SINGLE:
            medians = {variant.key: median_estimate(first[variant.key]).value for variant in same}
            same = [variant for variant in same if medians[variant.key] <= _NEAR * min(medians.values())]
        found += same
    return found


def decided(among: Sequence[Variant], first: Times, times: Times) -> Finals:
    """Whose figures of the second pass are reported.

    Args:
        among: the finalists. first, times: of both passes.
    """
    chosen = {mode: _fastest(same, first, times) for mode, same in _by_mode(among).items()}
    single = [variant for mode, variant in chosen.items() if mode in SINGLE]
    return Finals(chosen, _fastest(single, first, times).mode if single else None, times)


def _fastest(among: Sequence[Variant], first: Times, times: Times) -> Variant:
    """The first pass's, unless one is faster than it in the second by more than chance: its 95 % interval says so."""
    if len(among) == 1:
        return among[0]
    best = min(among, key=lambda variant: median_estimate(first[variant.key]).value)
    ratios = {variant.key: ratio_estimate(times[variant.key], times[best.key]) for variant in among}
    return min(
        (variant for variant in among if ratios[variant.key].high < 1),
        key=lambda variant: ratios[variant.key].value,
        default=best,
    )


def _by_mode(variants: Sequence[Variant]) -> dict[str, list[Variant]]:
    return {mode: list(same) for mode, same in itertools.groupby(variants, key=lambda variant: variant.mode)}
