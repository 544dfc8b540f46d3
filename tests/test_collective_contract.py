"""What breaks the collective's contract is refused with a message that says what was given and what is expected."""

from __future__ import annotations

import datetime
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import run_ranks
from tokenweave.collective import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm
from tokenweave.collective.workspace import find
from tokenweave.errors import CollectiveError, TokenWeaveError


@pytest.fixture
def workspace():
    with Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32) as workspace:
        yield workspace


def _call(workspace: Workspace, **changes):
    arguments = {
        "partial": torch.zeros(4, 16),
        "residual": torch.zeros(4, 16),
        "weight": torch.ones(16),
        "eps": 1e-5,
        **changes,
    }
    return fused_allreduce_rmsnorm(workspace=workspace, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial": torch.zeros(4, 8)}, r"partial is \[4, 8\] torch.float32; this workspace takes \[tokens, 16\]"),
        ({"partial": torch.zeros(4, 16, dtype=torch.float16)}, "torch.float16; this workspace takes .* torch.float32"),
        ({"partial": torch.zeros(64)}, r"partial is \[64\]"),
        ({"partial": torch.zeros(9, 16)}, "partial has 9 rows; this workspace holds 8: raise max_tokens"),
        ({"partial": torch.zeros(16, 4).T}, r"partial has strides \(1, 4\); its rows must be contiguous"),
        ({"partial": torch.zeros(4, 16, device="meta")}, "partial is on meta; this workspace is on cpu"),
        ({"residual": torch.zeros(3, 16)}, r"residual is \[3, 16\] .*; expected partial's \[4, 16\]"),
        (
            {"residual": torch.zeros(4, 16, dtype=torch.bfloat16)},
            "residual is .* torch.bfloat16 .*; expected partial's",
        ),
        ({"residual": torch.zeros(16, 4).T}, r"residual has strides \(1, 4\)"),
        ({"weight": torch.ones(8)}, r"weight has shape \[8\]; expected \[16\]"),
        ({"weight": torch.ones(16, dtype=torch.complex64)}, "weight is torch.complex64 on cpu; expected floats on cpu"),
        ({"bias": torch.ones(16, device="meta")}, "bias is torch.float32 on meta; expected floats on cpu"),
        ({"partial": torch.zeros(1, 16).expand(4, 16)}, r"partial has strides \(0, 1\); its rows must not overlap"),
        ({"residual": torch.zeros(1, 16).expand(4, 16)}, r"residual has strides \(0, 1\); its rows must not overlap"),
        ({"out": torch.zeros(76).as_strided((4, 16), (8, 1))}, r"out has strides \(8, 1\); its rows must not overlap"),
        ({"partial": torch.zeros(4, 16, requires_grad=True)}, "partial requires grad, and this has no backward"),
        ({"residual": torch.zeros(4, 16, requires_grad=True)}, "residual requires grad"),
        (
            {"rows": torch.tensor([1, 3]), "row_count": torch.tensor([2], dtype=torch.int32)},
            "row_count leaves rows below 2",
        ),
        ({"post_norm": torch.ones(4, 4)}, r"post_norm has shape \[4, 4\]; expected \[16\]"),
        ({"bias": torch.ones(17)}, r"bias has shape \[17\]; expected \[16\]"),
        ({"eps": -1.0}, "eps=-1.0; expected a number >= 0"),
        ({"channel": 2}, r"channel=2; this workspace has channels 0\.\.1"),
        ({"channel": -1}, "channel=-1"),
        ({"channel": 0.5}, "channel=0.5; this workspace has channels"),
        ({"ctas": -1}, "ctas=-1; expected 1 to 256"),
        ({"ctas": 257}, "ctas=257; expected 1 to 256"),
        ({"ctas": 4.0}, r"ctas=4.0; expected 1 to 256"),
        ({"cluster": 0}, "cluster=0; expected 1 or more, or None"),
        ({"weight": None}, r"weight is None; expected a tensor \[16\]"),
        ({"layout": "scattered"}, "layout='scattered'; expected 'sharded' or 'replicated'"),
        ({"rows": torch.tensor([0.0])}, r"rows is \[1\] torch.float32 on cpu; expected \[n\] int64"),
        ({"rows": torch.tensor([[0]])}, r"rows is \[1, 1\]"),
        ({"rows": torch.tensor([0, 4])}, r"rows=\[0, 4\]; expected ascending rows from 0 to 3"),
        ({"rows": torch.tensor([-1])}, r"rows=\[-1\]"),
        ({"rows": torch.tensor([2, 1])}, r"rows=\[2, 1\]; expected ascending"),
        ({"rows": torch.tensor([1, 1, 3])}, r"rows=\[1, 1, 3\]; expected ascending .*, none of them twice"),
        ({"rows": torch.zeros(9, dtype=torch.int64)}, "rows names 9 rows; this workspace holds 8: raise max_tokens"),
        ({"out": torch.zeros(3, 16)}, r"out is \[3, 16\] .*; expected \[4, 16\]"),
        ({"out": torch.zeros(4, 16), "rows": torch.tensor([1])}, r"out is \[4, 16\] .*; expected \[1, 16\]"),
        ({"out": torch.zeros(4, 16, dtype=torch.float16)}, "out is .* torch.float16"),
        ({"out": torch.zeros(16, 4).T}, r"out has strides \(1, 4\)"),
        ({"partial": None}, r"partial is None; expected a tensor \[tokens, 16\] torch.float32"),
        ({"residual": 1.0}, r"residual is 1.0, a float; expected a tensor"),
        ({"bias": 1.0}, r"bias is 1.0, a float; expected a tensor \[16\]"),
        ({"rows": [0, 1]}, r"rows is \[0, 1\], a list; expected a tensor \[n\] int64"),
        ({"row_count": 2}, r"row_count is 2, a int; expected a tensor \[1\] int32"),
        ({"eps": None}, "eps=None; expected a number >= 0"),
        ({"weight_offset": "1"}, "weight_offset='1'; expected a number"),
        ({"weight": torch.nn.Parameter(torch.ones(16))}, "weight requires grad, and this has no backward"),
        ({"bias": torch.nn.Parameter(torch.ones(16))}, "bias requires grad, and this has no backward"),
        ({"partial": torch.tensor(1.0), "out_dtype": torch.float8_e4m3fn}, r"partial is \[\] torch.float32"),
        (
            {"scale": 0.5, "out": torch.zeros(4, 16).to(torch.float8_e4m3fn), "out_dtype": torch.float8_e4m3fn},
            "scale is 0.5, a float; expected a tensor",
        ),
        (
            {
                "out": torch.zeros(76).to(torch.float8_e4m3fn).as_strided((4, 16), (8, 1)),
                "out_scales": torch.zeros(4),
                "out_dtype": torch.float8_e4m3fn,
            },
            r"out has strides \(8, 1\); its rows must not overlap",
        ),
    ],
)
def test_a_broken_contract_is_refused_before_anything_is_written(workspace, changes, message):
    with pytest.raises(CollectiveError, match=message) as caught:
        _call(workspace, **changes)
    assert isinstance(caught.value, TokenWeaveError)
    assert str(caught.value).startswith("fused_allreduce_rmsnorm: ")
    assert workspace.collectives == 0


@pytest.mark.parametrize("name", ["partial", "out"])
@pytest.mark.parametrize("behind", [0, 2])
def test_the_residual_has_memory_of_its_own(workspace, name, behind):
    shared = torch.zeros(8, 16)
    with pytest.raises(CollectiveError, match="share memory; each is written with its own result") as caught:
        _call(workspace, residual=shared[behind : behind + 4], **{name: shared[:4]})
    assert "residual" in str(caught.value)
    assert name in str(caught.value)
    assert _call(workspace, residual=shared[4:], **{name: shared[:4]})[0].shape == (4, 16)


def test_the_result_is_partial_itself_or_apart_from_it(workspace):
    partial = workspace.buffer(4)
    assert _call(workspace, partial=partial, out=workspace.buffer(4))[0].data_ptr() == partial.data_ptr()
    assert _call(workspace, partial=partial, out=workspace.buffer(4, start=4))[0].shape == (4, 16)
    for start in (1, 3):
        with pytest.raises(CollectiveError, match=r"partial and out share memory; .* only out may be partial itself"):
            _call(workspace, partial=partial, out=workspace.buffer(4, start=start))
    everything = torch.arange(4)
    with pytest.raises(CollectiveError, match=r"share memory; .* where rows is None"):
        _call(workspace, partial=partial, rows=everything, out=partial)


_BASE = torch.zeros(2048)


@given(
    pitch=st.integers(16, 48),
    starts=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    tokens=st.integers(0, 4),
    sampled=st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_memory_is_shared_where_an_element_is(pitch, starts, tokens, sampled):
    """Rows with gaps in one piece of memory: refused are those that have an element in common, and no others."""
    numbers = torch.arange(len(_BASE))
    sizes = (tokens, tokens, min(sampled, tokens))
    layouts = [((n, 16), (pitch, 1), start) for n, start in zip(sizes, starts, strict=True)]
    elements = [set(numbers.as_strided(*layout).flatten().tolist()) for layout in layouts]
    shared = any(one & other for one, other in itertools.combinations(elements, 2))
    partial, residual, out = (_BASE.as_strided(*layout) for layout in layouts)
    rows = torch.arange(out.shape[0])
    with Workspace(None, max_tokens=4, hidden=16, dtype=torch.float32) as workspace:
        if shared:
            with pytest.raises(CollectiveError, match="share memory"):
                _call(workspace, partial=partial, residual=residual, rows=rows, out=out)
        else:
            _call(workspace, partial=partial, residual=residual, rows=rows, out=out)


def test_the_baseline_names_itself(workspace):
    with pytest.raises(CollectiveError, match=r"^allreduce_rmsnorm: weight has shape"):
        allreduce_rmsnorm(torch.zeros(4, 16), torch.zeros(4, 16), torch.ones(8), 1e-5, workspace)


def test_a_fork_is_told_that_the_workspace_is_not_its_own(workspace, monkeypatch):
    monkeypatch.setattr(workspace, "process", workspace.process + 1)
    with pytest.raises(CollectiveError, match=r"belongs to process \d+, of which this one \(\d+\) is a fork"):
        _call(workspace)


def test_weights_that_are_trained_elsewhere_are_taken_without_gradients(workspace):
    with torch.no_grad():
        _call(workspace, partial=workspace.buffer(4), weight=torch.nn.Parameter(torch.ones(16)))
    assert not workspace.buffer(4).requires_grad
    assert _call(workspace, partial=workspace.buffer(4))[0].shape == (4, 16)


def test_memory_of_inference_mode():
    with torch.inference_mode():
        made = Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32)
        assert _call(made)[0].shape == (4, 16)
        residual = torch.zeros(4, 16)
    with made:
        assert _call(made, partial=made.buffer(4))[0].shape == (4, 16)
        with pytest.raises(CollectiveError, match=r"residual was made under torch.inference_mode\(\)"):
            _call(made, residual=residual)


def test_what_the_contract_allows_is_accepted(workspace):
    rows, scales = _call(workspace, eps=0.0, weight=torch.ones(16, dtype=torch.bfloat16), channel=1)
    assert rows.shape == (4, 16)
    assert scales is None
    assert _call(workspace, rows=torch.tensor([1, 3]))[0].shape == (2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 12}, "hidden=12; expected a multiple of 8 from 8 to 16384"),
        ({"hidden": 0}, "hidden=0"),
        ({"hidden": 16392}, "hidden=16392"),
        ({"max_tokens": 0}, "max_tokens=0; expected at least 1"),
        ({"dtype": torch.float64}, "dtype=torch.float64; expected torch.bfloat16"),
        ({"channels": 0}, "channels=0"),
        ({"regions": 0}, "regions=0"),
        ({"hidden": 16.0}, "hidden=16.0; expected a whole number"),  # what a division gives
        ({"max_tokens": "8"}, "max_tokens='8'; expected a whole number"),
        ({"fp8_regions": None}, "fp8_regions=None; expected a whole number"),
        ({"time_limit": 0}, "time_limit=0; expected seconds, more than 0"),
        ({"time_limit": -1.0}, "time_limit=-1.0"),  # as nanoseconds without a sign: for ever
        ({"time_limit": float("nan")}, "time_limit=nan"),
        ({"time_limit": float("inf")}, "time_limit=inf"),
        ({"time_limit": "20"}, "time_limit='20'; expected seconds"),
        ({"device": "cpux"}, "device='cpux': .*device"),
        ({"device": 1.5}, "device='1.5': "),
        ({"device": "meta"}, "device='meta': there is no memory on it"),
        ({"max_tokens": 2**63}, "lower max_tokens"),
        (
            {"max_tokens": 10**13},
            r"no 1\.19e\+06 GiB on cpu for 2 regions .*max_tokens=10000000000000.*; lower max_tokens",
        ),
    ],
)
def test_a_workspace_refuses_what_it_cannot_be(changes, message):
    arguments = {"max_tokens": 8, "hidden": 16, "dtype": torch.float32, **changes}
    with pytest.raises(CollectiveError, match=message):
        Workspace(None, **arguments)


def test_a_device_without_an_index_is_the_current_one():
    with Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32, device="cpu:0") as made:
        assert made.device == made.buffer(1).device
        assert _call(made, partial=made.buffer(4))[0].shape == (4, 16)


def _made(*each: dict) -> str:
    """Each rank makes a workspace with its own arguments; what is raised, else that it was made."""
    mine = {"max_tokens": 8, "hidden": 64, "dtype": torch.bfloat16, **each[dist.get_rank()]}
    try:
        with Workspace(dist.group.WORLD, **mine) as made:
            return f"made of {made.hidden}"
    except CollectiveError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "value", "usual"),
    [
        ("max_tokens", 9, "8"),
        ("hidden", 128, "64"),
        ("dtype", torch.float16, "torch.bfloat16"),
        ("channels", 1, "2"),
        ("regions", 1, "2"),
        ("fp8_regions", 1, "0"),
        ("staging", False, "True"),
        ("transport", "torch", r"'auto' \(torch here\)"),
    ],
)
def test_ranks_that_make_different_workspaces_are_told_at_once_on_all(name, value, usual):
    for text in run_ranks(3, _made, {}, {}, {name: value}, timeout=20):
        assert re.search(rf"rank 2 was given {name}=.*{value}.*, and rank 0 {name}={usual};", text)
    assert (
        run_ranks(3, _made, {}, {"time_limit": 3.0}, {}) == ["made of 64"] * 3
    )  # each rank's own; and they are in step


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 12}, "hidden=12; expected a multiple of 8"),
        ({"max_tokens": 10**13}, "lower max_tokens"),
        ({"device": "cpux"}, "device='cpux'"),
        ({"device": 1.5}, "device='1.5'"),
        ({"transport": "p2p"}, "p2p needs NVIDIA GPUs"),
    ],
)
def test_what_one_rank_cannot_make_no_rank_has(wrong, changes, message):
    found = run_ranks(2, _made, *[changes if rank == wrong else {} for rank in range(2)], timeout=20)
    assert message in found[wrong]
    assert found[wrong].startswith("Workspace: ")
    assert found[1 - wrong] == f"rank {wrong} cannot make its part of the workspace: {found[wrong]}"


def _made_by_some(seconds: float) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    if dist.get_rank() == 1:
        return "elsewhere"
    with pytest.raises(CollectiveError) as caught:
        Workspace(group, max_tokens=8, hidden=16, dtype=torch.float32)
    return str(caught.value)


def test_a_rank_that_makes_no_workspace_is_missed():
    assert "for a peer that did not come" in run_ranks(2, _made_by_some, 1.0)[0]


def _of_another_group() -> str:
    group = dist.new_group([0])
    try:
        Workspace(group, max_tokens=8, hidden=16, dtype=torch.float32).close()
    except CollectiveError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("group", [[0, 1], "tp"])
def test_a_group_is_a_group_that_is_there(group):
    with pytest.raises(CollectiveError, match=r"group=.* torch.distributed is not initialised .*init_process_group"):
        Workspace(group, max_tokens=8, hidden=16, dtype=torch.float32)


def _stale() -> list[str]:
    group, said = dist.new_group(), []
    for wrong in ([0, 1], "tp"):
        with pytest.raises(CollectiveError) as caught:
            Workspace(wrong, max_tokens=8, hidden=16, dtype=torch.float32)
        said.append(str(caught.value))
    dist.destroy_process_group(group)
    with pytest.raises(CollectiveError) as caught:
        Workspace(group, max_tokens=8, hidden=16, dtype=torch.float32)
    return [*said, str(caught.value)]


def test_a_group_that_was_destroyed_has_no_workspace():
    for said in run_ranks(2, _stale):
        assert all("expected a torch.distributed.ProcessGroup that is not destroyed" in text for text in said)


def test_a_rank_outside_the_group_has_no_workspace_of_it():
    made, refused = run_ranks(2, _of_another_group)
    assert made == "made"
    assert "rank 1 of the job is not in the group" in refused


@pytest.mark.parametrize(
    "arguments", [(9,), (1, 8), (4, 5), (-1,), (1, -1), (0, 9)], ids=lambda arguments: str(arguments)
)
def test_a_buffer_never_reaches_past_the_workspace(workspace, arguments):
    tokens, start = (*arguments, 0)[:2]
    with pytest.raises(CollectiveError, match="raise max_tokens or regions, or send fewer rows per step"):
        workspace.buffer(tokens, start=start)


@pytest.mark.parametrize("region", [-1, 2])
def test_a_region_that_does_not_exist(workspace, region):
    with pytest.raises(CollectiveError, match=f"region {region}; this workspace has 2 regions of 8 rows"):
        workspace.buffer(1, region=region)


def test_buffers_are_views_and_regions_are_apart(workspace):
    workspace.buffer(8).fill_(1.0)
    workspace.buffer(3, start=2).fill_(2.0)
    assert workspace.buffer(8)[:, 0].tolist() == [1, 1, 2, 2, 2, 1, 1, 1]
    assert (workspace.buffer(8, region=1) == 0).all()
    assert workspace.buffer(0, start=8).shape == (0, 16)


def test_a_closed_workspace_says_so():
    workspace = Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32)
    assert find(workspace.handle) is workspace
    workspace.close()
    workspace.close()
    with pytest.raises(CollectiveError, match="this workspace is closed; create a new one"):
        workspace.buffer(1)
    with pytest.raises(CollectiveError, match="is closed; create a new workspace"):
        _call(workspace)
    with pytest.raises(CollectiveError, match=f"no open workspace is called '{workspace.handle}'"):
        find(workspace.handle)


@pytest.mark.parametrize("which", ["partial", "residual", "weight"])
def test_compiled_code_has_no_gradients_either(which):
    """A compiler does not run the checks of an eager call, and autograd would take the operation for the identity."""
    tensors = {"partial": torch.randn(4, 16), "residual": torch.zeros(4, 16), "weight": torch.ones(16)}
    tensors[which].requires_grad_()
    with Workspace(None, max_tokens=4, hidden=16, dtype=torch.float32) as workspace:

        def function(partial, residual, weight):
            return fused_allreduce_rmsnorm(partial * 1.0, residual * 1.0, weight, 1e-5, workspace)[0] + 0.0

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=f"{which} requires grad, and this has no backward"):
            compiled(**tensors)
        with torch.no_grad():
            expected = function(**{name: tensor.detach() for name, tensor in tensors.items()})
            assert torch.equal(compiled(**tensors), expected)
