"""Symmetric memory of one tensor-parallel group: what the peers read and write in place.

One allocation per rank, laid out alike on all of them:
``[data: regions x max_tokens x hidden][staging: two regions, if asked for][fp8 rows, fp8 scales: if asked for]``
``[flags, and the word that poisons: a channel each][inboxes: a channel each]``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.collective import fp8
from tokenweave.collective.agreement import first_problem
from tokenweave.collective.arguments import MAX_BLOCKS, MAX_RANKS
from tokenweave.errors import CollectiveError
from tokenweave.switches import multicast_switched_off

STATE_WORDS = MAX_BLOCKS + 8  # epochs, whether there is a record, the one-shot kernel's counters
RECORD_WORDS = 8
# A row a block, and one with the word that poisons; whole lines of 128 bytes, since inboxes follow.
FLAG_BYTES = (MAX_BLOCKS + 4) * MAX_RANKS * 8
_REASONS = {
    1: "waited longer than the time limit",
    2: "got a different launch from its peer",
    3: "was told that a peer gave up",
    4: "was told by a peer that it got a different launch",
}
_OWN = (1, 2)  # those that this rank saw of its peer
_PHASES = {1: "start", 2: "end"}
SENTINELS = {torch.bfloat16: 0x80008000, torch.float16: 0x80008000, torch.float32: 0x80000000}
_ONESHOT_BYTES = {
    2: 4 << 20,
    3: 2 << 20,
    4: 1 << 20,
}  # of a batch, above which two shots were faster; 512 KiB from 5 ranks


def oneshot_rows(world_size: int, row_bytes: int) -> int:
    """Rows that an inbox holds: the largest batch that the one-shot kernel takes at once."""
    return max(1, _ONESHOT_BYTES.get(world_size, 512 << 10) // row_bytes)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """torch reads this variable when ranks exchange their memory, and knows neither ours nor NCCL's."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _pages(n: int) -> int:
    return -(-n // 4096) * 4096


@dataclass
class Symmetric:
    """Addresses are per rank, in the address space of this one.

    Attributes:
        data: [regions (+2 with staging), max_tokens, hidden], this rank's.
        fp8: e4m3 [fp8 regions, max_tokens, hidden]. scales: float32 [fp8 regions, max_tokens].
        addresses: of the allocation, by rank.
        multicast: address of the allocation for NVSwitch multicast; 0 where a rank has none.
        flags, inboxes: byte offsets of the first channel's.
        inbox_bytes: of one channel. inbox_rows: rows of one source in one of its three inboxes.
        state: int32 [channels, STATE_WORDS], local device memory.
        record: int32 [channels, RECORD_WORDS], pinned host memory; kernels write the first failure there.
        handle: keeps the mapping alive.
    """

    data: torch.Tensor
    fp8: torch.Tensor
    scales: torch.Tensor
    addresses: list[int]
    multicast: int
    flags: int
    inboxes: int
    inbox_bytes: int
    inbox_rows: int
    state: torch.Tensor
    record: torch.Tensor
    handle: Any

    def failure(self, channel: int) -> str | None:
        """What the record of a channel says if one of its kernels failed; costs no synchronisation."""
        words = (ctypes.c_uint32 * RECORD_WORDS).from_address(self.record[channel].data_ptr())
        if not words[0]:
            return None
        reason, phase, rank, peer, block, want, have, signature = words
        seen = f" (the peer is at {have}, launch {signature:#010x})" if reason in _OWN else ""
        return (
            f"rank {rank} {_REASONS.get(reason, reason)}: peer {peer}, channel {channel}, phase "
            f"{_PHASES.get(phase, phase)}, block {block}, epoch {want}{seen}"
        )


def _everywhere(true: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it is true on all ranks."""
    everywhere = torch.tensor([true], dtype=torch.int32, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return bool(everywhere)


def _expect_everywhere(failed: str | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises CollectiveError on all ranks if there is a failure on any."""
    if (problem := first_problem(failed, group, device)) is not None:
        raise CollectiveError(
            f"the GPUs of this group ({dist.get_world_size(group)} ranks) cannot share memory: {problem}. Peer-to-peer access over NVLink between all of them, in one host, is "
            "needed; transport='torch' works without"
        )


def allocate(
    group: dist.ProcessGroup,
    *,
    max_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    channels: int,
    regions: int,
    fp8_regions: int,
) -> Symmetric:
    """Allocates and exchanges; every rank of ``group`` calls it with the same arguments.

    A multicast mapping is torch's to make, and is not made where :func:`multicast_switched_off`.

    Raises:
        CollectiveError: on all ranks, where the GPU of any has no memory for it or cannot map the others'.
    """
    import torch.distributed._symmetric_memory as symm

    world = dist.get_world_size(group)
    row_bytes = hidden * dtype.itemsize
    data_bytes = _pages(regions * max_tokens * row_bytes)
    fp8_bytes = _pages(fp8_regions * max_tokens * hidden)
    scale_bytes = _pages(fp8_regions * max_tokens * 4)
    inbox_rows = oneshot_rows(world, row_bytes)
    inbox_bytes = 3 * world * inbox_rows * row_bytes
    flags = data_bytes + fp8_bytes + scale_bytes
    inboxes = flags + channels * FLAG_BYTES
    # Each step is agreed on: a rank that failed alone would leave the others waiting for it in the next one.
    memory = handle = failed = None
    try:
        memory = symm.empty(inboxes + channels * inbox_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        failed = str(error)
    _expect_everywhere(failed, group, device)
    assert memory is not None
    switched_off = multicast_switched_off(os.environ) is not None
    try:
        with _without_multicast() if switched_off else contextlib.nullcontext():
            handle = symm.rendezvous(memory, group)
    except RuntimeError as error:
        failed = str(error)
    _expect_everywhere(failed, group, device)
    assert handle is not None
    memory[flags:inboxes].zero_()
    sentinel = SENTINELS[dtype] - (1 << 32)
    memory[inboxes:].view(torch.int32).fill_(sentinel)
    torch.cuda.synchronize(device)
    multicast = 0 if switched_off else int(handle.multicast_ptr or 0)
    multicast = multicast if _everywhere(multicast != 0, group, device) else 0
    dist.barrier(group)  # nobody signals before everyone's flags are zero
    torch.cuda.synchronize(device)

    def part(start: int, count: int, kind: torch.dtype) -> torch.Tensor:
        return memory[start : start + count * max_tokens * kind.itemsize].view(kind)

    return Symmetric(
        data=part(0, regions * hidden, dtype).view(regions, max_tokens, hidden),
        fp8=part(data_bytes, fp8_regions * hidden, fp8.DTYPE).view(fp8_regions, max_tokens, hidden),
        scales=part(data_bytes + fp8_bytes, fp8_regions, torch.float32).view(fp8_regions, max_tokens),
        addresses=[int(p) for p in handle.buffer_ptrs],
        multicast=multicast,
        flags=flags,
        inboxes=inboxes,
        inbox_bytes=inbox_bytes,
        inbox_rows=inbox_rows,
        state=torch.zeros(channels, STATE_WORDS, dtype=torch.int32, device=device),
        record=torch.zeros(channels, RECORD_WORDS, dtype=torch.int32, pin_memory=True),
        handle=handle,
    )
