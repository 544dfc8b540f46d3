import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest, Scheduler
from tokenweave.errors import RequestError


def scheduler(cache_rows=64, context=64, max_batch_tokens=8, max_num_seqs=4):
    return Scheduler(
        cache_rows=cache_rows, context=context, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, vocab=100
    )


def request(number, prompt_tokens, max_tokens):
    prompt = tuple((7 * number + i) % 100 for i in range(prompt_tokens))
    return NewRequest(number, prompt, SamplingParams(temperature=0, max_tokens=max_tokens), seed=0)


def run_to_end(s, arrivals):
    """Schedules until nothing is left, "samples" 0 everywhere; arrivals are (step, request). Returns the steps' chunks."""
    steps, arrivals = [], sorted(arrivals, key=lambda a: (a[0], a[1].number))
    while arrivals or s.requests:
        while arrivals and arrivals[0][0] <= len(steps):
            s.add([arrivals.pop(0)[1]])
        chunks = s.schedule()
        assert chunks or not s.requests
        steps.append(chunks)
        for chunk in chunks:
            if chunk.sampled:
                r = s.requests[chunk.request]
                r.token_ids.append(0)
                if r.generated == r.max_tokens:
                    s.finish(r)
        assert len(steps) < 10_000, "requests are starving"
    return steps


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 15)), min_size=1, max_size=12),
    cache_rows=st.integers(32, 80),
    max_batch_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_every_request_is_served_within_the_limits(sizes, cache_rows, max_batch_tokens, max_num_seqs):
    s = scheduler(cache_rows, 64, max_batch_tokens, max_num_seqs)
    new = [request(i, p, m) for i, (p, m, _) in enumerate(sizes)]
    steps = run_to_end(s, [(at, r) for (_, _, at), r in zip(sizes, new, strict=True)])

    seen = {r.number: [] for r in new}
    started, held = [], {}
    for chunks in steps:
        assert sum(len(c.token_ids) for c in chunks) <= max_batch_tokens
        assert len({c.request for c in chunks}) == len(chunks) <= max_num_seqs
        decodes = [len(seen[c.request]) >= len(new[c.request].prompt_token_ids) for c in chunks]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        for c in chunks:
            if not seen[c.request]:
                started.append(c.request)
                held[c.request] = range(c.cache_start, c.cache_start + sum(sizes[c.request][:2]))
            assert c.first == len(seen[c.request]), "every position once, in order"
            assert held[c.request].start == c.cache_start
            seen[c.request] += c.token_ids
            done = len(seen[c.request]) >= sum(sizes[c.request][:2]) - 1
            runs = sorted(held.values(), key=lambda run: run.start)
            assert all(a.stop <= b.start for a, b in itertools.pairwise(runs)), "runs of cache rows overlap"
            assert all(run.start >= 0 and run.stop <= cache_rows for run in runs)
            if done:
                del held[c.request]
    order = [
        r.number
        for _, r in sorted(zip((at for _, _, at in sizes), new, strict=True), key=lambda a: (a[0], a[1].number))
    ]
    assert started == order, "first come, first served"
    for r in new:  # the last sampled token is never fed back
        assert tuple(seen[r.number]) == r.prompt_token_ids + (0,) * (r.params.max_tokens - 1)


def test_decodes_come_first_and_prompts_fill_the_rest_in_chunks():
    s = scheduler(max_batch_tokens=8)
    s.add([request(0, 3, 5), request(1, 12, 5)])
    sizes = []
    for _ in range(4):
        chunks = s.schedule()
        sizes.append([(c.request, c.first, len(c.token_ids), c.sampled) for c in chunks])
        for c in chunks:
            if c.sampled:
                s.requests[c.request].token_ids.append(0)
    assert sizes == [
        [(0, 0, 3, True), (1, 0, 5, False)],
        [(0, 3, 1, True), (1, 5, 7, True)],
        [(0, 4, 1, True), (1, 12, 1, True)],
        [(0, 5, 1, True), (1, 13, 1, True)],
    ]


def test_a_full_cache_makes_requests_wait_and_nobody_overtakes():
    s = scheduler(cache_rows=20, max_batch_tokens=32)
    s.add([request(0, 10, 2), request(1, 12, 2), request(2, 1, 1)])
    assert [c.request for c in s.schedule()] == [0]  # request 2 would fit beside it, but request 1 was first
    s.requests[0].token_ids += [0, 0]
    s.finish(s.requests[0])
    assert [c.request for c in s.schedule()] == [1, 2]


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "match"),
    [
        (0, 1, "empty"),
        (50, 1, "50 tokens; the context is 50"),
        (51, 1, "51 tokens; the context is 50"),
        (30, 11, "30 prompt tokens .* max_tokens 11 need 41 cache rows; the cache has 40"),
        (45, None, "need 46 cache rows; the cache has 40"),
    ],
)
def test_impossible_requests_say_why_and_nothing_is_queued(prompt_tokens, max_tokens, match):
    s = scheduler(cache_rows=40, context=50)
    with pytest.raises(RequestError, match=match):
        s.add([request(0, 1, 1), request(1, prompt_tokens, max_tokens)])
    assert not s.requests
    assert s.schedule() == []


@pytest.mark.parametrize("token", [100, -1, "x"])
def test_token_ids_outside_the_vocabulary_are_refused(token):
    s = scheduler()
    with pytest.raises(RequestError, match=r"prompt 0: token id .* ids 0\.\.99"):
        s.add([NewRequest(0, (1, token), SamplingParams(), 0)])


@pytest.mark.parametrize(
    ("prompt_tokens", "wanted", "given"), [(10, 100, 40), (10, None, 40), (49, 7, 1), (10, 40, 40), (10, 3, 3)]
)
def test_max_tokens_is_clipped_to_the_context(prompt_tokens, wanted, given):
    s = scheduler(cache_rows=60, context=50)
    s.add([request(0, prompt_tokens, wanted)])
    assert s.requests[0].max_tokens == given
    # Without a wish the cache is a limit as well.
    s = scheduler(cache_rows=30, context=50)
    if wanted is None:
        s.add([request(0, prompt_tokens, wanted)])
        assert s.requests[0].max_tokens == 20
