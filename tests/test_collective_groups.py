"""Several groups in one job: only a group's own ranks take part, and different groups may be in flight together."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
import torch.distributed as dist

from collective_cases import Case, call, call_sequential, check, fresh_seed, make, open_workspace
from ranks import run_ranks

CALLS = 25


def _calls(case: Case, group: dist.ProcessGroup, seed: int, failures: list[str] | None = None) -> None:
    try:
        with open_workspace(case, group) as workspace:
            for number in range(CALLS):
                way = ("sharded", "replicated", "sequential")[number % 3]
                this = dataclasses.replace(case, replicated=way != "sharded")
                data = make(this, workspace.world_size, seed + number)
                run = call_sequential if way == "sequential" else call
                check(this, data, *run(this, data, workspace), workspace, sequential=way == "sequential")
    except Exception as error:
        if failures is None:
            raise
        failures.append(f"{type(error).__name__}: {error}")


def _side_by_side(members: list[list[int]], seed: int) -> tuple[int, int]:
    groups = [dist.new_group(ranks) for ranks in members]  # every rank creates every group
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    # The groups differ in every size: a rank that talks to another group's ranks cannot go unnoticed.
    case = [Case(13, 72, torch.float32), Case(30, 576, torch.float32)][mine]
    _calls(case, groups[mine], seed + 1000 * mine)
    with open_workspace(case, groups[mine]) as workspace:
        place = workspace.rank, workspace.world_size
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return place


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3], [0, 1, 2]]], ids=str)
def test_two_groups_side_by_side(members):
    places = run_ranks(4, _side_by_side, members, fresh_seed())
    for ranks in members:
        assert [places[rank] for rank in ranks] == [(i, len(ranks)) for i in range(len(ranks))]


def _two_threads(seed: int) -> None:
    """Two threads, each with a group of its own over the same ranks.

    One gloo group cannot serve two threads: it matches calls by their order in the group, and two threads of a rank
    have none. The ``torch`` transport therefore takes its order from the caller, as one communication thread gives it,
    and channels with collectives in flight together need a group each.
    """
    groups = [dist.new_group(), dist.new_group()]
    failures: list[str] = []
    threads = [
        threading.Thread(target=_calls, args=(case, group, seed + 1000 * number, failures))
        for number, (case, group) in enumerate(
            zip((Case(17, 576, torch.float32), Case(5, 72, torch.float32)), groups, strict=True)
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    assert not failures, failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_collectives_in_flight_from_two_threads(world_size):
    run_ranks(world_size, _two_threads, fresh_seed())
