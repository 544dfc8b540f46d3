"""From a model that vLLM has just built to a :class:`Runtime`, or to a line in the log that says why not."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from tokenweave.errors import TokenWeaveError
from tokenweave.integrations.vllm import prometheus, switch
from tokenweave.integrations.vllm.checks import Finding, engine_problem, model_problem
from tokenweave.integrations.vllm.first_use import slower_collective
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.numbers import model_numbers
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.runtime import Runtime

log = logging.getLogger("vllm.tokenweave")


def start(model: Any, vllm_config: Any, prefix: str) -> Runtime | None:
    """A runtime for a ``LlamaForCausalLM`` (or alike), or None where it has to run as stock. Every rank calls it.

    It is called while the model is built, so that vLLM counts the buffers when it sizes its cache.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.platforms import current_platform

    group = get_tp_group()
    first = group.rank_in_group == 0
    platform = "cuda" if current_platform.is_cuda() else "cpu"
    verdict = switch.current()
    if verdict.module is None:
        return None
    found = engine_problem(vllm_config, prefix, platform)
    whole = found is None or found[0] is not Reason.SUBMODEL  # a part's steps are not the engine's
    steps = Steps(first_rank=first, sink=prometheus.sink(vllm_config) if first and whole else None)
    if found is not None:
        _stay_off(steps, *found)
        return None
    compat = switch.compat("cpu" if platform == "cpu" else verdict.module)
    if found := model_problem(model.model, compat):
        _stay_off(steps, *found)
        return None
    began = time.perf_counter()
    device = torch.device("cpu") if platform == "cpu" else torch.device("cuda", torch.cuda.current_device())
    config, runtime = vllm_config.model_config, None
    try:
        with _plain_defaults():
            numbers = model_numbers(config.hf_text_config, type(model).__name__)
            group_of, dtype = group.device_group, config.dtype
            runtime = Runtime(model.model, numbers, vllm_config, compat, group_of, device, dtype, steps)
            found = _collective_problem(runtime) if platform == "cuda" else None
    except TokenWeaveError as error:  # the workspace's own errors are agreed on by all ranks
        found = Reason.SETUP, str(error)
    except Exception as error:
        log.exception("TokenWeave: it could not be set up")
        found = Reason.ERROR, str(error)
    if found is not None or runtime is None:
        if found is not None:
            _stay_off(steps, *found)
        if runtime is not None:
            runtime.close()
        return None
    steps.engine(None)
    if platform == "cpu":
        from tokenweave.integrations.vllm import v1_cpu

        v1_cpu.install()
    if first:
        log.info(
            "TokenWeave: mode %s, %s transport (%s), steps of up to %d rows; ready in %.1f s",
            runtime.choice.mode or "auto",
            runtime.workspace.transport,
            runtime.workspace.reason,
            runtime.max_rows,
            time.perf_counter() - began,
        )
    return runtime


def _stay_off(steps: Steps, reason: Reason, detail: str) -> None:
    steps.say(reason, detail, warn=reason is not Reason.SUBMODEL)
    steps.engine(reason)


def _collective_problem(runtime: Runtime) -> Finding | None:
    if runtime.workspace.transport == "torch":
        return Reason.TRANSPORT, runtime.workspace.reason
    if slower := slower_collective(runtime):
        return Reason.SLOWER_COLLECTIVE, slower
    return None


@contextlib.contextmanager
def _plain_defaults() -> Iterator[None]:
    """vLLM builds models with the GPU and the model's dtype as torch's defaults, which our set-up does not expect."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
