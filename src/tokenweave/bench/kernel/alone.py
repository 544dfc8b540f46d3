"""All ranks of a group in one process, their kernels one after the other: for profilers and sanitizers.

Those run one kernel at a time, and a kernel that waits for a peer's would wait for ever. Here no kernel waits:
:func:`arrive` sets the barriers' flags as peers that are far ahead would (flags only grow, and a kernel compares the
launch shape only with a peer that is in the same call), and puts what the peers would push into the one-shot kernel's
inboxes. Kernels, launch shapes and pointer tables are the ones of :mod:`tokenweave.collective.cuda_backend`.

Run for rank after rank, a call gives the right result too: a rank writes only rows that it owns, and those of the others'
partial sums nobody else reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass

import torch

from tokenweave.collective import fp8, op
from tokenweave.collective.arguments import MAX_BLOCKS, MAX_RANKS
from tokenweave.collective.call import Call
from tokenweave.collective.symmetric import (
    FLAG_BYTES,
    RECORD_WORDS,
    SENTINELS,
    STATE_WORDS,
    Symmetric,
    oneshot_rows,
)
from tokenweave.collective.workspace import Workspace
from tokenweave.cuda.launch import driver
from tokenweave.errors import CollectiveError

_AHEAD = 1 << 30  # an epoch that no run reaches
_CALLS = MAX_BLOCKS + 1  # csrc/oneshot.cu, enum State: the word with the number of one-shot calls
_PEER_ACCESS_ALREADY_ENABLED = 704  # CUresult
GAP_BYTE = 0xFF  # makes a NaN in every dtype


@dataclass
class Ranks:
    """The ranks' workspaces, and the memory between the parts of each, which nothing may touch.

    Attributes:
        workspaces: by rank.
        gaps: of every rank, uint8, filled with :data:`GAP_BYTE`; empty if none were asked for.
    """

    workspaces: list[Workspace]
    gaps: list[torch.Tensor]


def open_ranks(
    devices: Sequence[torch.device],
    *,
    max_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    transport: str = "p2p",
    regions: int = 1,
    fp8_regions: int = 0,
    gap: int = 0,
) -> Ranks:
    """Workspaces of a rank per device, with one channel. They have no staging regions: results would be copied out of those
    before the ranks that come later have written theirs.

    Args:
        devices: by rank; the same one may come several times.
        max_tokens, hidden, dtype, regions, fp8_regions: as of :class:`tokenweave.Workspace`.
        transport: ``"p2p"`` or ``"multimem-emulated"``.
        gap: bytes behind each part of a rank's memory, a multiple of 16, filled with :data:`GAP_BYTE`.

    Raises:
        CollectiveError: two of the devices cannot reach each other's memory.
    """
    world, row_bytes = len(devices), hidden * dtype.itemsize
    inbox_rows = oneshot_rows(world, row_bytes)
    inbox_bytes = 3 * world * inbox_rows * row_bytes
    parts = [regions * max_tokens * row_bytes, fp8_regions * max_tokens * hidden, fp8_regions * max_tokens * 4]
    parts += [FLAG_BYTES, inbox_bytes]
    starts = [0]
    for size in parts:
        starts.append(starts[-1] + -(-size // 16) * 16 + gap)
    _reach_each_other(devices)
    memories = [torch.full((starts[-1],), GAP_BYTE, dtype=torch.uint8, device=device) for device in devices]
    workspaces, gaps = [], []
    for rank, (device, memory) in enumerate(zip(devices, memories, strict=True)):
        views = [memory[start : start + size] for start, size in zip(starts, parts, strict=False)]
        gaps += [memory[stop - gap : stop] for stop in starts[1:]] if gap else []
        views[3].zero_()
        views[4].view(torch.int32).fill_(SENTINELS[dtype] - (1 << 32))
        workspace = Workspace(
            None,
            max_tokens=max_tokens,
            hidden=hidden,
            dtype=dtype,
            device=device,
            channels=1,
            regions=regions,
            staging=False,
            transport="torch",
        )
        workspace.fp8_regions = fp8_regions
        workspace.rank, workspace.world_size = rank, world
        workspace.transport, workspace.reason = transport, "it was asked for"
        workspace.symmetric = Symmetric(
            data=views[0].view(dtype).view(regions, max_tokens, hidden),
            fp8=views[1].view(fp8.DTYPE).view(fp8_regions, max_tokens, hidden),
            scales=views[2].view(torch.float32).view(fp8_regions, max_tokens),
            addresses=[other.data_ptr() for other in memories],
            multicast=0,
            flags=starts[3],
            inboxes=starts[4],
            inbox_bytes=inbox_bytes,
            inbox_rows=inbox_rows,
            state=torch.zeros(1, STATE_WORDS, dtype=torch.int32, device=device),
            record=torch.zeros(1, RECORD_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda"),
            handle=memory,
        )
        workspace._data = workspace.symmetric.data
        workspace._fp8, workspace._scales = workspace.symmetric.fp8, workspace.symmetric.scales
        workspaces.append(workspace)
    return Ranks(workspaces, gaps)


def run(calls: Sequence[Call], *, only: int | None = None) -> list[torch.Tensor]:
    """A call per rank, in rank order, each done before the next; returns the results.

    Args:
        calls: by rank, of all ranks.
        only: the rank to run; None for all of them.

    Raises:
        CollectiveError: as of the calls.
    """
    arrive(calls)
    results = []
    for call in calls if only is None else calls[only : only + 1]:
        with torch.cuda.device(call.workspace.device):
            results.append(op.run(call))
            torch.cuda.synchronize()
    return results


def arrive(calls: Sequence[Call]) -> None:
    """Makes every rank's kernel of this call find its peers there. To be called anew for each call.

    Args:
        calls: by rank, of all ranks.

    Raises:
        CollectiveError: a one-shot call with more rows than an inbox holds, which several kernels share.
    """
    for call in calls:
        memory = _memory(call)
        flags = memory.handle[memory.flags : memory.flags + FLAG_BYTES].view(torch.int64)
        flags.view(-1, MAX_RANKS)[:MAX_BLOCKS].fill_(_AHEAD)
        if call.replicated:
            _fill_inbox(call, calls)
        if call.workspace.device.type == "cuda":
            torch.cuda.synchronize(call.workspace.device)


def _fill_inbox(call: Call, calls: Sequence[Call]) -> None:
    memory, workspace = _memory(call), call.workspace
    if call.results > memory.inbox_rows:
        raise CollectiveError(
            f"arrive: a one-shot call of {call.results} rows; the inboxes hold {memory.inbox_rows}, and a larger batch is "
            "several kernels, of which only the first could find its peers there"
        )
    inboxes = memory.handle[memory.inboxes : memory.inboxes + memory.inbox_bytes].view(torch.int32)
    inboxes = inboxes.view(3, workspace.world_size, memory.inbox_rows, -1)
    inbox = inboxes[int(memory.state[0, _CALLS]) % 3]
    for peer in calls:
        if peer is call:
            continue
        pushed = peer.partial if peer.rows is None else peer.partial[peer.rows]
        if peer.rows is None and peer.row_count is not None:
            pushed = pushed[: int(peer.row_count)]  # a peer pushes the real rows alone
        words = pushed.contiguous().view(torch.int32)
        sentinel = SENTINELS[workspace.dtype] - (1 << 32)
        inbox[peer.workspace.rank, : len(words)] = torch.where(words == sentinel, 0, words).to(inbox.device)


def _memory(call: Call) -> Symmetric:
    assert call.workspace.symmetric is not None
    return call.workspace.symmetric


def _reach_each_other(devices: Sequence[torch.device]) -> None:
    """Lets every GPU's kernels use the others' memory."""
    contexts = {}
    for device in {d for d in devices if d.type == "cuda"}:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # its context exists now
            contexts[device] = c_void_p()
            driver().cuCtxGetCurrent(byref(contexts[device]))
    for device in contexts:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes it current for this thread
            for other, context in contexts.items():
                status = 0 if other == device else driver().cuCtxEnablePeerAccess(context, 0)
                if status not in (0, _PEER_ACCESS_ALREADY_ENABLED):
                    raise CollectiveError(f"{device} cannot reach the memory of {other}: CUDA driver error {status}")
