"""Reasons to stay away that are found while the plugin is set up. vLLM, the buffers and the GPUs are stood in for."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm")

from vllm.distributed import parallel_state

from ranks import run_ranks
from tokenweave.errors import CollectiveError, TokenWeaveError
from tokenweave.integrations.vllm import runtime
from tokenweave.integrations.vllm import start as module
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.start import start
from tokenweave.integrations.vllm.switch import Verdict
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
    elsewhere = False  # whether another rank meets an error

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed = 0
        self.sink = Sink()

        def made(*given: Any) -> Any:
            if self.error is not None:
                raise self.error
            return SimpleNamespace(
                workspace=SimpleNamespace(transport=self.transport, reason="no peer access"),
                choice=SimpleNamespace(mode=None),
                max_rows=2048,
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
        monkeypatch.setattr(module, "slower_collective", lambda runtime: self.slower)
        monkeypatch.setattr(module, "Runtime", made)
        monkeypatch.setattr(module, "check", self.check)
        monkeypatch.setattr(module, "anywhere", lambda true, group, device: true or self.elsewhere)
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def check(self, workspace: Any) -> None:
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


def test_what_fails_on_another_rank_leaves_stock_vllm_here_too(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.elsewhere = True
    assert setup.start() is None
    assert setup.sink.state == {"setup": 1}
    assert "another rank could not" in caplog.text


def _fails_on_rank_1(rank: int) -> str:
    if rank == 1:
        raise ValueError("out of memory here")
    return "made"


def _set_up() -> Any:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    alike = module._on_all(lambda: rank, group, device)
    return alike, module._on_all(lambda: _fails_on_rank_1(rank), group, device)


def test_what_fails_on_one_rank_alone_is_told_to_all() -> None:
    (one, first), (other, second) = run_ranks(2, _set_up)
    assert (one, other) == ((0, None), (1, None))
    assert first == ("made", (Reason.SETUP, "another rank could not; its log says why"))
    assert second == (None, (Reason.ERROR, "out of memory here"))


def test_an_error_behind_the_workspace_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def fails(*given: Any, **named: Any) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(
        runtime, "Workspace", lambda *given, **named: SimpleNamespace(close=lambda: closed.append(True))
    )
    monkeypatch.setattr(runtime.Runtime, "_set_up", fails)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=64),
    )
    given = (None, SimpleNamespace(hidden=64), config, None, None, torch.device("cpu"), torch.float32, None)
    with pytest.raises(RuntimeError, match="no such GPU"):
        runtime.Runtime(*given)  # type: ignore[arg-type]
    assert closed == [True]


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
