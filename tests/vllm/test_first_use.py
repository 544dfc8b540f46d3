"""The collective against vLLM's when a model is built: what is refused, and how long the GPU sleeps; nothing runs, see graph_stand_ins.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_stand_ins import MAX_ROWS, make_runtime

from tokenweave.integrations.vllm import first_use
from tokenweave.integrations.vllm.graphs import Graphs
from tokenweave.planning import Mode

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.mark.parametrize(
    ("mode", "least", "after_capture", "ours", "refused"),
    [
        (None, 1, True, 1.9, False),  # whole steps will tell
        (None, 1, True, 2.1, True),
        (None, 1, False, 1.1, True),
        (Mode.FUSED, 1, True, 1.1, True),
        (None, MAX_ROWS + 1, True, 1.1, True),  # vLLM replays every step as a graph of its own: none is measured
        (None, MAX_ROWS + 1, True, 1.0, False),
    ],
)
def test_a_slow_collective_is_refused_unless_whole_steps_decide(
    mode: Mode | None, least: int, after_capture: bool, ours: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_use, "_warm_up", lambda device: None)
    sleeps: list[float] = []

    def microseconds(call: Any, sleep: float) -> tuple[float, float]:
        sleeps.append(sleep)
        host = {1: 0.5, 2: 0.5, 3: 0.01}.get(len(sleeps), 1e-4)  # kernels are loaded in the first round
        return (100 * ours if call.__name__ == "ours" else 100.0), host

    monkeypatch.setattr(first_use, "_microseconds", microseconds)
    monkeypatch.setattr(first_use, "slowest", lambda times, group, device: times)
    runtime = make_runtime(mode)
    runtime.graphs = Graphs(runtime, least_rows=least)
    runtime.compat.WARMS_UP_AFTER_CAPTURE = after_capture
    runtime.device = torch.device("cpu")
    runtime.residual, runtime.workspace.hidden, runtime.workspace.dtype = torch.zeros(4, 4), 4, torch.float32
    assert (first_use.slower_collective(runtime) is not None) == refused
    assert sleeps == [0.002] * 3 + [0.02] * (2 * first_use.REPEATS + 1), "twice as long as the slow host once needed"
