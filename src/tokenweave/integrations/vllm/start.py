"""From a model that vLLM has just built to a :class:`Runtime`, or to a line in the log that says why not."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tokenweave.errors import TokenWeaveError
from tokenweave.execution import check
from tokenweave.integrations.vllm import prometheus, switch
from tokenweave.integrations.vllm.checks import Finding, engine_problem, model_problem
from tokenweave.integrations.vllm.first_use import slower_collective
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.numbers import model_numbers
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.runtime import Runtime, anywhere

log = logging.getLogger("vllm.tokenweave")
T = TypeVar("T")


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
    config, ranks = vllm_config.model_config, (group.device_group, device)
    runtime = None
    with _plain_defaults():
        numbers, found = _on_all(lambda: model_numbers(config.hf_text_config, type(model).__name__), *ranks)
        if numbers is not None and found is None:
            made = functools.partial(Runtime, model.model, numbers, vllm_config, compat, *ranks, config.dtype, steps)
            runtime, found = _on_all(made, *ranks)
        if runtime is not None and found is None and platform == "cuda":
            problem, found = _on_all(functools.partial(_collective_problem, runtime), *ranks)
            found = found or problem
    if found is not None or runtime is None:
        if found is not None:
            _stay_off(steps, *found)
        if runtime is not None:
            runtime.close()
        return None
    runtime.close_with(model)
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


def _on_all(call: Callable[[], T], group: dist.ProcessGroup, device: torch.device) -> tuple[T | None, Finding | None]:
    """(what a call gives that all ranks make, None), or with why not, on every rank, if it failed on any: one that runs as stock
    while others wait for it would hang them all."""
    result, found = None, None
    try:
        result = call()
    except TokenWeaveError as error:
        log.info("TokenWeave: it could not be set up on this rank: %s", error)
        found = Reason.SETUP, str(error)
    except Exception as error:
        log.exception("TokenWeave: it could not be set up on this rank")
        found = Reason.ERROR, str(error)
    if not anywhere(found is not None, group, device):
        return result, None
    return result, found or (Reason.SETUP, "another rank could not; its log says why")


def _stay_off(steps: Steps, reason: Reason, detail: str) -> None:
    steps.say(reason, detail, warn=reason is not Reason.SUBMODEL)
    steps.engine(reason)


def _collective_problem(runtime: Runtime) -> Finding | None:
    if runtime.workspace.transport == "torch":
        return Reason.TRANSPORT, runtime.workspace.reason
    slower = slower_collective(runtime)
    check(runtime.workspace)  # a kernel that gave up waiting raised nothing
    return None if slower is None else (Reason.SLOWER_COLLECTIVE, slower)


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
