"""What the model state asks of TokenWeave in each kind of step; vLLM's own state and a runtime are stood in for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from tokenweave.errors import CollectiveError
from tokenweave.integrations.vllm import state as module
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.step import Planned

SIZES = [8, 16, 64, 512]
ROWS, REQUESTS = 2048, 32


class Batch(SimpleNamespace):
    """vLLM's ``InputBatch``, as far as it is looked at."""

    @classmethod
    def make_dummy(cls, requests: int, rows: int, buffers: Any) -> Batch:
        return cls(requests=requests, rows=rows, input_ids=buffers.input_ids, positions=buffers.positions)


class State:
    """A state whose base class notes what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after_capture: bool = True, same: bool = True) -> None:
        self.layers = ["layer"]  # of which each has metadata of its own
        self.asked: list[tuple[Any, bool]] = []
        self.contexts: list[tuple[int, Any]] = []
        self.warmed: list[Any] = []
        self.prepared: list[int] = []
        self.tables: list[Any] = []
        self.dummies: list[Batch] = []
        self.plan: Any = "a step"

        def prepare_attn(
            state: Any, batch: Any, mode: Any, blocks: Any, slots: Any, *more: Any, for_capture: bool = False
        ) -> Any:
            self.asked.append((mode, for_capture))
            self.dummies += [batch] if hasattr(batch, "requests") else []
            return {name: SimpleNamespace(number=len(self.asked)) for name in self.layers}

        def warm_up(runtime: Any, tables: Any, stock: Any) -> None:
            self.warmed.append((tables, stock))
            runtime.warmed_up = True

        def stock_context(metadata: Any, config: Any, rows: int, slots: Any, mode: Any) -> Any:
            self.contexts.append((rows, mode))
            return contextlib.nullcontext()

        def prepare(step: Any, tables: Any) -> Any:
            self.prepared.append(tables.metadata.number)
            self.tables.append(tables)
            return self.plan

        monkeypatch.setattr(DefaultModelState, "prepare_attn", prepare_attn)
        monkeypatch.setattr(module, "warm_up", warm_up)
        self.runtime = SimpleNamespace(
            off=None,
            warmed_up=False,
            steps=Steps(),
            compat=SimpleNamespace(
                WARMS_UP_AFTER_CAPTURE=after_capture, SAME_PATTERN=same, stock_context=stock_context
            ),
            requests=SimpleNamespace(known=lambda name: not name.startswith("dummy"), planned=lambda step: None),
            prepare=prepare,
            expect_intact=lambda: self.intact(),
        )
        module.state_class.cache_clear()
        self.state = object.__new__(module.state_class(True))
        self.state.model = SimpleNamespace(tokenweave=self.runtime, model=lambda ids, positions, *more: ids.shape[0])
        self.state.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_capture_sizes=SIZES
            )
        )
        self.state.model_config = SimpleNamespace(max_model_len=1500)
        self.state.max_num_reqs, self.state.device = REQUESTS, torch.device("cpu")

    def intact(self) -> None:
        """What is asked before every step; a test may replace it."""

    def step(self, mode: Any, name: str = "request", *, for_capture: bool = False, padded: int = 100) -> Any:
        batch = Batch(
            req_ids=[name],
            num_scheduled_tokens=torch.tensor([100]),
            num_computed_tokens_np=torch.tensor([0]),
            num_tokens=100,
            input_ids=torch.zeros(ROWS, dtype=torch.int32)[:padded],
            positions=torch.zeros(ROWS, dtype=torch.int64)[:padded],
            query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32)[:2],
            seq_lens=torch.zeros(REQUESTS, dtype=torch.int32)[:1],
        )
        blocks, slots = torch.zeros(REQUESTS, 4, dtype=torch.int32)[:1], torch.zeros(1, ROWS, dtype=torch.int64)
        return self.state.prepare_attn(batch, mode, (blocks,), slots[:, :padded], [], None, for_capture=for_capture)


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_steps_that_pass_through_the_model_are_planned(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    state = State(monkeypatch)
    metadata = state.step(mode)
    assert isinstance(metadata, Planned)
    assert metadata.step == "a step"


def test_the_rows_that_pieces_are_padded_by_are_not_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch)
    state.step(CUDAGraphMode.PIECEWISE, padded=104)
    (tables,) = state.tables
    assert {t.shape[0] for t in (tables.token_ids, tables.positions, tables.slots)} == {100}


def test_whole_graphs_and_dummies_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch)
    assert not isinstance(state.step(CUDAGraphMode.FULL), Planned)
    assert not isinstance(state.step(CUDAGraphMode.NONE, "dummy"), Planned)
    assert state.runtime.steps.reasons == {Reason.WHOLE_GRAPH: 1, Reason.DUMMY: 1}


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.NONE])
def test_no_step_follows_a_collective_that_failed(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """Also none of vLLM's: the cache holds what the failed step left there. A plugin that is off has no say any more."""
    state = State(monkeypatch)
    state.step(CUDAGraphMode.NONE)

    def failed() -> None:
        raise CollectiveError("collective failed")

    state.intact = failed  # type: ignore[method-assign]
    with pytest.raises(CollectiveError, match="collective failed"):
        state.step(mode)
    state.runtime.off = Reason.ERROR
    assert not isinstance(state.step(mode), Planned)


def test_the_first_step_of_the_engine_itself_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch)
    state.step(CUDAGraphMode.NONE, for_capture=True)
    state.step(CUDAGraphMode.NONE, "dummy")
    assert not state.warmed, "its graphs are not there yet, or a rank may be alone"
    state.step(CUDAGraphMode.PIECEWISE)
    assert len(state.warmed) == len(state.prepared) == 1
    state.step(CUDAGraphMode.NONE)
    assert len(state.warmed) == 1


def test_the_step_of_the_warm_up_gets_metadata_that_were_built_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch)
    built: list[int] = []
    monkeypatch.setattr(module, "warm_up", lambda runtime, tables, stock: built.append(len(state.asked)))
    state.plan = None
    assert state.step(CUDAGraphMode.NONE)["layer"].number == built[0] + 1
    assert state.step(CUDAGraphMode.FULL)["layer"].number == built[1] + 1


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_of_a_planned_step_no_metadata_are_built_unless_it_falls_back(
    monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    state = State(monkeypatch, after_capture=False)
    state.step(mode)
    assert len(state.asked) == 1, "a pattern"
    metadata = state.step(mode)
    assert (len(state.asked), dict(metadata)) == (1, {})
    metadata.restore()
    assert (len(state.asked), metadata["layer"].number) == (2, 2)
    state.plan = None
    assert state.step(mode)["layer"].number == 3
    assert state.prepared == [1, 1, 1]


def test_where_steps_may_differ_each_gets_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch, after_capture=False, same=False)
    metadata = [state.step(CUDAGraphMode.NONE) for _ in range(2)]
    assert state.prepared == [1, 2]
    metadata[1].restore()
    assert metadata[1]["layer"].number == 2
    state.plan = None
    assert state.step(CUDAGraphMode.NONE)["layer"].number == 3
    assert len(state.asked) == 3


def test_where_steps_may_differ_the_step_of_the_warm_up_is_planned_on_what_was_built_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = State(monkeypatch, same=False)
    metadata = state.step(CUDAGraphMode.NONE)
    assert state.prepared == [2], "the builder's buffers were used meanwhile"
    metadata.restore()
    assert (len(state.asked), metadata["layer"].number) == (2, 2)


def test_layers_with_caches_of_their_own_run_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch, after_capture=False)
    state.layers = ["one", "other"]
    for built in (1, 2):
        assert {pattern.number for pattern in state.step(CUDAGraphMode.NONE).values()} == {built}
    assert state.runtime.steps.reasons == {Reason.CACHE_GROUPS: 2}


def test_where_vllm_warms_up_before_its_capture_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch, after_capture=False)
    assert isinstance(state.step(CUDAGraphMode.NONE), Planned)
    assert not state.warmed


def test_a_warm_up_that_fails_leaves_the_step_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(monkeypatch)

    def fails(runtime: Any, tables: Any, stock: Any) -> None:
        runtime.warmed_up, runtime.off = True, Reason.ERROR

    monkeypatch.setattr(module, "warm_up", fails)
    assert not isinstance(state.step(CUDAGraphMode.NONE), Planned)
    assert not state.prepared


@pytest.mark.parametrize(
    ("rows", "ran", "mode"),
    [
        (64, 64, CUDAGraphMode.PIECEWISE),
        (60, 64, CUDAGraphMode.PIECEWISE),  # padded, as in a real step
        (512, 512, CUDAGraphMode.PIECEWISE),
        (640, 640, CUDAGraphMode.NONE),
        (1600, 1600, CUDAGraphMode.NONE),
    ],
)
def test_stock_is_timed_as_vllm_would_run_it(monkeypatch: pytest.MonkeyPatch, rows: int, ran: int, mode: Any) -> None:
    state = State(monkeypatch)
    state.step(CUDAGraphMode.NONE)
    ((_, stock),) = state.warmed
    assert stock(rows)() == ran
    assert state.contexts == [(ran, mode)]
    assert state.asked[-1] == (mode, False)
    assert state.dummies[-1].rows == rows, "attention sees no padding"


@pytest.mark.parametrize("graphs", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY])
def test_stock_without_graphs_in_pieces_is_launched(monkeypatch: pytest.MonkeyPatch, graphs: Any) -> None:
    state = State(monkeypatch)
    state.state.vllm_config.compilation_config.cudagraph_mode = graphs
    state.step(CUDAGraphMode.NONE)
    ((_, stock),) = state.warmed
    assert stock(64)() == 64
    assert state.contexts == [(64, CUDAGraphMode.NONE)]
