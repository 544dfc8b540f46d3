"""The engine on a tiny Llama: batching, chunking, waiting, stopping and seeds change nothing but the time."""

import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ranks import run_ranks
from tiny_llama import CONTEXT, EOS, VOCAB, Letters, answers, make_engine, new_requests, save_tiny_llama
from tokenweave.engine.batch import Chunk
from tokenweave.engine.build import EngineArgs, plan_function
from tokenweave.engine.sampling import SamplingParams
from tokenweave.errors import RequestError
from tokenweave.models import read_config
from tokenweave.planning.plan import Mode, Plan

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(model):
    """Greedy tokens by transformers, one prompt at a time."""
    from transformers import LlamaForCausalLM

    return Reference(LlamaForCausalLM.from_pretrained(model))


class Reference:
    def __init__(self, llama):
        self._llama, self._known = llama, {}

    def __call__(self, prompt, tokens):
        return self._generated(prompt, tokens)[0]

    def tie(self, prompt, tokens):
        """Whether a token's logit is so little above the next one's that rounding in another order decides: float32 logits
        of this model are up to about 10, 1e-6 apart, and sums of a few dozen terms."""
        return self._generated(prompt, tokens)[1] < 1e-4

    def _generated(self, prompt, tokens):
        key = (*prompt, -tokens)
        if key not in self._known:
            ids, least = torch.tensor([prompt]), float("inf")
            with torch.inference_mode():
                for _ in range(tokens):
                    best = self._llama(ids).logits[:, -1].topk(2)
                    least = min(least, float(best.values[0, 0] - best.values[0, 1]))
                    ids = torch.cat([ids, best.indices[:, :1]], dim=1)
            self._known[key] = ids[0, len(prompt) :].tolist(), least
        return self._known[key]


def prompts(count, seed=0, longest=40):
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCAB) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("mode", list(Mode))
def test_batched_equals_one_by_one_equals_transformers(model, reference, mode):
    given_prompts = prompts(9)
    engine = make_engine(model, mode, max_batch_tokens=32, max_num_seqs=4)
    together = answers(engine, new_requests(given_prompts, GREEDY))
    alone = [answers(engine, new_requests([p], GREEDY, first_number=100 + i))[0] for i, p in enumerate(given_prompts)]
    assert together == alone == [(reference(p, 8), "length") for p in given_prompts]
    engine.close()


@given(
    seed=st.integers(0, 10_000),
    max_batch_tokens=st.integers(1, 48),
    max_num_seqs=st.integers(1, 5),
    cache_rows=st.integers(60, 200),
)
@settings(max_examples=25, deadline=None)
def test_chunking_and_waiting_change_no_token(model, reference, seed, max_batch_tokens, max_num_seqs, cache_rows):
    numbers = random.Random(seed)
    plans = {}

    def any_plan(tokens):
        choices = [Plan(Mode.SEQUENTIAL), Plan(Mode.FUSED)]
        if tokens > 1:
            choices += 2 * [Plan(Mode.WOVEN, split=numbers.randint(1, tokens - 1))]
        plan = numbers.choice(choices)
        plans[str(plan.mode)] = plans.get(str(plan.mode), 0) + 1
        return plan

    given_prompts = prompts(6, seed)
    params = [SamplingParams(temperature=0, max_tokens=numbers.randint(1, 12), ignore_eos=True) for _ in given_prompts]
    asked = list(zip(given_prompts, params, strict=True))
    assume(not any(reference.tie(p, q.max_tokens) for p, q in asked))
    engine = make_engine(
        model, any_plan, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, cache_rows=cache_rows
    )
    got = answers(engine, new_requests(given_prompts, params))
    assert got == [(reference(p, q.max_tokens), "length") for p, q in asked]
    assert sum(plans.values()) == len(engine.steps)
    assert max(s.prefill_tokens + s.decode_tokens for s in engine.steps) <= max_batch_tokens
    assert sum(s.prefill_tokens for s in engine.steps) == sum(map(len, given_prompts))
    assert sum(s.decode_tokens for s in engine.steps) == sum(q.max_tokens - 1 for q in params)
    engine.close()


def test_requests_that_come_while_others_run(model, reference):
    engine = make_engine(model, max_batch_tokens=16)
    given_prompts = prompts(6, seed=5)
    waiting = new_requests(given_prompts, GREEDY)
    tokens = {request.number: [] for request in waiting}
    while waiting or engine.scheduler.requests:
        if waiting:
            engine.add([waiting.pop(0)])
        for event in engine.step():
            tokens[event.request].append(event.token_id)
    assert list(tokens.values()) == [reference(p, 8) for p in given_prompts]
    assert engine.step() == []
    engine.close()


def test_out_of_cache_requests_wait_and_all_are_served(model, reference):
    engine = make_engine(model, cache_rows=50, max_batch_tokens=64)
    given_prompts = prompts(8, seed=2)
    got = answers(engine, new_requests(given_prompts, GREEDY))
    assert got == [(reference(p, 8), "length") for p in given_prompts]
    engine.close()


def test_seeds(model):
    engine = make_engine(model)
    (prompt,) = prompts(1)

    def draw(seed, number, others=0):
        params = SamplingParams(temperature=1.5, top_p=0.95, max_tokens=12, seed=seed, ignore_eos=True)
        extra = [SamplingParams(temperature=1, max_tokens=9, seed=i, ignore_eos=True) for i in range(others)]
        requests = new_requests([*prompts(others, seed=9), prompt], [*extra, params], first_number=number)
        return answers(engine, requests)[-1]

    assert draw(7, 0) == draw(7, 10) == draw(7, 20, others=5)
    assert len({tuple(draw(seed, 100 + 10 * seed)[0]) for seed in range(6)}) == 6
    engine.close()


def test_end_of_sequence_and_stop_tokens(model, reference):
    engine = make_engine(model)
    (prompt,) = prompts(1, seed=3)
    tokens = reference(prompt, 60)
    third = tokens[2]
    place = tokens.index(third)
    params = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[third], ignore_eos=True)
    assert answers(engine, new_requests([prompt], params)) == [(tokens[: place + 1], "stop")]

    with_eos = next(p for p in prompts(200, seed=4) if EOS in reference(p, 8))
    tokens = reference(with_eos, 8)
    params = SamplingParams(temperature=0, max_tokens=8)
    place = tokens.index(EOS)
    assert answers(engine, new_requests([with_eos], params, 10)) == [(tokens[: place + 1], "stop")]
    assert answers(engine, new_requests([with_eos], GREEDY, 20)) == [(tokens, "length")]
    engine.close()


def test_stop_strings_across_token_borders(model, reference):
    engine = make_engine(model)
    (prompt,) = prompts(1, seed=6)
    tokens = reference(prompt, 30)
    stop = Letters().decode(tokens[4:7])
    end = next(n for n in range(31) if stop in Letters().decode(tokens[:n]))
    params = SamplingParams(temperature=0, max_tokens=30, stop=["never", stop], ignore_eos=True)
    assert answers(engine, new_requests([prompt], params)) == [(tokens[:end], "stop")]
    engine.close()


def test_what_a_finished_request_reports(model):
    engine = make_engine(model, Mode.WOVEN, max_batch_tokens=8)
    (request,) = new_requests([list(range(20))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    events = [event for step in engine.run([request]) for event in step]
    assert [event.finished is None for event in events] == [True] * 4 + [False]
    finished = events[-1].finished
    assert finished.mode_counts == {"woven": 3, "fused": 4}  # chunks of 8, 8 and 4 rows; then one row a step
    assert 0 < finished.ttft_ms < finished.total_ms
    assert [(s.mode, s.split, s.prefill_tokens, s.decode_tokens) for s in engine.steps] == [
        ("woven", 4, 8, 0),
        ("woven", 4, 8, 0),
        ("woven", 2, 4, 0),
        *[("fused", None, 0, 1)] * 4,
    ]
    engine.close()


def test_an_impossible_request_leaves_the_engine_usable(model, reference):
    engine = make_engine(model, cache_rows=40)
    good, bad = [1, 2, 3], list(range(60))
    with pytest.raises(RequestError, match="prompt 1: 60 prompt tokens"):
        list(engine.run(new_requests([good, bad], GREEDY)))
    assert engine.step() == []
    assert answers(engine, new_requests([good], GREEDY)) == [(reference(good, 8), "length")]
    engine.close()


def test_the_context_ends_a_request(model, reference):
    engine = make_engine(model, max_batch_tokens=CONTEXT)
    prompt = prompts(1, seed=8)[0] * 10
    prompt = prompt[: CONTEXT - 3]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    assert answers(engine, new_requests([prompt], params)) == [(reference(prompt, 3), "length")]
    engine.close()


def generate_on_rank(path, mode, given_prompts, params, cache_rows):
    engine = make_engine(path, mode, max_batch_tokens=24, max_num_seqs=4, cache_rows=cache_rows)
    got = answers(engine, new_requests(given_prompts, params))
    steps = [(s.mode, s.collectives, s.bytes_sent) for s in engine.steps]
    engine.close()
    return got, steps


@pytest.mark.parametrize(
    ("mode", "world_size"), [*[(mode, world_size) for mode in Mode for world_size in (2, 3)], (Mode.WOVEN, 8)]
)
def test_ranks_stay_in_lockstep(model, reference, mode, world_size):
    """Greedy and drawn requests in one batch, a cache too small for all of them."""
    given_prompts = prompts(7, seed=11)
    drawn = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, max_tokens=8, stop=["qqq"])
    params = [GREEDY if i % 2 else drawn for i in range(7)]
    results = run_ranks(world_size, generate_on_rank, model, mode, given_prompts, params, 90)
    assert all(got == results[0][0] for got, _ in results)
    for i in range(1, 7, 2):
        assert results[0][0][i] == (reference(given_prompts[i], 8), "length")
    # One collective is a reduce-scatter and an all-gather, or an all-reduce; there are 1 + 2 * 3 stages.
    for name, collectives, bytes_sent in results[0][1]:
        whole = 7 if name == "sequential" else 14
        assert collectives <= (2 if name == "woven" else 1) * whole
        assert collectives > 0
        assert bytes_sent > 0


@pytest.mark.parametrize("mode", ["auto", *map(str, Mode)])
def test_the_planner_gives_plans_that_a_step_can_run(mode):
    plan = plan_function(EngineArgs("x", 2, device="cpu", mode=mode), read_config("SmolLM2-135M"), "torch")
    for sizes in ([1], [2], [1, 1], [1, 5], [300], [1] * 40 + [77]):
        chunks = [Chunk(i, 10 * i, (0,) * size, 0, True) for i, size in enumerate(sizes)]
        chosen = plan(chunks)
        assert chosen.split is None or 0 < chosen.split < sum(sizes)
        if mode != "auto":
            assert str(chosen.mode) == ("fused" if mode == "woven" and sum(sizes) == 1 else mode)


def test_one_row_steps_of_a_forced_weave_are_logged_once(caplog):
    plan = plan_function(EngineArgs("x", 2, device="cpu", mode="woven"), read_config("SmolLM2-135M"), "torch")
    with caplog.at_level("INFO", logger="tokenweave"):
        for _ in range(3):
            plan([Chunk(0, 0, (1,), 0, True)])
    assert len(caplog.records) == 1
    assert "steps of one row" in caplog.text
