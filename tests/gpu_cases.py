"""What the tests of the GPU transports share: ranks with a GPU each, workspaces, inputs, calls that are checked.

Two ranks by default; TOKENWEAVE_TEST_RANKS=4 runs the same on four, TOKENWEAVE_TEST_TRANSPORT=multimem-emulated with the
body of the multicast kernel.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collective_cases import EPS, Case, bits, call, check, make
from ranks import run_ranks
from tokenweave.collective import Workspace, cuda_backend, fused_allreduce_rmsnorm
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
    mine = torch.Generator(device).manual_seed(seed * 17 + workspace.rank)
    ours = torch.Generator(device).manual_seed(seed)
    partial = workspace.buffer(tokens, start=start)
    partial.normal_(generator=mine)
    residual = torch.randn(tokens, workspace.hidden, device=device, generator=ours).to(workspace.dtype)
    weight = (torch.rand(workspace.hidden, device=device, generator=ours) + 0.5).to(workspace.dtype)
    return partial, residual, weight


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def expect_close(got: torch.Tensor, wanted: torch.Tensor, steps: float, what: str) -> None:
    """Every element within so many roundings of its size; a sum that cancels keeps the error of its terms."""
    ulp = torch.finfo(got.dtype).eps
    terms = 1e-5 if TRANSPORT == "p2p" else 8 * ulp  # a switch's sum is rounded before the residual is added
    excess = (got.double() - wanted).abs() - max(steps * ulp, 2e-6) * wanted.abs()
    worst = float(excess.max()) if excess.numel() else 0.0
    assert worst <= terms, f"{what}: an element is off by {worst:.3g} beyond rounding"  # NaN is not


def checked_call(workspace: Workspace, tokens: int, layout: str, ctas: int | None, seed: int) -> torch.Tensor:
    """One call against float64, every element, with guard rows around it; returns the rows."""
    partial, residual, weight = fresh(workspace, tokens, seed, start=3)
    start = residual.clone()
    guards = [workspace.buffer(3, start=row).fill_(7.0) for row in (0, tokens + 3)]
    parts = gathered(partial.clone())
    torch.cuda.synchronize()
    dist.barrier()
    rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, ctas=ctas, layout=layout)
    torch.cuda.synchronize()
    cuda_backend.check(workspace)
    own = range(tokens) if layout == "replicated" else owned_rows(tokens, workspace.rank, workspace.world_size)
    total = start.double()
    for part in parts:
        total += part.double()
    tolerance = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[workspace.dtype]
    if TRANSPORT != "p2p":
        tolerance *= 1.5  # the switch rounds the sum before the residual is added: one rounding more
    mine = slice(own.start, own.stop)
    what = f"{workspace.hidden=} {tokens=} {layout=} {ctas=}"
    if len(own):
        assert relative(residual[mine], total[mine]) < tolerance
        expect_close(residual[mine], total[mine], 1, f"residual, {what}")
    assert torch.equal(residual[: own.start], start[: own.start])
    assert torch.equal(residual[own.stop :], start[own.stop :])
    rounded = total.to(workspace.dtype).double()
    expected = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    if tokens:
        assert relative(rows, expected) < tolerance, what
        expect_close(rows, expected, 2, f"rows, {what}")
        for other in gathered(rows):
            assert torch.equal(bits(other), bits(rows)), "ranks differ"
    assert all((guard == 7).all() for guard in guards)
    return rows.clone()


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


def random_case(pick: random.Random, tokens: int, dtypes: tuple[torch.dtype, ...], **others: Any) -> Case:
    """One of a hidden size of each kind of kernel, with options of all kinds; ``others``: of :class:`Case`, as given."""
    rows = None
    if pick.random() < 0.4:
        rows = tuple(sorted(pick.sample(range(tokens), pick.randrange(tokens + 1))))
    return Case(
        tokens,
        pick.choice([72, 2880, 4096]),
        pick.choice(dtypes),
        has_residual=pick.random() < 0.7,
        post_norm=pick.random() < 0.4,
        weight_offset=pick.choice([0.0, 1.0]),
        bias=pick.random() < 0.4,
        replicated=pick.random() < 0.5,
        rows=rows,
        **others,
    )


def check_options(seed: int) -> int:
    pick = random.Random(seed)
    count = 0
    for number in range(60):
        tokens = pick.choice([1, 2, 5, 33, 130])
        ctas = pick.choice([None, 1, 2])  # of 130 rows, one or two blocks have enough for the ring
        case = random_case(
            pick, tokens, (torch.bfloat16, torch.float16, torch.float32), use_out=pick.random() < 0.5, ctas=ctas
        )
        with opened(tokens, case.hidden, case.dtype) as workspace:
            data = make(case, workspace.world_size, seed + number)
            residual, result = call(case, data, workspace)
            torch.cuda.synchronize()
            cuda_backend.check(workspace)
            check(case, data, residual, result, workspace, rounded_sum=workspace.transport != "p2p")
            for other in gathered(result):
                assert torch.equal(bits(other), bits(result)), case
        count += 1
    return count


def check_row_count() -> None:
    with opened(600, 4096) as workspace:
        count = torch.zeros(1, dtype=torch.int32, device=workspace.device)
        partial, residual, weight = fresh(workspace, 512, 11)
        p, r = partial.clone(), residual.clone()
        for layout in ("sharded", "replicated"):
            graph = torch.cuda.CUDAGraph()
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, row_count=count)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, row_count=count)
            for real in (0, 1, 3, 100, 511, 512):
                partial.copy_(p)
                residual.copy_(r)
                count.fill_(real)
                graph.replay()
                got = partial.clone()
                assert torch.equal(got[real:], p[real:])
                if layout == "replicated":
                    assert torch.equal(residual[real:], r[real:])
                x, res = workspace.buffer(real), r[:real].clone()
                x.copy_(p[:real])
                fused_allreduce_rmsnorm(x, res, weight, EPS, workspace, layout=layout)
                assert torch.equal(bits(x), bits(got[:real])), (layout, real)
            del graph
