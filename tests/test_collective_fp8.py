"""fp8 output of the ``torch`` transport: the oracle of the kernels, so it is held against float64 itself."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from collective_cases import EPS, Case, fresh_seed, make, reference
from fp8_cases import E4M3, Quantised, call, check, fingerprint
from ranks import run_ranks
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.errors import CollectiveError


def _workspace(q: Quantised, **options) -> Workspace:
    tokens = max(q.case.tokens, len(q.case.rows or ())) + q.start + 2
    return Workspace(None, max_tokens=tokens, hidden=q.case.hidden, dtype=q.case.dtype, fp8_regions=1, **options)


def _against_float64(cases: list[Quantised], seed: int) -> list:
    found = []
    for number, q in enumerate(cases):
        with _workspace(q) as workspace:
            result = call(q, workspace, seed + number)
            check(q, result, workspace, seed + number)
            found.append(fingerprint(result))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("static", [None, 0.02, 1.0], ids=["row scales", "0.02", "1.0"])
def test_against_float64_with_equal_bits_on_all_ranks(world_size, static):
    pick = random.Random(seed := fresh_seed())
    cases = []
    for tokens in (0, 1, 2, 3, 7, 33, 64):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows = (
                None if pick.random() < 0.6 else tuple(sorted(pick.sample(range(tokens), pick.randrange(tokens + 1))))
            )
            case = Case(
                tokens,
                pick.choice([8, 72, 576]),
                dtype,
                has_residual=pick.random() < 0.8,
                post_norm=pick.random() < 0.3,
                weight_offset=pick.choice([0.0, 1.0]),
                bias=pick.random() < 0.3,
                replicated=pick.random() < 0.4,
                rows=rows,
            )
            cases.append(Quantised(case, static, pick.random() < 0.5, pick.randrange(3)))
    first, *others = run_ranks(world_size, _against_float64, cases, seed)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(map(torch.equal, one, two))


def test_a_static_scale_saturates():
    q = Quantised(Case(9, 72), static=2.0**-9)  # what is beyond 448 * 2^-9 = 0.875
    with _workspace(q) as workspace:
        rows = call(q, workspace, 3).rows.float()
        _, expected = reference(q.case, make(q.case, 1, 3))
        assert torch.isfinite(rows).all()
        beyond = expected.abs() > 0.9
        assert beyond.any()
        assert torch.equal(rows[beyond], 448 * expected[beyond].sign().float())


def _row_count() -> None:
    with Workspace(None, max_tokens=16, hidden=72, dtype=torch.bfloat16, fp8_regions=1) as workspace:
        g = torch.Generator().manual_seed(workspace.rank)
        x, residual, weight = workspace.buffer(16).normal_(generator=g), torch.zeros(16, 72).bfloat16(), torch.ones(72)
        kept = x.clone()
        workspace.fp8(16).view(torch.uint8).fill_(1)
        workspace.scales(16).fill_(-1.0)
        count = torch.tensor([5], dtype=torch.int32)
        rows, scales = fused_allreduce_rmsnorm(
            x, residual.clone(), weight, EPS, workspace, out_dtype=E4M3, row_count=count, unquantised=x
        )
        assert (rows[5:].view(torch.uint8) == 1).all()
        assert (scales[5:] == -1).all()
        assert torch.equal(x[5:], kept[5:])
        wanted = rows[:5].clone()
        again, _ = fused_allreduce_rmsnorm(kept[:5], residual[:5], weight, EPS, workspace, out_dtype=E4M3)
        assert torch.equal(again.view(torch.uint8), wanted.view(torch.uint8))


def test_rows_behind_the_row_count_stay():
    run_ranks(2, _row_count)


def test_zero_rows_and_rows_with_a_nan():
    with Workspace(None, max_tokens=8, hidden=72, dtype=torch.bfloat16, fp8_regions=1) as workspace:
        x = torch.ones(4, 72).bfloat16()
        x[1], x[2, 5] = 0, float("nan")
        residual = torch.zeros_like(x)
        rows, scales = fused_allreduce_rmsnorm(x, residual, torch.ones(72), EPS, workspace, out_dtype=E4M3)
        assert (rows[1].float() == 0).all()
        assert scales[1] == 2.0**-40
        assert scales[2].isnan()
        assert rows[2].float().isnan().all()
        assert torch.isfinite(rows[[0, 3]].float()).all()
        assert torch.isfinite(scales[[0, 3]]).all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("both", [False, True])
def test_torch_compile_gives_the_same(backend, both):
    with Workspace(None, max_tokens=8, hidden=72, dtype=torch.bfloat16, fp8_regions=2) as workspace:
        x, weight = torch.randn(5, 72).bfloat16(), torch.randn(72).bfloat16()

        def function(x, residual, unquantised):
            return fused_allreduce_rmsnorm(
                x,
                residual,
                weight,
                EPS,
                workspace,
                out=workspace.fp8(5, start=2, region=1),
                out_scales=workspace.scales(5, start=2, region=1),
                out_dtype=E4M3,
                unquantised=unquantised,
            )

        results = []
        torch._dynamo.reset()
        for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
            workspace.fp8(8, region=1).view(torch.uint8).zero_()
            residual, unquantised = torch.ones_like(x), torch.zeros_like(x) if both else None
            run(x, residual, unquantised)
            found = [workspace.fp8(8, region=1).view(torch.uint8), workspace.scales(8, region=1), residual]
            results.append([tensor.clone() for tensor in [*found, *([unquantised] if both else [])]])
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_dtype": torch.float16}, "out_dtype=torch.float16; expected torch.float8_e4m3fn, or None"),
        ({"out_dtype": None, "scale": torch.ones(1)}, "scale is of quantised output; give out_dtype"),
        ({"out_dtype": None, "out_scales": torch.ones(4)}, "out_scales is of quantised output; give out_dtype"),
        ({"out_dtype": None, "unquantised": torch.ones(4, 16)}, "unquantised is of quantised output; give out_dtype"),
        ({"scale": torch.ones(1), "out_scales": torch.ones(4)}, "one static scale or their own"),
        ({"scale": torch.ones(2)}, r"scale is \[2\] torch.float32 on cpu; expected \[1\] torch.float32"),
        ({"scale": torch.ones(1).double()}, "scale is .* torch.float64"),
        ({"out_scales": torch.ones(3)}, r"out_scales is \[3\] .*; expected \[4\] torch.float32"),
        ({"out": torch.ones(4, 16)}, r"out is \[4, 16\] torch.float32 .*; expected \[4, 16\] torch.float8_e4m3fn"),
        ({"out": torch.ones(3, 16).to(E4M3)}, r"out is \[3, 16\] .*; expected \[4, 16\]"),
        ({"out": torch.ones(16, 4).to(E4M3).T}, r"out has strides \(1, 4\)"),
        ({"unquantised": torch.ones(4, 16).half()}, "unquantised is .* torch.float16 .*; expected .* torch.float32"),
    ],
)
def test_a_broken_contract(changes, message):
    with Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32, fp8_regions=1) as workspace:
        arguments = {"out_dtype": E4M3, **changes}
        with pytest.raises(CollectiveError, match=message) as caught:
            fused_allreduce_rmsnorm(torch.zeros(4, 16), torch.zeros(4, 16), torch.ones(16), EPS, workspace, **arguments)
        assert str(caught.value).startswith("fused_allreduce_rmsnorm: ")
        assert workspace.collectives == 0


def test_quantised_rows_share_no_memory():
    with Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32, fp8_regions=1) as workspace:
        partial, residual, weight = workspace.buffer(4), torch.zeros(4, 16), torch.ones(16)
        bytes_of = {name: x.view(torch.uint8).flatten() for name, x in (("partial", partial), ("residual", residual))}
        call = functools.partial(fused_allreduce_rmsnorm, partial, residual, weight, EPS, workspace, out_dtype=E4M3)
        for name, memory in bytes_of.items():
            for start in (0, 40):
                with pytest.raises(CollectiveError, match=f"{name} and out |out and {name} "):
                    call(out=memory[start : start + 64].view(E4M3).view(4, 16))
                with pytest.raises(CollectiveError, match=f"{name} and out_scales|out_scales and {name}"):
                    call(out_scales=memory[start : start + 16].view(torch.float32))
        with pytest.raises(
            CollectiveError, match=r"residual and unquantised share memory; .* only unquantised may be partial"
        ):
            call(unquantised=residual)
        rows = workspace.fp8(4)
        with pytest.raises(CollectiveError, match="share memory"):
            call(out=rows, out_scales=rows.view(torch.uint8).flatten()[48:].view(torch.float32))
        assert call(out=rows, unquantised=partial)[0].shape == (4, 16)


def test_memory_for_quantised_rows():
    with Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32, fp8_regions=2) as workspace:
        assert workspace.fp8(3, start=5, region=1).shape == (3, 16)
        assert workspace.scales(3, start=5, region=1).shape == (3,)
        for bad in ({"start": 6}, {"region": 2}, {"region": -1}, {"start": -1}):
            with pytest.raises(CollectiveError, match="2 fp8 regions of 8 rows"):
                workspace.fp8(3, **bad)
        workspace.fp8(8)[2] = 1.0
        assert (workspace.buffer(8) == 0).all()
    with pytest.raises(CollectiveError, match=r"Workspace\.fp8: this workspace is closed"):
        workspace.fp8(1)
    with (
        Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32) as workspace,
        pytest.raises(CollectiveError, match="0 fp8 regions of 8 rows: create it with fp8_regions=1 or more"),
    ):
        fused_allreduce_rmsnorm(torch.zeros(4, 16), torch.zeros(4, 16), torch.ones(16), EPS, workspace, out_dtype=E4M3)
    with pytest.raises(CollectiveError, match="fp8_regions=-1; expected 0 or more"):
        Workspace(None, max_tokens=8, hidden=16, dtype=torch.float32, fp8_regions=-1)
