"""What the engine is made of, on real GPUs: its own kernels, packed attention and limited GEMMs, against what they are defined as.

Every rank computes the same by itself; two by default, TOKENWEAVE_TEST_RANKS=4 for four.

    PYTHONPATH=src python3 -m pytest -m gpu -s tests/test_gpu_kernels.py
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from collective_cases import fresh_seed
from ranks import run_ranks
from tokenweave.cuda.sm_budget import sm_budget
from tokenweave.models import kernels
from tokenweave.models.attention import attend
from tokenweave.models.attention_cuda import attend_packed
from tokenweave.models.inputs import PackedSequences, SequenceRows

RANKS = int(os.environ.get("TOKENWEAVE_TEST_RANKS", "2"))
pytestmark = [pytest.mark.gpu(count=RANKS), pytest.mark.timeout(240)]


def _ranks(function, *args):
    return run_ranks(RANKS, function, *args, timeout=200.0, device="cuda")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _kernels(seed: int) -> float:
    generator = torch.Generator(_device()).manual_seed(seed)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=_device()).to(dtype)

    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # One rounding, and what fp32 adds to it.
        limit = {torch.bfloat16: 1.05 * 2**-8, torch.float16: 1.05 * 2**-11, torch.float32: 2e-6}[dtype]
        for queries, kv, size, normed in ((16, 4, 128, False), (5, 1, 64, True), (3, 3, 24, False), (2, 1, 256, True)):
            tokens, cached = 37, 90
            qkv = noise(tokens, queries + 2 * kv, size, dtype=dtype)
            keys, values = (noise(cached, kv, size, dtype=dtype) for _ in range(2))
            before = keys.clone(), values.clone()
            angles = noise(cached, size // 2)
            norm = noise(queries + kv, size) + 1 if normed else None
            positions = torch.randint(cached, (tokens,), generator=generator, device=_device())
            rows = torch.randperm(cached, generator=generator, device=_device())[:tokens]
            rows[5], rows[36] = -1, -1
            qkv[7, queries + kv, 3], qkv[9, -1, size - 1] = torch.nan, -torch.inf  # values, first head and last
            double = qkv[:, : queries + kv].double()
            if norm is not None:
                double = double * torch.rsqrt(double.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
            cosine, sine = (f(angles)[positions].double().unsqueeze(1) for f in (torch.cos, torch.sin))
            low, high = double.chunk(2, dim=-1)
            rotated = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
            rotated[7, queries], rotated[9, -1] = torch.nan, torch.nan  # keys of the values that aren't finite
            new_values = qkv[:, queries + kv :].nan_to_num(0, 0, 0)
            kernels.rope_cache(qkv, keys, values, queries, (angles.cos(), angles.sin()), norm, 1e-5, positions, rows)
            real = rows >= 0
            expected = before[0].double().index_copy(0, rows[real], rotated[real, queries:])
            for name, got, want in (
                ("queries", qkv[:, :queries], rotated[:, :queries]),
                ("keys", keys, expected),
                ("values", values, before[1].index_copy(0, rows[real], new_values[real])),
            ):
                assert torch.equal(got.isnan(), want.isnan()), f"{name} {dtype} {queries, kv, size, normed}"
                got, want = got.nan_to_num(), want.nan_to_num()
                error = float(((got.double() - want.double()).abs() / want.double().abs().clamp_min(1)).max())
                assert error <= limit, f"{name} {dtype} {queries, kv, size, normed}: {error:.1e} of {limit:.1e}"
                worst = max(worst, error / limit)
        for rows_, columns in ((1, 8), (37, 72), (513, 7168)):
            gate_up = 4 * noise(rows_, 2 * columns, dtype=dtype)
            gate, up = gate_up.double().chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
            error = float(((kernels.silu_mul(gate_up).double() - want).abs() / want.abs().clamp_min(1)).max())
            assert error <= 2 * limit, f"silu {dtype} {rows_, columns}: {error:.1e}"
        table, out = noise(300, 72, dtype=dtype), noise(515, 72, dtype=dtype)
        for ids in (torch.int32, torch.int64):  # the last four rows of the table are nobody's
            tokens = torch.randint(1000, (513,), generator=generator, device=_device(), dtype=ids)
            here = (tokens >= 400) & (tokens < 696)
            want = torch.where(here.unsqueeze(1), table[(tokens - 400).clamp(0, 299).long()], 0)
            before = out[513:].clone()
            kernels.embed_rows(table, tokens, out[:513], first=400, count=296)
            assert torch.equal(out[:513], want), f"embedding {dtype} {ids}"
            assert torch.equal(out[513:], before)
    return worst


def test_fused_kernels_against_float64():
    print(f"largest error: {max(_ranks(_kernels, fresh_seed())):.2f} of the limit")


def _attention(seed: int) -> float:
    pick, device = random.Random(seed), _device()
    worst = 0.0
    for heads, kv_heads, size in ((8, 8, 64), (16, 4, 128), (6, 1, 32), (3, 1, 256)):
        for decode in (False, True):
            sequences, row, start = [], 0, 2
            for _ in range(pick.randint(1, 7)):
                tokens, context = 1 if decode else pick.choice([1, 5, 130]), pick.choice([0, 1, 127, 300])
                sequences.append(SequenceRows(row, tokens, start, context))
                row, start = row + tokens, start + context + tokens + pick.randint(0, 9)
            padding = pick.randint(0, 3)
            noise = torch.randn(row + padding, heads + 2, size, device=device).bfloat16()
            keys, values = (torch.randn(start + 20, kv_heads, size, device=device).bfloat16() for _ in range(2))
            keys[: sequences[0].cache_start] = float("nan")  # another sequence's rows must not be read
            empty = [0] * padding

            def ints(values: list[int]) -> torch.Tensor:
                return torch.tensor(values, dtype=torch.int32, device=device)

            packed = PackedSequences(
                ints([s.first for s in sequences] + [row] * (padding + 1)),
                ints([s.cache_start for s in sequences] + [0] * (padding + 1)),
                ints([s.length for s in sequences] + empty),
                1 if decode else 256,
                1024,
            )
            queries = noise[:, :heads]
            got = attend_packed(queries, keys, values, packed)[:row]
            want = attend(queries[:row].float().contiguous(), keys.float(), values.float(), sequences)
            error = float((got.float() - want).norm() / want.norm())
            assert error < 0.01, f"{heads, kv_heads, size, decode}: {error}"
            worst = max(worst, error)
    return worst


def test_packed_attention_against_its_definition():
    print(f"largest relative error {max(_ranks(_attention, fresh_seed())):.1e}")


def _budgets() -> list[float]:
    a, w = (torch.randn(2048, 2048, device=_device()).bfloat16() for _ in range(2))
    bias = torch.randn(2048, device=_device()).bfloat16()
    sms = torch.cuda.get_device_properties(_device()).multi_processor_count
    free = torch.nn.functional.linear(a, w, bias)
    errors = []
    for budget in (None, sms, sms - 8, sms // 2):
        with sm_budget(budget):
            plain = a @ w.t()
            biased = torch.nn.functional.linear(a, w, bias)
        errors.append(float((biased - free).float().norm() / free.float().norm()))
        errors.append(float((plain + bias - free).float().norm() / free.float().norm()))
    return errors


def test_gemms_with_an_sm_budget_compute_the_same():
    assert max(_ranks(_budgets)[0]) < 0.01
