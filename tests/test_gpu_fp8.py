"""fp8 output of the GPU kernels against float64: both kinds of scales, every kernel, graphs, options, speed.

PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_fp8.py
"""

from __future__ import annotations

import random
import statistics

import pytest
import torch
import torch.distributed as dist

from collective_cases import EPS, Case, fresh_seed, make
from fp8_cases import E4M3, Quantised, call, check, fingerprint
from gpu_cases import RANKS, SMALL, TRANSPORT, fresh, gathered, on_ranks, opened, random_case
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.errors import CollectiveError

pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]


def _run(q: Quantised, workspace: Workspace, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One call against float64, the same bits on all ranks; returns the bits."""
    result = call(q, workspace, seed)
    torch.cuda.synchronize()
    workspace.check()
    check(q, result, workspace, seed)
    device = workspace.device
    for mine in filter(torch.Tensor.numel, fingerprint(result)):
        for other in gathered(mine.to(device)):
            assert torch.equal(other.cpu(), mine), f"ranks differ: {q}"
    return fingerprint(result)


def _sizes(hidden: int, dtype: torch.dtype, seed: int) -> None:
    world = dist.get_world_size()
    for tokens in (0, 1, world - 1, world, world + 1, 257, 1000):
        with opened(tokens + 4, hidden, dtype, fp8_regions=1) as workspace:
            for replicated in (False, True):
                for static in (None, 0.03):
                    case = Case(tokens, hidden, dtype, replicated=replicated)
                    _run(Quantised(case, static, both=tokens % 2 == 0, start=tokens % 3), workspace, seed + tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [2880, 4096, 16384])
def test_sizes_against_float64(hidden, dtype):
    on_ranks(_sizes, hidden, dtype, fresh_seed())


def test_odd_hidden_sizes():
    for hidden in (8, 72, 576, 1032, 6000):
        on_ranks(_sizes, hidden, torch.bfloat16, fresh_seed())


def _options(seed: int) -> None:
    pick = random.Random(seed)
    for number in range(40):
        tokens = pick.choice([1, 2, 5, 33, 130])
        case = random_case(pick, tokens, pick.choice(SMALL), pick.choice([torch.bfloat16, torch.float16]))
        q = Quantised(case, pick.choice([None, 0.02]), pick.random() < 0.5, pick.randrange(3))
        with opened(tokens + 4, case.hidden, case.dtype, fp8_regions=1) as workspace:
            _run(q, workspace, seed + number)


def test_options_against_float64():
    on_ranks(_options, fresh_seed())


def _kernels_agree(seed: int) -> None:
    """Ring, plain loads and one-shot: the same bits, and those of rows that come unquantised with them."""
    with opened(600, 4096, fp8_regions=1) as workspace:
        partial, residual, weight = fresh(workspace, 600, seed)
        kept = partial.clone()
        found = []
        for options in ({"ctas": 2}, {"ctas": 64}, {"layout": "replicated"}):
            for both in (False, True):
                partial.copy_(kept)
                more = {"unquantised": partial} if both else {}
                rows, scales = fused_allreduce_rmsnorm(
                    partial, residual.clone(), weight, EPS, workspace, out_dtype=E4M3, **options, **more
                )
                found.append((rows.view(torch.uint8).clone(), scales.clone()))
                if both:
                    plain = partial.clone()
                    partial.copy_(kept)
                    alone, _ = fused_allreduce_rmsnorm(partial, residual.clone(), weight, EPS, workspace, **options)
                    assert torch.equal(alone, plain)
        for rows, scales in found[1:]:
            assert torch.equal(scales, found[0][1])
            assert torch.equal(rows, found[0][0])
        oracle = opened(600, 4096, fp8_regions=1, transport="torch")
        rows, scales = fused_allreduce_rmsnorm(kept, residual.clone(), weight, EPS, oracle, out_dtype=E4M3)
        torch.testing.assert_close(scales, found[0][1], rtol=1e-5, atol=0)
        differ = (rows.view(torch.uint8) != found[0][0]).float().mean()
        assert differ < 1e-3, f"{float(differ):.1e} of the values differ from the torch transport's"
        oracle.close()


@pytest.mark.skipif(TRANSPORT != "p2p", reason=f"{TRANSPORT} promises equal bits on all ranks alone")
def test_kernels_give_the_same_bits():
    on_ranks(_kernels_agree, fresh_seed())


def _bad_values() -> None:
    for layout in ("sharded", "replicated"):
        with opened(8, 4096, fp8_regions=1) as workspace:
            device = workspace.device
            x, residual = workspace.buffer(6), torch.zeros(6, 4096, device=device).bfloat16()
            weight = torch.ones(4096, device=device).bfloat16()
            x.fill_(1.0)
            x[1], x[3, 5] = 0.0, float("nan")
            x[4, :100] = 50.0  # normalised: 6.2; 448 * 2^-9 is 0.875
            args = (x, residual, weight, EPS, workspace)
            rows, scales = fused_allreduce_rmsnorm(*args, out_dtype=E4M3, layout=layout)
            assert (rows[1].float() == 0).all()
            assert float(scales[1]) == 2.0**-40
            assert scales[3].isnan()
            assert rows[3].float().isnan().all()
            assert torch.isfinite(rows[[0, 1, 2, 4, 5]].float()).all()
            x.nan_to_num_(0.0)
            residual.zero_()
            x[4, :100], x[4, 100:] = 50.0, 1.0
            scale = torch.full((1,), 2.0**-9, device=device)
            rows, returned = fused_allreduce_rmsnorm(*args, out_dtype=E4M3, scale=scale, layout=layout)
            assert returned is scale
            assert (rows[4, :100].float() == 448).all()


def test_zero_rows_nan_and_saturation():
    on_ranks(_bad_values)


def _replay(seed: int) -> None:
    with opened(300, 4096, fp8_regions=1) as workspace:
        partial, residual, weight = fresh(workspace, 300, seed)
        scale = torch.full((1,), 0.02, device=workspace.device)
        start, before = partial.clone(), residual.clone()
        for options in ({}, {"scale": scale}, {"layout": "replicated"}, {"unquantised": partial}):
            args = (partial, residual, weight, EPS, workspace)
            rows, scales = fused_allreduce_rmsnorm(*args, out_dtype=E4M3, **options)
            wanted = rows.view(torch.uint8).clone(), scales.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                fused_allreduce_rmsnorm(*args, out_dtype=E4M3, **options)
            for _ in range(200):
                partial.copy_(start)
                residual.copy_(before)
                rows.view(torch.uint8).fill_(0x7F)
                graph.replay()
            torch.cuda.synchronize()
            workspace.check()
            assert torch.equal(rows.view(torch.uint8), wanted[0])
            assert torch.equal(scales, wanted[1])
            partial.copy_(start)
            residual.copy_(before)
            del graph


def test_graphs_replay():
    on_ranks(_replay, fresh_seed())


def _contract() -> None:
    with opened(16, 4096, fp8_regions=1) as workspace:
        partial, residual, weight = fresh(workspace, 8, 1)
        args = (partial, residual, weight, EPS, workspace)
        elsewhere = torch.empty(8, 4096, device=workspace.device, dtype=E4M3)
        scales = torch.empty(8, device=workspace.device)
        with pytest.raises(CollectiveError, match=r"out is outside the workspace.*workspace\.fp8"):
            fused_allreduce_rmsnorm(*args, out_dtype=E4M3, out=elsewhere)
        with pytest.raises(CollectiveError, match=r"out_scales is outside the workspace.*workspace\.scales"):
            fused_allreduce_rmsnorm(*args, out_dtype=E4M3, out_scales=scales)
        among_buffers = workspace.buffer(4, start=8).view(E4M3).view(8, 4096)
        with pytest.raises(CollectiveError, match="out is outside the workspace"):
            fused_allreduce_rmsnorm(*args, out_dtype=E4M3, out=among_buffers)
        rows, got = fused_allreduce_rmsnorm(
            *args, out_dtype=E4M3, out=elsewhere, out_scales=scales, layout="replicated"
        )
        assert rows is elsewhere
        assert got is scales
        assert torch.isfinite(scales).all()


def test_contract():
    on_ranks(_contract)


def _graph_us(workspace: Workspace, tokens: int, ctas: int, seed: int, **options) -> float:
    """Microseconds of one call: median of graph replays of 20 calls, the slowest rank's."""
    partial, residual, weight = fresh(workspace, tokens, seed)
    args = (partial, residual, weight, EPS, workspace)
    fused_allreduce_rmsnorm(*args, ctas=ctas, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(20):
            fused_allreduce_rmsnorm(*args, ctas=ctas, **options)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        partial.normal_()
        residual.normal_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 20)
    del graph
    slowest = torch.tensor([statistics.median(times)], device=workspace.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _speed() -> list[tuple[int, int, dict[str, float]]]:
    found = []
    with opened(16384, 4096, fp8_regions=1) as workspace:
        scale = torch.full((1,), 0.02, device=workspace.device)
        kinds = {"bf16": {}, "fp8 static": {"out_dtype": E4M3, "scale": scale}, "fp8 rows": {"out_dtype": E4M3}}
        for tokens in (256, 1024, 4096, 16384):
            for ctas in (4, 8, 12, 64):
                found.append((tokens, ctas, {k: _graph_us(workspace, tokens, ctas, 1, **v) for k, v in kinds.items()}))
    return found


@pytest.mark.skipif(TRANSPORT != "p2p", reason="the emulated multicast's speed says nothing")
def test_speed():
    """Partial sums stay bf16, so of the bytes on two ranks' link a quarter goes away: 1.33x is the limit there."""
    best: dict[int, dict[str, float]] = {}
    for tokens, ctas, us in on_ranks(_speed)[0]:
        ratios = "  ".join(f"{k} {v:7.1f} us ({us['bf16'] / v:.2f}x)" for k, v in us.items())
        print(f"{tokens:6} tokens, hidden 4096, {ctas:2} CTAs: {ratios}")
        for kind, time in us.items():
            best.setdefault(tokens, {}).setdefault(kind, time)
            best[tokens][kind] = min(best[tokens][kind], time)
    for tokens, us in best.items():
        print(
            f"{tokens:6} tokens, best CTAs: "
            + "  ".join(f"{k} {v:.1f} us ({us['bf16'] / v:.2f}x)" for k, v in us.items())
        )
    for tokens in (4096, 16384):
        assert best[tokens]["fp8 rows"] * 1.1 < best[tokens]["bf16"]


def test_a_workspace_without_memory_for_it_says_so():
    on_ranks(_no_memory)


def _no_memory() -> None:
    with opened(8, 72) as workspace:
        data = make(Case(4, 72), workspace.world_size, 1)
        partial = workspace.buffer(4)
        with pytest.raises(CollectiveError, match="create it with fp8_regions=1 or more"):
            fused_allreduce_rmsnorm(
                partial, torch.zeros_like(partial), data.weight.to(partial.device), EPS, workspace, out_dtype=E4M3
            )
