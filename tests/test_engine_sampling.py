import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.sampling import SamplingParams, sample
from tokenweave.errors import RequestError

DRAWS = 4000


def kept_probabilities(logits, params):
    """The distribution that is drawn from, in plain Python."""
    scaled = [float(x) / params.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    order = order[: params.top_k] if params.top_k > 0 else order
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total = sum(weights.values())
    kept, mass = {}, 0.0
    for i in order:
        if mass >= params.top_p:
            break
        kept[i] = weights[i] / total
        mass += kept[i]
    return {i: p / sum(kept.values()) for i, p in kept.items()}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2, top_k=3),
        SamplingParams(temperature=1, top_p=0.6),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.8),
        SamplingParams(temperature=1, top_k=1),
        SamplingParams(temperature=1, top_p=1e-9),
    ],
)
def test_draws_follow_the_distribution(params):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.1, -3.0, 0.9])
    expected = kept_probabilities(logits, params)
    # Evenly spread uniforms: each count must match its probability to within one draw per border.
    uniforms = [(i + 0.5) / DRAWS for i in range(DRAWS)]
    tokens = sample(logits.expand(DRAWS, -1), [params] * DRAWS, uniforms)
    counts = {token: tokens.count(token) for token in set(tokens)}
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        assert abs(counts.get(token, 0) - probability * DRAWS) <= 2


def test_greedy_takes_the_largest_and_needs_no_generator():
    logits = torch.randn(5, 100)
    assert sample(logits, [SamplingParams(temperature=0)] * 5, [0.0] * 5) == logits.argmax(dim=1).tolist()


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([-1, 1, 7, 1000]),
)


@given(
    st.lists(st.tuples(params_strategy, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=9), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_a_rows_token_does_not_depend_on_the_other_rows(rows, seed):
    logits = torch.randn(len(rows), 333, generator=torch.Generator().manual_seed(seed)) * 4
    together = sample(logits, [p for p, _ in rows], [u for _, u in rows])
    alone = [sample(logits[i : i + 1], [p], [u])[0] for i, (p, u) in enumerate(rows)]
    assert together == alone
    for i, (params, _) in enumerate(rows):
        if params.temperature < 1e-3 or params.top_k == 1:
            assert together[i] == int(logits[i].argmax())


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=2)])
def test_the_ends_of_the_uniform_range_give_a_token_of_positive_probability(uniform, params):
    logits = torch.full((1, 50), -math.inf)
    logits[0, 20:23] = torch.tensor([1.0, 3.0, 2.0])
    assert sample(logits, [params], [uniform])[0] in (20, 21, 22)


def test_large_vocabularies_and_extreme_logits_stay_finite():
    logits = torch.zeros(2, 256_000)
    logits[1, 7] = 1e30
    uniforms = [random.Random(3).random()] * 2
    tokens = sample(logits, [SamplingParams(temperature=1e-8)] * 2, uniforms)
    assert tokens[1] == 7
    assert abs(tokens[0] - uniforms[0] * 256_000) < 2  # a uniform distribution: the inverse is a line


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1; expected a number >= 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0; expected a number > 0 and <= 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"max_tokens": 0}, "max_tokens=0; expected an integer >= 1"),
        ({"seed": "x"}, "seed='x'"),
        ({"stop": ["a", ""]}, "stop="),
        ({"stop": 3}, "stop=3; expected strings"),
        ({"stop": 0}, "stop=0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids="),
        ({"stop_token_ids": 3}, "stop_token_ids=3; expected token ids"),
        ({"ignore_eos": "x"}, "ignore_eos='x'; expected True or False"),
    ],
)
def test_values_out_of_range_are_refused(arguments, match):
    with pytest.raises(RequestError, match=match):
        SamplingParams(**arguments)


def test_stop_takes_one_string_or_a_list():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]) == SamplingParams(stop=("a", "b"), stop_token_ids=(3,))
    assert SamplingParams(stop=None).stop == ()
