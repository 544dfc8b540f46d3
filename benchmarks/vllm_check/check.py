"""One start of vLLM on GPUs with the plugin on: are woven and fused steps right, and how long do they take?

    TOKENWEAVE=1 python benchmarks/vllm_check/check.py --requests 100 --json check.json

The model has random weights: Llama-3.1-8B, or another built-in configuration (Llama-3.2-1B has heads of 64), or a folder
with a config.json; of a folder with safetensors those are loaded. Its mode is switched in the running engine, so that all
modes share weights, cache and clocks. ``stock`` is vLLM's own path in the same engine.

Correctness: batches of prompts of random lengths, prefilled in chunks beside decodes, with every mode against stock, and stock
against itself. Of each comparison there are

- ``largest_logprob_difference``: of the first token of each request, over the five most probable ones of either.
- ``equal_tokens``: the share of tokens before a request's first different one. What comes after it answers another text and is
  not compared, so that a request that parts at its first token adds none, and one that parts at its last all others.
- ``parted``: the share of requests that part at all.
- ``largest_tie_broken``: where requests part, by how much stock preferred its own token. A tie that rounding breaks is a small
  difference, a fault is none. Null where the other token is not one of stock's five most probable ones.
- ``steps``: how many steps ran fused and woven meanwhile.

A prefix that a second request of the same step hits is one of the batches. It ends with an error where nothing was compared:
log-probabilities that are not finite, two prompts with the same ones, a mode of which no step ran.

Speed: one prompt and one token, in rounds of all modes in random order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compared import Compared, NothingCompared, check_answers, check_steps, compare

from tokenweave.bench.environment import describe
from tokenweave.bench.vllm.configurations import model_folder
from tokenweave.cache import cache_dir
from tokenweave.files import write_result
from tokenweave.models.hf_config import read_json

if TYPE_CHECKING:
    import torch

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions are sent to the workers

MODES = ("stock", "fused", "woven")
SCALE_OF_4_BITS = 3e-3


# ---- on the workers; a runtime's sequential mode is vLLM's own path


def _switch(worker: Any, mode: str) -> None:
    """``mode@N``: graphs with room for N requests, however few there are."""
    mode, _, room = mode.partition("@")
    runtime = worker.model_runner.model.tokenweave
    runtime.use("sequential" if mode == "stock" else mode)
    if runtime.graphs is not None:
        runtime.rooms_at_start = getattr(runtime, "rooms_at_start", runtime.graphs.rooms)
        runtime.graphs.rooms = (min(int(room), runtime.max_requests),) if room else runtime.rooms_at_start


def _randomise(worker: Any) -> None:
    """Weights at which every layer matters: vLLM's dummy weights leave the residual almost as the embedding made it.

    Quantised ones get random codes, one scale that makes of them about what the others are, and no mean: with one, rows of an
    MLP become thousands of times as large as fp16 goes. Zero points are codes too, or (vLLM's Machete) floats that are added.
    """
    import torch

    rank = torch.distributed.get_rank()
    parameters = dict(worker.model_runner.model.named_parameters())
    device = next(iter(parameters.values())).device
    own, shared = (torch.Generator(device).manual_seed(seed) for seed in (rank + 1, 1000))
    with torch.inference_mode():
        for name, parameter in parameters.items():
            data = parameter.data
            if "scale" in name:  # of fp8 codes with a deviation of 100, of 4-bit codes with one of 5; 4096 inputs
                data.fill_(1.5e-4 if data.dtype == torch.float32 else SCALE_OF_4_BITS)
            elif "zeros" in name and data.is_floating_point():
                data.fill_(-7.5 * SCALE_OF_4_BITS)
            elif data.dtype == torch.float8_e4m3fn:
                for part in data.split(1024):
                    part.copy_(_fp8_numbers(part.shape, own))
            elif data.dtype == torch.int32:
                data.random_(-(2**31), 2**31 - 1, generator=own)
            elif "norm" in name:
                data.copy_(1 + 0.1 * torch.randn(data.shape, generator=shared, device=data.device))
            elif "gate.weight" in name:  # a router is the same on all ranks
                data.copy_(torch.randn(data.shape, generator=shared, device=data.device) * data.shape[-1] ** -0.5)
            elif data.is_floating_point() and data.dim() >= 2:
                for part in data.view(-1, data.shape[-1]).split(8192):
                    part.copy_(torch.randn(part.shape, generator=own, device=data.device) * data.shape[-1] ** -0.5)
            elif data.is_floating_point():
                data.copy_(0.1 * torch.randn(data.shape, generator=own, device=data.device))


def _fp8_numbers(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random numbers with a deviation of 100, in fp32, that fp8 has: torch 2.11 makes NaN of larger ones."""
    import torch

    most = torch.finfo(torch.float8_e4m3fn).max
    return (100 * torch.randn(shape, generator=generator, device=generator.device)).clamp_(-most, most)


def _state(worker: Any) -> dict[str, Any]:
    import torch

    runtime = getattr(worker.model_runner.model, "tokenweave", None)
    if runtime is None:
        return {"off": "refused when the model was built; the log says why"}
    return {
        "steps": runtime.steps.line(),
        "off": str(runtime.off),
        "transport": runtime.workspace.transport,
        "graphs": 0 if runtime.graphs is None else len(runtime.graphs),
        "modes": {str(mode): count for mode, count in runtime.steps.modes.items()},
        "reasons": {str(reason): count for reason, count in runtime.steps.reasons.items()},
        "allocated_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
        "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 2),
    }


def _measured(worker: Any) -> dict[str, dict[str, float]]:
    """Rows -> mode -> ms that the engine measured at its start, by the slowest rank; {} where it measured nothing."""
    measured = worker.model_runner.model.tokenweave.choice.measured
    if measured is None:
        return {}
    of_rows = zip(measured.rows, *(getattr(measured, mode) for mode in MODES), strict=True)
    return {
        str(rows): {mode: round(ms, 2) for mode, ms in zip(MODES, times, strict=True) if math.isfinite(ms)}
        for rows, *times in of_rows
    }


# ---- in this process


class Check:
    """A running engine and the figures so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        folder, _ = model_folder(options.model, cache_dir("models"))
        weights = any(folder.glob("*.safetensors"))
        config = read_json(folder / "config.json")
        self.vocab = config["vocab_size"]
        self.text: list[int] = json.loads(Path(options.text).read_text()) if options.text else []
        layers = options.layers or config["num_hidden_layers"]
        engine = json.loads(options.engine)
        overrides = {"num_hidden_layers": layers, **engine.pop("hf_overrides", {})}
        began = time.perf_counter()
        self.llm = LLM(
            str(folder),
            load_format="auto" if weights else "dummy",
            hf_overrides=overrides,
            skip_tokenizer_init=True,
            tensor_parallel_size=options.tp,
            max_model_len=options.max_model_len,
            seed=0,
            **{"gpu_memory_utilization": 0.8, **engine},
        )
        self.result: dict[str, Any] = {"model": options.model, "layers": layers, "tp": options.tp}
        self.result["start_s"] = round(time.perf_counter() - began, 1)
        if not weights:
            self.llm.collective_rpc(_randomise)

    def switch(self, mode: str) -> None:
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc(_switch, args=(mode,))

    def generate(self, prompts: list[list[int]], tokens: int, logprobs: int | None = None) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        answers = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [answer.outputs[0] for answer in answers]

    def prompt(self, generator: random.Random, tokens: int) -> list[int]:
        """A piece of the text that was given, or random tokens."""
        if self.text:
            if len(self.text) <= tokens:
                raise SystemExit(f"vllm_check: --text has {len(self.text)} tokens, too few for a prompt of {tokens}")
            begin = generator.randrange(len(self.text) - tokens)
            return self.text[begin : begin + tokens]
        return [generator.randrange(10, self.vocab) for _ in range(tokens)]

    def layouts(self, count: int, tokens: int) -> None:
        """Random batches in all modes against stock."""
        generator = random.Random(1)
        compared = {mode: Compared() for mode in MODES}
        steps = {mode: Counter[str]() for mode in MODES}
        for number in range(count):
            batch = [self.prompt(generator, self.length(generator)) for _ in range(generator.choice((1, 2, 3, 8, 24)))]
            if number % 5 == 4:  # a second request whose beginning the first one writes in the same step
                first = self.prompt(generator, 1500)
                batch = [first, first[:1400] + self.prompt(generator, 30), *batch[:2]]
            answers = {}
            for mode in ("stock", *MODES):  # stock twice: what two runs of the same differ by
                self.switch(mode)
                before = self.steps()
                name = mode if mode not in answers else "again"
                answers[name] = self.generate(batch, tokens, logprobs=5)
                steps[mode] += self.steps() - before
                check_answers(batch, answers[name], f"mode {mode}, batch {number}")
            for mode, name in (("stock", "again"), ("fused", "fused"), ("woven", "woven")):
                compared[mode] += compare(answers["stock"], answers[name])
        self.result["layouts"] = {mode: {**compared[mode].figures(), "steps": dict(steps[mode])} for mode in MODES}
        print("LAYOUTS", json.dumps(self.result["layouts"]), flush=True)
        check_steps(steps)

    def length(self, generator: random.Random) -> int:
        return generator.choice((1, 17, 100, 513, 640, 1024, 1500, 3000)) + generator.randrange(130)

    def latency(self, sizes: list[int], rounds: int, modes: tuple[str, ...]) -> None:
        """Wall ms of one prompt and one token, medians, and the ratio stock / mode with its 95 % interval."""
        generator = random.Random(2)
        table: dict[str, Any] = {}
        for size in sizes:
            times: dict[str, list[float]] = {mode: [] for mode in modes}
            for round_ in range(-4, rounds):
                for mode in generator.sample(modes, len(modes)):
                    self.switch(mode)
                    prompt = self.prompt(generator, size)
                    began = time.perf_counter()
                    self.generate([prompt], 1)
                    if round_ >= 0:
                        times[mode].append((time.perf_counter() - began) * 1e3)
            row = {mode: {"ms": round(statistics.median(times[mode]), 3)} for mode in modes}
            for mode in modes[1:]:
                ratios = [a / b for a, b in zip(times[modes[0]], times[mode], strict=True)]
                spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
                row[mode]["speedup"] = round(statistics.mean(ratios), 4)
                row[mode]["interval"] = round(spread, 4)
            table[str(size)] = row
            print("LATENCY", size, json.dumps(row), flush=True)
        self.result["latency"] = table

    def requests(self, count: int, output: int) -> None:
        """Many requests of mixed lengths at once, in auto mode: none may hang, and nothing may leak."""
        generator = random.Random(3)
        self.switch("auto")
        prompts = [self.prompt(generator, self.length(generator)) for _ in range(count)]
        for turn in range(2):
            began = time.perf_counter()
            answers = self.generate(prompts, output)
            seconds = time.perf_counter() - began
            if short := [number for number, answer in enumerate(answers) if len(answer.token_ids) != output]:
                raise NothingCompared(f"turn {turn}: requests {short} have not {output} tokens")
            print("REQUESTS", count, f"{seconds:.1f} s", json.dumps(self.state()), flush=True)
            self.result[f"requests_{turn}"] = {"count": len(answers), "seconds": round(seconds, 2), **self.state()}

    def state(self) -> dict[str, Any]:
        return self.llm.collective_rpc(_state)[0]

    def steps(self) -> Counter[str]:
        """Steps so far that the plugin ran, by mode."""
        return Counter(self.state()["modes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.1-8B", help="a built-in configuration, or a Hugging Face folder")
    parser.add_argument("--layers", type=int, default=0, help="default: all of the model's")
    parser.add_argument("--tp", type=int, default=2)
    sizes = "512,768,1024,1536,2048,3072,4096,6144,8192"
    parser.add_argument("--tokens", default=sizes, help="prompt lengths to time (default %(default)s); empty for none")
    parser.add_argument(
        "--modes", default="stock,fused,woven,auto", help="woven@992: graphs with room for 992 requests"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layouts", type=int, default=20, help="random batches to compare")
    parser.add_argument("--text", help="a file with a JSON list of tokens; prompts are pieces of it, not random tokens")
    parser.add_argument("--requests", type=int, default=0, help="requests of the endurance run")
    parser.add_argument("--output", type=int, default=16, help="tokens that each of them makes")
    parser.add_argument("--max-model-len", type=int, default=16400)
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    run(options)


def run(options: argparse.Namespace) -> None:
    """Starts the engine, measures what was asked for, and writes the figures also where something fails."""
    check = Check(options)
    state = check.state()
    print("START", json.dumps(check.result), json.dumps(state), flush=True)
    if state["off"] != "None":
        raise SystemExit(f"vllm_check: the plugin is off: {state['off']}")
    check.result["step_ms_at_start"] = check.llm.collective_rpc(_measured)[0]
    try:
        if options.layouts:
            check.layouts(options.layouts, 8)
        if options.tokens:
            sizes = [int(size) for size in options.tokens.split(",")]
            check.latency(sizes, options.rounds, tuple(options.modes.split(",")))
        if options.requests:
            check.requests(options.requests, options.output)
    finally:
        check.result |= {"environment": describe(), "state": check.state()}
        print("STATE", json.dumps(check.result["state"]), flush=True)
        if options.json:
            write_result(check.result, Path(options.json))


if __name__ == "__main__":
    main()
