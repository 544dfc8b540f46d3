"""The p2p transport on real GPUs: numbers, bits, options, graphs, channels, faults, speed. Two ranks by default;
TOKENWEAVE_TEST_RANKS=4 runs the same on four, TOKENWEAVE_TEST_TRANSPORT=multimem-emulated with the body of the multicast
kernel.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_collective.py
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collective_cases import Case, bits, call, check, fresh_seed, make
from ranks import run_ranks
from tokenweave.collective import Workspace, cuda_backend, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows
from tokenweave.errors import CollectiveError

RANKS = int(os.environ.get("TOKENWEAVE_TEST_RANKS", "2"))
TRANSPORT = os.environ.get("TOKENWEAVE_TEST_TRANSPORT", "p2p")
same_bits = pytest.mark.skipif(TRANSPORT != "p2p", reason=f"{TRANSPORT} promises equal bits on all ranks alone")
pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(180)]
HIDDEN = (2048, 2880, 3584, 4096, 5120, 7168, 8192, 12288, 16384)
EPS = 1e-5


def _ranks(function, *args, timeout=120.0):
    return run_ranks(RANKS, function, *args, timeout=timeout, device="cuda")


def _open(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16, **options) -> Workspace:
    device = torch.device("cuda", torch.cuda.current_device())
    options = {"transport": TRANSPORT, "time_limit": 10.0, "channels": 2, "regions": 1, **options}
    return Workspace(dist.group.WORLD, max_tokens=tokens, hidden=hidden, dtype=dtype, device=device, **options)


def _gathered(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def _fresh(
    workspace: Workspace, tokens: int, seed: int, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(partial in the workspace, different on every rank; residual and weight, the same on all)."""
    device = workspace.device
    mine = torch.Generator(device).manual_seed(seed * 17 + workspace.rank)
    ours = torch.Generator(device).manual_seed(seed)
    partial = workspace.buffer(tokens, start=start)
    partial.normal_(generator=mine)
    residual = torch.randn(tokens, workspace.hidden, device=device, generator=ours).to(workspace.dtype)
    weight = (torch.rand(workspace.hidden, device=device, generator=ours) + 0.5).to(workspace.dtype)
    return partial, residual, weight


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def _expect_close(got: torch.Tensor, wanted: torch.Tensor, steps: float, what: str) -> None:
    """Every element within so many roundings of its size; a sum that cancels keeps the error of its terms."""
    ulp = torch.finfo(got.dtype).eps
    terms = 1e-5 if TRANSPORT == "p2p" else 8 * ulp  # a switch's sum is rounded before the residual is added
    excess = (got.double() - wanted).abs() - max(steps * ulp, 2e-6) * wanted.abs()
    worst = float(excess.max()) if excess.numel() else 0.0
    assert worst <= terms, f"{what}: an element is off by {worst:.3g} beyond rounding"  # NaN is not


def _one(workspace: Workspace, tokens: int, layout: str, ctas: int | None, seed: int) -> torch.Tensor:
    """One call against float64, every element, with guard rows around it; returns the rows."""
    partial, residual, weight = _fresh(workspace, tokens, seed, start=3)
    start = residual.clone()
    guards = [workspace.buffer(3, start=row).fill_(7.0) for row in (0, tokens + 3)]
    parts = _gathered(partial.clone())
    torch.cuda.synchronize()
    dist.barrier()
    rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, ctas=ctas, layout=layout)
    torch.cuda.synchronize()
    cuda_backend.check(workspace)
    own = range(tokens) if layout == "replicated" else owned_rows(tokens, workspace.rank, workspace.world_size)
    total = start.double()
    for part in parts:
        total += part.double()
    tolerance = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[workspace.dtype]
    if TRANSPORT != "p2p":
        tolerance *= 1.5  # the switch rounds the sum before the residual is added: one rounding more
    mine = slice(own.start, own.stop)
    what = f"{workspace.hidden=} {tokens=} {layout=} {ctas=}"
    if len(own):
        assert _relative(residual[mine], total[mine]) < tolerance
        _expect_close(residual[mine], total[mine], 1, f"residual, {what}")
    assert torch.equal(residual[: own.start], start[: own.start])
    assert torch.equal(residual[own.stop :], start[own.stop :])
    rounded = total.to(workspace.dtype).double()
    expected = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    if tokens:
        assert _relative(rows, expected) < tolerance, what
        _expect_close(rows, expected, 2, f"rows, {what}")
        for other in _gathered(rows):
            assert torch.equal(bits(other), bits(rows)), "ranks differ"
    assert all((guard == 7).all() for guard in guards)
    return rows.clone()


def _sizes(hidden: int, dtype: torch.dtype, most: int, seed: int) -> float:
    world = dist.get_world_size()
    began = time.perf_counter()
    with _open(most + 8, hidden, dtype) as workspace:
        for tokens in sorted({0, 1, world - 1, world, world + 1, 257, 1000, 4095, most}):
            if tokens > most:
                continue
            for ctas in (None, 1, 8):
                _one(workspace, tokens, "sharded", ctas, seed + tokens)
            if tokens <= 1000:  # also more than an inbox holds
                _one(workspace, tokens, "replicated", None, seed + tokens)
    return time.perf_counter() - began


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_sizes_against_float64(hidden, dtype):
    _ranks(_sizes, hidden, dtype, 4096 if dtype is torch.float32 else 16384, fresh_seed())


def test_a_very_large_batch():
    _ranks(_sizes, 4096, torch.bfloat16, 131072, fresh_seed())


def test_odd_hidden_sizes():
    for hidden in (8, 72, 256, 576, 1032, 6000):  # 256: a ring of exactly 48 KiB
        _ranks(_sizes, hidden, torch.bfloat16, 1000, fresh_seed())


def _options(seed: int) -> int:
    pick = random.Random(seed)
    count = 0
    for number in range(60):
        tokens = pick.choice([1, 2, 5, 33, 130])
        ctas = pick.choice([None, 1, 2])  # of 130 rows, one or two blocks have enough for the ring
        rows = None
        if pick.random() < 0.4:
            rows = tuple(sorted(pick.sample(range(tokens), pick.randrange(tokens + 1))))
        case = Case(
            tokens,
            pick.choice([72, 2880, 4096]),
            pick.choice([torch.bfloat16, torch.float16, torch.float32]),
            has_residual=pick.random() < 0.7,
            post_norm=pick.random() < 0.4,
            weight_offset=pick.choice([0.0, 1.0]),
            bias=pick.random() < 0.4,
            replicated=pick.random() < 0.5,
            rows=rows,
            use_out=pick.random() < 0.5,
            ctas=ctas,
        )
        with _open(tokens, case.hidden, case.dtype) as workspace:
            data = make(case, workspace.world_size, seed + number)
            residual, result = call(case, data, workspace)
            torch.cuda.synchronize()
            cuda_backend.check(workspace)
            check(case, data, residual, result, workspace, rounded_sum=workspace.transport != "p2p")
            for other in _gathered(result):
                assert torch.equal(bits(other), bits(result)), case
        count += 1
    return count


def test_options_against_float64():
    assert _ranks(_options, fresh_seed()) == [60] * RANKS


def _float32_weights() -> None:
    with _open(64, 4096) as workspace:
        partial, residual, weight = _fresh(workspace, 64, 3)
        kept, before = partial.clone(), residual.clone()
        fine = weight.float() * 1.0001
        rows, _ = fused_allreduce_rmsnorm(partial, residual, fine, EPS, workspace)
        one = rows.clone()
        partial.copy_(kept)
        other, _ = fused_allreduce_rmsnorm(partial, before, weight, EPS, workspace)
        assert _relative(one, other.double() * 1.0001) < 3e-3
        with pytest.raises(CollectiveError, match="all of them in"):
            fused_allreduce_rmsnorm(partial, before, fine, EPS, workspace, bias=weight)


def test_float32_weights():
    _ranks(_float32_weights)


def _bits_of_a_row(seed: int) -> None:
    """A row's bits: the same in any batch, at any position, with any number of blocks, one-shot or two-shot."""
    for hidden, dtype in ((4096, torch.bfloat16), (2880, torch.float16), (8192, torch.bfloat16)):
        with _open(3000, hidden, dtype) as workspace:
            partial, residual, weight = _fresh(workspace, 3000, seed)
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
    _ranks(_bits_of_a_row, fresh_seed())


def _same_as_the_torch_transport(seed: int) -> float:
    """Sums are exact in both; the norms' trees differ, so a rounding may."""
    with _open(300, 4096) as one, _open(300, 4096, transport="torch") as two:
        partial, residual, weight = _fresh(one, 300, seed)
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
    print("share of elements that round differently:", _ranks(_same_as_the_torch_transport, fresh_seed()))


def _not_a_number() -> None:
    for layout, ctas in (("sharded", None), ("sharded", 1), ("replicated", None)):  # plain loads, ring, one-shot
        with _open(40, 4096) as workspace:
            partial, residual, weight = _fresh(workspace, 40, 5)
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
    _ranks(_not_a_number)


def _outside_the_workspace() -> None:
    with _open(200, 4096) as workspace:
        partial, residual, weight = _fresh(workspace, 200, 9)
        p, r = partial.clone(), residual.clone()
        rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace)
        rows = rows.clone()
        assert workspace.copies == 0
        kept = p.clone()
        result, _ = fused_allreduce_rmsnorm(p, r.clone(), weight, EPS, workspace)
        assert result.data_ptr() == p.data_ptr()  # in place all the same
        assert torch.equal(rows, result)
        assert workspace.copies == 2
        p = kept
        picked, _ = fused_allreduce_rmsnorm(
            p, r.clone(), weight, EPS, workspace, rows=torch.arange(1, 200, 3).to(p.device)
        )
        assert torch.equal(picked, rows[1:200:3])
        out = torch.empty_like(p)
        result, _ = fused_allreduce_rmsnorm(p, r.clone(), weight, EPS, workspace, out=out)
        assert result.data_ptr() == out.data_ptr()
        assert torch.equal(rows, out)
    with _open(200, 4096, staging=False) as workspace, pytest.raises(CollectiveError, match="staging=True"):
        fused_allreduce_rmsnorm(p, r, weight, EPS, workspace)


def test_memory_outside_the_workspace_is_copied_and_counted():
    _ranks(_outside_the_workspace)


def _row_count() -> None:
    with _open(600, 4096) as workspace:
        count = torch.zeros(1, dtype=torch.int32, device=workspace.device)
        partial, residual, weight = _fresh(workspace, 512, 11)
        p, r = partial.clone(), residual.clone()
        for layout in ("sharded", "replicated"):
            graph = torch.cuda.CUDAGraph()
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, row_count=count)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, row_count=count)
            for real in (0, 1, 3, 100, 511, 512):
                partial.copy_(p)
                residual.copy_(r)
                count.fill_(real)
                graph.replay()
                got = partial.clone()
                assert torch.equal(got[real:], p[real:])
                if layout == "replicated":
                    assert torch.equal(residual[real:], r[real:])
                x, res = workspace.buffer(real), r[:real].clone()
                x.copy_(p[:real])
                fused_allreduce_rmsnorm(x, res, weight, EPS, workspace, layout=layout)
                assert torch.equal(bits(x), bits(got[:real])), (layout, real)
            del graph


def test_the_row_count_is_read_on_the_device():
    _ranks(_row_count)


def _random_calls(calls: int, seed: int) -> tuple[int, float]:
    """Random sizes, layouts, blocks, two channels; graphs replayed in between; every 50th call is checked."""
    pick = random.Random(seed)
    rows_done, began = 0, time.perf_counter()
    with _open(2100, 4096) as workspace:
        graphs = []
        for tokens, layout in ((5, "replicated"), (333, "sharded"), (2048, "sharded")):
            partial, residual, weight = _fresh(workspace, tokens, seed)
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
            graphs.append((graph, partial, residual, tokens))
        residual = torch.randn(2100, 4096, device=workspace.device).bfloat16()
        weight = torch.ones(4096, device=workspace.device).bfloat16()
        for number in range(calls):
            tokens = pick.choice([0, 1, 2, 3, 17, 64, 65, 200, 511, 800, 2048])
            layout = "replicated" if tokens <= 512 and pick.random() < 0.5 else "sharded"
            ctas, channel, replay = pick.choice([None, 1, 4, 8, 31]), pick.randrange(2), pick.random() < 0.2
            if replay:
                graph, partial, res, size = pick.choice(graphs)
                graph.replay()
                partial.normal_()
                res.normal_()
                rows_done += size
            elif number % 50 == 0:
                _one(workspace, tokens, layout, ctas, seed + number)
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
        cuda_backend.check(workspace)
        del graphs, graph
    return rows_done, time.perf_counter() - began


def test_ten_thousand_random_calls():
    results = _ranks(_random_calls, 10_000, fresh_seed())
    print(f"{results[0][0]} rows in {results[0][1]:.1f} s")


def _soak(rows: int, seed: int) -> int:
    """Fresh data each time, every element compared with float32 sums."""
    done, number = 0, 0
    pick = random.Random(seed)
    with _open(8200, 4096) as workspace:
        while done < rows:
            tokens = pick.choice([8192, 8191, 4096, 6000, 300, 64])
            layout = "replicated" if tokens <= 512 else "sharded"
            _one(workspace, tokens, layout, pick.choice([None, 8, 12]), seed + number)
            done, number = done + tokens, number + 1
    return done


def test_soak_of_a_million_rows():
    assert min(_ranks(_soak, 1_000_000, fresh_seed(), timeout=150)) >= 1_000_000


def _two_streams(rounds: int) -> None:
    """Two collectives in flight on two streams, each with its channel and its region."""
    with _open(1024, 4096, regions=2) as workspace:
        weight = torch.ones(4096, device=workspace.device).bfloat16()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        x = [workspace.buffer(1024, region=i) for i in range(2)]
        start = [torch.randn(1024, 4096, device=workspace.device).bfloat16() for _ in range(2)]
        residual = [torch.zeros(1024, 4096, device=workspace.device).bfloat16() for _ in range(2)]
        expected = []
        for i in range(2):
            x[i].copy_(start[i])
            rows, _ = fused_allreduce_rmsnorm(x[i], residual[i].clone(), weight, EPS, workspace, ctas=8)
            expected.append(rows.clone())
        for _ in range(rounds):
            for i in range(2):
                streams[i].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[i]):
                    x[i].copy_(start[i])
                    residual[i].zero_()
                    fused_allreduce_rmsnorm(x[i], residual[i], weight, EPS, workspace, ctas=8, channel=i)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        for i in range(2):
            assert torch.equal(bits(x[i]), bits(expected[i]))


def test_two_collectives_in_flight():
    _ranks(_two_streams, 300)


def _several_workspaces() -> None:
    with _open(64, 4096) as a, _open(64, 4096) as b, _open(40, 2880) as c:
        for number in range(20):
            for workspace in (a, b, c, a):
                _one(workspace, 29, "sharded", None, number)
                _one(workspace, 29, "replicated", None, number)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        _open(4096, 4096).close()
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20, "closed workspaces keep their memory"


def test_several_workspaces():
    _ranks(_several_workspaces)


def _compiled() -> None:
    with _open(256, 4096) as workspace:
        device = workspace.device
        matrix = (
            torch.randn(4096, 4096, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16() / 64
        )
        weight = torch.ones(4096, device=device).bfloat16()

        def layer(x, residual, rows):
            y, _ = fused_allreduce_rmsnorm(x @ matrix, residual, weight, EPS, workspace)
            z, _ = fused_allreduce_rmsnorm(y @ matrix, residual, weight, EPS, workspace, rows=rows)
            return z

        generator = torch.Generator(device).manual_seed(2 + workspace.rank)
        x = torch.randn(200, 4096, device=device, generator=generator).bfloat16()
        rows = torch.tensor([0, 7, 100, 199], device=device)
        one, two = torch.zeros_like(x), torch.zeros_like(x)
        expected = layer(x, one, rows)
        compiled = torch.compile(layer, fullgraph=True)
        result = compiled(x, two, rows)
        assert torch.equal(expected, result)
        assert torch.equal(one, two)
        for mode in ("eager", "compiled"):
            run = layer if mode == "eager" else compiled
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = run(x, two, rows)
            for _ in range(1000):
                two.zero_()
                graph.replay()
            assert torch.equal(captured, expected)
            run(x, two, rows)
            del graph


def test_torch_compile_and_graphs():
    _ranks(_compiled)


def _a_peer_that_does_not_come(layout: str) -> str:
    workspace = _open(64, 4096, time_limit=1.0)
    partial, residual, weight = _fresh(workspace, 64, 1)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, channel=1)
    torch.cuda.synchronize()
    message = ""
    if workspace.rank == 0:
        began = time.perf_counter()
        fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, channel=1)
        torch.cuda.synchronize()  # returns: the wait has a limit
        assert time.perf_counter() - began < 4
        with pytest.raises(CollectiveError) as caught:
            cuda_backend.check(workspace)
        message = str(caught.value)
        with pytest.raises(CollectiveError):  # poisoned from now on
            fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout, channel=1)
    dist.barrier()
    workspace.close()
    with _open(72, 4096) as again:
        _one(again, 64, layout, None, 2)
    return message


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_peer_that_does_not_come(layout):
    message = _ranks(_a_peer_that_does_not_come, layout)[0]
    for part in ("rank 0", "time limit", "peer", "channel 1", "phase start", "epoch"):
        assert part in message


def _ranks_that_differ(layout: str) -> str:
    workspace = _open(64, 4096, time_limit=5.0)
    partial, residual, weight = _fresh(workspace, 64, 1)
    tokens = 64 if workspace.rank == 0 else 63
    began = time.perf_counter()
    fused_allreduce_rmsnorm(partial[:tokens], residual[:tokens], weight, EPS, workspace, layout=layout)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 4, "a mismatch is an error at once, not after the time limit"
    with pytest.raises(CollectiveError) as caught:
        cuda_backend.check(workspace)
    dist.barrier()
    workspace.close()
    return str(caught.value)


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_ranks_that_call_with_different_shapes(layout):
    for message in _ranks(_ranks_that_differ, layout):
        assert "different launch" in message


def _killed(layout: str, folder: str) -> None:
    """Rank 1 is gone; the others write down what they were told, after a call that they could end."""
    workspace = _open(64, 4096, time_limit=0.5)
    partial, residual, weight = _fresh(workspace, 64, 1)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
    torch.cuda.synchronize()
    dist.barrier()
    if workspace.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
    torch.cuda.synchronize()
    try:
        cuda_backend.check(workspace)
    except CollectiveError as error:
        Path(folder, f"rank{workspace.rank}").write_text(str(error))


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_killed_peer_is_named(layout, tmp_path):
    with pytest.raises(RuntimeError, match="rank"):  # its processes are thrown away: the next test gets new ones
        _ranks(_killed, layout, str(tmp_path))
    for rank in set(range(RANKS)) - {1}:
        text = (tmp_path / f"rank{rank}").read_text()
        for part in (f"rank {rank} waited longer", "channel 0", "phase start"):
            assert part in text


def _two_groups(seed: int) -> None:
    """Halves of the ranks, or two groups of the same two; calls of both between each other."""
    world, rank = dist.get_world_size(), dist.get_rank()
    members = [list(range(world // 2)), list(range(world // 2, world))] if world >= 4 else [list(range(world))] * 2
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [(n, group) for n, (group, ranks) in enumerate(zip(groups, members, strict=True)) if rank in ranks]
    options = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", rank),
        "transport": TRANSPORT,
        "time_limit": 10.0,
    }
    hidden = (4096, 2880)  # the groups differ in every size
    workspaces = [Workspace(group, max_tokens=300, hidden=hidden[n], **options) for n, group in mine]
    for number in range(50):
        for (n, group), workspace in zip(mine, workspaces, strict=True):
            tokens, layout = (33, 200)[n] + number, ("sharded", "replicated")[(number + n) % 2]
            partial, residual, weight = _fresh(workspace, tokens, seed + 1000 * n + number)
            total = residual.double()
            parts = [torch.empty_like(partial) for _ in range(workspace.world_size)]
            dist.all_gather(parts, partial.clone(), group=group)
            for part in parts:
                total += part.double()
            rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout=layout)
            torch.cuda.synchronize()
            cuda_backend.check(workspace)
            rounded = total.bfloat16().double()
            expected = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
            _expect_close(rows, expected, 2, f"group {n}, {tokens=} {layout=}")
    for workspace in workspaces:
        workspace.close()
    dist.barrier()
    for _, group in mine:
        dist.destroy_process_group(group)


def test_two_groups():
    _ranks(_two_groups, fresh_seed())


def _expandable_segments() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        with _open(2100, 4096) as workspace:
            for layout in ("sharded", "replicated"):
                _one(workspace, 2048 if layout == "sharded" else 200, layout, None, 1)
            partial, residual, weight = _fresh(workspace, 200, 9)
            outside = partial.clone()  # where peers cannot reach it
            rows, _ = fused_allreduce_rmsnorm(partial, residual.clone(), weight, EPS, workspace)
            kept = rows.clone()
            rows, _ = fused_allreduce_rmsnorm(outside, residual, weight, EPS, workspace)
            assert torch.equal(rows, kept)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_expandable_segments():
    _ranks(_expandable_segments)


def _contract() -> None:
    with _open(64, 4096) as workspace:
        partial, residual, weight = _fresh(workspace, 64, 1)
        for options, message in (
            ({"ctas": 0}, "ctas=0; expected 1 to"),
            ({"ctas": 1000}, "ctas=1000; expected 1 to"),
            ({"ctas": 6, "cluster": 4}, "cluster=4 does not divide ctas=6"),
            ({"channel": 2}, "channel=2; this workspace has channels 0..1"),
        ):
            with pytest.raises(CollectiveError, match=message):
                fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, **options)
        with pytest.raises(CollectiveError, match="residual has strides"):
            fused_allreduce_rmsnorm(partial, residual.T.contiguous().T, weight, EPS, workspace)
        rows, _ = fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, ctas=8, cluster=4)
        assert torch.isfinite(rows).all()


def test_contract():
    _ranks(_contract)
