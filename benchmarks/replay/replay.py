"""A burst of a trace's requests, served by the engine and by the simulation: the same steps, and how far their times agree.

    torchrun --nproc-per-node 2 benchmarks/replay/replay.py --model Llama-3.1-8B --requests 64 --json replay.json

The model has random weights, and answers are as long as the trace says. Each mode serves the burst once to compile, to
tune and to capture graphs, and once under the clock. The simulation's step times are this machine's if it was tuned, else its
data sheet's; they know nothing of the host. What the engine's steps of decodes take beyond them (a median) is shown as the
host's time, and a second simulation adds it to every step. Steps that differ are an error: exit code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenweave.bench import launch
from tokenweave.engine.build import EngineArgs, engine_around
from tokenweave.engine.engine import StepRecord
from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest
from tokenweave.models import read_config
from tokenweave.models.dummy import dummy_model
from tokenweave.planning import Predictor, machine_of
from tokenweave.simulation import Limits, Outcome, StepTable, Trace, read_trace, simulate, sized
from tokenweave.simulation.modes import exact_us
from tokenweave.tuning import agreed_profile


def main() -> int:
    args = _arguments()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with launch.joined(device_type) as me:
        config = read_config(args.model)
        trace = sized(read_trace(args.trace), args.requests, args.seed, keep_order=False)
        trace = trace.kept(trace.prompts + trace.outputs <= config.context)
        dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
        where: dict[str, Any] = {"rank": me.rank, "world_size": me.ranks, "group": me.group, "device": me.device}
        model = dummy_model(config, layers=args.layers, dtype=dtype, **where)
        config = model.config
        cache = int((trace.prompts + trace.outputs).sum())  # all at once: where runs lie in it changes nothing then
        results = []
        for mode in args.modes.split(","):
            engine_args = EngineArgs(
                model=args.model,
                tensor_parallel_size=me.ranks,
                mode=mode,
                max_batch_tokens=args.max_batch_tokens,
                max_num_seqs=args.max_requests_running,
                cache_tokens=cache,
            )
            engine = engine_around(model, engine_args, me.group, me.device, _no_tokenizer)
            for first in (0, len(trace)):
                for _ in engine.run(_requests(trace, first, config.vocab)):
                    pass
            transport, steps = engine.workspace.transport, engine.steps
            engine.close()
            del engine
            machine = machine_of("cpu" if device_type == "cpu" else None, me.ranks, transport)
            costs = agreed_profile(config, machine, me.group) or machine
            if me.rank:
                continue
            exact = exact_us(Predictor(config, costs), mode)
            limits = Limits(args.max_batch_tokens, args.max_requests_running, cache)
            plain = simulate(trace, StepTable(exact, args.max_batch_tokens), limits, record=True)
            host_us = _host_us(steps, plain)
            loaded = simulate(trace, StepTable(exact, args.max_batch_tokens, host_us), limits, record=True)
            results.append({"mode": mode, "transport": transport, **_compared(steps, plain, loaded, host_us)})
            print(json.dumps(results[-1]), flush=True)
        del model
    if results and args.json is not None:
        about = {"model": args.model, "layers": config.layers, "requests": len(trace), "tp": me.ranks}
        args.json.write_text(json.dumps({**about, "results": results}, indent=2) + "\n", "utf-8")
    return int(any(not result["same_steps"] for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", default="Llama-3.1-8B", help="folder, GGUF file or built-in name (default %(default)s)"
    )
    parser.add_argument("--layers", type=int, help="so many layers only")
    parser.add_argument("--trace", default="sharegpt", help="CSV file, or one that comes with the package")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--modes", default="sequential,auto")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--max-requests-running", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _no_tokenizer() -> Any:
    raise AssertionError("only stop strings need a tokenizer, and there are none")


def _requests(trace: Trace, first: int, vocab: int) -> list[NewRequest]:
    draw = np.random.default_rng(first)
    return [
        NewRequest(
            first + number,
            tuple(draw.integers(0, vocab, int(prompt)).tolist()),
            SamplingParams(temperature=0, max_tokens=int(output), ignore_eos=True),
            seed=0,
        )
        for number, (prompt, output) in enumerate(zip(trace.prompts, trace.outputs, strict=True))
    ]


def _steps(outcome: Outcome) -> list[tuple[int, int, float]]:
    """(rows of prompts, decodes, seconds) of every step; in a stretch of equal ones each has its mean."""
    assert outcome.records is not None
    return [
        (sum(rows for _, _, rows in stretch.chunks), stretch.decodes, (stretch.end - stretch.start) / stretch.steps)
        for stretch in outcome.records[0]
        for _ in range(stretch.steps)
    ]


def _host_us(steps: list[StepRecord], plain: Outcome) -> float:
    beyond = [
        step.seconds - seconds
        for step, (prompts, _, seconds) in zip(steps, _steps(plain), strict=False)
        if not prompts and not step.prefill_tokens
    ]
    return max(0.0, 1e6 * statistics.median(beyond)) if beyond else 0.0


def _compared(steps: list[StepRecord], plain: Outcome, loaded: Outcome, host_us: float) -> dict[str, Any]:
    simulated = _steps(plain)
    same = [(s.prefill_tokens, s.decode_tokens) for s in steps] == [
        (prompts, decodes) for prompts, decodes, _ in simulated
    ]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for step, (prompts, _, seconds) in zip(steps, simulated, strict=False):
        ratios[prompts > 0].append(step.seconds / seconds)
    measured = sum(step.seconds for step in steps)
    modes = {step.mode for step in steps}
    return {
        "same_steps": same,
        "steps": len(steps),
        "steps_by_mode": {mode: sum(step.mode == mode for step in steps) for mode in sorted(modes)},
        "measured_s": round(measured, 4),
        "simulated_s": round(float(plain.finished.max()), 4),
        "host_us_per_step": round(host_us, 1),
        "simulated_with_host_s": round(float(loaded.finished.max()), 4),
        "measured_over_simulated_mixed_step": round(statistics.median(ratios[True]), 4),
        "measured_over_simulated_decode_step": round(statistics.median(ratios[False]), 4) if ratios[False] else None,
    }


if __name__ == "__main__":
    sys.exit(main())
