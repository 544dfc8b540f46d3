"""Peers that are late, differ or die, and calls that the GPU kernels refuse: errors that say so, in time.

PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_faults.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collective_cases import EPS
from gpu_cases import (
    RANKS,
    checked_call,
    fresh,
    on_ranks,
    opened,
)
from tokenweave.collective import fused_allreduce_rmsnorm
from tokenweave.errors import CollectiveError

pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]


def _a_peer_that_does_not_come(layout: str) -> str:
    workspace = opened(64, 4096, time_limit=1.0)
    partial, residual, weight = fresh(workspace, 64, 1)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, channel=1)
    torch.cuda.synchronize()
    message = ""
    if workspace.rank == 0:
        began = time.perf_counter()
        fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, channel=1)
        torch.cuda.synchronize()  # returns: the wait has a limit
        assert time.perf_counter() - began < 4
        with pytest.raises(CollectiveError) as caught:
            workspace.check()
        message = str(caught.value)
        with pytest.raises(CollectiveError):  # poisoned from now on
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, channel=1)
    dist.barrier()
    workspace.close()
    with opened(72, 4096) as again:
        checked_call(again, 64, layout, None, 2)
    return message


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_peer_that_does_not_come(layout):
    message = on_ranks(_a_peer_that_does_not_come, layout)[0]
    for part in ("rank 0", "time limit", "peer", "channel 1", "phase start", "epoch"):
        assert part in message


def _a_rank_that_is_late(layout: str, ctas: int | None) -> tuple[str, float]:
    """What a rank is told, and the seconds from its first call to the end of the last; rank 0 begins when the others have given up."""
    workspace = opened(64, 4096, time_limit=1.0)
    partial, residual, weight = fresh(workspace, 64, 1)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, ctas=ctas)
    torch.cuda.synchronize()
    dist.barrier()
    if workspace.rank == 0:
        time.sleep(2.5)
    began = time.perf_counter()
    with contextlib.suppress(CollectiveError):  # rank 0 may know before it has made all its calls
        for _ in range(4):  # the others queue what follows the call that fails
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, ctas=ctas)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    with pytest.raises(CollectiveError) as caught:
        workspace.check()
    dist.barrier()
    workspace.close()
    return str(caught.value), seconds


@pytest.mark.parametrize(("layout", "ctas"), [("sharded", None), ("sharded", 1), ("replicated", None)])  # 1: the ring
def test_a_rank_that_is_late_is_told_too_and_soon(layout, ctas):
    """Else it would take what its peers computed of rows that never came for results."""
    (late, seconds), *others = on_ranks(_a_rank_that_is_late, layout, ctas)
    assert "rank 0 was told that a peer gave up" in late
    assert seconds < 0.5
    assert any("waited longer than the time limit: peer 0" in text for text, _ in others)
    waited = [seconds for _, seconds in others]
    assert max(waited) >= 1.0
    assert all(0.8 <= seconds < 2.5 for seconds in waited), "the first that gives up tells the others"


def _ranks_that_differ(layout: str) -> str:
    workspace = opened(64, 4096, time_limit=5.0)
    partial, residual, weight = fresh(workspace, 64, 1)
    tokens = 64 if workspace.rank == 0 else 63
    began = time.perf_counter()
    fused_allreduce_rmsnorm(partial[:tokens], residual[:tokens], weight, EPS, workspace, layout=layout)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 4, "a mismatch is an error at once, not after the time limit"
    with pytest.raises(CollectiveError) as caught:
        workspace.check()
    dist.barrier()
    workspace.close()
    return str(caught.value)


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_ranks_that_call_with_different_shapes(layout):
    for message in on_ranks(_ranks_that_differ, layout):
        assert "different launch" in message


def _killed(layout: str, folder: str) -> None:
    """Rank 1 is gone; the others write down what they were told, after a call that they could end."""
    workspace = opened(64, 4096, time_limit=0.5)
    partial, residual, weight = fresh(workspace, 64, 1)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
    torch.cuda.synchronize()
    dist.barrier()
    if workspace.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
    torch.cuda.synchronize()
    try:
        workspace.check()
    except CollectiveError as error:
        Path(folder, f"rank{workspace.rank}").write_text(str(error))


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_killed_peer_is_named(layout, tmp_path):
    with pytest.raises(RuntimeError, match="rank"):  # its processes are thrown away: the next test gets new ones
        on_ranks(_killed, layout, str(tmp_path))
    for rank in set(range(RANKS)) - {1}:
        text = (tmp_path / f"rank{rank}").read_text()
        assert f"rank {rank} waited longer" in text or f"rank {rank} was told that a peer gave up" in text
        assert "channel 0" in text
        assert "phase start" in text


def _contract() -> None:
    with opened(72, 4096) as workspace:
        partial, residual, weight = fresh(workspace, 64, 1)
        for options, message in (
            ({"ctas": 0}, "ctas=0; expected 1 to"),
            ({"ctas": 1000}, "ctas=1000; expected 1 to"),
            ({"ctas": 6, "cluster": 4}, "cluster=4 does not divide ctas=6"),
            ({"channel": 2}, "channel=2; this workspace has channels 0..1"),
        ):
            with pytest.raises(CollectiveError, match=message):
                fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, **options)
        with pytest.raises(CollectiveError, match="residual has strides"):
            fused_allreduce_rmsnorm(partial, residual.T.contiguous().T, weight, EPS, workspace)
        checked_call(workspace, 64, "sharded", 8, 1, cluster=4)


def test_contract():
    on_ranks(_contract)
