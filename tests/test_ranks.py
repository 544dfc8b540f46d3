"""The test harness itself: results in rank order, a rank's failure reaches the test, a stuck pool is replaced."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, run_ranks
from tokenweave.errors import CollectiveError


class _Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _sum(value: int) -> tuple[int, int, float, int]:
    t = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(t)
    return dist.get_rank(), os.getpid(), t.item(), torch.get_num_threads()


def _raise_on(rank: int, picklable: bool) -> None:
    if dist.get_rank() == rank:
        raise CollectiveError("no good") if picklable else _Unpicklable("no", "good")
    dist.barrier()


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _say() -> None:
    print("said", dist.get_rank())


def test_results_come_in_rank_order_from_a_pool_that_is_kept():
    first = run_ranks(2, _sum, 10)
    assert [(rank, total, threads) for rank, _, total, threads in first] == [(0, 21.0, 1), (1, 21.0, 1)]
    assert [pid for _, pid, _, _ in run_ranks(2, _sum, 1)] == [pid for _, pid, _, _ in first]


def test_what_ranks_print_is_the_tests_output(capsys):
    run_ranks(2, _say)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] said 0", "[rank 1] said 1"]


@pytest.mark.parametrize(("picklable", "raised"), [(True, CollectiveError), (False, RuntimeError)])
def test_a_ranks_exception_is_raised_with_its_traceback(picklable, raised):
    with pytest.raises(raised, match="no good") as caught:
        run_ranks(2, _raise_on, 1, picklable)
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "on rank 1" in str(caught.value.__cause__)
    assert "_raise_on" in str(caught.value.__cause__)
    assert run_ranks(2, _sum, 0)[0][2] == 1.0


def test_a_dead_rank_is_named():
    with pytest.raises(RuntimeError, match="rank 1 of 2 died with exit code 7"):
        run_ranks(2, _exit_on, 1)


def test_a_stuck_rank_is_shown_and_replaced():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[1\] of 2 did not answer within 1 s.*_sleep_on"):
        run_ranks(2, _sleep_on, 1, timeout=1.0)
    assert time.monotonic() - start < 40  # it has not waited for the sleeper, though a pool may have had to start
    assert run_ranks(2, _sum, 0)[1][2] == 1.0
