"""The engine on real GPUs with real weights, SmolLM2-135M-Instruct: logits in every mode against float32, greedy texts.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_smollm2.py

Two ranks by default; TOKENWEAVE_TEST_RANKS=4 runs the same on four.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from engine_cases import built, errors_of, same_bits
from ranks import run_ranks
from tiny_llama import answers, new_requests
from tokenweave.engine.batch import Chunk, rows_of
from tokenweave.engine.build import EngineArgs, build_engine
from tokenweave.engine.engine import Engine
from tokenweave.engine.sampling import SamplingParams
from tokenweave.models import load_tokenizer
from tokenweave.planning.plan import Mode, Plan

RANKS = int(os.environ.get("TOKENWEAVE_TEST_RANKS", "2"))
pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(240)]

TEXT = "<|im_start|>user\nWrite a haiku about the sea, please.<|im_end|>\n<|im_start|>assistant\n"
SEQUENTIAL = "sequential"


def _ranks(function, *args):
    return run_ranks(RANKS, function, *args, timeout=200.0, device="cuda")


# ---- logits


@dataclass(frozen=True)
class Logits:
    """Of one dtype: way of running -> float32 [rows, vocab], each less its row's mean, which changes no probability."""

    dtype: torch.dtype
    of: dict[str, torch.Tensor]


def _steps(ids: list[int]) -> list[list[Chunk]]:
    """Prompts of one token to two times the text, the rest of the longest beside decodes, and decodes alone."""
    prompts = [ids[:1], ids[:2], ids[3:8], ids[:13], ids[1:], ids, ids[5:] + ids, ids + ids]
    starts = [100 * number + 3 for number in range(len(prompts))]  # rows of the cache
    most = 40
    first = [Chunk(n, 0, tuple(p[:most]), starts[n], True) for n, p in enumerate(prompts)]
    rest = [Chunk(n, min(most, len(p)), tuple(p[most:]) or (ids[n],), starts[n], True) for n, p in enumerate(prompts)]
    after = [chunk.first + len(chunk.token_ids) for chunk in rest]
    last = [Chunk(n, after[n], (ids[-1 - n],), starts[n], True) for n in range(len(prompts))]
    return [first, rest, last]


def _plan(way: str, rows: int) -> Plan:
    cut = {"woven": max(1, rows // 2), "woven, few rows first": max(1, rows // 5)}
    return {
        SEQUENTIAL: lambda: Plan(Mode.SEQUENTIAL),
        "fused": lambda: Plan(Mode.FUSED),
        "fused, 8 blocks": lambda: Plan(Mode.FUSED, ctas=8),
        "woven": lambda: Plan(Mode.WOVEN, split=cut["woven"], ctas=8, cluster=4),
        "woven, few rows first": lambda: Plan(Mode.WOVEN, split=cut["woven, few rows first"], ctas=4),
    }[way]()


WAYS = (SEQUENTIAL, "fused", "fused, 8 blocks", "woven", "woven, few rows first")


def _walk(engine: Engine, ids: list[int], way: str, times: int = 1) -> torch.Tensor:
    """The logits of all steps' sampled rows; ``times``: how often each step is run, the last counts."""
    for cache in (*engine.cache.keys, *engine.cache.values):
        cache.normal_(std=10)  # a row that this walk has not written shows; values that are masked have to be finite
    found = []
    for number, chunks in enumerate(_steps(ids)):
        for _ in range(times):
            rows = engine.forward(chunks, _plan(way, rows_of(chunks)))
        logits = engine.model.logits(rows)
        same_bits(logits, f"logits of step {number}, {way}")
        found.append(logits - logits.mean(1, keepdim=True))
    return torch.cat(found)


@torch.inference_mode()
def _logits(path: str, dtype: torch.dtype, device: str) -> Logits:
    args = EngineArgs(
        path,
        dist.get_world_size(),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        max_batch_tokens=256,
        cache_tokens=1200,
        max_context=400,
    )
    engine = built(args)
    ids = load_tokenizer(path).encode(TEXT)
    step_graphs, engine.graphs = engine.graphs, None
    found = {way: _walk(engine, ids, way) for way in WAYS}
    if step_graphs is not None:
        engine.graphs, before = step_graphs, step_graphs.replays
        for way in WAYS[1:]:  # a step is eager, then captured, then replayed
            found[f"{way}, replayed"] = _walk(engine, ids, way, times=3)
        assert step_graphs.replays - before >= len(WAYS[1:]) * len(_steps(ids)), "steps were not replayed"
    engine.close()
    return Logits(dtype, {way: logits.cpu() for way, logits in found.items()})


def check_float32(exact: Logits) -> float:
    """Every row is sequential's but for the order of float32 sums: the bound of CPUs against transformers.

    61 collectives and twice as many GEMMs in a row are each off by some 1e-7 (test_models_smollm2.py).
    """
    wanted = exact.of[SEQUENTIAL]
    worst = {way: float(errors_of(got, wanted, way).max()) for way, got in exact.of.items()}
    assert max(worst.values()) < 2e-5, worst
    return max(worst.values())


def check_bf16(rounded: Logits, exact: Logits) -> dict[str, float]:
    """No way is farther from float32's sequential step than bf16's sequential step, which rounds as often or more.

    Roundings are others, so that over all rows a third more is let pass, and in any row two times sequential's worst row.
    """
    wanted = exact.of[SEQUENTIAL]
    errors = {way: errors_of(got, wanted, way) for way, got in rounded.of.items()}
    overall = {way: float(error.square().mean().sqrt()) for way, error in errors.items()}
    of_rows = {way: float(error.max()) for way, error in errors.items()}
    assert overall[SEQUENTIAL] < 0.1, overall  # else it is no measure
    for way in errors:
        assert overall[way] < 1.33 * overall[SEQUENTIAL], (way, overall)
        assert of_rows[way] < 2 * of_rows[SEQUENTIAL], (way, of_rows)
    return overall


def test_logits_in_every_mode(smollm2_gguf):
    exact = _ranks(_logits, str(smollm2_gguf), torch.float32, "cuda")[0]
    print(f"float32: all within {check_float32(exact):.1e} of sequential")
    rounded = _ranks(_logits, str(smollm2_gguf), torch.bfloat16, "cuda")[0]
    print("bf16, off float32's by", {way: f"{error:.2%}" for way, error in check_bf16(rounded, exact).items()})


# ---- texts


def _texts(path: str, dtype: str, mode: str, device: str) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """Greedy tokens of three requests of different lengths, and (mode, rows) of the steps."""
    single = not dist.is_initialized()
    args = EngineArgs(
        path,
        1 if single else dist.get_world_size(),
        dtype=dtype,
        device=device,
        mode=mode,
        max_batch_tokens=64,
        cache_tokens=1200,
        max_context=400,
    )
    engine = build_engine(args, rank=0, group=None) if single else built(args)
    ids = load_tokenizer(path).encode(TEXT)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    got = answers(engine, new_requests([ids, ids[:7], ids + ids], params))
    steps = [(str(step.mode), step.prefill_tokens + step.decode_tokens) for step in engine.steps]
    engine.close()
    return [tokens for tokens, _ in got], steps


def check_modes(mode: str, steps: list[tuple[str, int]]) -> None:
    """Every step ran as it was asked to; one row cannot be cut, and runs fused."""
    for ran, rows in steps:
        wanted = "fused" if mode == "woven" and rows == 1 else mode
        assert mode == "auto" or ran == wanted, f"{mode}: a step of {rows} rows ran {ran}; {steps}"
    assert mode != "woven" or sum(ran == "woven" for ran, _ in steps) > len(steps) // 2, steps


@pytest.fixture(scope="module")
def texts_on_cpu(smollm2_gguf):
    return _texts(str(smollm2_gguf), "float32", SEQUENTIAL, "cpu")[0]


@pytest.mark.parametrize("mode", ["sequential", "fused", "woven", "auto"])
def test_texts_are_the_cpus(smollm2_gguf, texts_on_cpu, mode):
    for texts, steps in _ranks(_texts, str(smollm2_gguf), "float32", mode, "cuda"):
        assert texts == texts_on_cpu
        check_modes(mode, steps)


def test_texts_in_bf16(smollm2_gguf, texts_on_cpu):
    """A tie that bf16 breaks the other way changes the rest of a text: the first tokens are compared with fp32's.

    Between ranks all of them are.
    """
    for mode in ("fused", "woven"):
        results = _ranks(_texts, str(smollm2_gguf), "bfloat16", mode, "cuda")
        assert all(result == results[0] for result in results)
        texts, steps = results[0]
        check_modes(mode, steps)
        same = [
            next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
            for got, want in zip(texts, texts_on_cpu, strict=True)
        ]
        print(f"{mode}: the first {same} of 24 tokens are fp32's")
        assert sum(same) >= 24
