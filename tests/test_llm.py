"""From prompts to text: SmolLM2 against transformers, and the LLM class."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tiny_llama import answers, new_requests, save_tiny_llama
from tokenweave import LLM, SamplingParams
from tokenweave.engine.build import EngineArgs, build_engine, engine_around
from tokenweave.errors import ModelError, RequestError
from tokenweave.models import load_model, load_tokenizer

TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
STORY = " ".join(f"On day {day} the crew counted {3 * day} whales and wrote it down." for day in range(1, 25))
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    STORY + " On day 25 the crew counted",
    "Once upon a time, in a village by the sea,",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(smollm2_gguf, transformers_smollm2):
    """Prompt tokens, and transformers' greedy continuation of each."""
    tokenizer = load_tokenizer(smollm2_gguf)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Name three colours."}])
    prompts = [*(tokenizer.encode(text) for text in TEXTS), tokenizer.encode(chat, add_special_tokens=False)]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = transformers_smollm2.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=list(tokenizer.eos_token_ids),
            )
        texts.append(out[0, len(prompt) :].tolist())
    assert len(prompts[2]) > 300  # it is computed in chunks below
    return prompts, texts


MODES = {1: ("auto",), 2: ("auto", "sequential", "fused", "woven"), 3: ("woven",)}


def generate_in_all_modes(path, prompts):
    """On each rank: mode -> (token ids of each prompt, modes of the steps)."""
    rank, world_size, group, cpu = dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu")
    model = load_model(path, rank=rank, world_size=world_size, group=group)
    results = {}
    for mode in MODES[world_size]:
        args = EngineArgs(path, world_size, dtype="float32", device="cpu", mode=mode, max_batch_tokens=128)
        engine = engine_around(model, args, group, cpu, tokenizer=lambda: load_tokenizer(path))
        tokens = [ids for ids, _ in answers(engine, new_requests(prompts, GREEDY))]
        results[mode] = tokens, {step.mode for step in engine.steps}
        engine.close()
    return results


@pytest.mark.parametrize("world_size", MODES)
def test_greedy_text_is_transformers_in_all_modes(smollm2_gguf, expected, world_size):
    prompts, texts = expected
    for results in run_ranks(world_size, generate_in_all_modes, str(smollm2_gguf), prompts, timeout=250):
        for mode, (tokens, modes) in results.items():
            assert tokens == texts, mode
            if mode in ("sequential", "fused"):
                assert modes == {mode}
            if mode == "woven":
                assert "woven" in modes


@pytest.fixture(scope="module")
def llms(model):
    """The tiny model at TP 1 (in this process) and 2 (in processes of its own)."""
    with LLM(model, device="cpu") as one, LLM(model, 2, device="cpu", mode="woven") as two:
        yield one, two


def test_one_and_two_ranks_answer_alike(llms):
    prompts = ["w10 w11 w12", {"prompt": "w20 w21"}, {"prompt_token_ids": [30, 31, 32, 33]}]
    one, two = (llm.generate(prompts, GREEDY) for llm in llms)
    assert [o.outputs for o in one] == [o.outputs for o in two]
    assert [o.prompt for o in one] == ["w10 w11 w12", "w20 w21", None]
    assert [o.prompt_token_ids for o in one] == [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    for output in one + two:
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length")
        assert completion.text == llms[0].tokenizer.decode(completion.token_ids)
        assert 0 < output.metrics.ttft_ms <= output.metrics.total_ms
    for output in two:
        n = len(output.outputs[0].token_ids)
        assert sum(output.mode_counts.values()) == n
        assert output.mode_counts["woven"] >= 1
    assert sum(s.prefill_tokens for s in llms[1].steps) == 9
    assert all(s.collectives > 0 and s.bytes_sent > 0 for s in llms[1].steps)


@pytest.mark.parametrize("which", [0, 1])
class TestBothKinds:
    def test_streaming(self, llms, which):
        seen = {0: "", 1: ""}
        reasons = {}

        def on_token(token):
            seen[token.index] += token.text
            if token.finish_reason is not None:
                reasons[token.index] = token.finish_reason

        outputs = llms[which].generate(["w7 w8", "w9"], GREEDY, on_token=on_token)
        assert [seen[0], seen[1]] == [o.outputs[0].text for o in outputs]
        assert [reasons[0], reasons[1]] == [o.outputs[0].finish_reason for o in outputs]

    def test_stop_strings_end_the_text_before_them(self, llms, which):
        (plain,) = llms[which].generate("w40 w41", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        words = plain.outputs[0].text.split()
        stop = f"{words[4]} {words[5]}"
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
        (stopped,) = llms[which].generate("w40 w41", params)
        assert stopped.outputs[0].finish_reason == "stop"
        assert stopped.outputs[0].text == plain.outputs[0].text.split(stop)[0]
        assert stopped.outputs[0].token_ids == plain.outputs[0].token_ids[: len(stopped.outputs[0].token_ids)]

    def test_seeds(self, llms, which):
        def draw(seed, prompts="w50 w51"):
            params = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=10, seed=seed, ignore_eos=True)
            return llms[which].generate(prompts, params)[-1].outputs[0].token_ids

        assert draw(1) == draw(1) == draw(1, ["w3", "w4 w5", "w50 w51"])
        assert draw(1) != draw(2)
        assert draw(None) != draw(None)  # every request has its own

    def test_a_refused_request_leaves_the_llm_usable(self, llms, which):
        llm = llms[which]
        before = llm.generate("w1", GREEDY)[0].outputs
        with pytest.raises(RequestError, match="prompt 1: it has 200 tokens; the context is 128"):
            llm.generate(["w1", "w1 " * 200], GREEDY)
        with pytest.raises(RequestError, match="prompt 0: it is empty"):
            llm.generate("", GREEDY)
        with pytest.raises(RequestError, match=r"token id 96; this model has ids 0\.\.95"):
            llm.generate({"prompt_token_ids": [96]}, GREEDY)
        assert llm.generate("w1", GREEDY)[0].outputs == before

    def test_parameters_for_each_prompt(self, llms, which):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
        outputs = llms[which].generate(["w1", "w1"], params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 5]
        with pytest.raises(RequestError, match="3 prompts with 2 sampling parameters"):
            llms[which].generate(["w1"] * 3, params)
        for params in (5, [None, None], "greedy"):
            with pytest.raises(RequestError, match=r"sampling_params=.*; expected SamplingParams, or a list of them"):
                llms[which].generate(["w1", "w2"], params)
        for nothing in (None, 5):
            with pytest.raises(RequestError, match=f"prompts={nothing}; expected a prompt or a list"):
                llms[which].generate(nothing)
        with pytest.raises(RequestError, match="prompt_token_ids=5; expected a list"):
            llms[which].generate({"prompt_token_ids": 5})
        with pytest.raises(RequestError, match="a prompt is 3"):
            llms[which].generate([3], GREEDY)
        assert llms[which].generate([], GREEDY) == []

    def test_chat(self, llms, which):
        messages = [{"role": "user", "content": "w10 w11"}]
        (output,) = llms[which].chat(messages, GREEDY)
        assert output.prompt_token_ids == [5, 10, 11, 6]
        assert llms[which].chat([messages, messages], GREEDY)[1].outputs == output.outputs
        assert output.outputs == llms[which].generate("w5 w10 w11 w6", GREEDY)[0].outputs


def test_the_llms_seed_gives_each_request_its_own(model):
    def draws(seed):
        with LLM(model, device="cpu", seed=seed) as llm:
            outputs = llm.generate(["w1"] * 3, SamplingParams(temperature=1, max_tokens=8, ignore_eos=True))
            return [o.outputs[0].token_ids for o in outputs]

    first = draws(0)
    assert first == draws(0)
    assert first != draws(1)
    assert first[0] != first[1] != first[2]


def test_a_closed_llm_says_so(model):
    llm = LLM(model, device="cpu")
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate("w1")


def test_small_caches_and_contexts(model):
    with LLM(model, device="cpu", cache_tokens=20, max_context=15, max_batch_tokens=4) as llm:
        outputs = llm.generate(["w1 w2 w3"] * 4, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        assert [len(o.outputs[0].token_ids) for o in outputs] == [12] * 4
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
        assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"dtype": "int3"}, RequestError, "dtype='int3'; expected one of auto, float32"),
        ({"mode": "quick"}, RequestError, "mode='quick'; expected one of auto, sequential, fused, woven"),
        ({"seed": "a"}, RequestError, "seed='a'; expected an integer"),
        ({"seed": 1.5}, RequestError, "seed=1.5; expected an integer"),
        ({"model": None}, RequestError, "model=None; expected the path of a folder"),
        ({"graphs": "no"}, RequestError, "graphs='no'; expected True or False"),
        ({"max_batch_tokens": 0}, RequestError, "max_batch_tokens=0; expected an integer >= 1"),
        ({"max_context": 1000}, RequestError, "max_context=1000; this model's context is 128"),
        (
            {"tensor_parallel_size": 2, "max_context": 1000},
            RequestError,
            "max_context=1000; this model's context is 128",
        ),
        ({"tensor_parallel_size": 11}, ModelError, "more than the model's 10 query heads"),
    ],
)
def test_arguments_out_of_range(model, arguments, error, match):
    with pytest.raises(error, match=match):
        LLM(**{"model": model, "device": "cpu", **arguments})


def test_more_ranks_than_gpus():
    gpus = torch.cuda.device_count()
    with pytest.raises(RequestError, match=f"tensor_parallel_size={gpus + 1}; this machine has {gpus} GPUs"):
        EngineArgs("x", gpus + 1, device="cuda")


def test_a_script_needs_no_main_guard(model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from tokenweave import LLM, SamplingParams

            llm = LLM({str(model)!r}, 2, device="cpu")
            print(llm.generate("w1 w2", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids)
            """  # and nobody closes it
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3
    assert done.stderr == ""


def answer_alone(path):
    with LLM(path, device="cpu", show_progress=False) as llm:
        return llm.generate("w10 w11", GREEDY)[0].outputs[0].token_ids


def test_a_single_rank_in_a_program_with_a_process_group_of_its_own(model, llms):
    expected = llms[0].generate("w10 w11", GREEDY)[0].outputs[0].token_ids
    assert run_ranks(2, answer_alone, str(model)) == [expected] * 2


def test_token_ids_may_be_arrays(llms):
    import numpy as np

    lists = llms[0].generate({"prompt_token_ids": [10, 11]}, GREEDY)
    arrays = llms[0].generate([{"prompt_token_ids": kind([10, 11])} for kind in (np.array, torch.tensor)], GREEDY)
    assert [o.outputs for o in arrays] == [lists[0].outputs] * 2


def test_another_number_of_processes_than_ranks_is_an_error(model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RequestError, match=r"tensor_parallel_size=2, but .* WORLD_SIZE=3"):
        LLM(model, 2, device="cpu")


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two' in the environment; expected a whole number"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0 in the environment; expected at least 1"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK='x' in the environment"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 in the environment; expected 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected, but not set; start the ranks with torchrun"),
    ],
)
def test_a_broken_torchrun_environment_is_an_error(model, monkeypatch, environment, match):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=match):
        LLM(model, 2, device="cpu")


def test_one_call_at_a_time(llms):
    for llm in llms:
        expected = llm.generate("w10 w11", GREEDY)[0].outputs
        refused = []

        def call_again(token, llm=llm, refused=refused):
            with pytest.raises(RequestError, match="this LLM is generating already"):
                llm.generate("w1", GREEDY)
            refused.append(token)

        assert llm.generate("w10 w11", GREEDY, on_token=call_again)[0].outputs == expected
        assert len(refused) == len(expected[0].token_ids)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_cannot_use_the_llm_and_does_not_end_it(llms):
    for llm in llms:
        child = os.fork()
        if not child:
            try:
                llm.generate("w1", GREEDY)
            except RequestError as error:
                os._exit(0 if "of which this one is a fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.generate("w1", GREEDY)


@pytest.mark.parametrize("messages", ["hello", ["hello"], [["hello"]]])
def test_a_chat_without_roles_is_an_error(llms, messages):
    with pytest.raises(RequestError, match=r"a conversation is .*; expected messages"):
        llms[0].chat(messages)


@pytest.mark.parametrize("argument", ["max_batch_tokens", "cache_tokens"])
@pytest.mark.parametrize("value", [10**13, 2**70])
def test_more_memory_than_there_is(model, argument, value):
    with pytest.raises(RequestError, match=rf"{argument}={value}.* GiB on each rank, and .* GiB are free; lower them"):
        LLM(model, device="cpu", **{argument: value})


@pytest.mark.parametrize(("device", "warned"), [("auto", True), ("cpu", False)])
def test_too_few_gpus_for_the_ranks_are_not_passed_over_in_silence(model, monkeypatch, caplog, device, warned):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    build_engine(EngineArgs(str(model), 2, device=device, cache_tokens=8), rank=0, group=None).close()
    assert ("2 ranks run on the CPU, because torch can use only 1 GPU" in caplog.text) is warned


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys, tokenweave; assert 'torch' not in sys.modules; tokenweave.SamplingParams; print(dir(tokenweave))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "LLM" in done.stdout
