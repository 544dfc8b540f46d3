"""What ``tokenweave bench latency --sweep`` tries beside the planner's choice: blocks, clusters, SM budgets, cuts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tokenweave.bench.steps import PrefillSteps, Variant
from tokenweave.planning import Mode, Plan
from tokenweave.planning.machine import Costs, left
from tokenweave.planning.plan import FIRST_GEMMS, GEMMS, LATE_GEMMS, Scheme, woven_plan

_SCHEMES = (
    Scheme(8, None, ()),
    *(Scheme(ctas, cluster, FIRST_GEMMS) for ctas, cluster in ((4, 2), (4, 4), (8, 2), (12, 2), (12, 4), (16, 2))),
    *(Scheme(ctas, 2, ("qkv", "attention", "gate_up")) for ctas in (4, 8)),
    Scheme(8, 2, GEMMS),
    *(Scheme(ctas, cluster, LATE_GEMMS, late=True) for ctas, cluster in ((4, 2), (4, 4), (8, 2), (8, 4))),
)

Best = Callable[[Sequence[Variant]], list[Variant]]
"""Times candidates of one mode; gives the fastest, and those near it behind."""


def swept_fused(steps: PrefillSteps, planned: Variant, tokens: int, best: Best) -> list[Variant]:
    """The fastest numbers of blocks."""
    return best([planned, *_fused_candidates(steps, tokens)])


def _fused_candidates(steps: PrefillSteps, tokens: int) -> Iterator[Variant]:
    for ctas in (None, 8, 12, 16, 32):
        yield steps.of_plan("fused", f"ctas {ctas or 'default'}", Plan(Mode.FUSED, ctas=ctas), tokens)


def swept_woven(steps: PrefillSteps, planned: Variant, tokens: int, costs: Costs, best: Best) -> list[Variant]:
    """Schemes at an even cut, then cuts; one after the other. ``costs``: of the machine."""
    even = aligned(tokens // 2, tokens)

    def variant(scheme: Scheme) -> Variant:
        plan = woven_plan(even, scheme, left(costs, scheme.ctas))
        return steps.of_plan("woven", f"cut {even}, {scheme}", plan, tokens)

    shapes = [planned, *map(variant, _SCHEMES)]
    first = best(shapes)[0]
    plan = first.plan
    assert plan is not None
    assert plan.split is not None
    cuts = {aligned(tokens * k // 16, tokens) for k in (5, 6, 7, 9, 10, 11)} - {plan.split, even}
    moved = [
        steps.of_plan("woven", f"{first.name}, at {cut}", dataclasses.replace(plan, split=cut), tokens)
        for cut in sorted(cuts)
    ]
    return best([first, *moved])


def aligned(cut: int, tokens: int) -> int:
    """The multiple of 128 (64 below 512 tokens) nearest to ``cut``, inside the step."""
    step = 128 if tokens >= 512 else 64
    return min(max(step, round(cut / step) * step), tokens - 1)
