"""vLLM's V1 runner on CPUs, which has no hook for a plan: two of its methods are wrapped.

It takes the place of :mod:`tokenweave.integrations.vllm.state` and of nothing else: planner, veto, walk and collective are
those of GPUs. It exists so that they can be run, and tested, on a machine without GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Requests, Rows
from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.step import Planned


def install() -> None:
    """Wraps the runner's methods; safe to repeat."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if not hasattr(CPUModelRunner.execute_model, "tokenweave"):
        CPUModelRunner.execute_model = _execute_model(CPUModelRunner.execute_model)
        CPUModelRunner._model_forward = _model_forward(CPUModelRunner._model_forward)


def _execute_model(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = _runtime(self)
        if runtime is not None:
            _note(runtime.requests, scheduler_output)
        self.tokenweave_step = scheduler_output
        return original(self, scheduler_output, *args, **kwargs)

    execute_model.tokenweave = True  # type: ignore[attr-defined]
    return execute_model


def _model_forward(original: Any) -> Any:
    from vllm.forward_context import get_forward_context, override_forward_context

    @functools.wraps(original)
    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = _runtime(self)
        if runtime is None or runtime.off is not None:
            return original(self, *args, **kwargs)
        context = get_forward_context()
        step = _rows(self)
        if len(self.attn_groups) != 1 or len(self.attn_groups[0]) != 1:
            runtime.steps.count(Reason.CACHE_GROUPS)
            return original(self, *args, **kwargs)
        planned = runtime.prepare(step, _tables(self, context, kwargs, step))
        if planned is None:
            return original(self, *args, **kwargs)
        metadata = Planned(planned, lambda: context.attn_metadata)
        with override_forward_context(dataclasses.replace(context, attn_metadata=metadata)):
            return original(self, *args, **kwargs)

    return model_forward


def _runtime(runner: Any) -> Runtime | None:
    return getattr(runner.model, "tokenweave", None)


def _note(requests: Requests, scheduled: Any) -> None:
    for name in scheduled.finished_req_ids:
        requests.remove(name)
    for new in scheduled.scheduled_new_reqs:
        requests.add(new.req_id, new.prompt_token_ids or [], new.num_computed_tokens)
    cached = scheduled.scheduled_cached_reqs
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if name in cached.resumed_req_ids:  # after a preemption, with what the prefix cache holds by now
            requests.add(name, cached.all_token_ids[name], computed)


def _rows(runner: Any) -> list[Rows]:
    counts, batch = runner.tokenweave_step.num_scheduled_tokens, runner.input_batch
    context = batch.num_computed_tokens_cpu
    return [Rows(name, counts[name], int(context[i])) for i, name in enumerate(batch.req_ids)]


def _tables(runner: Any, context: Any, arguments: dict[str, Any], step: list[Rows]) -> Tables:
    (group,) = runner.attn_groups[0]
    name = group.layer_names[0]
    stock, rows = context.attn_metadata[name], sum(request.tokens for request in step)
    return Tables(
        arguments["input_ids"][:rows],
        arguments["positions"][:rows],
        stock.query_start_loc,
        stock.seq_lens,
        stock.block_table,
        context.slot_mapping[name][:rows],
        group.get_metadata_builder(0),
    )
