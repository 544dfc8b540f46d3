"""Reasons to stay away that are found while the plugin is set up. vLLM, the buffers and the GPUs are stood in for."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm")

from vllm.distributed import parallel_state

from ranks import run_ranks
from tokenweave.collective import workspace
from tokenweave.errors import CollectiveError, TokenWeaveError
from tokenweave.integrations.vllm import runtime
from tokenweave.integrations.vllm import start as module
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.start import start
from tokenweave.integrations.vllm.switch import Verdict
from tokenweave.models.config import ModelConfig
from vllm import platforms


class Sink:
    """Keeps what the metric of the engine's state says."""

    def __init__(self) -> None:
        self.state: dict[str, int] = {}

    def set(self, metric: Any, value: str, number: int) -> None:
        self.state[value] = number


class Setup:
    """One rank of an engine on GPUs that nothing speaks against so far."""

    transport, slower, error = "p2p", None, None  # what will be found
    gave_up = False  # whether a kernel did, as it was timed

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed = 0
        self.sink = Sink()

        def made(*given: Any) -> Any:
            if self.error is not None:
                raise self.error
            return SimpleNamespace(
                workspace=SimpleNamespace(transport=self.transport, reason="no peer access", check=self.check),
                choice=SimpleNamespace(mode=None),
                max_rows=2048,
                device=torch.device("cuda"),
                set_up=(),
                close=self.close,
                close_with=lambda owner: None,
            )

        group = SimpleNamespace(rank_in_group=0, device_group=None, cpu_group=None, world_size=1)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
        monkeypatch.setattr(platforms.current_platform, "is_cuda", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(module.switch, "current", lambda: Verdict("v0_30", ""))
        monkeypatch.setattr(module.switch, "compat", lambda name: None)
        monkeypatch.setattr(module.prometheus, "sink", lambda config: self.sink)
        monkeypatch.setattr(module, "engine_problem", lambda *given: None)
        monkeypatch.setattr(module, "model_problem", lambda *given: None)
        monkeypatch.setattr(module, "model_numbers", lambda *given: "numbers")
        monkeypatch.setattr(module.first_use, "prepare", lambda runtime: None)
        monkeypatch.setattr(module.first_use, "slower_collective", lambda runtime: self.slower)
        monkeypatch.setattr(module, "Runtime", made)
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def check(self) -> None:
        if self.gave_up:
            raise CollectiveError("rank 1 waited longer than the time limit")

    def close(self) -> None:
        self.closed += 1

    def start(self) -> Any:
        config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=None, dtype=torch.bfloat16))
        return start(SimpleNamespace(model=None), config, "")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch)


def test_an_engine_that_nothing_speaks_against_is_on(setup: Setup) -> None:
    assert setup.start() is not None
    assert (setup.sink.state, setup.closed) == ({"on": 1}, 0)


@pytest.mark.parametrize(
    ("found", "reason", "says", "closed"),
    [
        ({"error": TokenWeaveError("rank 1 has no memory left")}, Reason.SETUP, "rank 1 has no memory left", 0),
        ({"error": ValueError("whatever")}, Reason.ERROR, "whatever", 0),
        ({"gave_up": True}, Reason.SETUP, "rank 1 waited longer", 1),
        ({"transport": "torch"}, Reason.TRANSPORT, "no peer access", 1),
        ({"slower": "2.1 times as slow"}, Reason.SLOWER_COLLECTIVE, "2.1 times as slow", 1),
    ],
)
def test_what_is_found_during_the_set_up_leaves_stock_vllm(
    found: dict[str, Any], reason: Reason, says: str, closed: int, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    vars(setup).update(found)
    assert setup.start() is None
    assert f"stock vLLM runs ({reason}): {reason.value}: {says}" in caplog.text
    assert setup.sink.state == {str(reason): 1}
    assert setup.closed == closed, "buffers that were made are given back"


FAULTS = {
    "a reason": (module, "model_problem"),
    "memory": (runtime, "Ways"),  # of what is made first
    "the workspace": (runtime, "Workspace"),
    "the machine": (runtime, "machine_of"),
    "the planner": (runtime, "Planner"),
}
"""What fails on one rank, by what is replaced there."""


def _sets_up(fault: str, failing: tuple[int, ...]) -> tuple[bool, Any, int]:
    """(whether a runtime was made here, what is found, how many workspaces are open at the end)."""

    def fails(*given: Any, **named: Any) -> Any:
        if fault == "a reason":
            return Reason.LAYERS, "of rank 1"
        raise CollectiveError("no workspace") if fault == "the workspace" else RuntimeError(f"no more of {fault}")

    whole = dist.group.WORLD
    group = SimpleNamespace(world_size=2, rank_in_group=dist.get_rank(), device_group=whole, cpu_group=whole)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=64, dtype=torch.float32, hf_text_config=None),
        quant_config=None,
    )
    model = SimpleNamespace(model=SimpleNamespace(layers=[object()]))
    numbers = ModelConfig("llama", 64, 128, 2, 4, 2, 16, 256, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "model_problem", lambda *given: None)
        patch.setattr(module, "model_numbers", lambda *given: numbers)
        patch.setattr(module.switch, "compat", lambda name: None)
        if dist.get_rank() in failing:
            patch.setattr(*FAULTS[fault], fails)
        made, found = module._set_up(group, partial(module._make, model, config, "cpu", "cpu", group, Steps()))
    if made is not None:
        made.close()
    return made is not None, found, len(workspace._open)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_alone_meets_leaves_stock_on_all(fault: str) -> None:
    """Whatever it is, none waits for it, all know its reason, and buffers are given back."""
    if fault == "the workspace":  # it agrees for itself: not one rank's
        results = run_ranks(2, _sets_up, fault, (0, 1))
        assert [found for _, found, _ in results] == [(Reason.SETUP, "no workspace")] * 2
    else:
        results = run_ranks(2, _sets_up, fault, (1,))
        reason, text = (Reason.LAYERS, "of rank 1") if fault == "a reason" else (Reason.ERROR, f"no more of {fault}")
        assert [found for _, found, _ in results] == [(reason, f"on rank 1: {text}")] * 2
    assert [left for _, _, left in results] == [0, 0]


def test_without_a_fault_all_ranks_are_set_up() -> None:
    assert run_ranks(2, _sets_up, "memory", ()) == [(True, None, 0)] * 2


def test_a_mode_that_does_not_exist_costs_no_memory() -> None:
    for made, found, left in run_ranks(2, _in_mode, "wovn"):
        assert (made, left, found[0]) == (False, 0, Reason.SETUP)
        assert "wovn" in found[1]


def _in_mode(mode: str) -> tuple[bool, Any, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENWEAVE_MODE", mode)
        return _sets_up("memory", ())


def test_buffers_go_when_their_model_does() -> None:
    class Model:
        """Something that can be gone."""

    closed, found = [], object.__new__(runtime.Runtime)
    found._overlap = SimpleNamespace(close=lambda: closed.append("overlap"))  # type: ignore[assignment]
    found.workspace = SimpleNamespace(close=lambda: closed.append("workspace"))  # type: ignore[assignment]
    model = Model()
    found.close_with(model)
    assert not closed
    del model
    assert closed == ["overlap", "workspace"]
