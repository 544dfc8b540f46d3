"""The tuner without GPUs: what it measures and when it stops, and what an interruption leaves."""

import dataclasses
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.errors import ProfileError, RequestError
from tokenweave.planning import Planner
from tokenweave.planning.machine import machine_of
from tokenweave.planning.plan import GEMMS, Scheme
from tokenweave.planning.profile_points import CollectivePoint, GemmPoint, StepPoint
from tokenweave.planning.profile_table import Table, read_table, write_table
from tokenweave.tuning.run import partial_path, progress_bar, tune
from tokenweave.tuning.schedule import KEPT_SCHEMES, PHASES, TRIED_TOKENS, kept_schemes, planned, steps
from tokenweave.tuning.tuner import Tuner
from tuning_cases import LLAMA, FakeClock, FakePieces, h200, identity_of, setting_of, table_of

MACHINE = h200()
SETTING = setting_of(MACHINE)
OPTIONAL = [phase.name for phase in PHASES if phase.optional]


def _tuner(pieces, clock=lambda: 0.0, seconds=1e9, setting=SETTING, progress=lambda *_: None):
    return Tuner(setting, pieces, list, clock, seconds, progress)


# ---- the schedule


def test_rows_are_dense_where_gemms_have_steps_and_end_with_the_longest_step():
    assert steps(((256, 64), (1024, 256)), 1024) == [64, 128, 192, 256, 512, 768, 1024]
    assert steps(((256, 64), (1024, 256)), 700) == [64, 128, 192, 256, 512, 700]
    assert steps(((256, 64), (1024, 256)), 5000)[-1] == 5000


def test_everything_is_measured_once_at_first_in_what_matters_most():
    pieces, told = FakePieces(MACHINE), []
    tuner = _tuner(pieces, progress=lambda done, total, name: told.append((done, total, name)))
    times = tuner.run()
    assert len(pieces.asked) == len(set(pieces.asked)) == len(times)
    assert abs(len(times) - planned(SETTING)) <= 0.06 * len(times), "the bar's total is about right"
    assert told[-1] == (len(times), len(times), "done")
    assert [done for done, _, _ in told[:-1]] == list(range(len(times)))
    for name in GEMMS:
        rows = [p.rows for p in times if isinstance(p, GemmPoint) and p.name == name]
        assert {1, 64, 96, 128, 2048, 4096, 16384} <= set(rows)
    for ctas, cluster in SETTING.blocks:
        assert CollectivePoint("alone", 16384, ctas, cluster) in times
        assert CollectivePoint("beside", 1280, ctas, cluster) in times
    for mode in ("sequential", "fused", "no_comm"):
        assert {1, 64, 96, 1024, 1536, 12288, 16384} <= {p.tokens for p in _steps(times, mode)}


def test_the_points_fit_into_the_time_that_the_tuner_has():
    """At 10 ms a point, which is generous for all but the longest, they take half a minute less than the limit of 90 s."""
    assert planned(SETTING) * 0.018 < 60


def test_short_steps_need_fewer_points():
    small = setting_of(MACHINE, max_tokens=512)
    assert planned(small) < planned(SETTING) / 2
    table_of(FakePieces(MACHINE), small)


def _steps(times, mode):
    return [p for p in times if isinstance(p, StepPoint) and p.mode == mode]


def test_the_best_schemes_are_measured_at_every_size_the_others_at_few():
    """The best is one that is the fastest nowhere but at one size, where it is by far."""
    odd = Scheme(8)

    class Odd(FakePieces):
        def true_us(self, point):
            us = super().true_us(point)
            if isinstance(point, StepPoint) and point.mode == "woven":
                us *= 0.5 if (point.scheme, point.tokens) == (odd, 4096) else 1.0
            return us

    assert len(SETTING.schemes) == 6, "of 4 and 8 blocks; 2 are too few"
    assert {(s.ctas, s.cluster, s.told, s.late) for s in SETTING.schemes} >= {
        (8, 2, ("qkv", "gate_up"), False),
        (8, None, (), False),
        (4, 2, ("qkv", "down"), True),
    }
    times = _tuner(Odd(MACHINE)).run()
    kept = kept_schemes(SETTING, times)
    assert len(kept) == KEPT_SCHEMES
    assert odd in kept[:2]
    for scheme in SETTING.schemes:
        sizes = {p.tokens for p in _steps(times, "woven") if p.scheme == scheme}
        assert sizes == set(TRIED_TOKENS) if scheme not in kept else {128, 192, 1024, 12288, 16384} <= sizes
    planner = Planner(LLAMA, costs=_profile(times), mode="woven")
    assert set(planner.model.schemes) == set(kept)
    assert (planner.plan(4096).ctas, planner.plan(4096).cluster, planner.plan(4096).gemm_sms) == (8, None, {})
    assert (planner.plan(1024).ctas, planner.plan(1024).cluster) != (8, None)


def test_a_transport_without_a_choice_of_blocks_has_two_schemes():
    setting = setting_of(MACHINE, blocks=(), oneshot_rows=0)
    assert setting.schemes == (Scheme(told=("qkv", "gate_up")), Scheme())
    table = table_of(FakePieces(machine_of("h200", 2, "torch")), setting)
    assert {p.scheme for p in table.of(StepPoint) if p.split} == set(setting.schemes)


def test_mixtures_are_measured_by_rows_of_an_expert():
    setting = setting_of(MACHINE, experts=8, experts_per_token=2)
    points = [p for phase in PHASES for p in phase.points(setting, {}) if isinstance(p, GemmPoint)]
    assert max(p.rows for p in points if p.name == "qkv") == 16384
    assert max(p.rows for p in points if p.name == "gate_up") == 4096


def test_optional_phases_end_when_time_is_up():
    clock = FakeClock()
    whole = _tuner(FakePieces(MACHINE, clock=clock, cost=0.01), clock, 1e9)
    whole.run()
    needed = clock.now
    for share in (0.2, 0.9):
        clock = FakeClock()
        tuner = _tuner(FakePieces(MACHINE, clock=clock, cost=0.01), clock, share * needed)
        tuner.run()
        assert tuner.skipped == OPTIONAL
        assert len(tuner.times) < len(whole.times)
        Planner(LLAMA, costs=_profile(tuner.times), mode="auto").plan(5000)  # whole without
    assert not whole.skipped


def _profile(times):
    from tokenweave.planning.profile import Profile

    return Profile(Table(identity_of(), times), LLAMA, MACHINE)


# ---- a run on ranks


def _run(path, seconds=1e9, drivers=("580.1", "580.1"), replaces_any=True):
    rank, group = dist.get_rank(), dist.group.WORLD
    clock = FakeClock()
    pieces = FakePieces(MACHINE, clock=clock, rank=rank, noise=0.2, cost=0.01 * (1 + rank))
    setting = setting_of(MACHINE, max_tokens=1024)
    told = []
    table = tune(
        setting,
        pieces,
        identity_of(driver=drivers[rank]),
        path,
        group,
        torch.device("cpu"),
        clock,
        seconds,
        lambda *line: told.append(line),
        lambda tuner: {"left_out": tuner.skipped},
        replaces_any=replaces_any,
    )
    return list(table.times.items()), len(pieces.asked), told[-1]


def test_ranks_measure_the_same_points_and_the_slowest_counts(tmp_path):
    path = tmp_path / "new" / "table.json"
    (first, asked, told), (second, other_asked, _) = run_ranks(2, _run, path)
    assert first == second
    assert asked == other_asked == told[0]
    table = read_table(path)
    assert table.times == dict(first)
    assert table.complete
    truth = FakePieces(MACHINE)
    ratios = [us / truth.true_us(point) for point, us in first]
    assert all(1 <= ratio <= 1.2 for ratio in ratios)
    assert sum(ratios) / len(ratios) > 1.12, "the median of each round's slower rank, not of one rank's rounds"
    assert os.listdir(path.parent) == ["table.json"]


def test_ranks_run_out_of_time_together(tmp_path):
    """Rank 1's clock goes twice as fast."""
    (first, asked, _), (_, other_asked, _) = run_ranks(2, _run, tmp_path / "table.json", 3.0)
    assert asked == other_asked
    assert read_table(tmp_path / "table.json").info == {"left_out": OPTIONAL}
    assert len(first) < planned(setting_of(MACHINE, max_tokens=1024))


def _alone(path, ends, full=False):
    """What a run of one rank, whose group is its own, logs and keeps.

    Args:
        ends: "killed" after the last phase, before the table is written; "interrupted" in the midst of one.
        full: the disk.
    """
    from tokenweave.tuning import run

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank():
        return None
    lines, parts = [], []

    def write(table, to):
        if full:
            raise ProfileError("no room")
        if to == path and ends == "killed":
            raise SystemExit
        parts.append(len(table.times))
        write_table(table, to)

    with (
        pytest.raises((KeyboardInterrupt, SystemExit)),
        mock.patch.object(run, "write_table", write),
        mock.patch.object(run.log, "warning", lambda *line: lines.append(line[0] % line[1:])),
    ):
        tune(
            setting_of(MACHINE, max_tokens=1024),
            FakePieces(MACHINE, fail_at=None if ends == "killed" else 200),
            identity_of(),
            path,
            groups[0],
            torch.device("cpu"),
            FakeClock(),
            1e9,
            lambda *_: None,
            lambda tuner: {},
        )
    return lines, parts


def test_an_interruption_keeps_the_old_table_and_leaves_what_it_has_apart(tmp_path):
    path = tmp_path / "table.json"
    write_table(table_of(FakePieces(MACHINE), setting_of(MACHINE, max_tokens=512)), path)
    before = path.read_bytes()
    lines, _ = run_ranks(2, _alone, path, "interrupted")[0]
    assert lines == [f"tune: interrupted; 200 points are in {path}.partial"]
    assert sorted(os.listdir(tmp_path)) == ["table.json", "table.json.partial"]
    assert path.read_bytes() == before
    with pytest.raises(ProfileError, match="interrupted after 200 points"):
        read_table(partial_path(path))
    run_ranks(2, _run, path)
    assert os.listdir(tmp_path) == ["table.json"], "a whole run replaces the table and clears up"
    assert path.read_bytes() != before


def test_what_is_measured_is_kept_from_phase_to_phase(tmp_path):
    path = tmp_path / "table.json"
    lines, parts = run_ranks(2, _alone, path, "killed")[0]
    assert lines == []
    assert len(parts) == len(PHASES)
    assert parts == sorted(parts)
    with pytest.raises(ProfileError, match=f"interrupted after {parts[-1]} points"):
        read_table(partial_path(path))


def test_points_that_cannot_be_kept_are_one_line(tmp_path):
    lines, _ = run_ranks(2, _alone, tmp_path / "table.json", "interrupted", True)[0]
    assert lines == ["tune: what is measured so far is not kept: no room"]


def test_ranks_on_unlike_machines_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(RequestError, match=r"ranks 0 and 1 run on different machines: driver 580.1 and 590.1"):
        run_ranks(2, _run, tmp_path / "table.json", 1e9, ("580.1", "590.1"))
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        run_ranks(2, _run, tmp_path / "file" / "table.json")
    with pytest.raises(ProfileError, match="it is a folder"):
        run_ranks(2, _run, tmp_path)


def _refusal(path, replaces_any=True):
    """What is said of a place that a table must not be written to."""
    try:
        _run(path, 3.0, replaces_any=replaces_any)
    except ProfileError as error:
        return str(error)
    return None


def test_what_is_no_regular_file_is_refused_and_a_link_stays_one(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    told = f"{tmp_path}/null: it is no regular file; expected a file, which is replaced"
    assert run_ranks(2, _refusal, tmp_path / "null") == [told] * 2
    (tmp_path / "link").symlink_to(tmp_path / "table.json")
    run_ranks(2, _run, tmp_path / "link", 3.0)
    assert (tmp_path / "link").is_symlink()
    assert read_table(tmp_path / "table.json").complete


def test_another_models_table_is_not_replaced_unless_that_was_asked_for(tmp_path):
    path = tmp_path / "mine.json"
    small = table_of(FakePieces(MACHINE), setting_of(MACHINE, max_tokens=512))

    def refused(why):
        before = path.read_bytes()
        for told in run_ranks(2, _refusal, path, False):
            assert told.startswith(f"{path}: {why}")
            assert "; give --out FILE to replace it or to write elsewhere" in told
        assert path.read_bytes() == before

    foreign = dataclasses.replace(small, identity=identity_of(tp=4), info={"model": "Llama-9"})
    write_table(foreign, path)
    refused("it holds a table of Llama-9 on 4 x NVIDIA H200, p2p")
    path.write_text("my notes")
    refused("it is damaged or cut off")
    path.write_text("{}")
    refused("it is no table of measured times")
    path.unlink()
    run_ranks(2, _run, path, 3.0, ("580.1", "580.1"), False)
    first = read_table(path)
    write_table(dataclasses.replace(first, identity=identity_of(driver="1.0")), path)
    run_ranks(2, _run, path, 3.0, ("580.1", "580.1"), False)
    assert read_table(path).identity.driver == first.identity.driver, "of this machine and model: it is replaced"


def test_the_bar_follows_a_total_that_changes(capsys):
    with progress_bar(True) as progress:
        for done, total in ((0, 10), (5, 10), (12, 10), (12, 12)):
            progress(done, total, "GEMMs")
    assert "GEMMs" in capsys.readouterr().err
    with progress_bar(False) as progress:
        progress(1, 2, "GEMMs")
    assert capsys.readouterr().err == ""
