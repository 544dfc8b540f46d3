"""The plugin in real engines: greedy tokens are stock vLLM's in every mode, whatever the scheduler does with the requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import saved_models
import torch

MODES = ("sequential", "fused", "woven")
FAMILIES = {
    "llama": {},
    "llama-bias": {},
    "mistral": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3": {},
    "mixtral": {},
}
ENGINE = {"block_size": 32}  # small blocks, so that short prompts hit the prefix cache
TOKENS = 10

# Longer than a step (128 tokens), so cut in chunks; a shared beginning; single tokens; a step that is exactly full.
PROMPTS = [
    [3 + (7 * i) % 150 for i in range(200)],
    [3 + (7 * i) % 150 for i in range(100)] + [5, 4, 3],
    [9],
    [11, 12],
    [4 + (11 * i) % 140 for i in range(128)],
    [3 + (7 * i) % 150 for i in range(200)],
    [6 + (5 * i) % 99 for i in range(31)],
]


def in_modes(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """mode -> tokens, and what the plugin counted."""
    runtime = harness.model_of(llm).tokenweave
    found: dict[str, Any] = {}
    for mode in MODES:
        runtime.use(mode)
        llm.reset_prefix_cache()
        found[mode] = harness.generate(llm, prompts, max_tokens)
        found[mode + " again"] = harness.generate(llm, prompts, max_tokens)  # out of the prefix cache
    found["steps"] = {str(mode): count for mode, count in runtime.steps.modes.items()}
    found["stock"] = {str(reason): count for reason, count in runtime.steps.reasons.items()}
    return found


def aborted(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    runtime = harness.model_of(llm).tokenweave
    found = {}
    for mode in MODES:
        runtime.use(mode)
        llm.reset_prefix_cache()
        found[mode] = harness.generate_with_aborts(llm, prompts, {"0": 2, "4": 3, "6": 6}, max_tokens)
    found["left"] = len(runtime.requests._prompts)
    return found


def same_step_hit(llm: Any, veto: bool) -> dict[str, Any]:
    """B finds cache blocks that A writes in B's first step, and lies before A: X made place for it."""
    from vllm import SamplingParams

    runtime, engine = harness.model_of(llm).tokenweave, llm.llm_engine
    a = [3 + (7 * i) % 150 for i in range(220)]
    b = a[:200] + [8] * 20
    found: dict[str, Any] = {}
    hazard = runtime.requests.hazard
    for mode in MODES:
        runtime.use(mode)
        llm.reset_prefix_cache()
        if not veto:
            runtime.requests.hazard = lambda step, cut: False
        tokens: dict[str, list[int]] = {}
        try:
            _add(engine, "x", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1, detokenize=False))
            _add(engine, "a", a, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False))
            _step(engine, tokens)  # all of X, the first chunk of A
            _add(
                engine,
                "b",
                b,
                SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1),
            )
            while engine.has_unfinished_requests():
                _step(engine, tokens)
        finally:
            runtime.requests.hazard = hazard
        found[mode] = tokens
    found["vetoes"] = {str(reason): count for reason, count in runtime.steps.reasons.items()}.get("prefix_hazard", 0)
    return found


def resumed_hit(llm: Any) -> dict[str, Any]:
    """As above; B was preempted before A came, and resumes."""
    from vllm import SamplingParams

    runtime, engine = harness.model_of(llm).tokenweave, llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    b = [3 + (7 * i) % 150 for i in range(220)]
    a = b[:200] + [8] * 20
    found: dict[str, Any] = {}
    for mode in MODES:
        runtime.use(mode)
        llm.reset_prefix_cache()
        tokens: dict[str, Any] = {}
        many = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)
        _add(engine, "b", b, many)
        while not tokens.get("b"):
            _step(engine, tokens)
        llm.reset_prefix_cache(reset_running_requests=True)
        (preempted,) = scheduler.requests.values()
        scheduler.waiting.remove_requests([preempted])
        _add(engine, "x", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1, detokenize=False))
        _add(engine, "a", a, many)
        _step(engine, tokens)  # all of X, the first chunk of A
        scheduler.waiting.add_request(preempted)
        while engine.has_unfinished_requests():
            _step(engine, tokens)
        found[mode] = tokens
    found["vetoes"] = {str(reason): count for reason, count in runtime.steps.reasons.items()}.get("prefix_hazard", 0)
    return found


def _add(engine: Any, name: str, prompt: list[int], sampling: Any) -> None:
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)


def _step(engine: Any, tokens: dict[str, Any]) -> None:
    for output in engine.step():
        answer = output.outputs[0]
        tokens[output.request_id] = list(answer.token_ids)
        if answer.logprobs:
            tokens[output.request_id + " logprobs"] = [next(iter(of.values())).logprob for of in answer.logprobs]


def failing_step(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    runtime = harness.model_of(llm).tokenweave
    runtime.use("woven")
    llm.reset_prefix_cache()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a step that cannot run")

    runtime.walk = broken
    return {"tokens": harness.generate(llm, prompts, max_tokens), "off": str(runtime.off)}


def lost_step(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[str]:
    """A collective gives up in a step, as kernels do: that is seen before the next one. What two calls raise."""
    from tokenweave.errors import CollectiveError

    runtime, raised, asked = harness.model_of(llm).tokenweave, [], itertools.count(1)

    def check() -> None:
        if next(asked) > 2:
            raise CollectiveError("collective failed: a peer fell behind")

    runtime.use("woven")
    runtime.workspace.check = check
    try:
        for _ in range(2):
            try:
                harness.generate(llm, prompts, max_tokens)
            except CollectiveError as error:
                raised.append(str(error))
    finally:
        del runtime.workspace.check
    return [*raised, str(runtime.off)]


class Padded:
    """In the place of graphs, which CPUs have none of: steps run as in a graph that was made for full ones, of whose rows most
    may be padding and of whose requests most are empty. What lies there is poison where that may be, else something valid."""

    least_rows = 1

    def __init__(self, runtime: Any) -> None:
        self.runtime, self.padding = runtime, 0

    def rows_of(self, rows: int) -> int:
        return self.runtime.max_rows

    def has_room(self, requests: int) -> bool:
        return True

    def find(self, plan: Any, capacity: int, requests: int) -> Any:
        return plan, capacity

    def run(self, found: Any, tables: Any) -> None:
        from tokenweave.integrations.vllm.cut import Tables
        from tokenweave.integrations.vllm.step import Cut

        (plan, capacity), room, rows = found, 3 * self.runtime.max_requests, len(tables.token_ids)
        self.padding = max(self.padding, capacity - rows)

        def padded(of: torch.Tensor, length: int, value: int) -> torch.Tensor:
            more = of.new_full((length - len(of), *of.shape[1:]), value)
            return torch.cat([of, more])

        whole = Tables(
            padded(tables.token_ids, capacity, 11),
            padded(tables.positions, capacity, 99),
            padded(tables.query_start_loc, room + 1, rows),
            padded(tables.seq_lens, room, 0),
            padded(tables.block_table, room, 0),
            padded(tables.slots, capacity, -1),
            tables.metadata,
        )
        self.runtime.residual.fill_(float("nan"))
        cut = Cut(plan, capacity, whole, longest_query=capacity, longest_sequence=self.runtime.max_length)
        self.runtime.walk(cut, whole.query_start_loc[-1:])


def padded(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    runtime = harness.model_of(llm).tokenweave
    runtime.graphs = graphs = Padded(runtime)
    try:
        found = in_modes(llm, prompts, max_tokens)
    finally:
        runtime.graphs = None
    return {**found, "replays": runtime.steps.graphs, "padding": graphs.padding, "off": str(runtime.off)}


def class_of(llm: Any) -> str:
    import sys

    model = type(harness.model_of(llm))
    return f"{model.__module__}:{model.__name__}:{'tokenweave.integrations.vllm.models' in sys.modules}"


# What vLLM's CPU attention has a kernel for: heads of 32. Qwen2's have hidden_size / num_attention_heads.
@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: saved_models.tiny_model(tmp_path_factory.mktemp(family), family, **{"num_attention_heads": 4, **more})
        for family, more in FAMILIES.items()
    }


ARGUMENTS = {"prompts": PROMPTS, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def off(folders: dict[str, Path]) -> harness.Run:
    scenarios = {
        "tokens": harness.Scenario(harness.generate, ARGUMENTS),
        "class": harness.Scenario(class_of),
        "plugins": harness.Scenario(harness.loaded_plugins),
    }
    return harness.run(folders["llama"], scenarios, engine=ENGINE)


@pytest.fixture(scope="module")
def on(folders: dict[str, Path]) -> harness.Run:
    scenarios = {
        "modes": harness.Scenario(in_modes, ARGUMENTS),
        "padded": harness.Scenario(padded, ARGUMENTS),
        "aborted": harness.Scenario(aborted, ARGUMENTS),
        "hit": harness.Scenario(same_step_hit, {"veto": True}),
        "resumed hit": harness.Scenario(resumed_hit),
        "hit without veto": harness.Scenario(same_step_hit, {"veto": False}),
        "failing": harness.Scenario(failing_step, ARGUMENTS),
    }
    return harness.run(folders["llama"], scenarios, engine=ENGINE, env={"TOKENWEAVE": "force"})


def test_off_is_stock_vllm(off: harness.Run) -> None:
    assert "tokenweave" in off["plugins"]
    assert off["class"] == "vllm.model_executor.models.llama:LlamaForCausalLM:False"
    assert "TokenWeave" not in off.log


def test_every_mode_gives_the_tokens_of_the_engine_without_the_plugin(off: harness.Run, on: harness.Run) -> None:
    for rank in on.ranks("modes"):
        for mode in MODES:
            assert rank[mode] == rank[mode + " again"] == off["tokens"], mode
        # One row cannot be cut; everything else is.
        assert rank["steps"]["woven"] > 5
        assert rank["steps"]["fused"] > 10
        assert rank["stock"] == {"planner": rank["stock"]["planner"]}
    assert "TokenWeave: mode auto, torch transport" in on.log


def test_steps_in_graphs_of_larger_ones_give_the_same_tokens(off: harness.Run, on: harness.Run) -> None:
    for rank in on.ranks("padded"):
        assert rank["off"] == "None"
        assert rank["padding"] > 100
        assert rank["replays"] > 20
        for mode in MODES:
            assert rank[mode] == rank[mode + " again"] == off["tokens"], mode


def test_requests_that_are_aborted_leave_the_others_as_they_were(off: harness.Run, on: harness.Run) -> None:
    found = on["aborted"]
    assert found["left"] <= 1  # of the 21 that ended; vLLM tells the runner in its next step
    for mode in MODES:
        assert found[mode] == found["sequential"]
        whole = [tokens for i, tokens in enumerate(off["tokens"]) if i not in (0, 4, 6)]
        assert [tokens for i, tokens in enumerate(found[mode]) if i not in (0, 4, 6)] == whole


def test_a_hit_on_blocks_of_the_same_step_is_not_cut(on: harness.Run) -> None:
    found = on["hit"]
    assert found["vetoes"] == 1
    for mode in ("fused", "woven"):
        assert found[mode]["a"] == found["sequential"]["a"]
        assert found[mode]["b"] == found["sequential"]["b"]
        assert found[mode]["b logprobs"] == pytest.approx(found["sequential"]["b logprobs"], abs=1e-4)


def test_a_resumed_requests_hit_on_blocks_of_the_same_step_is_not_cut(on: harness.Run) -> None:
    found = on["resumed hit"]
    assert found["vetoes"] == on["hit"]["vetoes"] + 1, "counted since the engine's start"
    for mode in ("fused", "woven"):
        assert found[mode]["a"] == found["sequential"]["a"]
        assert found[mode]["b"] == found["sequential"]["b"]
        assert found[mode]["b logprobs"] == pytest.approx(found["sequential"]["b logprobs"], abs=1e-4)


def test_without_the_veto_that_hit_reads_what_is_not_written(on: harness.Run) -> None:
    found = on["hit without veto"]
    assert found["fused"]["b logprobs"] == pytest.approx(found["sequential"]["b logprobs"], abs=1e-4)
    assert abs(found["woven"]["b logprobs"][0] - found["sequential"]["b logprobs"][0]) > 1e-3


def test_an_error_leaves_a_stock_engine(off: harness.Run, on: harness.Run) -> None:
    assert on["failing"] == {"tokens": off["tokens"], "off": "error"}
    assert "stock vLLM runs (error)" in on.log
    assert "a step that cannot run" in on.log


def test_a_collective_that_failed_ends_the_engine(folders: dict[str, Path]) -> None:
    """With a message, before anything more is served."""
    scenarios = {"lost": harness.Scenario(lost_step, ARGUMENTS)}
    found = harness.run(folders["llama"], scenarios, engine=ENGINE, env={"TOKENWEAVE": "force"})
    for *raised, off in found.ranks("lost"):
        assert len(raised) == 2, "nor is a caller served who goes on"
        assert all("a peer fell behind" in text and "start it again" in text for text in raised)
        assert off == "None"
    assert "stock vLLM runs (error)" not in found.log


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_families(folders: dict[str, Path], family: str) -> None:
    scenarios = {"modes": harness.Scenario(in_modes, ARGUMENTS)}
    found = harness.run(folders[family], scenarios, engine=ENGINE, env={"TOKENWEAVE": "force"})
    for rank in found.ranks("modes"):
        assert rank["sequential"] == rank["fused"] == rank["woven"] == rank["woven again"]
        assert rank["steps"]["woven"] > 5


@pytest.mark.parametrize(("make", "dtype"), [(saved_models.int8_model, "float32"), (saved_models.awq_model, "float16")])
def test_quantised_layers(make: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    """AWQ's kernel has no float32, and in bfloat16 a prompt of one token meets a tie."""
    scenarios = {"modes": harness.Scenario(in_modes, ARGUMENTS), "padded": harness.Scenario(padded, ARGUMENTS)}
    found = harness.run(make(tmp_path), scenarios, engine={**ENGINE, "dtype": dtype}, env={"TOKENWEAVE": "force"})
    for rank in [*found.ranks("modes"), *found.ranks("padded")]:
        assert rank["sequential"] == rank["fused"] == rank["woven"] == rank["woven again"]
        assert rank["steps"]["woven"] > 5
        assert rank.get("off", "None") == "None"


def test_switched_on_where_it_was_never_measured_it_stays_off_and_says_so(folders: dict[str, Path]) -> None:
    found = harness.run(folders["llama"], {"class": harness.Scenario(class_of)}, engine=ENGINE, env={"TOKENWEAVE": "1"})
    assert found["class"].startswith("vllm.")
    assert "was never measured with TokenWeave: TOKENWEAVE=force turns it on" in found.log


def test_under_vllms_own_executor(folders: dict[str, Path], off: harness.Run) -> None:
    found = harness.run(
        folders["llama"],
        {"tokens": harness.Scenario(harness.generate, ARGUMENTS)},
        engine=ENGINE,
        env={"TOKENWEAVE": "force", "TOKENWEAVE_MODE": "woven"},
        executor="mp",
    )
    assert found["tokens"] == off["tokens"]
    assert "TokenWeave: mode woven" in found.log


def test_one_rank_runs_stock_and_says_so(folders: dict[str, Path]) -> None:
    scenarios = {"tokens": harness.Scenario(harness.generate, {"prompts": PROMPTS[:2], "max_tokens": 2})}
    found = harness.run(folders["llama"], scenarios, engine=ENGINE, env={"TOKENWEAVE": "force"}, ranks=1)
    assert len(found["tokens"]) == 2
    assert "stock vLLM runs (one_rank)" in found.log


def test_another_architecture_runs_stock_and_says_so(tmp_path: Path) -> None:
    model = saved_models.unknown_model(tmp_path)
    scenarios = {"class": harness.Scenario(class_of)}
    found = harness.run(model, scenarios, engine=ENGINE, env={"TOKENWEAVE": "force"})
    assert found["class"].startswith("vllm.model_executor.models.gemma:")
    (line,) = [line for line in found.log.splitlines() if "stock vLLM runs" in line]
    assert "GemmaForCausalLM is none of LlamaForCausalLM, " in line


STORY = (
    "Once upon a time there was a small village at the edge of a large forest. The people of the village were kind, and "
    "they worked hard. Every morning the baker lit the oven before the sun came up, and every evening the children ran "
    "home along the river. One day a stranger came out of the forest, with a bag on his shoulder and a smile on his face. "
    "He asked the baker for a loaf of bread, and the baker, who had never seen him before, asked him where he came from. "
    "The stranger sat down at the table, thought for a moment, and then began to tell his story, which was long, and which "
    "nobody in the village would forget. It began in a city by the sea, where his father had been a"
)
TEXTS = ["The capital of France is", STORY, "Water boils at a temperature of", STORY + " sailor"]


@pytest.fixture(scope="module")
def smollm2(
    tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """(model, prompts, transformers' greedy tokens)."""
    from tokenweave.models import load_tokenizer

    tokenizer, folder = load_tokenizer(smollm2_gguf), tmp_path_factory.mktemp("smollm2")
    prompts = [tokenizer.encode(text) for text in TEXTS]
    model = saved_models.smollm2_model(smollm2_gguf, folder)
    expected = []
    for prompt in prompts:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        expected.append(whole[0, len(prompt) :].tolist())
    return folder, prompts, expected


def test_smollm2(smollm2: tuple[Path, list[list[int]], list[list[int]]]) -> None:
    folder, prompts, expected = smollm2
    scenarios = {"modes": harness.Scenario(in_modes, {"prompts": prompts, "max_tokens": TOKENS})}
    found = harness.run(folder, scenarios, engine=ENGINE, env={"TOKENWEAVE": "force"}, time_limit=300)
    for rank in found.ranks("modes"):
        for mode in MODES:
            assert rank[mode] == rank[mode + " again"] == expected, mode
        assert rank["steps"]["woven"] > 5
