"""Every attention kernel that is installed, on a GPU, against attend() in float32: random batches, graphs, equal bits.

PYTHONPATH=src python3 -m pytest -m gpu -s tests/test_gpu_attention.py
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from collective_cases import fresh_seed
from tokenweave.models import attention_choice
from tokenweave.models.attention import attend
from tokenweave.models.attention_choice import NAMES, TORCH, Choice, choose
from tokenweave.models.attention_cuda import attend_packed
from tokenweave.models.attention_flash import Kernel
from tokenweave.models.inputs import PackedSequences, SequenceRows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

DEVICE = "cuda:0"
# Of each sequence, in the Euclidean norm: probabilities and outputs are rounded to the dtype, 2^-9 and 2^-12 of them.
TOLERANCE = {torch.bfloat16: 0.008, torch.float16: 0.002}
SHAPES = [(8, 8, 64), (16, 4, 128), (32, 8, 128), (6, 1, 80), (9, 3, 192), (4, 2, 256), (5, 1, 96)]


def installed(name: str) -> Kernel:
    """The kernel of this name, unchecked; skips where it can't be had, and says why."""
    refused: list[str] = []
    gpu, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    for choice in attention_choice._loadable(gpu, capability, name, refused):
        return choice.kernel
    pytest.skip("; ".join(refused))


class Batch:
    """Sequences, apart from each other in a cache of large numbers, as (context, tokens); (0, 0) is an empty one.

    Rows of queries past the last sequence are padding. ``spare`` cache rows let :meth:`become` lay out another batch.
    """

    def __init__(
        self,
        runs: list[tuple[int, int]],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        pick: random.Random,
        *,
        rows: int | None = None,
        spare: int = 0,
        most: int | None = None,
        device: str = DEVICE,
    ) -> None:
        heads, kv_heads, size = shape
        self._random = torch.Generator(device).manual_seed(pick.getrandbits(32))
        self._pick, self._device, self._dtype = pick, device, dtype
        needed = sum(tokens for _, tokens in runs)
        longest, length = max(tokens for _, tokens in runs), max(sum(run) for run in runs)
        if rows is None:
            rows = needed + pick.randint(0, 5) if longest > 1 else len(runs)
        cache = sum(context + tokens + 9 for context, tokens in runs) + 16 + spare
        # The queries lie beside other columns, as those of the fused projection do.
        self.queries = self._noise(rows, heads + 2 * kv_heads, size)[:, :heads]
        self.keys, self.values = self._noise(cache, kv_heads, size), self._noise(cache, kv_heads, size)
        empty = torch.zeros(len(runs) + 1, dtype=torch.int32, device=device)
        if most is None:
            most = longest + pick.choice([0, 1, 200]) if longest > 1 else 1
        self.packed = PackedSequences(
            empty, empty.clone(), empty[:-1].clone(), max(1, most), length + spare + pick.choice([0, 1, 5000])
        )
        self.sequences: list[SequenceRows] = []
        self.become(runs)

    def _noise(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random, device=self._device).to(self._dtype)

    def become(self, runs: list[tuple[int, int]]) -> None:
        """Another batch in the same tensors, as a graph's replay has it."""
        starts, cache_starts, lengths, self.sequences = [0], [0] * (len(runs) + 1), [], []
        self.queries.copy_(self._noise(*self.queries.shape))
        for cache in (self.keys, self.values):
            cache.copy_(200 * self._noise(*cache.shape))  # of sequences that are none of this batch's
        start = self._pick.randint(0, 9)
        for index in self._pick.sample(range(len(runs)), len(runs)):  # in any order in the cache
            length = sum(runs[index])
            if length:
                cache_starts[index] = start
                for cache in (self.keys, self.values):
                    cache[start : start + length] = self._noise(length, *cache.shape[1:])
                start += length + self._pick.randint(0, 9)
        for (context, tokens), cache_start in zip(runs, cache_starts, strict=False):
            if tokens:
                self.sequences.append(SequenceRows(starts[-1], tokens, cache_start, context))
            starts.append(starts[-1] + tokens)
            lengths.append(context + tokens)
        new = (starts, cache_starts, lengths)
        old = (self.packed.query_starts, self.packed.cache_starts, self.packed.lengths)
        for tensor, numbers in zip(old, new, strict=True):
            tensor.copy_(torch.tensor(numbers, dtype=torch.int32))

    @property
    def used(self) -> int:
        """Query rows that belong to a sequence."""
        return int(self.packed.query_starts[-1])

    def run(self, kernel: Kernel) -> torch.Tensor:
        return kernel(self.queries, self.keys, self.values, self.packed, 0)

    def error(self, got: torch.Tensor) -> float:
        """The largest of all sequences, as a share of what is allowed."""
        assert got.shape == self.queries.shape
        assert got.dtype == self._dtype
        keys, values = self.keys.float(), self.values.float()
        want = attend(self.queries[: self.used].float().contiguous(), keys, values, self.sequences)
        worst = 0.0
        for sequence in self.sequences:
            rows = slice(sequence.first, sequence.first + sequence.tokens)
            error = float((got[rows].float() - want[rows]).norm() / want[rows].norm())
            assert error <= TOLERANCE[self._dtype], f"{sequence}: {error:.1e}"  # NaN fails too
            worst = max(worst, error / TOLERANCE[self._dtype])
        return worst


def prompts(pick: random.Random) -> list[tuple[int, int]]:
    """Chunks and parts of chunks with and without a context, decoded rows among them, and empty sequences."""
    runs = [(pick.choice([0, 1, 63, 128, 500, 1777]), pick.choice([1, 2, 5, 64, 129, 300])) for _ in range(8)]
    runs = runs[: pick.randint(1, 8)] + [(0, 0)] * pick.randint(0, 3)
    pick.shuffle(runs)
    runs[runs.index(max(runs, key=lambda run: run[1]))] = (pick.choice([0, 77]), 430)
    return runs


def decodes(pick: random.Random) -> list[tuple[int, int]]:
    """A row a sequence, the contexts short and long, with empty sequences at the end."""
    runs = [(pick.choice([0, 1, 127, 128, 900, 3000]), 1) for _ in range(pick.choice([1, 2, 7, 64]))]
    return runs + [(0, 0)] * pick.randint(0, 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_against_attention_in_float32(name, dtype):
    kernel = installed(name)
    pick, worst = random.Random(fresh_seed()), 0.0
    for shape in SHAPES:
        for runs in [*(prompts(pick) for _ in range(3)), *(decodes(pick) for _ in range(3))]:
            batch = Batch(runs, shape, dtype, pick)
            try:
                got = batch.run(kernel)
            except RuntimeError as error:
                if "build does not support" in str(error):
                    pytest.skip(str(error).splitlines()[0])
                raise
            worst = max(worst, batch.error(got))
    print(f"{name}, {dtype}: largest error {worst:.2f} of the limit")


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_many_decodes_and_one_of_a_long_context(name):
    kernel = installed(name)
    pick = random.Random(fresh_seed())
    for runs in ([(20000, 1), (3, 1)], [(pick.randint(0, 40), 1) for _ in range(1100)], [(9000, 1)] + [(5, 1)] * 63):
        batch = Batch(runs, (16, 4, 128), torch.bfloat16, pick)
        batch.error(batch.run(kernel))


def replays_like_eager(
    kernel: Kernel, pick: random.Random, capture: Callable[[Callable[[], torch.Tensor]], tuple], device: str = DEVICE
) -> float:
    """A graph of a batch, replayed with four others of as many sequences, all of whose lengths and places differ."""
    worst = 0.0
    for shape in ((16, 4, 128), (8, 8, 64)):
        for make, count, most, rows in ((prompts, 11, 512, 3000), (decodes, 67, 1, 67)):

            def fill(make=make, count=count):
                runs = make(pick)
                return runs + [(0, 0)] * (count - len(runs))

            batch = Batch(fill(), shape, torch.bfloat16, pick, rows=rows, spare=220_000, most=most, device=device)
            out, replay = capture(lambda batch=batch: batch.run(kernel))
            for _ in range(4):
                batch.become(fill())
                out.fill_(float("nan"))
                replay()
                worst = max(worst, batch.error(out))
                again = batch.run(kernel)
                assert torch.equal(out[: batch.used], again[: batch.used]), "a replay's bits are not the eager call's"
    return worst


def cuda_graph(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return out, graph.replay


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_graph_sees_new_lengths_and_gives_the_eager_bits(name):
    kernel = installed(name)
    worst = replays_like_eager(kernel, random.Random(fresh_seed()), cuda_graph)
    print(f"{name}: largest error {worst:.2f} of the limit")


def equal_bits(kernel: Kernel, pick: random.Random, device: str = DEVICE) -> None:
    """From call to call, and of a prompt whatever else is in its batch."""
    for make in (prompts, decodes):
        batch = Batch(make(pick), (16, 4, 128), torch.bfloat16, pick, device=device)
        first = batch.run(kernel)[: batch.used].clone()
        for _ in range(20):
            assert torch.equal(batch.run(kernel)[: batch.used], first)
        if make is decodes:
            continue  # how many blocks share a row's keys depends on the other rows
        for sequence in batch.sequences:
            rows = slice(sequence.first, sequence.first + sequence.tokens)
            numbers = ([0, sequence.tokens], [sequence.cache_start, 0], [sequence.length])
            tensors = (torch.tensor(n, dtype=torch.int32, device=device) for n in numbers)
            alone = PackedSequences(*tensors, max(2, sequence.tokens), sequence.length)
            got = kernel(batch.queries[rows], batch.keys, batch.values, alone, 0)
            assert torch.equal(got, first[rows]), f"{sequence} has other bits alone"


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_equal_bits(name):
    equal_bits(installed(name), random.Random(fresh_seed()))


@torch.inference_mode()
def test_the_choice_is_what_runs(monkeypatch):
    monkeypatch.delenv(attention_choice.ATTENTION_VARIABLE, raising=False)
    attention_choice._once.cache_clear()
    try:
        choice = choose(torch.device(DEVICE), torch.bfloat16, 128)
        assert isinstance(choice, Choice)
        print(f"{choice.label}: {choice.why}")
        refused: list[str] = []
        gpu, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
        assert choice.name == next(attention_choice._loadable(gpu, capability, None, refused)).name, choice.why
        pick = random.Random(fresh_seed())
        batch = Batch(prompts(pick), (16, 4, 128), torch.bfloat16, pick)
        assert torch.equal(batch.run(attend_packed)[: batch.used], batch.run(choice.kernel)[: batch.used])
        attention_choice._once.cache_clear()
        monkeypatch.setenv(attention_choice.ATTENTION_VARIABLE, TORCH)
        forced = choose(torch.device(DEVICE), torch.bfloat16, 128)
        assert forced is not None
        assert forced.name == TORCH
    finally:
        attention_choice._once.cache_clear()


@torch.inference_mode()
def test_the_check_is_quick_and_refuses_capture():
    attention_choice._once.cache_clear()
    choose(torch.device(DEVICE), torch.bfloat16, 128)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    attention_choice._once.cache_clear()
    start.record()
    choose(torch.device(DEVICE), torch.bfloat16, 128)
    end.record()
    end.synchronize()
    print(f"a choice, once its libraries are loaded: {start.elapsed_time(end):.1f} ms")
    assert start.elapsed_time(end) < 50
    attention_choice._once.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before a graph's capture"), torch.cuda.graph(graph):
        choose(torch.device(DEVICE), torch.bfloat16, 128)
    attention_choice._once.cache_clear()


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_speed(name):
    """Of Llama-3.1-8B on two ranks and of Llama-3.3-70B on two; printed, not judged."""
    kernel, pick = installed(name), random.Random(fresh_seed())
    for shape in ((16, 4, 128), (32, 4, 128)):
        for runs in (
            [(0, 1024)],
            [(0, 2048)],
            [(0, 8192)],
            [(1024, 1024)],
            [(0, 512)] * 4,
            [(1024, 1)] * 64,
            [(8000, 1)] * 4,
        ):
            batch = Batch(runs, shape, torch.bfloat16, pick)
            _, replay = cuda_graph(lambda batch=batch: [batch.run(kernel) for _ in range(10)][-1])
            times = []
            for _ in range(12):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 100)  # us a call
            us = sorted(times)[len(times) // 2]
            pairs = sum(tokens * context + tokens * (tokens + 1) / 2 for context, tokens in runs)
            read = sum(sum(run) for run in runs) * shape[1] * shape[2] * 4
            print(
                f"{name}: {len(runs)} of {runs[0]} on {shape}: {us:.1f} us, "
                f"{4 * pairs * shape[0] * shape[2] / us / 1e6:.0f} TFLOP/s, {read / us / 1e3:.0f} GB/s of keys and values"
            )
