"""The fused collective against vLLM's own all-reduce and norm, timed once when the model is built.

It refuses what is broken or has no use. Whether a mode pays is for whole steps to tell, which are measured later on where they
are graphs (:mod:`tokenweave.integrations.vllm.measured`): a collective that takes as long as vLLM's may still hide.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tokenweave.collective import fused_allreduce_rmsnorm
from tokenweave.integrations.vllm.measured import slowest

if TYPE_CHECKING:
    from tokenweave.integrations.vllm.runtime import Runtime

log = logging.getLogger("vllm.tokenweave")

REPEATS = 5
MARGIN = 1.05  # ours is slower if it takes more than this many times theirs; less is noise
MARGIN_MEASURED = 2.0  # ... where whole steps are measured before any runs: more is no use even in another's shadow
_WARM_SIZE = 4096
_WARM_SECONDS = 0.3  # of GEMMs: a GPU that has waited for weights runs at a sixth of its clock
CALLS = 5  # timed one after the other
_SLEEP_S = 2e-3  # of the GPU, at least: the host queues a whole sample meanwhile, so that its own time is not measured
_MOST_SLEEP_S = 0.1
_CYCLES_A_S = 2e9  # of the GPU's clock, at most


def prepare(runtime: Runtime) -> None:
    """What :func:`slower_collective` needs of this rank alone, kernel and memory: where that fails no rank must begin.

    Raises:
        CudaError: the kernel cannot be compiled or loaded.
        RuntimeError: there is no memory.
    """
    from tokenweave.collective import cuda_backend

    cuda_backend.prepare(runtime.workspace, "sharded", runtime.max_rows, None)
    torch.empty_like(runtime.residual)  # torch's allocator keeps it for vLLM's all-reduce, and these for the GEMMs
    torch.empty(2, _WARM_SIZE, _WARM_SIZE, dtype=torch.bfloat16, device=runtime.device)


def slower_collective(runtime: Runtime) -> str | None:
    """Whether vLLM's collective is (much) faster at the largest step, as a sentence; None if not. Every rank calls it, all of them
    :func:`prepare` before.

    Both run on the same rows, in turns. Some 0.4 s.
    """
    from vllm.distributed import tensor_model_parallel_all_reduce

    workspace, rows, device = runtime.workspace, runtime.max_rows, runtime.device
    partial = workspace.buffer(rows).zero_()
    weight = torch.ones(workspace.hidden, dtype=workspace.dtype, device=device)

    def ours() -> None:
        fused_allreduce_rmsnorm(partial, runtime.residual, weight, 1e-5, workspace)

    def vllms() -> None:
        torch.ops._C.fused_add_rms_norm(tensor_model_parallel_all_reduce(partial), runtime.residual, weight, 1e-5)

    with torch.inference_mode():
        _warm_up(device)
        times: list[list[float]] = [[], []]
        sleep = _SLEEP_S
        for turn in range(REPEATS + 2):
            for call, seen in zip((ours, vllms), times, strict=True):
                us, queued = _microseconds(call, sleep)
                if turn >= 1:  # in the first turn kernels are loaded, which takes more than any host later on
                    sleep = min(max(sleep, 2 * queued), _MOST_SLEEP_S)
                if turn >= 2:
                    seen.append(us)
    mine, theirs = slowest([[statistics.median(seen)] for seen in times], workspace.group, device)
    runtime.residual.zero_()
    told = f"{rows} rows took {mine[0]:.0f} us, and vLLM's all-reduce and norm {theirs[0]:.0f}"
    trials = runtime.trials
    measured = trials is not None and runtime.compat.WARMS_UP_AFTER_CAPTURE and trials.measures_modes
    if mine[0] > theirs[0] * (MARGIN_MEASURED if measured else MARGIN):
        return told
    if runtime.steps.first_rank:
        log.info("TokenWeave: the fused collective of %s", told)
    return None


def _warm_up(device: torch.device) -> None:
    matrix = torch.zeros(_WARM_SIZE, _WARM_SIZE, dtype=torch.bfloat16, device=device)
    began = time.perf_counter()
    while time.perf_counter() - began < _WARM_SECONDS:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize(device)


def _microseconds(call: Callable[[], object], sleep: float) -> tuple[float, float]:
    """GPU time of a call, and how many seconds the host took to queue a sample, for which the GPU should have slept. The first
    call, in which ranks wait for each other's host, is not counted."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(sleep * _CYCLES_A_S))
    began = time.perf_counter()
    call()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    queued = time.perf_counter() - began
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS, queued
