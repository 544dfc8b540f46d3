"""Costs from a measured table: measured times come back, what lies between is sound, and plans are made of them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.errors import ProfileError
from tokenweave.planning import Mode, Planner
from tokenweave.planning.batch import Batch, runs_of
from tokenweave.planning.cost import CostModel
from tokenweave.planning.machine import machine_of
from tokenweave.planning.profile import Profile
from tokenweave.planning.profile_curves import Curve, Surface, never_falling
from tokenweave.planning.profile_points import AllReducePoint, CollectivePoint, GemmPoint, StepPoint, StreamPoint
from tokenweave.planning.profile_table import Table
from tokenweave.planning.waves import attention_gemms, mlp_gemms
from tuning_cases import LLAMA, FakePieces, h200, identity_of, setting_of, table_of

MACHINE = h200()
SETTING = setting_of(MACHINE, blocks=((4, 2), (8, 2), (12, 4)))
BLOCKS = (4, 8, 12)
EXACT = Profile(table_of(FakePieces(MACHINE, factor=1.25), SETTING), LLAMA, MACHINE)
NOISY_TABLE = table_of(FakePieces(MACHINE, noise=0.04), SETTING)
NOISY = Profile(NOISY_TABLE, LLAMA, MACHINE)
GEMMS = {g.name: g for g in (*attention_gemms(LLAMA, 2), *mlp_gemms(LLAMA, 2))}

times = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=30)


@given(times)
def test_never_falling_is_sorted_near_and_keeps_what_is_sorted(values):
    result = never_falling(values)
    assert len(result) == len(values)
    assert (np.diff(result) >= -1e-9 * max(values)).all()
    assert math.isclose(result.sum(), sum(values), rel_tol=1e-9)
    assert min(values) <= result.min() * (1 + 1e-12)
    assert result.max() <= max(values) * (1 + 1e-12)
    rising = sorted(values)
    assert never_falling(rising) == pytest.approx(rising)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.integers(1, 5000), st.floats(0.1, 1e4), min_size=1, max_size=12),
    st.lists(st.integers(1, 20000), min_size=1, max_size=50),
    st.sampled_from([None, lambda m: np.ceil(np.asarray(m) / 100) * 7.0, lambda m: np.ones(np.shape(m))]),
)
def test_a_curve_never_falls_and_goes_through_its_points(points, at, shape):
    curve = Curve(points, shape)
    xs = np.array(sorted(at))
    values = curve(xs)
    assert values.shape == xs.shape
    assert (np.diff(values) >= -1e-9 * max(points.values())).all()
    for x, value in zip(xs, values, strict=True):
        assert float(curve(int(x))) == value, "a number is as an array of it"
    order = sorted(points)
    assert np.allclose(curve(np.array(order)), never_falling([points[x] for x in order]))


def test_a_fall_that_is_no_noise_is_kept():
    assert never_falling([10.0, 17.0, 10.1, 10.0, 12.0], 0.04) == pytest.approx([10.0, 17.0, 10.05, 10.05, 12.0])
    curve = Curve({384: 10.0, 448: 17.0, 512: 11.0}, lambda m: np.asarray(m) * 1.0, 0.04)
    assert [float(curve(m)) for m in (384, 448, 480, 512)] == [10.0, 17.0, 14.0, 11.0]


def test_a_curve_has_steps_where_its_shape_has_them():
    steps = Curve({100: 10.0, 300: 30.0}, lambda m: np.ceil(np.asarray(m) / 128) * 1.0)
    assert [float(steps(m)) for m in (100, 128, 129, 256, 257, 300)] == [10, 10, 20, 20, 30, 30]
    assert float(steps(768)) == 60, "beyond the last point as its shape goes on"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.floats(1, 1e3)), min_size=1, max_size=20))
def test_a_surface_never_falls_in_either_direction(points):
    surface = Surface({(x * 100.0, y * 50.0): us for x, y, us in points}, 1.0)
    xs, ys = np.meshgrid(np.linspace(1, 800, 23), np.linspace(0, 400, 19), indexing="ij")
    values = surface(xs, ys)
    assert (np.diff(values, axis=0) >= -1e-9 * values.max()).all()
    assert (np.diff(values, axis=1) >= -1e-9 * values.max()).all()


def test_measured_times_come_back():
    """Exactly where nothing is smoothed: of a machine whose times never fall."""
    for point, us in EXACT.table.times.items():
        if isinstance(point, GemmPoint):
            gemm = GEMMS[point.name]
            assert EXACT.gemm_us(point.rows, gemm.n, gemm.k) == pytest.approx(us, rel=1e-9), point
        elif isinstance(point, CollectivePoint) and point.kind in ("alone", "beside"):
            got = EXACT.collective_us(point.tokens, LLAMA.hidden, point.ctas, alone=False)
            assert got == pytest.approx(us * (1.1 if point.kind == "alone" else 1.0), rel=1e-4), point
        elif isinstance(point, AllReducePoint):
            got = EXACT.all_reduce_us(point.tokens, LLAMA.hidden) + EXACT.norm_us(point.tokens, LLAMA.hidden)
            assert got == pytest.approx(us), point
        elif isinstance(point, StreamPoint) and point.name == "norm":
            assert EXACT.norm_us(point.rows, LLAMA.hidden) == pytest.approx(us), point


@pytest.mark.parametrize("rows", [1, 100, 1000, 3000, 7777, 20000, 100000])
def test_between_the_points_a_distorted_machine_is_found_again(rows):
    """The table of a machine that is 1.25 times as slow describes just that machine, at rows that were not measured too."""
    for gemm in GEMMS.values():
        true = 1.25 * MACHINE.gemm_us(rows, gemm.n, gemm.k)
        assert EXACT.gemm_us(rows, gemm.n, gemm.k) == pytest.approx(true, rel=0.05), gemm
    for ctas in BLOCKS:
        true = 1.25 * 1.1 * MACHINE.collective_us(rows, LLAMA.hidden, ctas)
        assert EXACT.collective_us(rows, LLAMA.hidden, ctas) == pytest.approx(true, rel=0.1)
    reads, pairs = rows, rows * (rows + 1) / 2
    true = 1.25 * MACHINE.attention_us(pairs, reads, 2048, 512)
    assert EXACT.attention_us(pairs, reads, 2048, 512) == pytest.approx(true, rel=0.15)
    assert EXACT.attention_us(pairs, reads, 2048, 512, rows=rows) == pytest.approx(true, rel=0.15)


def test_nothing_falls_with_more_work():
    rows = np.arange(1, 20000, 37)
    for gemm in GEMMS.values():
        assert (np.diff(NOISY.gemm_us(rows, gemm.n, gemm.k)) >= -1e-6).all(), gemm
    for ctas in (None, *BLOCKS):
        assert (np.diff(NOISY.collective_us(rows, LLAMA.hidden, ctas)) >= -1e-6).all()
    for us in (NOISY.norm_us(rows, LLAMA.hidden), NOISY.stream_us(rows * 1e5)):
        assert (np.diff(us) >= -1e-6).all()
    # A prompt that grows, and a chunk behind a context that grows.
    assert (np.diff(NOISY.attention_us(rows * (rows + 1) / 2, rows, 2048, 512, rows=rows)) >= -1e-6).all()
    assert (np.diff(NOISY.attention_us(512.0 * rows + 512 * 513 / 2, rows + 512, 2048, 512, rows=512)) >= -1e-6).all()


def test_arrays_and_numbers_are_the_same():
    rows = np.array([[64, 700], [5000, 9000]])
    ctas = np.array([8, 12])
    table = NOISY.collective_us(rows, LLAMA.hidden, ctas)
    assert all(
        table[i, j] == NOISY.collective_us(int(rows[i, j]), LLAMA.hidden, int(ctas[j]))
        for i in range(2)
        for j in range(2)
    )


def test_what_was_not_measured_follows_the_analytical_machine():
    head = EXACT.gemm_us(64, 64128, 4096)
    assert head == pytest.approx(1.25 * MACHINE.gemm_us(64, 64128, 4096), rel=1e-6)
    assert EXACT.collective_us(512, 8192, 8) == MACHINE.collective_us(512, 8192, 8)
    six = EXACT.collective_us(4096, LLAMA.hidden, 6)
    assert EXACT.collective_us(4096, LLAMA.hidden, 8) < six < EXACT.collective_us(4096, LLAMA.hidden, 4)


def test_few_rows_of_a_fused_step_go_in_one_shot():
    assert EXACT.collective_us(64, LLAMA.hidden, 8, alone=True) == pytest.approx(
        EXACT.table.times[CollectivePoint("oneshot", 64)]
    )
    assert EXACT.collective_us(513, LLAMA.hidden, 8, alone=True) == EXACT._collectives["alone", 8](513)
    assert EXACT.collective_us(64, LLAMA.hidden, 8) == pytest.approx(EXACT._collectives["beside", 8](64))


def test_a_planner_over_a_table_predicts_what_was_measured():
    for tokens in (64, 777, 2048, 10000):
        measured = Planner(LLAMA, costs=EXACT, mode="auto").explain(tokens)
        described = Planner(LLAMA, costs=MACHINE, mode="auto").explain(tokens)
        for mode in ("sequential", "no_comm"):
            ratio = measured.predicted_ms[mode] / described.predicted_ms[mode]
            assert ratio == pytest.approx(1.25, rel=0.03), (tokens, mode)
    planner = Planner(LLAMA, costs=NOISY, mode="auto")
    for tokens in (1, 2, 100, 5000, 16384):
        plan = planner.plan(tokens)
        if plan.mode is Mode.WOVEN:
            assert (plan.ctas, plan.cluster) in {(scheme.ctas, scheme.cluster) for scheme in NOISY.schemes}


def test_signatures_tell_tables_and_machines_apart():
    again = Profile(Table(identity_of(), dict(NOISY_TABLE.times)), LLAMA, MACHINE)
    assert again.signature == NOISY.signature
    assert (
        len({again.signature, EXACT.signature, Profile(NOISY_TABLE, LLAMA, machine_of("h100", 2, "p2p")).signature})
        == 3
    )


@pytest.mark.parametrize("kind", ["gemm", "stream", "all_reduce", "attention"])
def test_a_table_that_lacks_a_part_is_refused(kind):
    from tokenweave.planning.profile_points import KINDS

    rest = {p: us for p, us in NOISY_TABLE.times.items() if type(p) is not KINDS[kind]}
    with pytest.raises(
        ProfileError, match=r"the table lacks points that a plan needs: .*; run `tokenweave tune` again"
    ):
        Profile(Table(identity_of(), rest), LLAMA, MACHINE)


def test_predictions_are_put_right_by_whole_steps():
    """Under a power limit a long step takes 8 % longer than the sum of its parts in short chains."""
    tables = {pace: Profile(table_of(FakePieces(MACHINE, pace=pace), SETTING), LLAMA, MACHINE) for pace in (1.0, 1.08)}
    plain, slower = (CostModel(LLAMA, tables[pace]) for pace in (1.0, 1.08))
    table = tables[1.0].table
    others = {point: us for point, us in table.times.items() if not isinstance(point, StepPoint)}
    parts = CostModel(LLAMA, Profile(dataclasses.replace(table, times=others), LLAMA, MACHINE))
    for tokens in (64, 700, 4096, 16384, 100_000):
        batch = Batch(runs_of([(tokens, 0)]))
        head = plain.head_us(batch.sampled)
        for kind in ("sequential", "fused", "no_comm"):
            ratio = (slower.unsplit_us(batch, kind) - head) / (plain.unsplit_us(batch, kind) - head)
            assert ratio == pytest.approx(1.08, rel=1e-6)
            assert parts.scale(kind, tokens) == 1.0
        assert plain.schemes == slower.schemes
        which = np.arange(len(plain.schemes))
        woven = [model.woven_us(batch, np.full(len(which), tokens // 2), which) - head for model in (plain, slower)]
        assert woven[1] / woven[0] == pytest.approx(1.08, rel=1e-6)
    step = next(point for point in tables[1.08].table.of(StepPoint) if (point.mode, point.tokens) == ("fused", 2048))
    four = CostModel(dataclasses.replace(LLAMA, layers=step.layers), tables[1.08])
    measured, batch = tables[1.08].table.times[step], Batch(runs_of([(2048, 0)]))
    assert four.unsplit_us(batch, "fused") - four.head_us(1) == pytest.approx(measured), (
        "what was measured is predicted"
    )


@pytest.mark.parametrize(
    "step",
    [
        StepPoint("faster", 256, 4),
        StepPoint("woven", 256, 4),
        StepPoint("fused", 256, 4, 128, 8),
        StepPoint("fused", 256, 4, ctas=8),
        StepPoint("woven", 256, 4, 256, 8),
        StepPoint("woven", 256, 4, 128, 7),
        StepPoint("woven", 256, 4, 128, 8, told="qkv+head"),
        StepPoint("woven", 256, 4, 128, 8, 3),
        StepPoint("woven", 256, 4, 128, 0, 2),
        StepPoint("fused", 2**40, 4),
    ],
    ids=str,
)
def test_a_step_that_no_plan_makes_is_refused(step):
    times = {**EXACT.table.times, step: 900.0}
    with pytest.raises(ProfileError, match=r"the table has a step that no plan makes: StepPoint\(.*`tokenweave tune`"):
        Profile(Table(identity_of(), times), LLAMA, MACHINE)
