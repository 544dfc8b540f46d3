"""What ``tokenweave bench latency --sweep`` tries beside the planner's choice: blocks, clusters, SM budgets, cuts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tokenweave.bench.steps import PrefillSteps, Variant
from tokenweave.planning import Mode, Plan
from tokenweave.planning.plan import GEMMS, LATE

_FIRST_GEMMS = ("qkv", "gate_up")  # of a stage: these start beside the other split's collective
_SHAPES = ((4, 4), (8, 2), (8, 4), (12, 4))  # blocks, cluster

Best = Callable[[Sequence[Variant]], Variant]
"""Times candidates of one mode; gives the fastest."""


def swept_fused(steps: PrefillSteps, planned: Variant, tokens: int, best: Best) -> Variant:
    """The fastest number of blocks."""
    return best([planned, *_fused_candidates(steps, tokens)])


def _fused_candidates(steps: PrefillSteps, tokens: int) -> Iterator[Variant]:
    for ctas in (None, 8, 12, 16, 32):
        yield steps.of_plan("fused", f"ctas {ctas or 'default'}", Plan(Mode.FUSED, ctas=ctas), tokens)


def swept_woven(steps: PrefillSteps, planned: Variant, tokens: int, sms: int, best: Best) -> Variant:
    """Blocks, clusters and SM budgets at an even cut, then cuts; one after the other. ``sms``: of the GPU."""
    even = aligned(tokens // 2, tokens)

    def variant(
        cut: int,
        ctas: int,
        cluster: int | None,
        left: int | None,
        gemms: Sequence[str],
        start: Sequence[str] = (),
    ) -> Variant:
        budget = {(gemm, split): left for gemm in gemms for split in ("prefix", "suffix") if left is not None}
        plan = Plan(Mode.WOVEN, split=cut, ctas=ctas, cluster=cluster, gemm_sms=budget, start_at=frozenset(start))
        text = f"cut {cut} ctas {ctas} cluster {cluster or 1} sms {left or 'all'} of {'+'.join(gemms) or '-'}"
        return steps.of_plan("woven", text + (f" start {'+'.join(start)}" if start else ""), plan, tokens)

    shapes: list[Variant] = [planned, variant(even, 8, None, None, ())]
    for ctas, cluster in _SHAPES:
        for gemms in (_FIRST_GEMMS, GEMMS):
            shapes.append(variant(even, ctas, cluster, sms - ctas, gemms))
        beside = [gemm for gemm in GEMMS if gemm != "gate_up"]
        shapes.append(variant(even, ctas, cluster, sms - ctas, beside, LATE))
    first = best(shapes)
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
