"""The engine on real GPUs: every mode, eagerly and as graphs, against the sequential eager step; ranks' bits; texts.

Two ranks by default; TOKENWEAVE_TEST_RANKS=4 runs the same on four (that share a GPU: with TOKENWEAVE_TEST_TURNS=1, see shared_gpu.py).

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_engine.py
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collective_cases import fresh_seed
from engine_cases import built, errors_of, same_bits
from ranks import run_ranks
from shared_gpu import shares_gpu
from tiny_llama import answers, new_requests, save_tiny_llama
from tokenweave import LLM, execution
from tokenweave.engine import graphs
from tokenweave.engine.batch import Chunk, rows_of
from tokenweave.engine.build import EngineArgs, build_engine, engine_around
from tokenweave.engine.engine import Engine
from tokenweave.engine.sampling import SamplingParams
from tokenweave.errors import TokenWeaveError
from tokenweave.models.config import ModelConfig
from tokenweave.models.dummy import dummy_model
from tokenweave.planning.plan import Mode, Plan

RANKS = int(os.environ.get("TOKENWEAVE_TEST_RANKS", "2"))
pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(240)]

LLAMA = ModelConfig(
    family="llama", hidden=256, intermediate=384, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=1000, context=2048
)
FAMILIES = {
    "llama": LLAMA,
    "llama-odd": dataclasses.replace(LLAMA, heads=9, kv_heads=3, intermediate=404, vocab=1003, tied_embeddings=True),
    "llama-bias": dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, head_dim=32),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, head_dim=128),
    "mixtral": dataclasses.replace(LLAMA, family="mixtral", experts=4, experts_per_token=2),
}
# Relative to the sequential eager step, in the Euclidean norm. fp32: sums in another order. bf16: a rounding of 2^-9 at each
# of some 15 places a layer, of values that the last norm makes comparable with the whole.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.05}
CACHE, LARGEST = 4096, 640


def _ranks(function, *args, timeout=200.0):
    return run_ranks(RANKS, function, *args, timeout=timeout, device="cuda")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _engine(config: ModelConfig, dtype: torch.dtype, *, alike_experts: bool = False) -> Engine:
    rank, world = dist.get_rank(), dist.get_world_size()
    where = {"rank": rank, "world_size": world, "group": dist.group.WORLD, "dtype": dtype, "device": _device()}
    model = dummy_model(config, **where, alike_experts=alike_experts)
    args = EngineArgs(
        "unused",
        world,
        dtype=str(dtype).removeprefix("torch."),
        device=_device().type,
        max_batch_tokens=LARGEST,
        cache_tokens=CACHE,
        max_context=1024,
    )
    engine = engine_around(model, args, dist.group.WORLD, _device(), lambda: None)
    for tensor in engine.cache.keys + engine.cache.values:
        tensor.normal_()  # contexts
    return engine


def _step(pick: random.Random, vocab: int, kind: str) -> list[Chunk]:
    """``kind``: decode, prompt or mixed."""
    count = {"decode": pick.randint(1, 24), "prompt": 1, "mixed": pick.randint(2, 9)}[kind]
    chunks, start, rows = [], pick.randint(0, 5), 0
    for number in range(count):
        first = pick.choice([0, 1, 63, 64, pick.randint(0, 200)])
        size = 1 if kind == "decode" else pick.choice([1, 2, 37, 128, 200] if kind == "mixed" else [130, 256, 511])
        if rows + size > LARGEST or start + first + size > CACHE:
            break
        tokens = tuple(pick.randrange(vocab) for _ in range(size))
        chunks.append(Chunk(number, first, tokens, start, kind != "mixed" or pick.random() < 0.7))
        start, rows = start + first + size + pick.randint(0, 3), rows + size
    return chunks


def _plans(rows: int, pick: random.Random, sms: int) -> list[Plan]:
    plans = [Plan(Mode.FUSED), Plan(Mode.FUSED, ctas=8)]
    if rows > 1:
        cut = pick.randint(1, rows - 1)
        budget = {(gemm, split): sms - 8 for gemm in ("qkv", "gate_up") for split in ("prefix", "suffix")}
        plans.append(Plan(Mode.WOVEN, split=cut, ctas=8, cluster=4, gemm_sms=budget))
        plans.append(Plan(Mode.WOVEN, split=max(1, rows // 2), ctas=4))
        late = frozenset(("qkv", "activation"))
        plans.append(
            Plan(Mode.WOVEN, split=cut, ctas=4, cluster=4, gemm_sms={("down", "suffix"): sms - 4}, start_at=late)
        )
    return plans


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str, share: float = 1.0) -> float:
    """Most of the rows (``share`` of them) are within ``tolerance`` of the expected ones; returns the largest error."""
    errors = errors_of(got, expected, what)
    if not len(got):
        return 0.0
    kth = errors.sort().values[max(0, int(len(errors) * share) - 1)]
    assert kth <= tolerance, f"{what}: {float(kth):.2e} of {tolerance:.0e}; rows {errors.tolist()}"
    return float(errors.max())


def _done(engine: Engine) -> None:
    """Waits for what was launched; an error where a collective gave up, before its rows are compared."""
    torch.cuda.synchronize()
    engine.workspace.check()


def _logits(engine: Engine, rows: torch.Tensor, what: str) -> torch.Tensor:
    """Of these rows, after a look at the bits that other ranks have of both."""
    _done(engine)
    same_bits(rows, f"rows, {what}")
    logits = engine.model.logits(rows)
    same_bits(logits, f"logits, {what}")
    return logits


def _modes_agree(name: str, dtype: torch.dtype, seed: int, share: float = 1.0) -> tuple[float, int]:
    """``share``: of the rows, how many are looked at. All of them are where experts are alike: in bf16 a row whose best experts
    are nearly equal may go to another one, which then computes the same."""
    config = FAMILIES[name]
    engine = _engine(config, dtype, alike_experts=dtype == torch.bfloat16 and share == 1.0)
    step_graphs, pick = engine.graphs, random.Random(seed)
    assert (step_graphs is not None) == (dtype == torch.bfloat16), "graphs need FlashAttention's dtypes"
    sms = torch.cuda.get_device_properties(_device()).multi_processor_count
    worst = 0.0
    with torch.inference_mode():
        for kind in ("decode", "prompt", "mixed", "mixed"):
            chunks = _step(pick, config.vocab, kind)
            engine.graphs = None
            expected = _logits(engine, engine.forward(chunks, Plan(Mode.SEQUENTIAL)), f"{name} {kind} sequential")
            for plan in _plans(rows_of(chunks), pick, sms):
                what = f"{name} {dtype} {kind} {rows_of(chunks)} rows {plan}"
                engine.graphs = None
                logits = _logits(engine, engine.forward(chunks, plan), what)
                worst = max(worst, _close(logits, expected, TOLERANCE[dtype], what, share))
                if step_graphs is None:
                    continue
                engine.graphs = step_graphs
                first, captured, replayed = (engine.forward(chunks, plan) for _ in range(3))
                _done(engine)
                assert torch.equal(first, captured), f"{what}: the graph computes something else"
                assert torch.equal(first, replayed), f"{what}: the second replay differs"
                logits = _logits(engine, replayed, f"{what}, graph")
                worst = max(worst, _close(logits, expected, TOLERANCE[dtype], f"{what}, graph", share))
    replays = 0 if step_graphs is None else step_graphs.replays
    engine.graphs = step_graphs
    engine.close()
    return worst, replays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_modes_and_graphs_agree(name, dtype):
    worst, replays = _ranks(_modes_agree, name, dtype, fresh_seed())[0]
    print(f"{name} {dtype}: largest relative error {worst:.1e}, {replays} replays")
    assert replays or dtype == torch.float32


def test_modes_agree_where_experts_differ():
    """bf16: some rows of two right steps go to other experts, and are unrelated; not most of them."""
    worst, replays = _ranks(_modes_agree, "mixtral", torch.bfloat16, fresh_seed(), 0.7)[0]
    print(f"largest relative error {worst:.1e}, {replays} replays")
    assert replays


def _two_shot(seed: int) -> tuple[float, int]:
    """Small fused steps, which take the one-shot otherwise, through the collective of large ones."""
    with mock.patch.object(graphs, "layout_of", _sharded), mock.patch.object(execution, "layout_of", _sharded):
        return _modes_agree("llama", torch.bfloat16, seed)


def _sharded(plan, tokens, workspace) -> str:
    return "sharded"


def test_graphs_of_the_two_shot():
    worst, replays = _ranks(_two_shot, fresh_seed())[0]
    print(f"largest relative error {worst:.1e}, {replays} replays")


def _many_steps(name: str, count: int, seed: int) -> dict[str, float]:
    """Random steps in random modes, most of them offered to the graphs, between eager ones."""
    engine = _engine(FAMILIES[name], torch.bfloat16, alike_experts=True)
    step_graphs, pick = engine.graphs, random.Random(seed)
    assert step_graphs is not None
    sms = torch.cuda.get_device_properties(_device()).multi_processor_count
    worst, began = 0.0, time.perf_counter()
    offered, replays = dict.fromkeys(Mode, 0), dict.fromkeys(Mode, 0)
    with torch.inference_mode():
        for _ in range(count):
            chunks = _step(pick, LLAMA.vocab, pick.choice(["decode", "decode", "prompt", "mixed"]))
            plan = pick.choice(_plans(rows_of(chunks), pick, sms))
            if plan.split is not None:  # as the planner cuts, so that buckets are met again
                plan = dataclasses.replace(plan, split=max(1, rows_of(chunks) // 128 * 64))
            engine.graphs = None
            expected = engine.model.logits(engine.forward(chunks, Plan(Mode.SEQUENTIAL)))
            engine.graphs = None if pick.random() < 0.2 else step_graphs
            before = step_graphs.replays
            logits = _logits(engine, engine.forward(chunks, plan), str(plan))
            offered[plan.mode] += engine.graphs is not None
            replays[plan.mode] += step_graphs.replays - before
            worst = max(worst, _close(logits, expected, TOLERANCE[torch.bfloat16], str(plan)))
    seconds = time.perf_counter() - began
    found = {"worst": worst, "seconds": seconds, "eager": step_graphs.eager, **dataclasses.asdict(step_graphs.record)}
    for what, by_mode in (("offered", offered), ("replays", replays)):
        found |= {f"{what}, {mode}": number for mode, number in by_mode.items()}
    engine.graphs = step_graphs
    engine.close()
    return found


@pytest.mark.timeout(430)
@pytest.mark.parametrize(("name", "count", "share"), [("llama", 1000, 0.7), ("mixtral", 300, 0.45)])
def test_many_random_steps(name, count, share):
    """More than ``share`` of the steps that are offered to the graphs are replays, of fused and of woven ones: what is missing are
    buckets' first steps. Of 1000 steps some 800 are offered, in some 135 buckets, of which 128 are held, so that 0.84 to 0.88 of
    the fused and 0.79 to 0.84 of the woven ones are replays; of 300 some 240, in some 80 buckets, 0.62 to 0.75 and 0.57 to 0.69
    (what :func:`bucket_of` makes of 60 seeds)."""
    found = _ranks(_many_steps, name, count, fresh_seed(), timeout=400.0)[0]
    print(found)
    offered, replays = ({mode: found[f"{what}, {mode}"] for mode in Mode} for what in ("offered", "replays"))
    assert found["eager"] + sum(replays.values()) == sum(offered.values()), "a step had no bucket"
    for mode in (Mode.FUSED, Mode.WOVEN):
        assert replays[mode] > share * offered[mode] > 0, mode
    assert 0 < found["count"] <= min(found["eager"], graphs.MAX_GRAPHS)
    assert found["mib"] <= graphs.MAX_BYTES / 2**20


def _generated(path: str, dtype: str, mode: str, captured: bool, prompts: list[list[int]]) -> tuple[list, list, int]:
    args = EngineArgs(
        path,
        dist.get_world_size(),
        dtype=dtype,
        device="cuda",
        mode=mode,
        max_batch_tokens=48,
        max_num_seqs=5,
        cache_tokens=600,
        graphs=captured,
    )
    engine = built(args)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    got = answers(engine, new_requests(prompts, params))
    modes = [step.mode for step in engine.steps]
    replays = 0 if engine.graphs is None else engine.graphs.replays
    engine.close()
    return got, modes, replays


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


def _prompts() -> list[list[int]]:
    pick = random.Random(4)
    return [[pick.randrange(96) for _ in range(pick.randint(1, 60))] for _ in range(9)]


@pytest.fixture(scope="module")
def cpu_answers(tiny):
    args = EngineArgs(tiny, 1, dtype="float32", device="cpu", cache_tokens=2000)
    engine = build_engine(args, rank=0, group=None)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    got = answers(engine, new_requests(_prompts(), params))
    engine.close()
    return got


@pytest.mark.parametrize("mode", ["sequential", "fused", "woven", "auto"])
def test_greedy_texts_are_the_cpus(tiny, cpu_answers, mode):
    results = _ranks(_generated, tiny, "float32", mode, True, _prompts())
    for got, modes, _ in results:
        assert got == cpu_answers
        assert mode == "auto" or mode in modes


@pytest.mark.parametrize("mode", ["fused", "woven"])
def test_generation_with_graphs(tiny, mode):
    """bf16: ranks agree on every token, and most steps are replays."""
    results = _ranks(_generated, tiny, "bfloat16", mode, True, _prompts())
    assert all(result == results[0] for result in results)
    got, modes, replays = results[0]
    assert [len(tokens) for tokens, _ in got] == [12] * 9
    print(f"{replays} of {len(modes)} steps were replays")
    assert replays > len(modes) // 3


# ---- a rank that dies


@pytest.mark.skipif(shares_gpu(), reason="the ranks that LLM starts need a GPU each")
def test_a_killed_rank_ends_the_others(tiny):
    """Generation on all ranks, one of them killed: the caller gets an exception that names it, within the time limit."""
    llm = LLM(tiny, RANKS, device="cuda", dtype="bfloat16", mode="woven", cache_tokens=2000)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    processes = list(llm._ranks.processes)
    killer = threading.Timer(1.0, processes[-1].kill)

    def generate_until_it_fails() -> None:
        while time.perf_counter() - began < 60:
            llm.generate(["w1 w2 w3"] * 8, params)

    began = time.perf_counter()
    killer.start()
    try:
        with pytest.raises(TokenWeaveError, match=f"rank {RANKS - 1}"):
            generate_until_it_fails()
    finally:
        killer.cancel()
        llm.close()
    assert time.perf_counter() - began < 40
    assert all(process.returncode is not None for process in processes)
