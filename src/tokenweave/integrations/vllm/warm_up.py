"""What is done once the engine's KV cache is there and before it serves: schemes and modes are measured, graphs are made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.measured import Measured, slowest
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.trials import Trials
from tokenweave.planning import Mode

log = logging.getLogger("vllm.tokenweave")
T = TypeVar("T")

START_S = 11.0  # that measuring and capturing may add to an engine's start
LEAST_GRAPHS = 4  # in any case: the full steps'


def warm_up(runtime: Runtime, tables: Tables, stock: Callable[[int], Callable[[], object]]) -> None:
    """Called on every rank, in the same step; the first call does the work, in which that step's buffers end as they were.

    Args:
        stock: rows -> vLLM's own step of as many, on the same buffers.
    """
    if runtime.warmed_up or runtime.off is not None:
        return
    runtime.warmed_up = True
    try:
        _measure_and_capture(runtime, tables, stock)
    except Exception as error:  # whatever it is: vLLM goes on
        log.exception("TokenWeave: steps could not be measured, or their graphs not be made")
        runtime.turn_off(Reason.ERROR, str(error))


def _measure_and_capture(runtime: Runtime, tables: Tables, stock: Callable[[int], Callable[[], object]]) -> None:
    """Raises on all ranks what is raised on one. Each exchange of figures is a part of its own: what ranks launch between may fail."""
    graphs, trials, choice = runtime.graphs, runtime.trials, runtime.choice
    if graphs is None or trials is None:
        return
    runtime.anywhere(False)  # all are here: a rank may capture for longer than our kernels wait for a peer
    began = time.perf_counter()
    group, device = runtime.workspace.group, runtime.device
    if choice.mode in (None, Mode.WOVEN) and trials.scheme_sizes:
        times = _together(runtime, lambda: trials.time_schemes(tables))
        _together(runtime, lambda: _choose_schemes(runtime, trials.scheme_sizes, slowest(times, group, device)))
    if trials.measures_modes:
        timed, mine = _together(runtime, lambda: (trials.time_modes(tables, stock), trials.time_launching(tables)))
        modes, (launching,) = _together(
            runtime, lambda: (slowest(timed, group, device), slowest([mine], group, device))
        )
        choice.measured = Measured.of(trials.sizes, modes, launching)
        if runtime.steps.first_rank:
            log.info("TokenWeave: ms of a step: %s", choice.measured)
    most = _together(runtime, lambda: _graphs_left(runtime, trials, began))
    _together(runtime, lambda: trials.make_graphs(tables, most))
    if trials.captured:
        _, runtime.ways.price_ms = _together(runtime, lambda: _cost_so_far(runtime, trials, began))
    if runtime.steps.first_rank:
        log.info("TokenWeave: %d step graphs, made in %.1f s", len(graphs), time.perf_counter() - began)


def _graphs_left(runtime: Runtime, trials: Trials, began: float) -> int:
    """How many can be captured in the time that is left."""
    spent_ms, each_ms = _cost_so_far(runtime, trials, began)
    return max(LEAST_GRAPHS, int((START_S * 1e3 - spent_ms) / each_ms))


def _cost_so_far(runtime: Runtime, trials: Trials, began: float) -> tuple[float, float]:
    """(ms since ``began``, ms of a capture), of the slowest rank."""
    mine = [[(time.perf_counter() - began) * 1e3, trials.capture_ms]]
    ((spent, each),) = slowest(mine, runtime.workspace.group, runtime.device)
    return spent, each


def _choose_schemes(runtime: Runtime, sizes: Sequence[int], times: Sequence[Sequence[float]]) -> None:
    """By the times of each size in each scheme, of the slowest rank."""
    tried, best = runtime.choice.tried, {}
    for size, of in zip(sizes, times, strict=True):
        best[size] = tried[of.index(min(of))]
        if runtime.steps.first_rank:
            each = ", ".join(f"{ms:.2f} ({scheme})" for ms, scheme in zip(of, tried, strict=True))
            log.info("TokenWeave: ms of a woven step of %d rows by scheme: %s", size, each)
    runtime.choice.schemes = best


def _together(runtime: Runtime, call: Callable[[], T]) -> T:
    """:meth:`Runtime.together`, and a failure too where a kernel of ours gave up waiting, which raised nothing."""

    def checked() -> T:
        with torch.inference_mode():
            result = call()
        runtime.workspace.check()
        return result

    return runtime.together(checked)
