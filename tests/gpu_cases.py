"""What the tests of the GPU transports share: ranks with a GPU each, workspaces, inputs, calls that are checked.

Two ranks by default; TOKENWEAVE_TEST_RANKS=4 runs the same on four, TOKENWEAVE_TEST_TRANSPORT=multimem-emulated with the
body of the multicast kernel.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collective_cases import EPS, Case, bits, call, check, is_poison, make, poison
from ranks import run_ranks
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.collective.call import Layout
from tokenweave.collective.rows import owned_rows

RANKS = int(os.environ.get("TOKENWEAVE_TEST_RANKS", "2"))
TRANSPORT = os.environ.get("TOKENWEAVE_TEST_TRANSPORT", "p2p")
same_bits = pytest.mark.skipif(TRANSPORT != "p2p", reason=f"{TRANSPORT} promises equal bits on all ranks alone")


def on_ranks(function, *args, timeout=120.0):
    return run_ranks(RANKS, function, *args, timeout=timeout, device="cuda")


def opened(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16, **options) -> Workspace:
    device = torch.device("cuda", torch.cuda.current_device())
    options = {"transport": TRANSPORT, "time_limit": 10.0, "channels": 2, "regions": 1, **options}
    return Workspace(dist.group.WORLD, max_tokens=tokens, hidden=hidden, dtype=dtype, device=device, **options)


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def fresh(
    workspace: Workspace, tokens: int, seed: int, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(partial in the workspace, different on every rank; residual and weight, the same on all)."""
    device = workspace.device
    partial = workspace.buffer(tokens, start=start)
    residual = torch.empty(tokens, workspace.hidden, dtype=workspace.dtype, device=device)
    refill(workspace, partial, residual, seed)
    ours = torch.Generator(device).manual_seed(seed + 1)
    weight = (torch.rand(workspace.hidden, device=device, generator=ours) + 0.5).to(workspace.dtype)
    return partial, residual, weight


def refill(workspace: Workspace, partial: torch.Tensor, residual: torch.Tensor, seed: int) -> None:
    """Fresh numbers in both: other partial sums on every rank, the same residual on all."""
    partial.normal_(generator=torch.Generator(workspace.device).manual_seed(seed * 17 + workspace.rank))
    residual.normal_(generator=torch.Generator(workspace.device).manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def expect_close(got: torch.Tensor, wanted: torch.Tensor, steps: float, what: str) -> None:
    """Every element within so many roundings of its size; a sum that cancels keeps the error of its terms."""
    ulp = torch.finfo(got.dtype).eps
    terms = 1e-5 if TRANSPORT == "p2p" else 8 * ulp  # a switch's sum is rounded before the residual is added
    excess = (got.double() - wanted).abs() - max(steps * ulp, 2e-6) * wanted.abs()
    worst = float(excess.max()) if excess.numel() else 0.0
    assert worst <= terms, f"{what}: an element is off by {worst:.3g} beyond rounding"  # NaN is not


def checked_call(
    workspace: Workspace,
    tokens: int,
    layout: Layout,
    ctas: int | None,
    seed: int,
    *,
    cluster: int | None = None,
    channel: int = 0,
) -> torch.Tensor:
    """One call against float64, every element, with guard rows around it; returns the rows."""
    partial, residual, weight = fresh(workspace, tokens, seed, start=3)
    guards = [workspace.buffer(3, start=row).fill_(7.0) for row in (0, tokens + 3)]
    launch = {"ctas": ctas, "cluster": cluster, "channel": channel, "layout": layout}

    def run() -> None:
        fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, **launch)

    checked(workspace, partial, residual, weight, layout, run, f"{workspace.hidden=} {tokens=} {launch}")
    assert all((guard == 7).all() for guard in guards)
    return partial.clone()


def checked(
    workspace: Workspace,
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    layout: Layout,
    run: Callable[[], None],
    what: str,
) -> None:
    """Whatever ``run`` does has to be a call in place of these tensors: against float64, every element.

    Args:
        partial: of this rank. residual: the same on all ranks; rows that the call must not read are poisoned first.
        run: the call, eager or as a graph. what: says which one it is.
    """
    tokens = len(partial)
    total = residual.double()
    for part in gathered(partial.clone()):
        total += part.double()
    own = range(tokens) if layout == "replicated" else owned_rows(tokens, workspace.rank, workspace.world_size)
    mine = slice(own.start, own.stop)
    others = residual[: own.start], residual[own.stop :]
    for rows in others:
        poison(rows)
    torch.cuda.synchronize()
    dist.barrier()
    run()
    torch.cuda.synchronize()
    workspace.check()
    tolerance = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[workspace.dtype]
    if TRANSPORT != "p2p":
        tolerance *= 1.5  # the switch rounds the sum before the residual is added: one rounding more
    if len(own):
        assert relative(residual[mine], total[mine]) < tolerance, what
        expect_close(residual[mine], total[mine], 1, f"residual, {what}")
    assert all(is_poison(rows) for rows in others), f"a row of the residual that is not this rank's was written: {what}"
    rounded = total.to(workspace.dtype).double()
    expected = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    if tokens:
        assert relative(partial, expected) < tolerance, what
        expect_close(partial, expected, 2, f"rows, {what}")
        for other in gathered(partial):
            assert torch.equal(bits(other), bits(partial)), f"ranks differ: {what}"


def check_sizes(hidden: int, dtype: torch.dtype, most: int, seed: int) -> float:
    world = dist.get_world_size()
    began = time.perf_counter()
    with opened(most + 8, hidden, dtype) as workspace:
        for tokens in sorted({0, 1, world - 1, world, world + 1, 257, 1000, 4095, most}):
            if tokens > most:
                continue
            for ctas in (None, 1, 8):
                checked_call(workspace, tokens, "sharded", ctas, seed + tokens)
            if tokens <= 1000:  # also more than an inbox holds
                checked_call(workspace, tokens, "replicated", None, seed + tokens)
    return time.perf_counter() - began


def check_clusters(hidden: int, seed: int) -> None:
    """Blocks in clusters, with plain loads and in the ring: fewer rows than blocks, and more than they hold at once."""
    with opened(1008, hidden) as workspace:
        for ctas, cluster in ((2, 2), (4, 4), (8, 4), (8, 8), (12, 2), (16, 4)):
            for tokens in (3, 64, 1000):
                checked_call(workspace, tokens, "sharded", ctas, seed + tokens, cluster=cluster)
        checked_call(workspace, 1000, "sharded", 8, seed, cluster=4, channel=1)


def random_case(
    pick: random.Random, tokens: int, hidden: int, dtype: torch.dtype, ctas: int | None = None, **others: Any
) -> Case:
    """With options of all kinds; ``others``: of :class:`Case`, as given."""
    rows = None
    if pick.random() < 0.4:
        rows = tuple(sorted(pick.sample(range(tokens), pick.randrange(tokens + 1))))
    return Case(
        tokens,
        hidden,
        dtype,
        has_residual=pick.random() < 0.7,
        post_norm=pick.random() < 0.4,
        weight_offset=pick.choice([0.0, 1.0]),
        bias=pick.random() < 0.4,
        replicated=pick.random() < 0.5,
        rows=rows,
        ctas=ctas,
        cluster=2 if ctas is not None and ctas % 2 == 0 and pick.random() < 0.5 else None,
        **others,
    )


SMALL, LARGE = (72, 2880, 4096), (5120, 7168, 8192, 16384)  # hidden sizes


def option_cases(pick: random.Random) -> list[Case]:
    """Sixty: small ones, whose kernels take little time to compile, and two of each large hidden size."""
    cases = []
    for _ in range(52):
        dtype = pick.choice([torch.bfloat16, torch.float16, torch.float32])
        # Of 130 rows, one or two blocks have enough for the ring.
        tokens, ctas = pick.choice([1, 2, 5, 33, 130]), pick.choice([None, 1, 2])
        cases.append(random_case(pick, tokens, pick.choice(SMALL), dtype, ctas, use_out=pick.random() < 0.5))
    for hidden in LARGE:
        for tokens, ctas in ((513, 4), (pick.choice([257, 513]), None)):
            cases.append(random_case(pick, tokens, hidden, torch.bfloat16, ctas, use_out=pick.random() < 0.5))
    return cases


def check_options(seed: int) -> int:
    cases = option_cases(random.Random(seed))
    for number, case in enumerate(cases):
        with opened(case.tokens, case.hidden, case.dtype) as workspace:
            data = make(case, workspace.world_size, seed + number)
            residual, result = call(case, data, workspace)
            torch.cuda.synchronize()
            workspace.check()
            check(case, data, residual, result, workspace, rounded_sum=workspace.transport != "p2p")
            for other in gathered(result):
                assert torch.equal(bits(other), bits(result)), case
    return len(cases)
