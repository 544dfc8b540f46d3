"""Ranks whose GPUs cannot reach each other's memory, stood in for by ranks of CPUs whose symmetric allocation fails."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

from ranks import run_ranks
from tokenweave import Workspace, fused_allreduce_rmsnorm
from tokenweave.collective import workspace
from tokenweave.errors import CollectiveError

WHY = "CUDA driver error: peer access is not supported between these two devices"


class _Handle:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


def _open(fails_in: str, ranks: tuple[int, ...], transport: str) -> tuple[str, str, bool, float]:
    """(transport or "refused", why, whether nothing is left of the memory and of the registry, seconds)."""
    rank = dist.get_rank()
    mapped: list[weakref.ref[Any]] = []

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if fails_in == "empty" and rank in ranks:
            raise torch.OutOfMemoryError(WHY)
        memory = torch.empty(size, dtype=dtype, device=device)
        mapped.append(weakref.ref(memory))
        return memory

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> Any:
        if rank in ranks:
            raise RuntimeError(WHY)
        handle = _Handle(memory)
        mapped.append(weakref.ref(handle))
        return handle

    before = set(workspace._open)
    began = time.monotonic()
    gc.disable()  # nothing may hang on until a collection happens to come
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symm, "empty", empty)
            patch.setattr(symm, "rendezvous", rendezvous)
            patch.setattr(
                workspace, "choose_transport", lambda asked, *_: ("p2p", "the GPUs reach each other's memory")
            )
            try:
                made = Workspace(
                    dist.group.WORLD, max_tokens=9, hidden=64, dtype=torch.float32, transport=transport, time_limit=5
                )
            except CollectiveError as error:
                found = "refused", str(error)
            else:
                found = made.transport, made.reason
                _use(made)
                made.close()
        gone = all(reference() is None for reference in mapped) and set(workspace._open) == before
        return *found, gone, time.monotonic() - began
    finally:
        gc.enable()


def _use(made: Workspace) -> None:
    """The transport that is fallen back to works, and the ranks are in step."""
    weight, partial = torch.ones(64), torch.full((5, 64), 1.0 + dist.get_rank())
    residual = torch.ones(5, 64)
    rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, 0.0, made, layout="replicated")
    torch.testing.assert_close(rows, torch.ones(5, 64))
    total = 1.0 + sum(range(1, dist.get_world_size() + 1))
    torch.testing.assert_close(residual, torch.full((5, 64), total))


@pytest.mark.parametrize("fails_in", ["empty", "rendezvous"])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["on all ranks", "on one"])
@pytest.mark.parametrize("asked", ["auto", "p2p"])
def test_peers_out_of_reach(asked: str, ranks: tuple[int, ...], fails_in: str) -> None:
    for transport, why, gone, seconds in run_ranks(2, _open, fails_in, ranks, asked, timeout=20):
        assert transport == ("torch" if asked == "auto" else "refused")
        assert "the GPUs of this group (2 ranks) cannot share memory" in why
        assert f"rank {ranks[0]}: {WHY}" in why
        assert "transport='torch' works without" in why
        assert gone, "memory or its mapping is kept"
        assert seconds < 5
