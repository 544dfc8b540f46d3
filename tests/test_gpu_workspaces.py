"""Symmetric memory on GPUs: what lies outside, several workspaces and groups, torch's expandable segments.

PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_workspaces.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collective_cases import EPS, fresh_seed
from gpu_cases import (
    RANKS,
    TRANSPORT,
    checked_call,
    expect_close,
    fresh,
    on_ranks,
    opened,
)
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.errors import CollectiveError

pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]


def _outside_the_workspace() -> None:
    with opened(200, 4096) as workspace:
        partial, residual, weight = fresh(workspace, 200, 9)
        p, r = partial.clone(), residual.clone()
        rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace)
        rows = rows.clone()
        assert workspace.copies == 0
        kept = p.clone()
        result, _ = fused_allreduce_rmsnorm(p, r.clone(), weight, EPS, workspace)
        assert result.data_ptr() == p.data_ptr()  # in place all the same
        assert torch.equal(rows, result)
        assert workspace.copies == 2
        p = kept
        picked, _ = fused_allreduce_rmsnorm(
            p, r.clone(), weight, EPS, workspace, rows=torch.arange(1, 200, 3).to(p.device)
        )
        assert torch.equal(picked, rows[1:200:3])
        out = torch.empty_like(p)
        result, _ = fused_allreduce_rmsnorm(p, r.clone(), weight, EPS, workspace, out=out)
        assert result.data_ptr() == out.data_ptr()
        assert torch.equal(rows, out)
    with opened(200, 4096, staging=False) as workspace, pytest.raises(CollectiveError, match="staging=True"):
        fused_allreduce_rmsnorm(p, r, weight, EPS, workspace)


def test_memory_outside_the_workspace_is_copied_and_counted():
    on_ranks(_outside_the_workspace)


def _several_workspaces() -> None:
    with opened(64, 4096) as a, opened(64, 4096) as b, opened(40, 2880) as c:
        for number in range(20):
            for workspace in (a, b, c, a):
                checked_call(workspace, 29, "sharded", None, number)
                checked_call(workspace, 29, "replicated", None, number)
    dist.barrier()  # where ranks share a GPU, its free memory is that of all of them
    before = torch.cuda.mem_get_info()[0]
    dist.barrier()
    for _ in range(5):
        opened(4096, 4096).close()
    torch.cuda.synchronize()
    dist.barrier()
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20, "closed workspaces keep their memory"


def test_several_workspaces():
    on_ranks(_several_workspaces)


def _two_groups(seed: int) -> None:
    """Halves of the ranks, or two groups of the same two; calls of both between each other."""
    world, rank = dist.get_world_size(), dist.get_rank()
    members = [list(range(world // 2)), list(range(world // 2, world))] if world >= 4 else [list(range(world))] * 2
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [(n, group) for n, (group, ranks) in enumerate(zip(groups, members, strict=True)) if rank in ranks]
    options = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", torch.cuda.current_device()),
        "transport": TRANSPORT,
        "time_limit": 10.0,
    }
    hidden = (4096, 2880)  # the groups differ in every size
    workspaces = [Workspace(group, max_tokens=300, hidden=hidden[n], **options) for n, group in mine]
    for number in range(50):
        for (n, group), workspace in zip(mine, workspaces, strict=True):
            tokens, layout = (33, 200)[n] + number, ("sharded", "replicated")[(number + n) % 2]
            partial, residual, weight = fresh(workspace, tokens, seed + 1000 * n + number)
            total = residual.double()
            parts = [torch.empty_like(partial) for _ in range(workspace.world_size)]
            dist.all_gather(parts, partial.clone(), group=group)
            for part in parts:
                total += part.double()
            rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
            torch.cuda.synchronize()
            workspace.check()
            rounded = total.bfloat16().double()
            expected = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
            expect_close(rows, expected, 2, f"group {n}, {tokens=} {layout=}")
    for workspace in workspaces:
        workspace.close()
    dist.barrier()
    for _, group in mine:
        dist.destroy_process_group(group)


def test_two_groups():
    on_ranks(_two_groups, fresh_seed())


def _expandable_segments() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        with opened(2100, 4096) as workspace:
            for layout in ("sharded", "replicated"):
                checked_call(workspace, 2048 if layout == "sharded" else 200, layout, None, 1)
            partial, residual, weight = fresh(workspace, 200, 9)
            outside = partial.clone()  # where peers cannot reach it
            rows, _ = fused_allreduce_rmsnorm(partial, residual.clone(), weight, EPS, workspace)
            kept = rows.clone()
            rows, _ = fused_allreduce_rmsnorm(outside, residual, weight, EPS, workspace)
            assert torch.equal(rows, kept)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_expandable_segments():
    on_ranks(_expandable_segments)
