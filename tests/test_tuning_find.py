"""How ranks find one measured table, and what they say of one that does not hold."""

import dataclasses
import logging
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.errors import ProfileError
from tokenweave.planning import Planner
from tokenweave.planning.machine import machine_of
from tokenweave.planning.profile_points import GemmPoint
from tokenweave.planning.profile_table import write_table
from tokenweave.tuning import find
from tokenweave.tuning.find import agreed_profile, profile_path
from tokenweave.tuning.identity import driver_version
from tuning_cases import LLAMA, FakePieces, h200, identity_of, setting_of, table_of

MACHINE = h200()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(find.VARIABLE, raising=False)
    monkeypatch.setenv("TOKENWEAVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(find, "_said", set())
    return tmp_path


SMALL = table_of(FakePieces(MACHINE), setting_of(MACHINE, max_tokens=1024), date="2026-11-29")


def test_the_search_goes_by_the_variable_then_the_cache(home, monkeypatch):
    here = identity_of()
    assert profile_path(here) == home / "cache" / "profiles" / f"{here.key}.json"
    monkeypatch.setenv(find.VARIABLE, str(home / "mine.json"))
    assert profile_path(here) == home / "mine.json"
    monkeypatch.setenv(find.VARIABLE, str(home))
    assert profile_path(here) == home / f"{here.key}.json"
    monkeypatch.setenv(find.VARIABLE, "off")
    assert profile_path(here) is None


def test_a_table_is_found_and_used(home, caplog):
    write_table(SMALL, profile_path(identity_of()))
    with caplog.at_level(logging.INFO, "tokenweave"):
        profile = agreed_profile(LLAMA, MACHINE, None, here=identity_of())
        agreed_profile(LLAMA, MACHINE, None, here=identity_of())
    assert profile.table == SMALL
    (line,) = caplog.messages
    assert line.startswith("planner: measured times from")
    assert "2026-11-29" in line


def _foreign(**changes):
    return dataclasses.replace(SMALL, identity=identity_of(**changes))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_foreign(driver="1.0"), "it is stale: measured with driver 1.0"),
        (_foreign(gpu="NVIDIA B200", sms=148), "it is foreign: measured with gpu NVIDIA B200"),
        (dataclasses.replace(SMALL, complete=False), "was interrupted"),
        (dataclasses.replace(SMALL, times={GemmPoint("qkv", 64): 1.0}), "lacks points"),
        ("{", "damaged or cut off"),
    ],
    ids=["stale", "foreign", "interrupted", "empty", "damaged"],
)
def test_a_table_that_does_not_hold_is_refused_in_one_line(home, caplog, content, reason):
    path = profile_path(identity_of())
    if isinstance(content, str):
        path.parent.mkdir(parents=True)
        path.write_text(content)
    else:
        write_table(content, path)
    with caplog.at_level(logging.INFO, "tokenweave"):
        assert agreed_profile(LLAMA, MACHINE, None, here=identity_of()) is None
        assert agreed_profile(LLAMA, MACHINE, None, here=identity_of()) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message
    assert "the analytical model is used" in record.message
    assert str(path) in record.message
    with pytest.raises(ProfileError, match=reason):
        agreed_profile(LLAMA, MACHINE, None, path, identity_of())


def test_no_table_is_no_warning_unless_one_was_named(home, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "tokenweave"):
        assert agreed_profile(LLAMA, MACHINE, None, here=identity_of()) is None
        monkeypatch.setenv(find.VARIABLE, "off")
        assert agreed_profile(LLAMA, MACHINE, None, here=identity_of()) is None
        monkeypatch.setenv(find.VARIABLE, str(home / "gone.json"))
        assert agreed_profile(LLAMA, MACHINE, None, here=identity_of()) is None
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO, logging.WARNING]
    with pytest.raises(ProfileError, match="there is no such file"):
        agreed_profile(LLAMA, MACHINE, None, home / "gone.json", identity_of())


@pytest.mark.parametrize(("name", "tp"), [("cpu", 2), ("h200", 1)])
def test_a_table_that_is_ignored_is_told_once(home, caplog, monkeypatch, name, tp):
    machine = machine_of(name, tp, "torch" if name == "cpu" else None)
    for setting in ("off", "/nowhere"):
        monkeypatch.setenv(find.VARIABLE, setting)
        for _ in range(2):
            assert agreed_profile(LLAMA, machine, None) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "TOKENWEAVE_PROFILE=/nowhere is ignored: measured tables are for two or more ranks on GPUs" in record.message


def test_machines_without_gpus_have_no_table(home):
    from tokenweave.planning.machine import machine_of
    from tokenweave.tuning.find import find_profile

    assert find_profile(LLAMA, machine_of("cpu", 2)) is None
    with pytest.raises(ProfileError, match="on GPUs"):
        agreed_profile(LLAMA, machine_of("cpu", 2), None, home / "table.json")


def _found(folder, drivers, asked):
    """Each rank with a file of its own: only rank 0's may count."""
    rank = dist.get_rank()
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("tokenweave")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    path = Path(folder) / f"rank{rank}.json"
    os.environ[find.VARIABLE] = str(path)
    find._said.clear()
    try:
        profile = agreed_profile(
            LLAMA, MACHINE, dist.group.WORLD, path if asked else None, identity_of(driver=drivers[rank])
        )
    finally:
        del os.environ[find.VARIABLE]
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    plans = None if profile is None else [Planner(LLAMA, costs=profile, mode="auto").plan(n) for n in (64, 700)]
    return None if profile is None else profile.signature, plans, records


GOOD = identity_of().driver


def test_ranks_use_rank_0s_table(home):
    write_table(SMALL, home / "rank0.json")
    other = table_of(FakePieces(MACHINE, factor=3.0), setting_of(MACHINE, max_tokens=1024))
    write_table(other, home / "rank1.json")
    (first, plans, records), (second, other_plans, silent) = run_ranks(2, _found, home, (GOOD, GOOD), False)
    assert first == second is not None
    assert plans == other_plans
    assert len(records) == 1
    assert not silent


@pytest.mark.parametrize("asked", [False, True])
def test_a_table_that_one_rank_cannot_use_is_used_by_none(home, asked):
    write_table(SMALL, home / "rank0.json")
    if asked:
        with pytest.raises(ProfileError, match=r"on rank 1: .*it is stale: measured with driver"):
            run_ranks(2, _found, home, (GOOD, "1.0"), True)
        return
    (first, _, records), (second, _, silent) = run_ranks(2, _found, home, (GOOD, "1.0"), False)
    assert first is second is None
    assert len(records) == 1
    assert "on rank 1: " in records[0]
    assert not silent


def _found_in_groups(folder, members, drivers):
    """Tensor-parallel groups beside each other: signature of the table that this rank's uses."""
    groups = [dist.new_group(ranks) for ranks in members]  # every rank creates every group
    rank = dist.get_rank()
    mine = next(i for i, ranks in enumerate(members) if rank in ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(find.VARIABLE, str(Path(folder) / f"rank{rank}.json"))
        profile = agreed_profile(LLAMA, MACHINE, groups[mine], None, identity_of(driver=drivers[rank]))
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return None if profile is None else profile.signature


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [3, 1]]], ids=str)
def test_groups_side_by_side_agree_each_for_itself(home, members):
    """A group's first rank, which need not be the job's, has the table; one that a group cannot use troubles no other."""
    for first, factor in zip((ranks[0] for ranks in members), (1.0, 3.0), strict=True):
        first = min(members[0] if first in members[0] else members[1])  # groups sort their ranks
        table = table_of(FakePieces(MACHINE, factor=factor), setting_of(MACHINE, max_tokens=1024))
        write_table(table, home / f"rank{first}.json")
    found = run_ranks(4, _found_in_groups, home, members, (GOOD,) * 4)
    (a, b), (c, d) = ([found[rank] for rank in ranks] for ranks in members)
    assert a == b is not None
    assert c == d is not None
    assert a != c
    drivers = [("1.0" if rank == members[1][1] else GOOD) for rank in range(4)]
    found = run_ranks(4, _found_in_groups, home, members, drivers)
    assert [found[rank] for rank in members[0]] == [a, b]
    assert [found[rank] for rank in members[1]] == [None, None]


def test_drivers_name_themselves():
    open_module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)"
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 11"
    assert driver_version(open_module) == "580.65.06"
    assert driver_version(closed) == "535.129.03"
    assert driver_version("nothing") is None
