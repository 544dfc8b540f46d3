"""What the simulation is fed: traces, arrivals, the cache's size, step times."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest

from tokenweave.errors import RequestError
from tokenweave.models import read_config
from tokenweave.planning import GPUS, Predictor, gpu_by_name, machine_of
from tokenweave.simulation import StepTable, Trace, kv_tokens, poisson, read_trace, sized
from tokenweave.simulation.memory import MEMORY_GIB, position_bytes, weight_bytes
from tokenweave.simulation.modes import MODES, exact_us
from tokenweave.simulation.table import chunks_of
from tokenweave.simulation.trace import builtin_traces


def test_traces_that_come_with_the_package_are_what_they_say() -> None:
    assert builtin_traces() == ["arxiv_summarization", "sharegpt"]
    for name, longest, prompt, output in (("sharegpt", 8192, 2340, 439), ("arxiv_summarization", 4096, 2588, 291)):
        trace = read_trace(name)
        assert len(trace) == 4096
        assert trace.arrivals is None
        assert (trace.prompts + trace.outputs).max() <= longest
        # The whole files' means: a sample of 4096 is within 5 standard errors, which are 1 to 2 %.
        assert trace.prompts.mean() == pytest.approx(prompt, rel=0.07)
        assert trace.outputs.mean() == pytest.approx(output, rel=0.12)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("arrived_at,num_prefill_tokens,num_decode_tokens", ["5.5", "0.25", "1"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", ["2023-11-16 18:00:05.5000000", "2023-11-16 18:00:00.25", "2023-11-16T18:00:01"]),
        (" Arrival_Time ,PROMPT_TOKENS,Output_Tokens", ["2024-05-10 00:00:05.5+00:00", "2024-05-10 00:00:00.250000Z", "2024-05-10 00:00:01"]),
    ],
)  # fmt: skip
def test_columns_by_any_of_their_names_and_requests_in_order_of_arrival(tmp_path: Path, header, times) -> None:
    rows = [f"{time},{prompt},{prompt + 10}" for time, prompt in zip(times, (1, 2, 3), strict=True)]
    trace = read_trace(written(tmp_path, "\ufeff" + "\n".join([header, *rows, "", ""])))
    assert trace.prompts.tolist() == [2, 3, 1]
    assert trace.outputs.tolist() == [12, 13, 11]
    assert trace.arrivals == pytest.approx([0.0, 0.75, 5.25])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns ''; expected one with the prompt tokens, called one of num_prefill_tokens"),
        ("prompt_tokens,answer\n1,2", "expected one with the output tokens"),
        ("prompt_tokens,output_tokens\n", "has no requests"),
        ("prompt_tokens,output_tokens\n1,2\n\n7", r"line 4: '7'; expected whole numbers of tokens >= 1$"),
        ("prompt_tokens,output_tokens\n1,0", "line 2: '1,0'"),
        ("prompt_tokens,output_tokens\n1.5,1", "line 2: '1.5,1'"),
        ("prompt_tokens,output_tokens\nnan,1", "line 2"),
        ("prompt_tokens,output_tokens\n1e400,1", "line 2"),
        ("arrived_at,prompt_tokens,output_tokens\nlater,1,1", "and in 'arrived_at' seconds or an ISO date and time"),
        ("arrived_at,prompt_tokens,output_tokens\nnan,1,1", "seconds or an ISO date and time"),
        ("prompt_tokens,output_tokens\n1e30,1", "line 2"),
        ("arrived_at,prompt_tokens,output_tokens\nnow,1,1", "seconds or an ISO date and time"),
        ("arrived_at,prompt_tokens,output_tokens\nNaT,1,1", "seconds or an ISO date and time"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_trace(written(tmp_path, text))


def test_what_is_no_csv_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match="there is no such file, and it is none of those that come with TokenWeave: arx"
    ):
        read_trace("no/such.csv")
    with pytest.raises(RequestError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "weights.bin").write_bytes(bytes(range(128, 256)) * 50)
    with pytest.raises(RequestError, match="cannot be read"):
        read_trace(tmp_path / "weights.bin")


def test_a_trace_is_cut_or_repeated_to_size() -> None:
    trace = Trace("test", np.arange(1, 11), np.arange(11, 21), np.arange(10.0))
    timed = sized(trace, 25, 0, keep_order=True)
    assert timed.prompts.tolist() == [*range(1, 11), *range(1, 11), *range(1, 6)]
    assert timed.arrivals.tolist() == list(range(25)), "a gap like the others between the passes"
    assert sized(trace, 4, 0, keep_order=True).arrivals.tolist() == [0, 1, 2, 3]
    shuffled = sized(trace, 20, 1, keep_order=False)
    assert (shuffled.outputs - shuffled.prompts == 10).all()
    assert sorted(shuffled.prompts[:10]) == sorted(shuffled.prompts[10:]) == list(range(1, 11))
    assert sized(trace, 20, 1, keep_order=False).prompts.tolist() == shuffled.prompts.tolist()
    assert sized(trace, 20, 2, keep_order=False).prompts.tolist() != shuffled.prompts.tolist()
    with pytest.raises(RequestError, match="0 requests"):
        sized(trace, 0, 0, keep_order=True)


def test_poisson_arrivals_have_their_rate_and_its_variance() -> None:
    gaps = np.diff(poisson(100_000, 8.0, 3))
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.02)
    assert np.allclose(poisson(100, 8.0, 3), poisson(100, 4.0, 3) / 2)
    assert not np.allclose(poisson(100, 8.0, 3), poisson(100, 8.0, 4))
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(RequestError, match="expected a positive number"):
            poisson(10, rate, 0)


@pytest.mark.parametrize(
    ("model", "parameters"),
    # Counts as the models' cards and papers give them.
    [("Llama-3.1-8B", 8.03e9), ("Llama-3.2-1B", 1.24e9), ("Llama-3.3-70B", 70.6e9), ("Qwen2.5-72B", 72.7e9), ("Qwen3-32B", 32.8e9),
     ("Mixtral-8x7B", 46.7e9), ("Mixtral-8x22B", 141e9), ("SmolLM2-135M", 135e6)],
)  # fmt: skip
def test_weights_are_counted(model: str, parameters: float) -> None:
    assert weight_bytes(read_config(model), 1) == pytest.approx(2 * parameters, rel=0.01)


def test_the_cache_gets_what_is_left() -> None:
    config, h100 = read_config("Llama-3.1-8B"), gpu_by_name("h100")
    assert position_bytes(config, 1) == 2 * 2 * 32 * 8 * 128
    assert position_bytes(config, 2) == position_bytes(config, 1) / 2
    one = kv_tokens(config, h100, 1, 2048, 256)
    assert one == pytest.approx((0.9 * 80 * 2**30 - 16.06e9) / 131072, rel=0.02)
    assert kv_tokens(config, h100, 2, 2048, 256) > 2 * one, "weights are shared too"
    assert kv_tokens(config, h100, 1, 16384, 256) < one
    assert kv_tokens(config, h100, 1, 2048, 256, memory_gib=40) < one / 2
    assert set(MEMORY_GIB) == set(GPUS) - {"cpu"}
    with pytest.raises(
        RequestError, match=r"weights take 131.\d GiB and a step .* GiB; 90% of h100's 80 GiB leave no room"
    ):
        kv_tokens(read_config("Llama-3.3-70B"), h100, 1, 2048, 256)
    with pytest.raises(RequestError, match="memory of 'cpu' is not known"):
        kv_tokens(config, gpu_by_name("cpu"), 1, 2048, 256)
    with pytest.raises(RequestError, match="expected a positive number"):
        kv_tokens(config, h100, 1, 2048, 256, memory_gib=0)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000, 4096])
@pytest.mark.parametrize("span", [0, 1, 16, 33, 512, 8192])
def test_chunks_have_the_rows_and_the_attention_asked_for(rows: int, span: int) -> None:
    chunks = chunks_of(rows, span)
    assert sum(size for size, _ in chunks) == rows
    pairs = sum(size * before + size * (size + 1) / 2 for size, before in chunks)
    assert pairs == pytest.approx(rows * max(1, span), rel=0.05, abs=rows)
    assert chunks_of(0, span) == ()


@pytest.mark.parametrize(("gpu", "tp", "transport"), [("h100", 8, "multimem"), ("h200", 2, "p2p"), ("a100", 4, "p2p")])
def test_interpolated_times_are_the_predictors(gpu: str, tp: int, transport: str) -> None:
    numbers = random.Random(gpu)
    predictor = Predictor(read_config("Llama-3.1-8B"), machine_of(gpu, tp, transport))
    exact = {mode: exact_us(predictor, mode) for mode in ("sequential", "auto")}
    tables = {mode: StepTable(exact[mode], 4096) for mode in exact}
    decode: dict[str, list[float]] = {mode: [] for mode in exact}
    mixed: dict[str, list[float]] = {mode: [] for mode in exact}
    for _ in range(80):
        # Contexts that the predictor does not round, so that both are asked for the same; for its sake no one-row chunks.
        decodes = int(2 ** numbers.uniform(0, 8))
        context = numbers.randint(4, 7) * 2 ** numbers.randint(4, 10)
        for mode, table in tables.items():
            us = 1e6 * table.decode(decodes, decodes * context)[0]
            decode[mode].append(us / exact[mode]((), decodes, context) - 1)
        decodes = numbers.choice([0, decodes])
        chunks = [(int(2 ** numbers.uniform(1, 11.5)), numbers.choice([0, numbers.randint(0, 6000)]))]
        while numbers.random() < 0.6 and sum(size for size, _ in chunks) < 2000:
            chunks.append((int(2 ** numbers.uniform(1, 10)), 0))
        if numbers.random() < 0.4 and (left := 4096 - decodes - sum(size for size, _ in chunks)) > 1:
            chunks.append((left, 0))  # a full step
        rows = decodes + sum(size for size, _ in chunks)
        pairs = sum(size * before + size * (size + 1) / 2 for size, before in chunks)
        for mode, table in tables.items():
            us = 1e6 * table.mixed(rows, decodes, pairs, decodes * context)
            mixed[mode].append(us / exact[mode](tuple(chunks), decodes, context) - 1)
    for mode in exact:
        for errors, median, most in ((np.array(decode[mode]), 0.005, 0.04), (np.array(mixed[mode]), 0.01, 0.06)):
            assert np.median(abs(errors)) < median
            assert np.percentile(abs(errors), 95) < most
            assert abs(errors.mean()) < 0.015


def test_every_mode_has_its_time_and_steps_of_one_row_too() -> None:
    predictor = Predictor(read_config("Llama-3.1-8B"), machine_of("h100", 4))
    times = {mode: exact_us(predictor, mode)(((4096, 0),), 10, 512) for mode in MODES}
    assert times["auto"] == min(times[mode] for mode in ("sequential", "fused", "woven"))
    assert len(set(times.values())) == 4
    assert exact_us(predictor, "woven")((), 1, 512) == exact_us(predictor, "fused")((), 1, 512)
    table = StepTable(exact_us(predictor, "auto"), 8)
    assert table.mixed(1, 0, 1, 0) > 0
    assert table.decode(1, 0)[2] >= 1
    table.decode(8, 8000)
    table.mixed(8, 7, 100, 700)
    assert table.points > 0


def test_the_bundled_traces_are_rows_of_plain_csv() -> None:
    from importlib import resources

    for name in builtin_traces():
        with (resources.files("tokenweave.simulation") / "traces" / f"{name}.csv").open() as file:
            assert next(csv.reader(file)) == ["num_prefill_tokens", "num_decode_tokens"]
