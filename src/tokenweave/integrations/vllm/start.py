"""From a model that vLLM has just built to a :class:`Runtime`, or to a line in the log that says why not."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.errors import TokenWeaveError
from tokenweave.integrations.vllm import first_use, prometheus, switch
from tokenweave.integrations.vllm.checks import Finding, engine_problem, model_problem
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
    began = time.perf_counter()
    with _plain_defaults():
        found = _on_all(group, lambda: engine_problem(vllm_config, prefix, platform))
        whole = found is None or found[0] is not Reason.SUBMODEL  # a part's steps are not the engine's
        steps = Steps(first_rank=first, sink=prometheus.sink(vllm_config) if first and whole else None)
        runtime = None
        if found is None:
            name = "cpu" if platform == "cpu" else verdict.module
            runtime, found = _set_up(group, partial(_make, model, vllm_config, name, platform, group, steps))
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


def _set_up(group: Any, make: Callable[[], Runtime | Finding]) -> tuple[Runtime | None, Finding | None]:
    """(this rank's runtime, None), or with what speaks against it on any rank; what was made has to be closed then."""
    made: list[Runtime] = []

    def first() -> Finding | None:
        found = make()
        if isinstance(found, tuple):
            return found
        made.append(found)
        return None

    found = _on_all(group, first)
    runtime = made[0] if made else None
    if found is None and runtime is not None:
        more: list[Callable[[], Finding | None]] = [*runtime.set_up]
        if runtime.device.type == "cuda":
            more += [partial(part, runtime) for part in (_transport_problem, first_use.prepare, _slower_collective)]
        found = next(filter(None, (_on_all(group, part) for part in more)), None)
    return runtime, found


def _make(model: Any, vllm_config: Any, name: str, platform: str, group: Any, steps: Steps) -> Runtime | Finding:
    """What a rank does alone."""
    compat = switch.compat(name)
    if found := model_problem(model.model, compat):
        return found
    device = torch.device("cpu") if platform == "cpu" else torch.device("cuda", torch.cuda.current_device())
    config = vllm_config.model_config
    numbers = model_numbers(config.hf_text_config, type(model).__name__)
    groups = group.device_group, group.cpu_group
    return Runtime(model.model, numbers, vllm_config, compat, *groups, device, config.dtype, steps)


def _on_all(group: Any, part: Callable[[], Finding | None]) -> Finding | None:
    """What a part of the set-up finds on any rank, told to all: one that ran as stock while others set up would have them wait.

    Args:
        group: vLLM's tensor-parallel one, whose ranks all call it.
        part: an error is a finding too.
    """
    found = None
    try:
        found = part()
    except TokenWeaveError as error:
        found = Reason.SETUP, str(error)
    except Exception as error:
        log.exception("TokenWeave: it could not be set up on this rank")
        found = Reason.ERROR, str(error)
    if group.world_size == 1:
        return found
    every: list[Finding | None] = [None] * group.world_size
    dist.all_gather_object(every, found, group=group.cpu_group)
    if all(other == found for other in every):
        return found
    rank, (reason, detail) = next((rank, other) for rank, other in enumerate(every) if other is not None)
    return reason, f"on rank {rank}: {detail}"


def _stay_off(steps: Steps, reason: Reason, detail: str) -> None:
    steps.say(reason, detail, warn=reason is not Reason.SUBMODEL)
    steps.engine(reason)


def _transport_problem(runtime: Runtime) -> Finding | None:
    return (Reason.TRANSPORT, runtime.workspace.reason) if runtime.workspace.transport == "torch" else None


def _slower_collective(runtime: Runtime) -> Finding | None:
    slower = first_use.slower_collective(runtime)
    runtime.workspace.check()  # a kernel that gave up waiting raised nothing
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
