"""Whatever the planner says of any batch, on whichever GPU, is a plan that the engine can run, and changes no answer."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ranks import run_ranks
from tiny_llama import CONTEXT, VOCAB, answers, make_engine, new_requests, save_tiny_llama
from tokenweave.engine.sampling import SamplingParams
from tokenweave.models import read_config
from tokenweave.planning import Planner, machine_of
from tokenweave.planning.plan import POINTS, Mode

MACHINES = [
    ("h100", "multimem"),
    ("h200", "p2p"),
    ("a100", "p2p"),
    ("l40s", "p2p"),
    ("b200", "multimem"),
    ("cpu", "torch"),
]
STARTS = [frozenset[str](), *(frozenset((point,)) for point in POINTS), frozenset(("down", "qkv")), frozenset(POINTS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


def random_requests(draw, count):
    """Prompts that fill steps, that are cut between steps, and of one token; answers of one token and of several."""
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.choice((1, 1, 2, 7, 33, 64, 65, 90)))] for _ in range(count)]
    lengths = [draw.randint(1, min(12, CONTEXT - len(prompt))) for prompt in prompts]
    return new_requests(prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths])


def both_answers(path, tp, gpu, transport, seed):
    """Of an engine that runs the planner's woven plans, with all starts of collectives; and of one that runs fused."""
    planner = Planner(read_config(path), mode="woven", costs=machine_of(gpu, tp, transport))
    draw = random.Random(seed)

    def plan(rows):
        chosen = planner.plan(rows, context=draw.randrange(CONTEXT))
        assert (chosen.split is None) == (rows == 1)
        if chosen.split is None:
            return chosen
        assert 0 < chosen.split < rows
        return dataclasses.replace(chosen, start_at=draw.choice([chosen.start_at, *STARTS]))

    requests = random_requests(random.Random(seed + 1000), 8)
    found = []
    for planned in (plan, Mode.FUSED):
        engine = make_engine(path, planned, max_batch_tokens=64, max_num_seqs=5)
        found.append(answers(engine, requests))
        woven = sum(step.mode == "woven" for step in engine.steps)
        assert woven >= 3 if planned is plan else woven == 0
        engine.close()
    return tuple(found)


@pytest.mark.parametrize(("gpu", "transport"), MACHINES)
@pytest.mark.parametrize("tp", [1, 2])
def test_plans_of_any_machine_run_woven_and_change_no_answer(path, tp, gpu, transport):
    if tp == 1:
        found = [both_answers(path, 1, gpu, None, seed) for seed in range(3)]
    else:
        found = run_ranks(2, both_answers, path, 2, gpu, transport, 7)
        assert found[0] == found[1]
    for planned, fused in found:
        assert planned == fused
