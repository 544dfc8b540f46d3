"""The ``torch`` transport against float64 on fresh random inputs, 1 to 4 ranks, and 8 of them once: rows, residual, options, equal bits."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from collective_cases import Case, bits, call, call_sequential, check, fresh_seed, make, open_workspace
from ranks import run_ranks
from tokenweave.collective import allreduce_rmsnorm, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows, owner

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN = (8, 72, 576, 2880)


def _against_float64(cases: list[Case], seed: int, sequential: bool = False) -> list[torch.Tensor]:
    results = []
    for number, case in enumerate(cases):
        with open_workspace(case) as workspace:
            data = make(case, workspace.world_size, seed + number)
            residual, rows = (call_sequential if sequential else call)(case, data, workspace)
            try:
                check(case, data, residual, rows, workspace, sequential)
            except AssertionError as error:
                raise AssertionError(f"{case}, seed {seed + number}, rank {workspace.rank}: {error}") from error
            results.append(rows.clone())
    return results


def _same_on_all_ranks(results: list[list[torch.Tensor]]) -> None:
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(bits(one), bits(two))


def _run(world_size: int, cases: list[Case], sequential: bool = False) -> None:
    _same_on_all_ranks(run_ranks(world_size, _against_float64, cases, fresh_seed(), sequential))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestAgainstFloat64:
    def test_every_small_number_of_tokens(self, world_size, dtype):
        _run(world_size, [Case(tokens, random.choice(HIDDEN[:3]), dtype) for tokens in range(34)])

    def test_hidden_sizes_and_some_hundreds_of_tokens(self, world_size, dtype):
        _run(world_size, [Case(random.randrange(200, 700), hidden, dtype) for hidden in HIDDEN])

    def test_every_combination_of_options(self, world_size, dtype):
        flags = itertools.product([True, False], repeat=5)
        cases = [
            Case(
                tokens=random.randrange(1, 20),
                hidden=72,
                dtype=dtype,
                has_residual=has_residual,
                post_norm=post_norm,
                weight_offset=random.choice([0.0, 1.0]),
                bias=bias,
                replicated=replicated,
                use_out=use_out,
            )
            for has_residual, post_norm, bias, replicated, use_out in flags
        ]
        _run(world_size, cases)

    def test_sampled_rows_only(self, world_size, dtype):
        tokens = 23
        one_owner = tuple(owned_rows(tokens, min(1, world_size - 1), world_size))[:3]
        some = tuple(sorted(random.sample(range(tokens), 7)))
        kinds = [(), (0,), (tokens - 1,), one_owner, some, tuple(range(tokens))]
        cases = [
            Case(tokens, 72, dtype, rows=rows, use_out=use_out, replicated=replicated)
            for rows, use_out, replicated in itertools.product(kinds, [True, False], [True, False])
        ]
        _run(world_size, [*cases, Case(0, 72, dtype, rows=()), Case(1, 72, dtype, rows=(0,))])

    def test_the_sequential_baseline(self, world_size, dtype):
        cases = [Case(tokens, 72, dtype) for tokens in (0, 1, 2, 3, 4, 5, 33)]
        options = [{"has_residual": False}, {"bias": True, "post_norm": True, "weight_offset": 1.0}, {"rows": (2, 9)}]
        cases += [Case(12, 576, dtype, **option) for option in options]
        if dtype is not torch.float32:
            # Its all-reduce rounds after each addition, to the partials' dtype: compare where sums are exact.
            cases = [case for case in cases if world_size == 1]
            _run(world_size, cases, sequential=True)
            results = run_ranks(world_size, _sequential_of_small_integers, dtype, fresh_seed())
            _same_on_all_ranks([[rows] for rows in results])
        else:
            cases = [dataclasses.replace(case, replicated=True) for case in cases]
            _run(world_size, cases, sequential=True)


def test_eight_ranks():
    """As many as a host's transports take: fewer rows than ranks, as many, and more; options; rows that one rank or none owns."""
    options = [
        {"replicated": True},
        {"bias": True, "post_norm": True},
        {"rows": (0,)},
        {"rows": ()},
        {"has_residual": False},
    ]
    cases = [Case(tokens, 72, torch.bfloat16) for tokens in (0, 1, 7, 8, 9, 33, 300)]
    _run(8, [*cases, *[Case(23, 72, torch.float32, **option) for option in options]])


def _sequential_of_small_integers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    case = Case(33, 72, dtype, replicated=True)
    with open_workspace(case) as workspace:
        data = make(case, workspace.world_size, seed)
        data.partials.copy_(torch.randint(-8, 8, data.partials.shape, generator=torch.Generator().manual_seed(seed)))
        residual, rows = call_sequential(case, data, workspace)
        check(case, data, residual, rows, workspace, sequential=True)
        return rows.clone()


# The order of the sum --------------------------------------------------------------------------------------------


def _residual_by_numpy(dtype: torch.dtype, seed: int) -> None:
    case = Case(29, 72, dtype, bias=True)
    with open_workspace(case) as workspace:
        data = make(case, workspace.world_size, seed)
        residual, _ = call(case, data, workspace)
        total = np.zeros((case.tokens, case.hidden), np.float32)
        for part in data.partials.float().numpy():
            total = total + part
        total = total + data.bias.float().numpy() + data.residual.float().numpy()
        mine = owned_rows(case.tokens, workspace.rank, workspace.world_size)
        expected = torch.from_numpy(total).to(dtype)[mine.start : mine.stop]
        assert torch.equal(bits(residual[mine.start : mine.stop]), bits(expected))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_run_in_rank_order_in_fp32_with_one_rounding(world_size, dtype):
    run_ranks(world_size, _residual_by_numpy, dtype, fresh_seed())


# A row's bits depend on its own data only --------------------------------------------------------------------------


def _alone(case: Case, seed: int, cut: int, order: list[int], one: int) -> None:
    with open_workspace(case) as workspace:
        world, rank = workspace.world_size, workspace.rank
        data = make(case, world, seed)

        def run(which: list[int], replicated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
            """(bits of the owned rows of the residual, and of the result) of a batch of these rows alone."""
            part = dataclasses.replace(case, tokens=len(which), replicated=replicated)
            chosen = dataclasses.replace(data, partials=data.partials[:, which], residual=data.residual[which])
            residual, rows = call(part, chosen, workspace)
            return bits(residual), bits(rows).clone()

        residual, rows = run(list(range(case.tokens)))
        mine = owned_rows(case.tokens, rank, world)
        full_residual, full_rows = run(list(range(case.tokens)), replicated=True)
        assert torch.equal(full_rows, rows), "replicated and sharded differ"
        assert torch.equal(full_residual[mine.start : mine.stop], residual[mine.start : mine.stop])
        for which in (list(range(cut)), list(range(cut, case.tokens)), order, [one]):
            part_residual, part_rows = run(which)
            assert torch.equal(part_rows, rows[which]), f"rows {which} of {case} differ, seed {seed}"
            mine = owned_rows(len(which), rank, world)
            owned = which[mine.start : mine.stop]
            assert torch.equal(part_residual[mine.start : mine.stop], full_residual[owned])


def _each_alone(draws: list[tuple[Case, int, int, list[int], int]]) -> None:
    for draw in draws:
        _alone(*draw)


# Drawn here, not by Hypothesis: a rank that raises ends its pool, and to shrink a failure would start processes for minutes.
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_rows_bits_do_not_change_with_its_neighbours_its_owner_or_the_cut(world_size):
    pick = random.Random(fresh_seed())
    draws = []
    for number in range(36):
        tokens = pick.choice([1, 2, 3, 4, 5, pick.randint(1, 40), pick.randint(1, 40)])
        case = Case(
            tokens,
            8 * pick.choice([1, 2, 3, pick.randint(1, 80)]),
            DTYPES[number % 3],
            has_residual=pick.random() < 0.5,
            post_norm=pick.random() < 0.5,
            bias=pick.random() < 0.5,
            weight_offset=pick.choice([0.0, 1.0]),
        )
        order = pick.sample(range(tokens), tokens)
        draws.append((case, pick.randrange(2**31), pick.randint(0, tokens), order, pick.randrange(tokens)))
    run_ranks(world_size, _each_alone, draws)


def _bad_row(value: float, bad: int, on_rank: int, seed: int) -> None:
    case = Case(11, 72)
    with open_workspace(case) as workspace:
        data = make(case, workspace.world_size, seed)
        _, clean = call(case, data, workspace)
        clean = clean.clone()
        data.partials[on_rank, bad, 5] = value
        residual, rows = call(case, data, workspace)
        others = [row for row in range(case.tokens) if row != bad]
        assert torch.equal(bits(rows[others]), bits(clean[others]))
        assert not rows[bad].isfinite().all()
        if bad in owned_rows(case.tokens, workspace.rank, workspace.world_size):
            assert not residual[bad, 5].isfinite()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_bad_row_stays_a_bad_row(world_size, value):
    run_ranks(world_size, _bad_row, value, random.randrange(11), random.randrange(world_size), fresh_seed())


# Strides, bytes, long sequences of calls --------------------------------------------------------------------------------


def _strided(seed: int) -> None:
    case = Case(13, 72)
    with open_workspace(case) as workspace:
        data = make(case, workspace.world_size, seed)
        _, expected = call(case, data, workspace)
        wide = torch.full((3, case.tokens, 2 * case.hidden), 3.0, dtype=case.dtype)
        partial, residual, out = (wide[i, :, : case.hidden] for i in range(3))
        partial.copy_(data.partials[workspace.rank])
        residual.copy_(data.residual)
        args = (data.weight, 1e-5, workspace)
        rows, _ = fused_allreduce_rmsnorm(partial, residual, *args, out=out)
        assert torch.equal(bits(rows), bits(expected))
        assert rows.data_ptr() == out.data_ptr()
        partial.copy_(data.partials[workspace.rank])
        residual.copy_(data.residual)
        rows, _ = fused_allreduce_rmsnorm(partial, residual, *args)
        assert torch.equal(bits(rows), bits(expected))
        assert rows.data_ptr() == partial.data_ptr()
        partial.copy_(data.partials[workspace.rank])
        residual.copy_(data.residual)
        rows = allreduce_rmsnorm(partial, residual, *args)
        contiguous = call_sequential(case, data, workspace)
        assert torch.equal(bits(rows), bits(contiguous[1]))
        assert torch.equal(bits(residual), bits(contiguous[0]))
        assert (wide[:, :, case.hidden :] == 3.0).all(), "wrote between the rows"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_may_be_far_apart(world_size):
    run_ranks(world_size, _strided, fresh_seed())


def _bytes_of(case: Case) -> int:
    """What torch.distributed is given for other ranks, which is what the workspace counts."""
    given, exchange = 0, dist.all_to_all_single

    def counting(received, rows, received_counts, counts, group):
        nonlocal given
        assert len(rows) == sum(counts)
        given += rows.nbytes - counts[dist.get_rank()] * case.hidden * rows.element_size()
        return exchange(received, rows, received_counts, counts, group=group)

    with open_workspace(case) as workspace, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        call(case, make(case, workspace.world_size, 0), workspace)
        assert workspace.bytes_sent == given
        return given


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_more_bytes_travel_than_the_rows_take(world_size):
    tokens, hidden = 16, 576
    all_rows = tokens * hidden * 2
    expected = 2 * all_rows * (world_size - 1) // world_size
    assert run_ranks(world_size, _bytes_of, Case(tokens, hidden)) == [expected] * world_size
    # Of 7 rows, 4 ranks own 2, 2, 2 and 1: sent are the rows of others, then the own ones to the others. No padding.
    sent = run_ranks(world_size, _bytes_of, Case(7, hidden))
    for rank, bytes_sent in enumerate(sent):
        mine = len(owned_rows(7, rank, world_size))
        assert bytes_sent == ((7 - mine) + mine * (world_size - 1)) * hidden * 2


def _random_walk(shapes: list[tuple[int, tuple[int, ...] | None]], seed: int) -> None:
    case = Case(64, 72)
    with open_workspace(case) as workspace:
        for step, (tokens, rows) in enumerate(shapes):
            this = dataclasses.replace(case, tokens=tokens, rows=rows)
            data = make(this, workspace.world_size, seed + step)
            residual, result = call(this, data, workspace, start=(step * 7) % (65 - tokens))
            check(this, data, residual, result, workspace)


@pytest.mark.parametrize("world_size", [2, 4])
def test_shapes_that_change_with_every_call(world_size):
    shapes = []
    for _ in range(300):
        tokens = random.choice([0, 1, world_size - 1, world_size, world_size + 1, random.randrange(65)])
        rows = tuple(sorted(random.sample(range(tokens), random.randrange(tokens + 1))))
        shapes.append((tokens, random.choice([None, rows])))
    run_ranks(world_size, _random_walk, shapes, fresh_seed())


def _of_other_tokens(tokens: list[int]) -> None:
    with open_workspace(Case(max(tokens), 72)) as workspace:
        case = Case(tokens[dist.get_rank()], 72)
        call(case, make(case, workspace.world_size, 0), workspace)


@pytest.mark.parametrize("tokens", [[9, 8], [6, 3]], ids=str)
def test_ranks_that_call_with_other_numbers_of_rows_end_at_once_where_one_gets_more_than_it_expects(tokens):
    """It is gloo that ends the process, no check of ours: what gloo cannot see (as many rows, but other ones) is not found, and
    a rank without any rows sends nothing that the others could find wrong: they wait until the group's timeout."""
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died(.|\n)*collective mismatch"):
        run_ranks(2, _of_other_tokens, tokens, timeout=30)


# Ownership ------------------------------------------------------------------------------------------------------------


@given(tokens=st.integers(0, 10_000), world_size=st.integers(1, 16))
def test_every_row_has_one_owner(tokens, world_size):
    shards = [owned_rows(tokens, rank, world_size) for rank in range(world_size)]
    assert [row for shard in shards for row in shard] == list(range(tokens))
    for rank, shard in enumerate(shards):
        assert all(owner(row, tokens, world_size) == rank for row in {*shard[:1], *shard[-1:]})
        assert len(shard) <= -(-tokens // world_size)


def test_the_pool_is_the_group():
    assert run_ranks(3, dist.get_world_size) == [3, 3, 3]
