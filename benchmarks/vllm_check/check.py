"""One start of vLLM on GPUs with the plugin on: are woven and fused steps right, and how long do they take?

    TOKENWEAVE=1 python benchmarks/vllm_check/check.py --requests 100 --json check.json

The model has random weights: Llama-3.1-8B, or another built-in configuration (Llama-3.2-1B has heads of 64), or a folder
with a config.json; of a folder with safetensors those are loaded. Its mode is switched in the running engine, so that all
modes share weights, cache and clocks. ``stock`` is vLLM's own path in the same engine.

Correctness: batches of prompts of random lengths, prefilled in chunks beside decodes, with every mode; what is compared are
log-probabilities of the first tokens, the share of equal greedy tokens, and, where tokens part, by how much stock preferred its
own: a tie that rounding breaks is a small difference, a fault is none. A prefix that a second request of the same step hits is
one of the batches. Speed: one prompt and one token, in rounds of all modes in random order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from tokenweave.bench.environment import describe
from tokenweave.bench.vllm.configurations import model_folder
from tokenweave.cache import cache_dir
from tokenweave.models.hf_config import read_json

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions are sent to the workers

MODES = ("stock", "fused", "woven")


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

    Quantised ones get random codes, and one scale that makes of them about what the others are.
    """
    import torch

    rank = torch.distributed.get_rank()
    own, shared = (torch.Generator("cuda").manual_seed(seed) for seed in (rank + 1, 1000))
    with torch.inference_mode():
        for name, parameter in worker.model_runner.model.named_parameters():
            data = parameter.data
            if "scale" in name:  # of fp8 codes with a deviation of 100, of 4-bit codes with one of 5; 4096 inputs
                data.fill_(1.5e-4 if data.dtype == torch.float32 else 3e-3)
            elif data.dtype == torch.float8_e4m3fn:
                for part in data.split(1024):
                    part.copy_(100 * torch.randn(part.shape, generator=own, device=data.device))
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
        return [generator.randrange(10, self.vocab) for _ in range(tokens)]

    def layouts(self, count: int, tokens: int) -> None:
        """Random batches in all modes against stock."""
        generator = random.Random(1)
        worst, broken = dict.fromkeys(MODES, 0.0), dict.fromkeys(MODES, 0.0)
        equal, total = dict.fromkeys(MODES, 0), 0
        for number in range(count):
            batch = [self.prompt(generator, self.length(generator)) for _ in range(generator.choice((1, 2, 3, 8, 24)))]
            if number % 5 == 4:  # a second request whose beginning the first one writes in the same step
                first = self.prompt(generator, 1500)
                batch = [first, first[:1400] + self.prompt(generator, 30), *batch[:2]]
            answers = {}
            for mode in ("stock", *MODES):  # stock twice: what two runs of the same differ by
                self.switch(mode)
                answers[mode if mode not in answers else "again"] = self.generate(batch, tokens, logprobs=5)
            total += sum(len(answer.token_ids) for answer in answers["stock"])
            for mode, name in (("stock", "again"), ("fused", "fused"), ("woven", "woven")):
                difference, same, tie = _compare(answers["stock"], answers[name])
                worst[mode], broken[mode] = max(worst[mode], difference), max(broken[mode], tie)
                equal[mode] += same
        self.result["layouts"] = {
            mode: {
                "largest_logprob_difference": round(worst[mode], 4),
                "equal_tokens": round(equal[mode] / total, 4),
                "largest_tie_broken": round(broken[mode], 4),
            }
            for mode in MODES
        }
        print("LAYOUTS", json.dumps(self.result["layouts"]), flush=True)

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
            print("REQUESTS", count, f"{seconds:.1f} s", json.dumps(self.state()), flush=True)
            self.result[f"requests_{turn}"] = {"count": len(answers), "seconds": round(seconds, 2), **self.state()}

    def state(self) -> dict[str, Any]:
        return self.llm.collective_rpc(_state)[0]


def _compare(stock: list[Any], other: list[Any]) -> tuple[float, int, float]:
    """(largest difference of a log-probability of the first token, equal tokens before the first different one, by how much
    stock's log-probability of its own token there was above the other's)."""
    worst, same, tie = 0.0, 0, 0.0
    for a, b in zip(stock, other, strict=True):
        first, second = a.logprobs[0], b.logprobs[0]
        both = set(first) & set(second)
        worst = max([worst, *(abs(first[token].logprob - second[token].logprob) for token in both)])
        if not both:
            worst = float("inf")
        for x, y, known in zip(a.token_ids, b.token_ids, a.logprobs, strict=True):
            if x != y:
                tie = max(tie, known[x].logprob - known[y].logprob if y in known else math.inf)
                break
            same += 1
    return worst, same, tie


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
            Path(options.json).write_text(json.dumps(check.result, indent=1) + "\n")


if __name__ == "__main__":
    main()
