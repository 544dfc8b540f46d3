"""The body of the multicast kernel, with peer-to-peer loops in place of its two instructions, and the self-test on GPUs.

PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_multimem.py

All tests of the p2p transport run through that body with TOKENWEAVE_TEST_TRANSPORT=multimem-emulated.
"""

from __future__ import annotations

import logging
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import gpu_cases
from collective_cases import EPS, fresh_seed
from gpu_cases import RANKS, check_clusters, check_options, check_sizes, checked_call, fresh, on_ranks, opened
from kernel_edits import compiled_from
from row_count_cases import COUNTED, check_row_count
from tokenweave.collective import fused_allreduce_rmsnorm, selftest
from tokenweave.cuda import launch
from tokenweave.errors import CollectiveError

pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]


def _emulated(function, *args):
    """Runs a function of the p2p transport's tests with the other transport, in this rank."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu_cases, "TRANSPORT", "multimem-emulated")
        return function(*args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [576, 2880, 4096, 16384])
def test_sizes_against_float64(hidden, dtype):
    on_ranks(_emulated, check_sizes, hidden, dtype, 4096, fresh_seed())


def test_options_against_float64():
    on_ranks(_emulated, check_options, fresh_seed())


def test_clusters_against_float64():
    on_ranks(_emulated, check_clusters, 4096, fresh_seed())


@pytest.mark.parametrize("counted", [counted for counted in COUNTED if not counted.case.replicated], ids=str)
def test_the_row_count_is_read_on_the_device(counted):
    on_ranks(_emulated, check_row_count, counted, fresh_seed())


def _without_multicast() -> str:
    with pytest.raises(CollectiveError) as caught:
        opened(8, 576, transport="multimem")
    return str(caught.value)


def test_switched_off_multicast_is_an_error_where_it_is_asked_for():
    on_ranks(_switched_off)


def _switched_off() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TOKENWEAVE_DISABLE_MULTICAST", "1")
        assert "TOKENWEAVE_DISABLE_MULTICAST=1 in the environment" in _without_multicast()
        with opened(72, 576, transport="auto") as workspace:
            assert workspace.transport == "p2p"
            assert workspace.symmetric.multicast == 0
            checked_call(workspace, 64, "sharded", None, 1)


# ---- the self-test


def _broken(change: tuple[str, str]) -> tuple[str, list[str]]:
    """Compiles the kernels from sources with a mistake in them; returns why they were refused and what was logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("tokenweave.collective.workspace")
    log.addHandler(handler)
    try:
        with compiled_from(("row.cuh", *change)), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(selftest, "_passed", type(selftest._passed)())
            launch.loaded.cache_clear()
            with pytest.raises(CollectiveError, match="did not pass its self-test"):
                opened(100, 4096, transport="p2p")
            with opened(100, 4096, transport="auto") as workspace:
                assert workspace.transport == "torch"
                reason = workspace.reason
                partial, residual, weight = fresh(workspace, 64, 1)
                rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace)
                assert torch.isfinite(rows).all()
    finally:
        log.removeHandler(handler)
        launch.loaded.cache_clear()
    with opened(72, 4096) as workspace:
        assert workspace.transport == "p2p"
        checked_call(workspace, 64, "sharded", None, 1)
    return reason, messages


@pytest.mark.parametrize(
    "change",
    [("1.0f / S::H", "1.1f / S::H"), ("if constexpr (has<S, HAS_RESIDUAL>) Num::add(acc, residual(v));", "")],
    ids=["wrong mean", "no residual"],
)
def test_a_wrong_kernel_is_refused(change):
    for rank, (reason, messages) in enumerate(on_ranks(_broken, change)):
        assert "the p2p transport is refused" in reason
        assert len(messages) == (rank == 0)


def test_it_takes_less_than_two_seconds():
    print("self-test, seconds:", on_ranks(_seconds))


def _seconds() -> float:
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TOKENWEAVE_CACHE", folder)
        with opened(200, 4096) as workspace:  # also warms NCCL up
            monkeypatch.setattr(selftest, "_passed", type(selftest._passed)())
            launch.loaded.cache_clear()
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            assert selftest.failure(workspace) is None
            seconds = time.perf_counter() - began
    launch.loaded.cache_clear()
    assert seconds < 2
    return seconds
