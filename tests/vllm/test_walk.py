"""What a walk hands to the stages: which rows each split has, and how many of them are real. Nothing runs, see graph_stand_ins.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stand_ins import Buffers, make_runtime

from tokenweave.integrations.vllm import runtime as module
from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.step import Cut
from tokenweave.overlap import Inline
from tokenweave.planning import Mode, Plan
from tokenweave.stages import Split

pytestmark = pytest.mark.usefixtures("no_gpu")
CAPACITY, ROOM = 24, 4  # of the graph
CUT = 10


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Split]:
    """The splits of the last walk."""
    found: list[Split] = []
    monkeypatch.setattr(module, "run_stages", lambda stages, splits, *rest: found.__setitem__(slice(None), splits))
    return found


def walking_runtime(quantised: bool = False) -> Any:
    """One that walks by itself, on the CPU and past no stage."""
    runtime = make_runtime()
    runtime.device, runtime.residual, runtime._overlap = torch.device("cpu"), torch.zeros(CAPACITY, 4), Inline()
    runtime.stages, runtime.layer_names, runtime.workspace.symmetric = [], [], None
    runtime.vllm_config = SimpleNamespace(
        quant_config=object() if quantised else None, cache_config=SimpleNamespace(block_size=16)
    )
    runtime.compat.cut_metadata = lambda metadata, **tables: tables
    runtime.compat.forward_context = lambda config, names, metadata, slots: metadata
    return runtime


def walk_padded(runtime: Any, plan: Plan, counts: list[int]) -> None:
    """As a graph with more room does it."""
    tables = Buffers().step(counts)[1].grown(CAPACITY, ROOM)
    Runtime.walk(runtime, Cut(plan, CAPACITY, tables, CAPACITY, CAPACITY), tables.query_start_loc[-1:])


@pytest.mark.parametrize("counts", [[17], [9, 2], [CUT, 1], [20, 4]])
def test_collectives_send_no_row_of_padding(walked: list[Split], counts: list[int]) -> None:
    runtime, rows = walking_runtime(), sum(counts)
    walk_padded(runtime, Plan(Mode.FUSED), counts)
    (whole,) = walked
    assert (whole.start, whole.tokens, whole.row_count.tolist()) == (0, CAPACITY, [rows])
    walk_padded(runtime, Plan(Mode.WOVEN, CUT), counts)
    prefix, suffix = walked
    assert (prefix.start, prefix.tokens, prefix.row_count) == (0, CUT, None)  # all are real
    assert (suffix.start, suffix.tokens, suffix.row_count.tolist()) == (CUT, CAPACITY - CUT, [rows - CUT])
    assert suffix.inputs.token_ids.tolist() == list(range(CUT, CAPACITY))
    for split in (whole, prefix, suffix):
        tables = split.inputs.context
        sent = split.tokens if split.row_count is None else int(split.row_count)
        assert int(tables["query_start_loc"][-1]) == sent  # and attention has as many
        assert bool((tables["slot_mapping"][sent:] == -1).all())


def test_rows_of_padding_are_cleared_where_rows_meet(walked: list[Split]) -> None:
    runtime = walking_runtime(quantised=True)
    walk_padded(runtime, Plan(Mode.WOVEN, CUT), [9, 8])
    prefix, suffix = walked
    assert prefix.inputs.padding is None
    assert suffix.inputs.padding.flatten().tolist() == [False] * 7 + [True] * 7
    walk_padded(runtime, Plan(Mode.FUSED), [9, 8])
    assert walked[0].inputs.padding.flatten().tolist() == [False] * 17 + [True] * 7
    walk_padded(walking_runtime(), Plan(Mode.FUSED), [9, 8])
    assert walked[0].inputs.padding is None
