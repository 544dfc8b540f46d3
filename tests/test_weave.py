"""Sequential, fused and woven are three ways to walk the same stages: the same logits, the same cache, any cut."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks import run_ranks
from tiny_llama import CONTEXT, VOCAB, make_engine, save_tiny_llama
from tokenweave.engine.batch import Chunk, rows_of, splits_of
from tokenweave.errors import RequestError
from tokenweave.execution import collective_of
from tokenweave.overlap import Inline, StartAt
from tokenweave.planning.plan import POINTS, Mode, Plan
from tokenweave.weave import run_stages

# fp32; rows are sums of other shapes' GEMMs, so bits may differ where the cut changes a GEMM's row count.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


@st.composite
def mixed_batches(draw):
    """(context, tokens, sampled) of each request: decodes, first and later prefill chunks."""
    decode = st.tuples(st.integers(1, 40), st.just(1), st.just(True))
    first_chunk = st.tuples(st.just(0), st.integers(1, 12), st.booleans())
    later_chunk = st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans())
    batch = draw(st.lists(st.one_of(decode, first_chunk, later_chunk), min_size=1, max_size=5))
    return batch if sum(tokens for _, tokens, _ in batch) > 1 else [*batch, (3, 1, True)]


def walk_every_cut(path, batch, seed):
    """On each rank: the step's logits fused, sequential and woven at every cut; largest differences from fused."""
    engine = make_engine(path)
    generator = torch.Generator().manual_seed(seed)
    contexts, chunks, start = [], [], 2
    for number, (context, tokens, sampled) in enumerate(batch):
        ids = torch.randint(VOCAB, (context + tokens,), generator=generator).tolist()
        if context:
            contexts.append(Chunk(number, 0, tuple(ids[:context]), start, False))
        chunks.append(Chunk(number, context, tuple(ids[context:]), start, sampled))
        start += context + tokens + number
    cache = engine.cache.keys + engine.cache.values
    for tensor in cache:
        tensor.fill_(float("nan"))  # a row that is read before it is written shows
    with torch.inference_mode():
        for chunk in contexts:
            engine.forward([chunk], Plan(Mode.FUSED))
        before = [tensor.clone() for tensor in cache]

        def outcome(plan):
            for tensor, saved in zip(cache, before, strict=True):
                tensor.copy_(saved)
            engine.workspace.buffer(engine.workspace.max_tokens).fill_(float("nan"))
            logits = engine.model.logits(engine.forward(chunks, plan))
            return logits, torch.stack([tensor[:start] for tensor in cache])

        logits, written = outcome(Plan(Mode.FUSED))
        assert not logits.isnan().any()
        scale = logits.abs().amax().item() if logits.numel() else 1.0
        worst = 0.0
        plans = [Plan(Mode.SEQUENTIAL), *(Plan(Mode.WOVEN, split=at) for at in range(1, rows_of(chunks)))]
        late = frozenset(("qkv", "activation") if seed % 2 else ("o", "down"))
        plans.append(Plan(Mode.WOVEN, split=1, start_at=late))
        for plan in plans:
            other, other_written = outcome(plan)
            torch.testing.assert_close(other_written, written, rtol=1e-4, atol=1e-4, equal_nan=True)
            if logits.numel():
                worst = max(worst, (other - logits).abs().amax().item() / scale)
    engine.close()
    return logits, worst


@given(batch=mixed_batches(), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_woven_equals_fused_at_every_cut_of_a_mixed_batch(model, batch, seed):
    (logits, worst), (other_logits, _) = run_ranks(2, walk_every_cut, model, batch, seed)
    assert torch.equal(logits, other_logits), "ranks hold different bits"
    assert logits.shape == (sum(sampled for _, _, sampled in batch), VOCAB)
    assert worst < TOLERANCE


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes(model, world_size):
    batch = [(17, 1, True), (5, 1, True), (20, 9, False), (0, 11, True), (0, 4, False)]
    results = run_ranks(world_size, walk_every_cut, model, batch, 1)
    assert all(torch.equal(logits, results[0][0]) for logits, _ in results)
    assert max(worst for _, worst in results) < TOLERANCE
    single = run_ranks(2, walk_every_cut, model, batch, 1)[0][0]
    torch.testing.assert_close(results[0][0], single, rtol=1e-4, atol=1e-4)


def test_a_step_that_samples_nothing_is_walked_as_well(model):
    for logits, _ in run_ranks(2, walk_every_cut, model, [(0, 6, False), (4, 3, False)], 0):
        assert logits.shape == (0, VOCAB)


def test_a_long_prompt_cut_once_equals_transformers(model):
    from transformers import LlamaForCausalLM

    ids = torch.randint(VOCAB, (CONTEXT - 1,), generator=torch.Generator().manual_seed(3))
    expected = LlamaForCausalLM.from_pretrained(model)(ids[None]).logits[0, -1]
    for at in (1, 64, 126):
        engine = make_engine(model, max_batch_tokens=CONTEXT)
        with torch.inference_mode():
            rows = engine.forward([Chunk(0, 0, tuple(ids.tolist()), 5, True)], Plan(Mode.WOVEN, split=at))
            torch.testing.assert_close(engine.model.logits(rows)[0], expected, rtol=1e-4, atol=1e-4)
        engine.close()


class _Recorder:
    """An overlap that writes down what happens."""

    def __init__(self):
        self.events = []

    def run(self, collective, *args):
        self.events.append(f"start {collective}")
        return collective

    def wait(self, pending):
        self.events.append(f"wait {pending}")
        return pending

    def reached(self, point):
        pass

    def close(self):
        pass


def test_collectives_start_at_the_first_of_their_points():
    recorder = _Recorder()
    overlap = StartAt(recorder, ("qkv", "activation"))
    a = overlap.run("a")
    for point in ("gate_up", "activation", "down"):  # of the other split's MLP
        overlap.reached(point)
        recorder.events.append(point)
    b = overlap.run("b")
    overlap.wait(a)
    overlap.reached("qkv")
    c = overlap.run("c")
    overlap.wait(b)
    d = overlap.run("d")
    overlap.wait(d)  # nothing was reached: both start now, in their order
    overlap.wait(c)
    expected = "gate_up, start a, activation, down, wait a, start b, wait b, start c, start d, wait d, wait c"
    assert ", ".join(recorder.events) == expected


def test_the_points_that_computes_pass(model):
    engine = make_engine(model, 1)
    for split in range(1, 3):
        passed = []
        overlap = StartAt(Inline(), POINTS)
        overlap.reached = passed.append
        plan = Plan(Mode.WOVEN, split=split)
        splits = splits_of([Chunk(0, 0, (1, 2, 3), 0, True)], plan, engine._residual, reached=overlap.reached)
        collective = collective_of(plan, 3, engine.workspace)
        with torch.inference_mode():
            run_stages(engine._stages, splits, collective, engine.workspace, overlap)
            with pytest.raises(RequestError, match=rf"rows 0\.\.{split} were walked already.*make a Split anew"):
                run_stages(engine._stages, splits, collective, engine.workspace, overlap)
        assert passed == [*POINTS[:3] * 2, *POINTS[3:] * 2] * 3, "three layers, prefix and suffix"
    engine.close()


def test_a_mode_is_a_mode():
    with pytest.raises(ValueError, match=r"mode='woven'; expected a Mode, such as Mode\.WOVEN"):
        Plan("woven", split=5)  # type: ignore[arg-type]


def test_points_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"start_at=\['mlp'\]; expected points of qkv, attention"):
        Plan(Mode.WOVEN, split=1, start_at=frozenset(("mlp",)))
    with pytest.raises(ValueError, match="start_at='down'; expected a set"):
        Plan(Mode.WOVEN, split=1, start_at="down")  # type: ignore[arg-type]
    assert Plan(Mode.WOVEN, split=1, start_at=["down", "down"]).start_at == {"down"}  # type: ignore[arg-type]
