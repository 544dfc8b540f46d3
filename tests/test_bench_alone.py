"""All ranks in one process, with a model of the kernels' waits in place of the kernels: none of them would wait."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from alone_cases import Alone, _call, _expect_untouched, fine, kernel_of, make_inputs, open_ranks, small
from collective_cases import Case, make
from tokenweave.bench.kernel import alone
from tokenweave.collective import cuda_backend
from tokenweave.collective.arguments import MAX_BLOCKS, MAX_RANKS
from tokenweave.collective.symmetric import SENTINELS, STATE_WORDS
from tokenweave.errors import CollectiveError

_CALLS = MAX_BLOCKS + 1


class _Model:
    """What csrc/barrier.cuh and oneshot.cu do with flags, epochs and inboxes; raises where a kernel would spin."""

    def __init__(self, kernel):
        self.kernel = kernel

    def launch(self, blocks, stream, args, *params, cluster=1, overlap=False):
        oneshot = self.kernel.name == "oneshot"
        state = (ctypes.c_uint32 * STATE_WORDS).from_address(args.state)
        flags = [
            (ctypes.c_uint64 * (MAX_BLOCKS * MAX_RANKS)).from_address(args.flags[p]) for p in range(self.kernel.ranks)
        ]
        peers = [p for p in range(self.kernel.ranks) if p != args.rank]
        for block in range(1 if oneshot else blocks):
            for epoch in range(state[block] + 1, state[block] + (2 if oneshot else 3)):
                for p in peers:
                    flags[p][block * MAX_RANKS + args.rank] = args.signature << 32 | epoch
                for p in peers:
                    signature, have = divmod(flags[args.rank][block * MAX_RANKS + p], 1 << 32)
                    assert have >= epoch, f"rank {args.rank} would wait for rank {p}, block {block}"
                    assert have > epoch or signature == args.signature, "a mismatch"
            state[block] += 1 if oneshot else 2
        if oneshot:
            self._inbox(state, args, *params, peers=peers)

    def _inbox(self, state, args, inboxes, inbox_rows, *, peers):
        row_bytes = self.kernel.hidden * {"float32": 4}.get(self.kernel.dtype, 2)
        n = args.n_rows
        if args.row_count and not args.rows:
            n = min(n, ctypes.c_int.from_address(args.row_count).value)
        plane = inbox_rows.value * row_bytes
        for p in peers:
            start = inboxes.of[args.rank] + (state[_CALLS] % 3 * self.kernel.ranks + p) * plane
            words = (ctypes.c_uint32 * (plane // 4)).from_address(start)
            sentinel = SENTINELS[getattr(torch, self.kernel.dtype)]
            arrived = torch.frombuffer(words, dtype=torch.int32).view(inbox_rows.value, -1) != sentinel - (1 << 32)
            assert arrived[:n].all(), f"rank {args.rank} would wait for rank {p}"
            assert not arrived[n:].any(), "more rows than the peer pushes: nobody would clear them"
            torch.frombuffer(words, dtype=torch.int32).fill_(sentinel - (1 << 32))  # as the next call does
        state[_CALLS] += 1


@pytest.fixture(autouse=True)
def model(monkeypatch):
    monkeypatch.setattr(cuda_backend, "loaded", lambda kernel, device: _Model(kernel))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@pytest.mark.parametrize(
    "what",
    [what for what in (*small(), *fine()) if what.kernel != "add_rmsnorm"],
    ids=lambda what: f"{what.kernel}-{what.case.tokens}x{what.case.hidden}",
)
def test_no_kernel_would_wait(what):
    ranks = open_ranks(what, torch.device("cpu"))
    for number in range(4):  # the three inboxes, and the first again
        data = make_inputs(what, number)
        calls = [_call(what, data, workspace) for workspace in ranks.workspaces]
        assert {kernel_of(call).name for call in calls} == {what.kernel}
        alone.run(calls)
    assert len(ranks.gaps) == 5 * what.ranks
    for gap in ranks.gaps:
        _expect_untouched(gap)


def test_without_arrival_the_first_rank_would_wait():
    for replicated in (False, True):
        what = Alone(Case(5, 72, replicated=replicated), "")
        ranks = open_ranks(what, torch.device("cpu"))
        calls = [_call(what, make(what.case, 2, 1), workspace) for workspace in ranks.workspaces]
        with pytest.raises(AssertionError, match="rank 0 would wait for rank 1"):
            cuda_backend.fused(calls[0])


def test_a_call_of_several_kernels_is_refused():
    what = Alone(Case(513, 4096, replicated=True), "oneshot")
    ranks = open_ranks(what, torch.device("cpu"))
    calls = [_call(what, make(what.case, 2, 1), workspace) for workspace in ranks.workspaces]
    with pytest.raises(CollectiveError, match="513 rows; the inboxes hold 512"):
        alone.arrive(calls)
