"""Step graphs without a GPU: buckets, buffers, and whole steps whose graph is a function that is called again."""

import contextlib
import functools
import itertools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import run_ranks
from tiny_llama import VOCAB, make_engine, save_tiny_llama
from tokenweave import execution
from tokenweave.collective import fused_allreduce_rmsnorm
from tokenweave.engine import build, graphs
from tokenweave.engine import engine as engine_module
from tokenweave.engine.batch import Chunk, row_range_of, rows_of
from tokenweave.engine.buckets import MAX_ROWS, TILE, bucket_of, bucket_rows, fill_bucket
from tokenweave.engine.build import EngineArgs
from tokenweave.engine.graphs import GraphRecord, StepGraphs
from tokenweave.engine.split_buffer import PADDING, SplitShape, packed_inputs
from tokenweave.models import llama, load_model
from tokenweave.models.attention import attend
from tokenweave.models.inputs import SequenceRows
from tokenweave.planning.plan import Mode, Plan


@st.composite
def steps(draw, most=6):
    """Chunks of one step: decodes, first and later prefill chunks, in cache rows of their own."""
    chunks, start = [], 0
    for number in range(draw(st.integers(1, most))):
        first, size = draw(st.integers(0, 9)), draw(st.sampled_from([1, 1, 2, 3, 7, 40]))
        start += draw(st.integers(0, 3))
        tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(size))
        chunks.append(Chunk(number, first, tokens, start, draw(st.booleans())))
        start += first + size
    return chunks


def test_buckets_waste_less_than_a_tile():
    for rows in range(1, MAX_ROWS + 1):
        room = bucket_rows(rows)
        assert rows <= room < rows + TILE
        assert bucket_rows(room) == room
        assert room <= max(2 * rows, 8) or room - rows < 16
    assert len({bucket_rows(rows) for rows in range(1, MAX_ROWS + 1)}) < 80


def test_a_steps_plan_is_that_of_its_bucket():
    assert fill_bucket([(100, 5), (1, 80)], 8192) == [(100, 5), (1, 80)]  # at most a tile
    assert fill_bucket([(1, 80), (200, 5)], 8192) == [(1, 80), (255, 5)]
    assert fill_bucket([(1, 80), (200, 5)], 210) == [(1, 80), (209, 5)]
    assert fill_bucket([(MAX_ROWS + 1, 0)], 1 << 20) == [(MAX_ROWS + 1, 0)]


@given(steps(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_bucket_has_room_for_the_step_and_its_buffer_holds_it(chunks, data):
    rows = rows_of(chunks)
    cut = data.draw(st.none() if rows == 1 else st.one_of(st.none(), st.integers(1, rows - 1)))
    plan = Plan(Mode.FUSED) if cut is None else Plan(Mode.WOVEN, split=cut, gemm_sms={("qkv", "prefix"): 120})
    edges = [0, rows] if cut is None else [0, cut, rows]
    ranges = [row_range_of(chunks, a, b) for a, b in itertools.pairwise(edges)]
    bucket = bucket_of(ranges, plan, 512, 4096)
    assert bucket == bucket_of(ranges, plan, 512, 4096)
    assert hash(bucket) == hash(bucket_of(ranges, plan, 512, 4096))
    assert rows <= bucket.rows <= 512
    for split, given_rows in zip(bucket.splits, ranges, strict=True):
        shape = split.shape
        assert split.max_queries >= max(s.tokens for s in given_rows.sequences)
        assert bucket.max_length >= max(s.length for s in given_rows.sequences)
        assert split.max_queries > 1 or shape.rows == shape.sequences  # attention counts on a row a sequence
        buffer = torch.full((shape.words,), -7)
        shape.fill(buffer, given_rows, past=99)
        views = shape.views(buffer)
        n, s, k = given_rows.rows, len(given_rows.sequences), len(given_rows.sampled)
        assert views.token_ids.tolist() == [*given_rows.token_ids, *[0] * (shape.rows - n)]
        assert views.positions.tolist() == [*given_rows.positions, *[0] * (shape.rows - n)]
        assert views.cache_rows.tolist() == [*given_rows.cache_rows, *[PADDING] * (shape.rows - n)]
        assert views.sampled.tolist() == [*given_rows.sampled, *[99] * (shape.sampled - k)]
        starts = [x.first for x in given_rows.sequences]
        assert views.query_starts.tolist() == [*starts, *[n] * (shape.sequences + 1 - s)]
        assert views.cache_starts.tolist()[:s] == [x.cache_start for x in given_rows.sequences]
        assert views.lengths.tolist() == [x.length for x in given_rows.sequences] + [0] * (shape.sequences - s)
        assert views.row_count.tolist() == [n]
        assert {v.dtype for v in views[:4]} == {torch.int64}
        assert {v.dtype for v in views[4:]} == {torch.int32}
        assert shape.words % 2 == 0


def test_a_step_that_is_too_large_has_no_bucket():
    rows = row_range_of([Chunk(0, 0, (1,) * 3, 0, True)], 0, 3)
    assert bucket_of([rows], Plan(Mode.FUSED), 512, 64) is not None
    many = row_range_of([Chunk(0, 0, (1,) * (MAX_ROWS + 1), 0, True)], 0, MAX_ROWS + 1)
    assert bucket_of([many], Plan(Mode.FUSED), 1 << 20, 1 << 20) is None
    with pytest.raises(ValueError, match="do not fit"):
        SplitShape(2, 4, 4).fill(torch.zeros(SplitShape(2, 4, 4).words, dtype=torch.int64), rows, 0)


# ---- whole steps


def attend_like_flash(queries, keys, values, packed, held=0):
    """What FlashAttention makes of the packed sequences; rows of no sequence are NaN."""
    starts, lengths = packed.query_starts.tolist(), packed.lengths.tolist()
    assert len(starts) == len(packed.cache_starts) == len(lengths) + 1
    out = torch.full(queries.shape, float("nan"), dtype=queries.dtype)
    for index, length in enumerate(lengths):
        first, tokens = starts[index], starts[index + 1] - starts[index]
        assert tokens <= packed.max_queries
        assert length <= packed.max_length
        if tokens:
            rows = slice(first, first + tokens)
            one = SequenceRows(0, tokens, int(packed.cache_starts[index]), length - tokens)
            out[rows] = attend(queries[rows].contiguous(), keys, values, [one])
    return out


def rope_like_the_kernel(qkv, keys, values, query_slots, rotary, norm, eps, positions, cache_rows):
    kv_slots = (qkv.shape[1] - query_slots) // 2
    rotated = qkv[:, : query_slots + kv_slots].float()
    if norm is not None:
        rotated = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + eps) * norm
    cosine, sine = (table[positions].unsqueeze(1) for table in rotary)
    low, high = rotated.chunk(2, dim=-1)
    rotated = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(qkv.dtype)
    real = cache_rows >= 0
    keys[cache_rows[real]] = rotated[real, query_slots:]
    values[cache_rows[real]] = qkv[real, query_slots + kv_slots :]
    qkv[:, :query_slots] = rotated[:, :query_slots]


def embed_like_the_kernel(table, token_ids, out, *, first, count):
    here = (token_ids >= first) & (token_ids < first + count)
    out.copy_(torch.where(here.unsqueeze(1), table[torch.where(here, token_ids - first, 0)], 0))


_CAPTURE = StepGraphs._capture  # which `replaced_gpu` replaces


class _Stream:
    def wait_stream(self, other):
        pass


class _Graph:
    """Calls the walk again and writes its results where the first call's were."""

    def __init__(self, walk, outputs):
        self._walk, self._outputs = walk, outputs

    def replay(self):
        for kept, new in zip(self._outputs, self._walk(), strict=True):
            kept.copy_(new)


@contextlib.contextmanager
def replaced_gpu():
    """The engine's CUDA calls do nothing, its kernels are replaced by what they compute, a graph is a call."""

    def capture(self, step):
        outputs = [out.clone() for out in self._walk(step)]
        for out in outputs:
            out.fill_(float("nan"))
        step.outputs, step.graph, step.bytes = outputs, _Graph(lambda: self._walk(step), outputs), 1 << 20

    replacements = {
        torch.cuda: {
            "Stream": lambda device: _Stream(),
            "current_stream": _Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda device: None,
            "graph_pool_handle": lambda: None,
        },
        llama: {"attend_packed": attend_like_flash},
        llama.kernels: {
            "available": lambda x: True,
            "embed_rows": embed_like_the_kernel,
            "rope_cache": rope_like_the_kernel,
            "silu_mul": lambda x: llama.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
        },
        StepGraphs: {"_capture": capture},
    }
    with contextlib.ExitStack() as stack:
        for where, names in replacements.items():
            stack.enter_context(mock.patch.multiple(where, **names))
        yield


@pytest.fixture
def without_gpu():
    with replaced_gpu():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


def _random_step(pick, number):
    """Chunks of decodes and prompts; the contexts' keys and values are whatever the cache holds."""
    chunks, start = [], 0
    only_decodes = pick.random() < 0.3
    for index in range(pick.randint(1, 5)):
        first, size = pick.randint(0, 20), 1 if only_decodes else pick.choice([1, 1, 4, 9, 17])
        tokens = tuple(pick.randrange(VOCAB) for _ in range(size))
        chunks.append(Chunk(10 * number + index, first, tokens, start, pick.random() < 0.7))
        start += first + size + pick.randint(0, 3)
    return chunks


def test_replayed_steps_equal_eager_ones(model, without_gpu):
    """Every bucket eagerly, captured and replayed with other rows; the cache and the final rows are eager's."""
    engine = make_engine(model, max_batch_tokens=96, cache_rows=256)
    step_graphs = StepGraphs(engine._stages, engine.workspace, engine._residual, engine._overlap, 128)
    pick, woven = random.Random(5), 0
    cache = engine.cache.keys + engine.cache.values
    for tensor in cache:
        tensor.normal_()
    with torch.inference_mode():
        for number in range(80):
            chunks = _random_step(pick, number)
            rows = rows_of(chunks)
            plan = Plan(pick.choice([Mode.SEQUENTIAL, Mode.FUSED]))
            if rows > 1 and pick.random() < 0.5:
                plan = Plan(Mode.WOVEN, split=max(1, rows // 2 // 8 * 8))
            before = [tensor.clone() for tensor in cache]
            expected = engine.forward(chunks, plan)
            written = [tensor.clone() for tensor in cache]
            for tensor, saved in zip(cache, before, strict=True):
                tensor.copy_(saved)
            replays = step_graphs.replays
            got = step_graphs.forward(chunks, plan)
            woven += plan.mode is Mode.WOVEN and step_graphs.replays > replays
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            for tensor, saved in zip(cache, written, strict=True):
                torch.testing.assert_close(tensor, saved, rtol=1e-4, atol=1e-5)
    assert step_graphs.replays > 20
    assert woven > 5
    assert step_graphs.eager > 5
    assert 0 < step_graphs.graphs <= step_graphs.eager
    assert step_graphs.bytes == step_graphs.graphs << 20
    step_graphs.close()
    assert step_graphs.graphs == 0
    engine.close()


@contextlib.contextmanager
def _bounded(model, max_graphs, mebibytes):
    """Step graphs within bounds, and what runs steps of so many rows -> how many of them were replays."""
    engine = make_engine(model, max_batch_tokens=96, cache_rows=256)
    parts = engine._stages, engine.workspace, engine._residual, engine._overlap
    step_graphs = StepGraphs(*parts, 128, max_graphs=max_graphs, max_bytes=mebibytes << 20)

    def run(*sizes):
        before = step_graphs.replays
        for rows in sizes:
            step_graphs.forward([Chunk(0, 0, (1,) * rows, 0, True)], Plan(Mode.SEQUENTIAL))
            assert step_graphs.bytes <= mebibytes << 20
        return step_graphs.replays - before

    yield step_graphs, run
    step_graphs.close()
    engine.close()


def test_graphs_are_bounded_in_number(model, without_gpu):
    with _bounded(model, 3, 3) as (step_graphs, run):
        assert run(3, 3, 5, 5, 3, 20) == 3
        assert (step_graphs.graphs, step_graphs.bytes) == (2, 2 << 20)
        assert run(40) == 0  # a fourth bucket: 5 rows were not used for longest
        assert run(3) == 1
        assert run(5) == 0
        assert run(5, 3) == 2
        assert run(20) == 0  # it had given way to 5 rows
        assert step_graphs.graphs == 2
        assert run(20) == 1
        assert step_graphs.bytes == 3 << 20
        assert run(96) == 0
        assert step_graphs.graphs == 2
        step_graphs.close()
        assert (step_graphs.graphs, step_graphs.bytes) == (0, 0)
        assert run(96, 96, 3, 3) == 2


def test_the_memory_is_bounded_at_every_capture(model, without_gpu, caplog):
    """Also where all buckets were made before the first capture."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80)
    with _bounded(model, 128, 3) as (step_graphs, run):
        assert run(*sizes) == 0
        assert run(*sizes) == 10
        assert (step_graphs.graphs, step_graphs.bytes) == (3, 3 << 20)
        assert caplog.messages == ["step graphs take 3 MiB: those not used for longest give way"]
        assert run(64, 80) == 2  # they are held
        assert run(1) == 0  # it gave way, and begins again
        assert run(1, 80) == 2
        assert run(48) == 0  # its graph was the oldest
        assert step_graphs.eager == 12


def test_what_graphs_take_is_told_at_each_doubling_and_at_the_end(model, without_gpu, caplog):
    caplog.set_level("INFO", graphs.__name__)
    with _bounded(model, 128, 16) as (step_graphs, run):
        assert step_graphs.record == GraphRecord(0, 0.0, 0.0)
        for rows in (1, 2, 4, 8, 16, 24, 32):
            run(rows, rows, rows)
        assert run(1, 2, 4) == 3
        seconds = step_graphs.capture_seconds
        assert seconds > 0
        assert step_graphs.record == GraphRecord(7, 7.0, seconds)
    told = [message.split(", captured in ")[0] for message in caplog.messages]
    assert told == [f"step graphs: {count} in {count} MiB" for count in (1, 2, 4, 7)]
    assert caplog.messages[-1] == f"step graphs: 7 in 7 MiB, captured in {seconds:.1f} s"


def _sequential_on_rank(path):
    """What each rank's log says of sequential steps, and whether they ran as graphs."""
    engine = make_engine(path, max_batch_tokens=96, cache_rows=256)
    chunks, said = [Chunk(0, 0, (1,) * 3, 0, True)], []
    with replaced_gpu(), mock.patch.object(graphs.log, "warning", said.append):
        step_graphs = StepGraphs(engine._stages, engine.workspace, engine._residual, engine._overlap, 128)
        engine.workspace.transport = "p2p"
        ran = [step_graphs.forward(chunks, Plan(Mode.SEQUENTIAL)) for _ in range(3)]
        engine.workspace.transport = "torch"
    engine.close()
    return ran, said


def test_sequential_steps_of_several_ranks_say_once_that_they_are_no_graphs(model):
    (ran, (said,)), other = run_ranks(2, _sequential_on_rank, model)
    assert ran == [None] * 3
    assert said.startswith("sequential steps of several ranks run launch by launch")
    assert other == (ran, [])


def test_a_step_whose_graph_is_too_large_runs_launch_by_launch(model, without_gpu, caplog):
    """Beside what others left in the pool it is tried again alone; a graph that does not fit alone is not."""
    captures, capture = [], StepGraphs._capture

    def large(self, step):
        """The pool has 1 MiB; 32 rows take 2 MiB more of one that others have used. Launches of 64 rows take 5 MiB."""
        captures.append(step.bucket.rows)
        if step.bucket.rows == 32 and self._pool_bytes:
            self._pool_bytes += 2 << 20
        elif not self._pool_bytes:
            self._pool_bytes = 1 << 20
        capture(self, step)
        if step.bucket.rows == 64:
            step.bytes = 5 << 20

    with mock.patch.object(StepGraphs, "_capture", large), _bounded(model, 128, 3) as (step_graphs, run):
        assert run(8, 8) == 1
        assert (step_graphs.graphs, step_graphs.bytes) == (1, 2 << 20)
        assert run(32, 32) == 0
        assert (step_graphs.graphs, step_graphs.bytes) == (0, 0)
        assert run(32, 32) == 2
        assert (step_graphs.graphs, step_graphs.bytes) == (1, 2 << 20)
        assert run(64, 64) == 0  # beside the other one's pool
        assert run(64, 64, 64) == 0
        assert captures == [8, 32, 32, 64, 64]
        assert caplog.messages[1:] == [
            "a sequential step of 64 rows runs launch by launch: its graph takes 6 MiB, more than all may (3 MiB)"
        ]
        assert run(8, 8, 64, 8) == 2


def _counting(partial, residual, weight, eps, workspace, **options):
    """A single rank's collective, counted as one of several ranks would be."""
    workspace.collectives += 1
    workspace.bytes_sent += partial.nbytes
    del options["row_count"]
    return fused_allreduce_rmsnorm(partial, residual, weight, eps, workspace, **options)


@contextlib.contextmanager
def _capturing(stream, pool):
    """What is captured has not run: a replay of it is counted by nobody but the graphs."""
    yield mock.Mock(spec=["replay"])


def test_a_replay_counts_what_its_step_sends_and_a_capture_nothing(model, without_gpu):
    engine = make_engine(model, max_batch_tokens=96, cache_rows=256)
    step_graphs = StepGraphs(engine._stages, engine.workspace, engine._residual, engine._overlap, 128)
    cuda = {"mem_get_info": lambda device: (1 << 30, 1 << 31), "memory_reserved": lambda device: 0}
    grown = []
    with (
        mock.patch.object(execution, "fused_allreduce_rmsnorm", _counting),
        mock.patch.object(graphs, "capturing", _capturing),
        mock.patch.object(StepGraphs, "_capture", _CAPTURE),
        mock.patch.multiple(torch.cuda, **cuda),
    ):
        for plan in (Plan(Mode.FUSED), Plan(Mode.WOVEN, split=8)):
            for _ in range(4):
                before = engine.workspace.collectives, engine.workspace.bytes_sent
                step_graphs.forward([Chunk(0, 0, (1,) * 24, 0, True)], plan)
                after = engine.workspace.collectives, engine.workspace.bytes_sent
                grown.append(tuple(b - a for a, b in zip(before, after, strict=True)))
    assert (step_graphs.eager, step_graphs.replays) == (2, 6)
    stages = len(engine._stages)
    row = engine.workspace.hidden * engine.workspace.dtype.itemsize
    assert grown[:4] == [(stages, 24 * row * stages)] * 4  # the first, and a capture with its replay, and two replays
    assert grown[4:] == [(2 * stages, 24 * row * stages)] * 4
    step_graphs.close()
    engine.close()


def test_the_packed_inputs_say_what_the_sequences_say():
    chunks = [Chunk(0, 4, (1, 2, 3), 10, True), Chunk(1, 30, (4,), 40, True)]
    rows = row_range_of(chunks, 1, 4)
    shape = SplitShape(4, 3, 3)
    buffer = torch.zeros(shape.words, dtype=torch.int64)
    shape.fill(buffer, rows, past=0)
    packed = packed_inputs(shape.views(buffer), 2, 64).packed
    assert packed.query_starts.tolist() == [0, 2, 3, 3]
    assert packed.cache_starts.tolist()[:2] == [10, 40]
    assert packed.lengths.tolist() == [7, 31, 0]
    assert bucket_of([rows], Plan(Mode.FUSED), 64, 64).splits[0].max_queries == 2


def _fused_like_the_kernels(counts, partial, residual, weight, eps, workspace, *, rows, row_count, **options):
    """The real rows alone are reduced, sampled rows behind them are skipped, everything else is garbage. ``counts`` gets how
    many rows are real."""
    real = int(row_count)
    counts.add(real)
    partial[real:] = float("nan")
    del options["ctas"], options["cluster"]
    arguments = (partial[:real], residual[:real], weight, eps, workspace)
    workspace.transport = "torch"
    try:
        if rows is None:
            fused_allreduce_rmsnorm(*arguments, **options)
            return partial, None
        wanted = rows[rows < real]
        assert (rows[len(wanted) :] >= partial.shape[0]).all(), "padding that some rank would own"
        out = partial.new_full((len(rows), partial.shape[1]), float("nan"))
        out[: len(wanted)] = fused_allreduce_rmsnorm(*arguments, rows=wanted, **options)[0]
        return out, None
    finally:
        workspace.transport = "p2p"


def _replays_on_rank(path, seed):
    engine = make_engine(path, max_batch_tokens=96, cache_rows=256)
    pick = random.Random(seed)
    for tensor in engine.cache.keys + engine.cache.values:
        tensor.normal_()
    worst = 0.0
    with torch.inference_mode(), replaced_gpu():
        step_graphs = StepGraphs(engine._stages, engine.workspace, engine._residual, engine._overlap, 128)
        for number in range(60):
            chunks = _random_step(pick, number)
            rows = rows_of(chunks)
            plan = Plan(Mode.FUSED)
            if rows > 1 and pick.random() < 0.6:
                plan = Plan(Mode.WOVEN, split=max(1, rows // 2 // 8 * 8))
            expected = engine.forward(chunks, plan)
            engine.workspace.transport = "p2p"
            counts: set[int] = set()
            kernels = functools.partial(_fused_like_the_kernels, counts)
            with mock.patch.object(execution, "fused_allreduce_rmsnorm", kernels):
                got = step_graphs.forward(chunks, plan)
            engine.workspace.transport = "torch"
            assert counts == ({rows} if plan.split is None else {plan.split, rows - plan.split}), "padding is sent"
            assert got.shape == expected.shape
            if got.numel():
                worst = max(worst, float((got - expected).abs().max()))
    replays = step_graphs.replays
    engine.close()
    return worst, replays


def test_collectives_of_replayed_steps_get_the_real_rows(model):
    """Two ranks, the row count and padded sampled rows as the GPU's kernels take them."""
    for worst, replays in run_ranks(2, _replays_on_rank, model, 3):
        assert worst < 1e-4
        assert replays > 10


def _graphs_of(path, capturable):
    """On each rank: whether its engine makes graphs, of ranks that can or cannot; and what its log says."""
    rank, group, said = dist.get_rank(), dist.group.WORLD, []
    model = load_model(path, rank=rank, world_size=dist.get_world_size(), group=group)
    args = EngineArgs(path, dist.get_world_size(), device="cpu", cache_tokens=64)
    with (
        mock.patch.object(type(model), "capturable", property(lambda self: capturable[rank])),
        mock.patch.object(engine_module, "StepGraphs"),
        mock.patch.object(build.log, "warning", said.append),
    ):
        engine = build.engine_around(model, args, group, torch.device("cpu"), lambda: None)
        made = engine.graphs is not None
        engine.graphs = None
        engine.close()
    return made, said


def test_no_rank_has_graphs_where_one_cannot_have_them(model):
    assert run_ranks(2, _graphs_of, model, (True, True)) == [(True, [])] * 2
    (one, said), other = run_ranks(2, _graphs_of, model, (True, False))
    assert not one
    assert said == ["steps run without CUDA graphs: another rank's cannot be captured, and its log says why"]
    assert other == (False, [])
