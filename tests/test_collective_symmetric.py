"""How symmetric memory is laid out, and who takes part in its set-up; on CPUs, with memory that nobody else can see."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

from collective_cases import fresh_seed
from ranks import run_ranks
from tokenweave import Workspace
from tokenweave.bench.kernel import alone
from tokenweave.collective import cuda_backend, selftest, symmetric, torch_backend, workspace
from tokenweave.collective.symmetric import FLAG_BYTES, RECORD_WORDS, SENTINELS, STATE_WORDS, Symmetric
from tokenweave.errors import CollectiveError


@contextmanager
def _plain_memory(expected: dist.ProcessGroup) -> Iterator[list[torch.Tensor]]:
    """``allocate`` as it is, over CPU memory, for ranks of the expected group; the allocations."""
    made: list[torch.Tensor] = []
    zeros = torch.zeros

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full((size,), 0x5A, dtype=dtype, device=device))
        return made[-1]

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        assert group is expected
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * dist.get_world_size(group), multicast_ptr=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm, "empty", empty)
        patch.setattr(symm, "rendezvous", rendezvous)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
        yield made


def _parts(memory: torch.Tensor, of: Symmetric, channels: int, ranks: int, row_bytes: int) -> dict[str, range]:
    """Bytes of the allocation that each part takes, flags and inboxes where a call on the channel looks for them."""
    parts = {}
    for name in ("data", "fp8", "scales"):
        tensor = getattr(of, name)
        start = tensor.data_ptr() - memory.data_ptr() if tensor.numel() else 0
        parts[name] = range(start, start + tensor.nbytes)
    for channel in range(channels):
        flags, inboxes = of.flags + channel * FLAG_BYTES, of.inboxes + channel * of.inbox_bytes
        parts[f"flags {channel}"] = range(flags, flags + FLAG_BYTES)
        parts[f"inboxes {channel}"] = range(inboxes, inboxes + 3 * ranks * of.inbox_rows * row_bytes)
    return parts


def _layouts(seed: int) -> None:
    pick, group = random.Random(seed), dist.group.WORLD
    assert group is not None
    for _ in range(8):
        dtype = pick.choice([torch.bfloat16, torch.float16, torch.float32])
        sizes = {"max_tokens": pick.choice([1, 7, 255, 600]), "hidden": 8 * pick.choice([1, 9, 72, 360, 512])}
        sizes |= {"channels": pick.randint(1, 3), "regions": pick.randint(1, 4), "fp8_regions": pick.randint(0, 2)}
        with _plain_memory(group) as made:
            of = symmetric.allocate(group, dtype=dtype, device=torch.device("cpu"), **sizes)
        (memory,) = made
        channels, row_bytes = sizes["channels"], sizes["hidden"] * dtype.itemsize
        parts = _parts(memory, of, channels, dist.get_world_size(), row_bytes)
        for (one, first), (other, second) in itertools.combinations(parts.items(), 2):
            assert first.stop <= second.start or second.stop <= first.start, (
                f"{one} and {other} overlap: {sizes} {dtype}"
            )
        assert max(part.stop for part in parts.values()) <= memory.numel(), f"past the end: {sizes} {dtype}"
        assert all(part.start % 16 == 0 for part in parts.values())
        assert memory[parts["data"].stop - 1] == 0x5A  # nobody's to write yet
        for channel in range(channels):
            flags, inboxes = (parts[f"{name} {channel}"] for name in ("flags", "inboxes"))
            assert not memory[flags.start : flags.stop].any()
            words = memory[inboxes.start : inboxes.stop].view(torch.int32)
            assert (words == SENTINELS[dtype] - (1 << 32)).all()
        assert of.state.shape == (channels, STATE_WORDS)
        assert of.record.shape == (channels, RECORD_WORDS)


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_part_of_the_memory_overlaps_another(world_size):
    run_ranks(world_size, _layouts, fresh_seed())


def _of_some_ranks(members: list[int]) -> tuple[str, int] | None:
    """The group's ranks set up a workspace as on GPUs, kernels aside; the job's other ranks do nothing."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    with _plain_memory(group), pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "choose_transport", lambda *_: ("p2p", "a test"))
        patch.setattr(cuda_backend, "prepare", lambda *case: None)
        patch.setattr(selftest, "_launch", torch_backend.fused)
        with Workspace(group, max_tokens=9, hidden=64, dtype=torch.float32) as made:
            return made.transport, made.world_size


@pytest.mark.parametrize("members", [[0, 2], [1]], ids=str)
def test_the_set_up_waits_for_nobody_outside_the_group(members):
    results = run_ranks(3, _of_some_ranks, members, timeout=20)
    assert results == [("p2p", len(members)) if rank in members else None for rank in range(3)]


@pytest.mark.parametrize("transport", ["auto", "p2p", "torch"])
def test_a_workspace_is_not_created_while_a_stream_captures(monkeypatch, transport):
    """Its set-up waits for the GPU and for the other ranks, of which there are none here: nothing must be asked of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = set(workspace._open)
    with pytest.raises(CollectiveError, match=r"captures a CUDA graph, .* create the workspace before"):
        Workspace(None, max_tokens=9, hidden=64, dtype=torch.float32, device="cuda", transport=transport)
    assert set(workspace._open) == before


def test_check_says_what_a_kernel_recorded() -> None:
    """Without a call after it, as where graphs are replayed. A torch transport has no record, nor has what is closed."""
    cpu = torch.device("cpu")
    (workspace, other) = alone.open_ranks([cpu, cpu], max_tokens=4, hidden=8, dtype=torch.float32).workspaces
    workspace.check()
    words = [1, 2, 0, 1, 5, 9, 8, 0xABCDEF]  # csrc/barrier.cuh, give_up
    workspace.symmetric.record[0] = torch.tensor(words, dtype=torch.int32)
    said = (
        "rank 0 waited longer than the time limit: peer 1, channel 0, phase end, block 5, epoch 9 (the peer is at 8, "
        "launch 0x00abcdef)"
    )
    with pytest.raises(CollectiveError, match=re.escape(said) + ".* close the workspace on all ranks"):
        workspace.check()
    other.check()
    workspace.close()
    workspace.check()
    with Workspace(None, max_tokens=4, hidden=8, dtype=torch.float32) as plain:
        plain.check()
