"""``tokenweave bench vllm`` with a made-up vLLM: the real benchmark and the real engine processes, an engine that sleeps."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tokenweave.bench import environment
from tokenweave.bench.vllm import configurations
from tokenweave.bench.vllm.configurations import arguments_of, config_json, environment_of, graph_sizes, model_folder
from tokenweave.bench.vllm.engine import prompt, steady_step
from tokenweave.bench.vllm.process import EngineFailed, EngineProcess
from tokenweave.bench.vllm.report import compare, finish, percentiles
from tokenweave.bench.vllm.table import table
from tokenweave.cli import bench_vllm
from tokenweave.cli.main import main
from tokenweave.doctor import vllm as doctor_vllm
from tokenweave.doctor.vllm import Vllm
from tokenweave.errors import ModelError, RequestError
from tokenweave.models.config import builtin_names, read_config

# A prefill takes 20 us a token, a third less with TokenWeave on; a decoding step 2 ms. Tokens follow from the prompt alone.
ENGINE = """
import asyncio, os, sys
from prometheus_client import REGISTRY
from types import SimpleNamespace as Thing

class AsyncLLM:
    def __init__(self, args):
        self.args = args
        best = "compilation_config" in args
        if best and os.environ.get("FAKE") == "start":
            print("tokenweave: a line of the log that matters", flush=True)
            raise MemoryError("this engine does not start")
        seqs = args.get("max_num_seqs", 256)
        self.left = 3 if best and os.environ.get("FAKE") == "die" else None
        self.model_config = Thing(get_vocab_size=lambda: 1000, max_model_len=args["max_model_len"], architectures=["L"])
        self.vllm_config = Thing(
            model_config=self.model_config,
            cache_config=Thing(num_gpu_blocks=100, block_size=16, enable_prefix_caching=True),
            compilation_config=Thing(cudagraph_mode=Thing(name="FULL" if best else "NONE"), max_cudagraph_capture_size=512),
            scheduler_config=Thing(
                max_num_seqs=seqs, max_num_batched_tokens=args["max_num_batched_tokens"], enable_chunked_prefill=True
            ),
        )
        print("TokenWeave: switch", os.environ["TOKENWEAVE"], flush=True)
        if os.environ.get("FAKE") == "off" and os.environ["TOKENWEAVE"] != "0":
            print("(Worker_TP0 pid=7) DEBUG 11-30 TokenWeave: stock vLLM runs (dummy): a step", flush=True)
            print("WARNING TokenWeave: stock vLLM runs (lora): a reason", flush=True)

    @classmethod
    def from_engine_args(cls, args, usage_context):
        assert usage_context == "server"
        return cls(args.settings)

    async def generate(self, prompt, settings, request_id):
        if self.left is not None:
            self.left -= 1
            if not self.left:
                os._exit(3)
            await asyncio.sleep(0)
        REGISTRY.requests += 1
        ids = prompt["prompt_token_ids"]
        faster = 2 / 3 if os.environ["TOKENWEAVE"] != "0" else 1.0
        await asyncio.sleep(20e-6 * len(ids) * faster)
        for i in range(settings.max_tokens):
            if i:
                await asyncio.sleep(0.002)
            yield Thing(outputs=[Thing(token_ids=[(sum(ids) + i) % 1000])])

    async def reset_prefix_cache(self):
        return True

    def shutdown(self):
        print("shut down", flush=True)
"""
# The plugin's steps, one a request, and what else is there to be asked.
PROMETHEUS = """
import os
from types import SimpleNamespace as Thing

class Registry:
    requests = 0

    def collect(self):
        if os.environ["TOKENWEAVE"] != "0":
            labels = {"model_name": "m", "engine": "0", "mode": "woven"}
            steps = [Thing(labels=labels, value=float(self.requests)), Thing(labels={"mode": "fused"}, value=0.0)]
            yield Thing(name="tokenweave:steps", type="counter", samples=steps)
            yield Thing(name="tokenweave:state", type="gauge", samples=[Thing(labels={"state": "on"}, value=1.0)])
        yield Thing(name="vllm:requests", type="counter", samples=[Thing(labels={}, value=7.0)])

REGISTRY = Registry()
"""
FILES = {
    "../prometheus_client.py": PROMETHEUS,
    "__init__.py": "__version__ = '0.26.0'\nfrom types import SimpleNamespace as SamplingParams",
    "sampling_params.py": "class RequestOutputKind:\n    DELTA = 1",
    "usage/usage_lib.py": "class UsageContext:\n    OPENAI_API_SERVER = 'server'",
    "engine/arg_utils.py": "class AsyncEngineArgs:\n    def __init__(self, **settings):\n        self.settings = settings",
    "model_executor/models/registry.py": "class ModelRegistry:\n    models = {}",
    "v1/engine/async_llm.py": ENGINE,
}
WORDS = ["--decode-context=8", "--decode-steps=6", "--max-batched-tokens=2048", "--max-num-seqs=64"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on the engines' path with that vLLM, found as if it were installed."""
    for name, text in FILES.items():
        file = tmp_path / "site" / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: Vllm("0.26.0", cpu=True))
    monkeypatch.setattr(doctor_vllm, "plugin_is_visible", lambda: True)
    monkeypatch.setattr(environment, "describe", described)
    for name in ("TOKENWEAVE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def described() -> dict[str, Any]:
    """An environment in no time."""
    more = dict.fromkeys(["power_limit_w", "torch", "nccl", "driver", "nvlinks"])
    return {"gpus": [], "multicast": {"value": "no", "why": ""}, **more}


def bench(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = path / "result.json"
    common = ["--model=Llama-3.1-8B", f"--json={file}", f"--logs={path / 'logs'}", *WORDS]
    code = main(["bench", "vllm", *common, *words])
    return code, json.loads(file.read_text())


def rows(result: dict[str, Any], phase: str) -> dict[tuple[str, int], dict[str, Any]]:
    size = {"prefill": "tokens", "decode": "batch"}[phase]
    return {(row["configuration"], row[size]): row for row in result["rows"] if row["phase"] == phase}


def test_all_configurations_one_after_the_other(vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens=600,2000", "--rounds=7", "--decode=1,40", "--requests=5", "--max-output=3"]
    words.append("--trace=sharegpt,arxiv_summarization")
    code, result = bench(vllm, *words, f"--plot={vllm / 'plot.png'}")
    out = capsys.readouterr().out
    assert code == 0
    names = ("default", "best", "tokenweave")
    prefill = rows(result, "prefill")
    assert set(prefill) == set(itertools.product(("default", "best", "tokenweave"), (600, 2000)))
    for (_, tokens), row in prefill.items():
        assert row["samples"] == 7
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["ms"] > 20e-3 * tokens * 0.66
    default, ours = prefill["default", 2000], prefill["tokenweave", 2000]
    assert default["ms"] > 40  # it slept for so long, and on a busy machine longer
    assert ours["speedup_over_default"] == pytest.approx(default["ms"] / ours["ms"])
    assert "speedup_over_default" not in prefill["default", 2000]
    decode = rows(result, "decode")
    assert ("best", 40) not in decode  # it takes fewer requests a step
    assert {name for name, batch in decode if batch == 1} == {"default", "best", "tokenweave"}
    assert all(row["ms"] >= 2.0 for row in decode.values())
    trace = [row for row in result["rows"] if row["phase"] == "trace"]
    wanted = itertools.product(("sharegpt", "arxiv_summarization"), ("default", "best", "tokenweave"))
    assert [(row["trace"], row["configuration"]) for row in trace] == sorted(
        wanted, key=lambda pair: names.index(pair[1])
    )
    assert trace[-1]["throughput_over_best"] == pytest.approx(trace[-1]["requests_per_s"] / trace[3]["requests_per_s"])
    for row in trace:
        assert row.get("plugin") == ({"steps mode=woven": 5} if row["configuration"] == "tokenweave" else None)
        assert row["requests"] == 5
        assert row["requests_per_s"] == pytest.approx(5 / row["seconds"])
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        assert row["tpot_ms"]["p50"] >= 2.0
    assert {c["equal"] for c in result["compared"]} == {4}
    assert "not paired" in result["pairing"]
    assert (vllm / "plot.png").stat().st_size > 10_000
    for word in (
        "2000",
        "tokenweave over best",
        "requests of sharegpt",
        "requests of arxiv_summ",
        "4 of 4 requests equal",
        "tokenweave: steps mode=woven 5",
        "not paired",
    ):
        assert word in out


def test_figures_of_a_plugin_that_is_not_at_work_are_told(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE", "off")
    code, result = bench(vllm, "--tokens=1024", "--rounds=1", "--decode=none", "--configs=default,tokenweave")
    assert code == 0
    assert "tokenweave: NOT AT WORK, its figures are stock vLLM's: WARNING TokenWeave: stock" in capsys.readouterr().err
    assert any("(lora)" in line for line in result["engines"][-1]["said"])


def test_engines_get_the_same_arguments_and_their_switch(vllm: Path) -> None:
    code, result = bench(vllm, "--tokens=1024", "--rounds=1", "--decode=none", "--engine-args", '{"dtype": "float16"}')
    assert code == 0
    engines = {engine["configuration"]: engine for engine in result["engines"]}
    assert list(engines) == ["default", "best", "tokenweave"]
    assert engines["default"]["arguments"] == engines["tokenweave"]["arguments"]
    arguments = engines["default"]["arguments"]
    assert (arguments["load_format"], arguments["dtype"], arguments["max_num_batched_tokens"]) == (
        "dummy",
        "float16",
        2048,
    )
    best = engines["best"]["arguments"]
    assert {key for key in best if best[key] != arguments.get(key)} == {"compilation_config", "max_num_seqs"}
    assert best["max_num_seqs"] == engines["best"]["max_num_seqs"] == 63
    switches = {name: engine["variables"]["TOKENWEAVE"] for name, engine in engines.items()}
    assert switches == {"default": "0", "best": "0", "tokenweave": "1"}
    assert {name: engine["said"] for name, engine in engines.items()} == {
        name: [f"TokenWeave: switch {switch}"] for name, switch in switches.items()
    }
    assert all(engine["kv_tokens"] == 1600 and engine["start_s"] > 0 for engine in engines.values())
    assert all(engine["variables"]["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm" for engine in engines.values())


def test_side_by_side_rounds_are_paired(vllm: Path) -> None:
    words = ["--together", "--configs=default,tokenweave", "--tokens=1500", "--rounds=5", "--decode=2"]
    code, result = bench(vllm, *words)
    assert code == 0
    assert result["pairing"].startswith("paired")
    for found in result["engines"]:
        assert found["arguments"]["gpu_memory_utilization"] == 0.45
        assert found["arguments"]["kv_cache_memory_bytes"] == 2**28
    row = rows(result, "prefill")["tokenweave", 1500]
    assert row["speedup_over_default_low"] <= row["speedup_over_default"] <= row["speedup_over_default_high"]


def test_several_starts_are_pooled(vllm: Path) -> None:
    code, result = bench(vllm, "--starts=2", "--configs=default", "--tokens=16", "--rounds=3", "--decode=none")
    assert code == 0
    assert rows(result, "prefill")["default", 16]["samples"] == 6
    assert len({engine["log"] for engine in result["engines"]}) == 2


@pytest.mark.parametrize(("how", "message"), [("start", "this engine does not start"), ("die", "ended")])
def test_an_engine_that_fails_is_told_and_the_others_are_measured(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    monkeypatch.setenv("FAKE", how)
    code, result = bench(vllm, "--together", "--tokens=64", "--rounds=2", "--decode=1")
    assert code == 1
    (failed,) = result["failed"]
    assert failed["configuration"] == "best"
    assert message in failed["error"]
    assert {name for name, _ in rows(result, "prefill")} == {"default", "tokenweave"}
    captured = capsys.readouterr()
    assert "FAILED: best" in captured.out
    assert message in captured.err


def engine(vllm: Path, time_limit: float = 30, **arguments: Any) -> EngineProcess:
    settings = {"max_model_len": 64, "max_num_batched_tokens": 64, **arguments}
    variables = environment_of("default", {**os.environ, "PYTHONPATH": configurations.python_path()}, False)
    return EngineProcess("default", settings, variables, vllm, time_limit)


def test_an_engine_that_does_not_answer_in_time_is_an_error_and_is_ended(vllm: Path) -> None:
    with engine(vllm, time_limit=4) as process:
        process.wait_ready()
        with pytest.raises(EngineFailed, match="did not answer within 4 s"):
            process.ask("replay", requests=[{"at": 0, "prompt": 3, "output": 10_000, "seed": 0}])
    assert process._process.poll() is not None


def test_an_engine_ends_when_its_input_does(vllm: Path) -> None:
    with engine(vllm) as process:
        ready = process.wait_ready()
        assert ready["vllm"] == "0.26.0"
        answer = process.ask("replay", requests=[{"prompt": 3, "output": 2, "seed": 5, "at": 0.05}], keep_tokens=True)
        (request,) = answer["requests"]
        assert request["tokens"] == [(sum(prompt(3, 1000, 5)) + i) % 1000 for i in range(2)]
        assert 0.05 <= request["sent"] < request["first"] < request["last"]
        assert process._process.stdin is not None
        process._process.stdin.close()
        assert process._process.wait(10) == 0
    assert "shut down" in process.log.read_text()


def test_best_has_graphs_for_all_steps_and_stays_off_the_decode_tile() -> None:
    shared = {"max_num_batched_tokens": 8192, "model": "m"}
    assert arguments_of("default", shared, (1024,), 32, 8) == shared
    for heads, kv_heads, tokens in (
        (32, 8, (512, 1024, 8192)),
        (64, 8, (640, 3000)),
        (32, 32, (16,)),
        (32, 8, (16384,)),
    ):
        best = arguments_of("best", shared, tokens, heads, kv_heads)
        sizes = best["compilation_config"]["cudagraph_capture_sizes"]
        assert sizes == sorted(set(sizes))
        assert {t for t in tokens if t <= 8192} <= set(sizes)
        assert sizes[-1] == 8192
        large = [size for size in sizes if size > 512]
        assert all(size / best["max_num_seqs"] * (heads // kv_heads) > 64 for size in large)
    assert arguments_of("best", {**shared, "max_num_seqs": 8}, (1024,), 32, 8)["max_num_seqs"] == 8
    assert graph_sizes((), 8192, 1024)[:5] == [1, 2, 4, 8, 16]


def test_environments_keep_multicast_off_unless_it_is_asked_for() -> None:
    base = {"NCCL_NVLS_ENABLE": "1", "HF_HUB_OFFLINE": "0", "TOKENWEAVE": "force"}
    found = environment_of("tokenweave", base, multicast=False)
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        assert found[name] == ("0" if name == "NCCL_NVLS_ENABLE" else "1")
    assert found["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm"
    assert (found["TOKENWEAVE"], found["HF_HUB_OFFLINE"]) == ("force", "0")
    assert environment_of("best", base, multicast=False)["TOKENWEAVE"] == "0"
    assert environment_of("default", base, multicast=True)["NCCL_NVLS_ENABLE"] == "1"
    assert "NVSHMEM_DISABLE_NVLS" not in environment_of("default", {}, multicast=True)


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_names_become_folders_that_say_the_same(name: str, tmp_path: Path) -> None:
    folder, weightless = model_folder(name, tmp_path)
    assert weightless
    assert read_config(folder) == read_config(name)
    assert config_json(read_config(folder)) == config_json(read_config(name))
    made = (folder / "config.json").stat()
    assert model_folder(name.upper(), tmp_path)[0] == folder, "vLLM's compile cache goes by the path"
    assert (folder / "config.json").stat() == made
    (folder / "config.json").write_text("{}")
    model_folder(name, tmp_path)
    assert read_config(folder) == read_config(name)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="TOKENWEAVE_CACHE"):
        model_folder(builtin_names()[0], tmp_path / "file")


def test_no_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no model is named"):
        model_folder("", tmp_path)


def test_a_step_is_measured_while_all_requests_decode() -> None:
    assert steady_step([[0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5]]) == pytest.approx(1.0)
    assert steady_step([[0.0, 9.0, 10.0, 11.0], [9.5, 10.5, 11.5]]) == pytest.approx(1.0)  # not the wait before
    assert steady_step([[0.0, 1.0], [2.0, 3.0]]) is None  # never together
    assert steady_step([[0.0]]) is None
    assert steady_step([]) is None


def test_outputs_are_compared_up_to_their_first_difference() -> None:
    outputs = {
        "default": {"alone": [[1, 2, 3, 4], [5, 6, 7, 8]], "batch": [[1, 2, 3, 4], [5, 6, 0, 8]]},
        "tokenweave": {"alone": [[9, 2, 3, 4], [5, 6, 7, 8]], "batch": [[9, 2, 3, 4], [5, 6, 7, 8]]},
    }
    inside, other, between = compare(outputs)
    assert (inside["equal"], inside["equal_first_token"], inside["tokens_before_a_difference"]) == (1, 2, 6 / 8)
    assert (other["equal"], other["tokens_before_a_difference"]) == (2, 1.0)
    assert (between["equal"], between["equal_first_token"], between["tokens_before_a_difference"]) == (1, 1, 4 / 8)
    assert between["first"] == "default, alone"
    assert compare({}) == []


def test_ratios_are_paired_only_where_rounds_are() -> None:
    # Each round is twice as fast as the one before: pairs tell 2.0 exactly, medians only about.
    times = {"default": [2.0, 4.0, 8.0, 16.0], "tokenweave": [1.0, 2.0, 4.0, 8.0]}
    result = {
        "environment": described(),
        "config": {"ranks": 2, "model": "m", "configurations": {"default": "", "tokenweave": ""}},
        "engines": [],
        "rows": [],
        "outputs": {},
        "clocks": [{"sm_mhz": {"low": 1.0, "median": 2.0, "high": 3.0}, "power_w": None}],
    }
    paired = finish(result, {("prefill", 8): times}, paired=True)["rows"][1]
    assert (paired["speedup_over_default_low"], paired["speedup_over_default_high"]) == (2.0, 2.0)
    loose = finish(result, {("prefill", 8): times}, paired=False)
    assert loose["rows"][1]["speedup_over_default"] == 2.0
    assert loose["rows"][1]["speedup_over_default_low"] < 1.5
    assert loose["environment"]["while_measuring"]["sm_mhz"] == {"low": 1.0, "median": 2.0, "high": 3.0}
    assert percentiles([]) is None


def test_the_published_table_is_what_the_result_says():
    """Of the sizes that it shows; a run of the same command writes its own."""
    result = json.loads(
        (Path(__file__).parents[1] / "benchmarks" / "results" / "h200x2-vllm-llama-3.1-8b.json").read_text("utf-8")
    )
    made = table(result)
    of = {row[0]: row for row in made["rows"]}
    assert [of[row[0]] for row in result["table"]["rows"]] == result["table"]["rows"]
    assert made["columns"] == result["table"]["columns"]
    assert made["title"] == "Inside vLLM 0.26.0, Llama-3.1-8B, 2 GPUs"
    assert made["note"].startswith("Paired: all engines")
    stock = [row for row in result["rows"] if row["configuration"] != "tokenweave"]
    assert table({**result, "rows": stock}) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--configs=default,fast"], "--configs 'fast'"),
        (["--tokens=0"], "--tokens '0'"),
        (["--tokens=none", "--decode=none"], "nothing to measure"),
        (["--together", "--starts=2"], "--together starts each engine once"),
        (["--rounds=0"], "--rounds 0"),
        (["--decode-steps=1"], "--decode-steps 1"),
        (["--memory=1.5"], "--memory 1.5"),
        (["--kv-gib=0"], "--kv-gib 0"),
        (["--engine-args=[1]"], "expected a JSON object"),
        (["--engine-args={"], "is not JSON"),
        (["--tokens=200000"], "the model's context is 131072"),
        (["--model=nothing"], "no model 'nothing'"),
        (["--tp=3"], "vLLM wants it to divide the model's 32 query heads"),
        (["--trace=sharegpt,nothing"], "no trace 'nothing'"),
        (["--trace=sharegpt", "--rate=0"], "a rate of 0.0"),
    ],
)
def test_what_cannot_run_is_refused_before_an_engine_starts(
    vllm: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    began = time.monotonic()
    assert main(["bench", "vllm", "--model=Llama-3.1-8B", *words]) == 2
    assert message in capsys.readouterr().err
    assert time.monotonic() - began < 5


def test_layers_need_random_weights(vllm: Path) -> None:
    (vllm / "model").mkdir()
    model = config_json(read_config("SmolLM2-135M"))
    (vllm / "model" / "config.json").write_text(json.dumps(model))
    with pytest.raises(RequestError, match="add --dummy"):
        bench_vllm.run(arguments(vllm / "model", "--layers=2"))


def arguments(model: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_vllm.add_parser(parser.add_subparsers())
    return parser.parse_args(["vllm", f"--model={model}", *words])


def test_without_vllm_or_the_plugin_it_says_how_to_get_them(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_vllm, "plugin_is_visible", lambda: False)
    assert main(["bench", "vllm", "--model=Llama-3.1-8B"]) == 2
    assert "pip install --no-deps -e ." in capsys.readouterr().err
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: Vllm("0.26.0", cpu=False))
    assert main(["bench", "vllm", "--model=Llama-3.1-8B", "--tp=64"]) == 2
    assert "--tp 64 needs as many GPUs" in capsys.readouterr().err
    monkeypatch.setattr(doctor_vllm, "installed_vllm", lambda: None)
    assert main(["bench", "vllm", "--model=Llama-3.1-8B"]) == 2
    assert "pip install vllm==0.26.0" in capsys.readouterr().err
