"""Whether a step is fused, woven or left to stock vLLM, and whether a graph runs it: ``choice.py``'s answer for its rows, as far
as its requests allow. The same on all ranks: it goes by the scheduler's words and by times that all have agreed on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.graphs import TILE, Graph, Graphs, key_of
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Rows
from tokenweave.integrations.vllm.step import Cut, Step
from tokenweave.integrations.vllm.walk import attentions
from tokenweave.integrations.vllm.ways import Times, Way
from tokenweave.planning import Mode, Plan

if TYPE_CHECKING:
    from tokenweave.integrations.vllm.runtime import Runtime

DECODE_ROWS = 16  # of a request, up to which FlashAttention packs query heads into a tile; ours plan for long prompts
DECODE_POSITIONS = 16384  # of all requests, up to which that costs less than launching what a graph replays
LONG_CONTEXT = 16384  # positions, from which on stock's attention splits them where rows alone don't fill the GPU
FEW_ROWS = 512  # up to so many stock's attention may split them in 32, and a long context costs ours more than ...
LONG_CONTEXT_OF_FEW = 8192  # ... so many positions are worth
BUSY = 0.5  # of the SMs, on average while the longest request's tiles run: less is what splitting would save


def decide(runtime: Runtime, step: Sequence[Rows], tables: Tables) -> Step | Reason:
    """How a step runs that stock vLLM would launch kernel by kernel or piece by piece, or why stock runs it.

    Args:
        step: its requests' rows, in order. tables: of it.
    """
    if problem := runtime.compat.metadata_problem(tables.metadata, next(attentions(runtime.model))):
        runtime.turn_off(Reason.ATTENTION_BACKEND, problem)
        return Reason.ATTENTION_BACKEND
    rows, graphs = sum(request.tokens for request in step), runtime.graphs
    if runtime.device.type == "cuda" and _decodes(step):
        return Reason.DECODES
    if not _fills_gpu(runtime, step, rows):
        return Reason.LONG_CONTEXT
    capacity = None if graphs is None else graphs.rows_of(rows)
    plan = plan_of(runtime, step, capacity or rows)
    if plan is None or (plan.split is not None and plan.split >= rows):
        return Reason.PLANNER
    longest = max(request.context + request.tokens for request in step)
    cut = Cut(plan, rows, tables, max(request.tokens for request in step), longest)
    if graphs is None or capacity is None or not graphs.has_room(len(step)):
        return _without_graph(runtime, cut)
    return _with_graph(runtime, graphs, step, cut, capacity)


def plan_of(runtime: Runtime, step: Sequence[Rows], capacity: int) -> Plan | None:
    """Fused, woven, or None where stock is expected to be as fast.

    Args:
        step: its requests' rows, in order.
        capacity: rows that will be computed, of which the last may be padding.
    """
    plan = runtime.choice.plan(capacity)
    if plan.split is not None:
        hazard = runtime.requests.hazard(step, plan.split)
        if hazard:
            runtime.steps.count(Reason.PREFIX_HAZARD)
        rows = sum(request.tokens for request in step)
        # A suffix of nothing but padding is refused by whoever takes the plan.
        suffix = rows - plan.split if rows > plan.split else capacity - plan.split
        if hazard or not _fills_gpu(runtime, step, min(plan.split, suffix)):
            plan = runtime.choice.plan(capacity, allow_woven=False)
    return None if plan.mode is Mode.SEQUENTIAL else plan


def _without_graph(runtime: Runtime, cut: Cut) -> Step | Reason:
    """A step for which none is made: launched, or left to stock."""
    if runtime.device.type != "cuda":
        return Step(cut)
    ms = runtime.choice.launched_ms(cut.rows, cut.plan)
    few = runtime.graphs is not None and cut.rows < runtime.graphs.least_rows
    return Reason.EAGER_SLOWER if few or math.isinf(ms) or ms > runtime.choice.stock_ms(cut.rows) else Step(cut)


def _with_graph(runtime: Runtime, graphs: Graphs, step: Sequence[Rows], cut: Cut, capacity: int) -> Step | Reason:
    """A step that may have one: its own, or what is the fastest without."""
    choice, plan, tables, requests = runtime.choice, cut.plan, cut.tables, len(step)
    if own := graphs.find(plan, capacity, requests):
        return Step(cut, own)
    suitable = (found for found in graphs.larger(capacity, requests) if _suits(runtime, found, step, plan))
    larger = next(suitable, None)
    times = Times(
        own=choice.ms(capacity, plan),
        larger=math.inf if larger is None else choice.ms(larger.capacity, larger.cut.plan),
        launched=choice.launched_ms(cut.rows, plan),
        stock=choice.stock_ms(cut.rows),
    )
    way = runtime.ways.choose(key_of(plan, capacity, graphs.room_of(requests)), times)
    if way is None:
        return Step(cut, graphs.add(plan, tables, capacity, requests))
    if way is Way.LARGER and larger is not None:
        return Step(dataclasses.replace(cut, plan=larger.cut.plan), larger)
    return Step(cut) if way is Way.LAUNCHED else Reason.NEW_BUCKET


def _suits(runtime: Runtime, graph: Graph, step: Sequence[Rows], own: Plan) -> bool:
    """Whether a step, which would have a plan of its own, may run in a graph that was made for more rows."""
    rows, plan = sum(request.tokens for request in step), graph.cut.plan
    if runtime.choice.mode is not None and plan.mode is not own.mode:
        return False
    if plan.split is None:
        return True
    if plan.split >= rows or runtime.requests.hazard(step, plan.split):
        return False
    return _fills_gpu(runtime, step, min(plan.split, rows - plan.split))


def _fills_gpu(runtime: Runtime, step: Sequence[Rows], rows: int) -> bool:
    """Whether attention of so many rows of the step keeps the GPU busy for about as long as its longest request takes.

    Ours does not split a tile's positions over SMs, stock's does where there are few tiles.
    """
    total = sum(request.tokens for request in step)
    longest = max((request.context + request.tokens for request in step), default=0)
    if runtime.device.type != "cuda" or longest < (LONG_CONTEXT_OF_FEW if total <= FEW_ROWS else LONG_CONTEXT):
        return True
    attention = next(attentions(runtime.model))
    group = attention.num_heads // attention.num_kv_heads  # query heads share a tile with their rows
    work = sum(-(-r.tokens * group // TILE) * (r.context + r.tokens) for r in step) * attention.num_kv_heads
    return work * rows / total >= BUSY * longest * runtime.choice.planner.model.gpu.sms


def _decodes(step: Sequence[Rows]) -> bool:
    """Whether attention of such a step is much faster with a kernel for few rows a request."""
    if max(request.tokens for request in step) > DECODE_ROWS:
        return False
    return sum(request.context + request.tokens for request in step) > DECODE_POSITIONS
