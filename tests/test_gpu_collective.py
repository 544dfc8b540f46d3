"""The p2p transport's numbers on real GPUs: sizes, options, bits, NaN, many calls.

PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_collective.py
"""

from __future__ import annotations

import random
import time

import pytest
import torch

import rounding_cases
from collective_cases import EPS, Case, bits, call, fresh_seed
from gpu_cases import (
    RANKS,
    check_clusters,
    check_options,
    check_sizes,
    checked,
    checked_call,
    fresh,
    gathered,
    on_ranks,
    opened,
    refill,
    same_bits,
)
from tokenweave.collective import fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows
from tokenweave.errors import CollectiveError

pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]
HIDDEN = (2048, 2880, 3584, 4096, 5120, 7168, 8192, 12288, 16384)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_sizes_against_float64(hidden, dtype):
    most = 4096 if dtype is torch.float32 else 16384
    print(f"{max(on_ranks(check_sizes, hidden, dtype, most, fresh_seed())):.1f} s")


def test_a_very_large_batch():
    print(f"{max(on_ranks(check_sizes, 4096, torch.bfloat16, 131072, fresh_seed())):.1f} s")


def test_odd_hidden_sizes():
    for hidden in (8, 72, 256, 576, 1032, 6000):  # 256: a ring of exactly 48 KiB
        on_ranks(check_sizes, hidden, torch.bfloat16, 1000, fresh_seed())


def test_options_against_float64():
    assert on_ranks(check_options, fresh_seed()) == [60] * RANKS


@pytest.mark.parametrize("hidden", [4096, 7168])
def test_clusters_against_float64(hidden):
    on_ranks(check_clusters, hidden, fresh_seed())


def _float32_vectors(seed: int) -> None:
    every = {"post_norm": True, "bias": True, "weight_offset": 1.0}
    for case in (
        Case(64, 4096, ctas=1),  # the ring
        Case(64, 4096),
        Case(64, 4096, replicated=True),
        Case(130, 2880, torch.float16, ctas=1, **every),
        Case(33, 2880, torch.float16, **every),
        Case(33, 2880, torch.float16, replicated=True, **every),
        Case(33, 2880, torch.float32, bias=True),
    ):
        with opened(case.tokens, case.hidden, case.dtype) as workspace:
            data = rounding_cases.make(case, workspace.world_size, seed)
            residual, rows = call(case, data, workspace)
            torch.cuda.synchronize()
            workspace.check()
            rounding_cases.check(case, data, residual, rows, workspace)
            assert all(torch.equal(bits(other), bits(rows)) for other in gathered(rows)), f"ranks differ: {case}"
    with opened(8, 4096) as workspace:
        partial, residual, weight = fresh(workspace, 8, seed)
        with pytest.raises(CollectiveError, match="all of them in"):
            fused_allreduce_rmsnorm(partial, residual, weight.float(), EPS, workspace, bias=weight)


def test_float32_vectors():
    on_ranks(_float32_vectors, fresh_seed())


def _bits_of_a_row(seed: int) -> None:
    """A row's bits: the same in any batch, at any position, with any number of blocks, one-shot or two-shot."""
    for hidden, dtype in ((4096, torch.bfloat16), (2880, torch.float16), (8192, torch.bfloat16)):
        with opened(3000, hidden, dtype) as workspace:
            partial, residual, weight = fresh(workspace, 3000, seed)
            p, r = partial.clone(), residual.clone()
            wanted: list[torch.Tensor] = []
            for tokens, at in ((1, 0), (7, 3), (64, 63), (700, 1), (3000, 2999), (3000, 10)):
                for layout, ctas in (("sharded", None), ("sharded", 2), ("sharded", 12), ("replicated", None)):
                    if layout == "replicated" and tokens > 700:
                        continue
                    x, res = workspace.buffer(tokens), r[:tokens].clone()
                    x.copy_(p[:tokens])
                    x[at], res[at] = p[500], r[500]
                    rows, _ = fused_allreduce_rmsnorm(x, res, weight, EPS, workspace, ctas=ctas, layout=layout)
                    wanted.append(rows[at].clone())
            for row in wanted[1:]:
                assert torch.equal(bits(row), bits(wanted[0])), (hidden, dtype)


@same_bits
def test_bits_of_a_row_depend_on_nothing_else():
    on_ranks(_bits_of_a_row, fresh_seed())


def _same_as_the_torch_transport(seed: int) -> float:
    """Sums are exact in both; the norms' trees differ, so a rounding may."""
    with opened(300, 4096) as one, opened(300, 4096, transport="torch") as two:
        partial, residual, weight = fresh(one, 300, seed)
        x, r = two.buffer(300), residual.clone()
        x.copy_(partial)
        a, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, one)
        b, _ = fused_allreduce_rmsnorm(x, r, weight, EPS, two)
        own = owned_rows(300, one.rank, one.world_size)
        assert torch.equal(residual[own.start : own.stop], r[own.start : own.stop])
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
        return float((a != b).float().mean())


@same_bits
def test_same_as_the_torch_transport():
    print("share of elements that round differently:", on_ranks(_same_as_the_torch_transport, fresh_seed()))


def _not_a_number() -> None:
    for layout, ctas in (("sharded", None), ("sharded", 1), ("replicated", None)):  # plain loads, ring, one-shot
        with opened(40, 4096) as workspace:
            partial, residual, weight = fresh(workspace, 40, 5)
            kept, before = partial.clone(), residual.clone()
            clean, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, ctas=ctas)
            clean = clean.clone()
            partial.copy_(kept)
            partial[3, 17], partial[20, 5], partial[39, 4095] = float("nan"), float("inf"), -float("inf")
            partial[7] = -0.0  # the one-shot kernel's sentinel, as data
            rows, _ = fused_allreduce_rmsnorm(partial, before, weight, EPS, workspace, layout=layout, ctas=ctas)
            assert torch.isnan(rows[3]).all()
            assert torch.isnan(rows[20]).any()
            others = [i for i in range(40) if i not in (3, 7, 20, 39)]
            assert torch.equal(bits(rows[others]), bits(clean[others]))
            assert torch.isfinite(rows[7]).all()


def test_nan_and_infinity_stay_in_their_row():
    on_ranks(_not_a_number)


def _random_calls(calls: int, seed: int) -> tuple[int, int, float]:
    """Random sizes, layouts, blocks, two channels; graphs replayed in between. Returns (rows, calls compared, seconds).

    One eager call in 50 and one replay in 20 is compared with float64, on both channels.
    """
    pick = random.Random(seed)
    rows_done, began = 0, time.perf_counter()
    compared = {(kind, channel): 0 for kind in ("eager", "replay") for channel in (0, 1)}
    with opened(2100, 4096) as workspace:
        graphs = []
        for tokens, layout, channel in (
            (5, "replicated", 0),
            (333, "sharded", 1),
            (64, "replicated", 1),
            (2048, "sharded", 0),
        ):
            partial, residual, weight = fresh(workspace, tokens, seed)
            options = {"layout": layout, "channel": channel}
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, **options)
            graphs.append((graph, partial, residual, weight, layout, channel))
        residual = torch.randn(2100, 4096, device=workspace.device).bfloat16()
        weight = torch.ones(4096, device=workspace.device).bfloat16()
        for number in range(calls):
            tokens = pick.choice([0, 1, 2, 3, 17, 64, 65, 200, 511, 800, 2048])
            layout = "replicated" if tokens <= 512 and pick.random() < 0.5 else "sharded"
            ctas, channel, replay = pick.choice([None, 1, 4, 8, 31]), pick.randrange(2), pick.random() < 0.2
            if replay:
                graph, x, res, norm, layout, channel = pick.choice(graphs)
                if pick.random() < 0.05:
                    refill(workspace, x, res, seed + number)
                    what = f"call {number}, a replay on {channel=}: {len(x)} rows, {layout=}"
                    checked(workspace, x, res, norm, layout, graph.replay, what)
                    compared["replay", channel] += 1
                else:
                    graph.replay()
                x.normal_()
                res.normal_()
                tokens = len(x)
            elif pick.random() < 0.02:
                checked_call(workspace, tokens, layout, ctas, seed + number, channel=channel)
                compared["eager", channel] += 1
            else:
                x = workspace.buffer(tokens)
                fused_allreduce_rmsnorm(
                    x, residual[:tokens], weight, EPS, workspace, layout=layout, ctas=ctas, channel=channel
                )
                if number % 10 == 0:
                    residual.normal_()
                    workspace.buffer(2100).normal_()
            rows_done += tokens
        torch.cuda.synchronize()
        workspace.check()
        del graphs, graph
    assert min(compared.values()) > calls // 1000, compared
    return rows_done, sum(compared.values()), time.perf_counter() - began


def test_ten_thousand_random_calls():
    results = on_ranks(_random_calls, 10_000, fresh_seed())
    print(f"{results[0][0]} rows in {results[0][2]:.1f} s, {results[0][1]} calls compared")


def _soak(rows: int, seed: int) -> tuple[int, float]:
    """(rows, seconds). Fresh data each time, every element compared with float64 sums."""
    done, number, began = 0, 0, time.perf_counter()
    pick = random.Random(seed)
    with opened(8200, 4096) as workspace:
        while done < rows:
            tokens = pick.choice([8192, 8191, 4096, 6000, 300, 64])
            layout = "replicated" if tokens <= 512 else "sharded"
            checked_call(workspace, tokens, layout, pick.choice([None, 8, 12]), seed + number)
            done, number = done + tokens, number + 1
    return done, time.perf_counter() - began


def test_soak_of_a_million_rows():
    done, seconds = min(on_ranks(_soak, 1_000_000, fresh_seed(), timeout=150))
    assert done >= 1_000_000
    print(f"{done} rows in {seconds:.1f} s")
