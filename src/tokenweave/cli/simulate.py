"""``tokenweave simulate``: what one or several replicas serve of a trace, with and without TokenWeave, before renting any."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tokenweave.cli.arguments import PICTURES, check_output, check_seed, numbers
from tokenweave.errors import RequestError
from tokenweave.files import require_matplotlib, write_result
from tokenweave.models import read_config
from tokenweave.models.config import ModelConfig
from tokenweave.planning import GPUS, Costs, Predictor, caveat, machine_of
from tokenweave.planning.comm import TRANSPORTS
from tokenweave.planning.cost import MOST_TOKENS
from tokenweave.planning.runtime import RUNTIMES
from tokenweave.simulation import (
    ROUTINGS,
    Limits,
    StepTable,
    Trace,
    fitting,
    kv_tokens,
    poisson,
    read_trace,
    refuse_unfit,
    simulate,
    sized,
)
from tokenweave.simulation.modes import MODES, exact_us
from tokenweave.simulation.plots import plot
from tokenweave.simulation.report import Run, gain, header, line, run_of
from tokenweave.simulation.trace import builtin_traces

MOST_REPLICAS = 100_000
MOST_REQUESTS = 10_000_000
MOST_OVERHEAD_US = 1e9
"""Beyond these a simulation says nothing of any fleet: it would only fill the memory, or never end."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("simulate", help="simulate continuous batching of a trace on a fleet")
    names = ", ".join(builtin_traces())
    parser.add_argument("--trace", required=True, help=f"CSV file of prompt and output lengths, or {names}")
    parser.add_argument("--model", required=True, help="Hugging Face folder, GGUF file or built-in name (Llama-3.1-8B)")
    parser.add_argument(
        "--gpu", help=f"{', '.join(GPUS)}; default: this machine's, with its measured table if there is one"
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a replica (default 1)")
    parser.add_argument("--transport", help=f"{', '.join(TRANSPORTS)}; default: the one with the least traffic")
    parser.add_argument(
        "--launch", choices=tuple(RUNTIMES), default="graph", help="how steps are launched (default graph)"
    )
    parser.add_argument("--modes", default="sequential,auto", help=f"of {', '.join(MODES)} (default %(default)s)")
    parser.add_argument("--max-batch-tokens", type=int, default=2048, help="most rows of a step (default %(default)s)")
    parser.add_argument("--max-requests-running", type=int, default=256, help="of a replica (default %(default)s)")
    parser.add_argument(
        "--kv-tokens", type=int, help="positions that a replica's cache holds; default: what memory is left"
    )
    parser.add_argument("--memory-gib", type=float, help="of each GPU; default: its data sheet's")
    parser.add_argument("--overhead-us", type=float, default=0.0, help="of the host, added to each step (default 0)")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", help="requests a second, arriving at random (Poisson); several separated by commas")
    arrivals.add_argument(
        "--burst", action="store_true", help="all requests at once; the default for a trace without times"
    )
    parser.add_argument(
        "--replicas", default="1", help="behind a router; several numbers separated by commas (default 1)"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0], help="default %(default)s")
    parser.add_argument(
        "--requests", type=int, help="how many; more than the trace has repeat it (default: the trace's)"
    )
    parser.add_argument(
        "--drop-unfit", action="store_true", help="leave out requests too long for the model or the cache"
    )
    parser.add_argument(
        "--ttft-target", type=float, metavar="MS", help="count the requests whose first token comes in time"
    )
    parser.add_argument("--tpot-target", type=float, metavar="MS", help="and those whose further tokens do")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and order (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw waiting times (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Prints a line a run, and what each mode gains over the first."""
    modes = _modes(args.modes)
    fleets = numbers("--replicas", args.replicas)
    rates = _rates(args.rate)
    if max(fleets) > MOST_REPLICAS:
        raise RequestError(f"--replicas {max(fleets)}; expected at most {MOST_REPLICAS}")
    if args.requests is not None and args.requests > MOST_REQUESTS:
        raise RequestError(f"--requests {args.requests}; expected at most {MOST_REQUESTS}")
    for option, target in (("--ttft-target", args.ttft_target), ("--tpot-target", args.tpot_target)):
        if target is not None and not 0 < target < math.inf:
            raise RequestError(f"{option} {target:g}; expected a positive number of milliseconds, below infinity")
    check_seed(args.seed)
    check_output("--json", args.json)
    check_output("--plot", args.plot, PICTURES)
    if args.plot is not None:
        require_matplotlib()
    config = read_config(args.model)
    costs = _costs(config, args)
    limits = _limits(config, costs, args)
    trace = read_trace(args.trace)
    timed = trace.arrivals is not None and not args.burst and args.rate is None
    kept = _fitting(trace, limits, config, args.drop_unfit)
    if len(kept) < len(trace):
        print(f"{len(trace) - len(kept)} of {len(trace)} requests left out: too long")
    trace = sized(kept, args.requests, args.seed, keep_order=timed)
    predictor = Predictor(config, costs)
    tables = {mode: StepTable(exact_us(predictor, mode), args.max_batch_tokens, args.overhead_us) for mode in modes}
    about = {
        "trace": args.trace,
        "requests": len(trace),
        "prompt_tokens": int(trace.prompts.sum()),
        "output_tokens": int(trace.outputs.sum()),
        "arrivals": "poisson" if args.rate else "trace" if timed else "burst",
        "seed": args.seed,
        "model": args.model,
        "gpu": costs.gpu.name,
        "tp": costs.tp,
        "transport": costs.transport,
        "runtime": costs.runtime.name,
        "overhead_us": args.overhead_us,
        "routing": args.routing,
        **vars(limits),
        "ttft_target_ms": args.ttft_target,
        "tpot_target_ms": args.tpot_target,
    }
    if (note := caveat(costs, config)) is not None:
        print(note, flush=True)
    print(header(about), flush=True)
    runs: list[Run] = []
    for replicas in fleets:
        for rate in rates:
            arrivals = trace.arrivals if timed else None if rate is None else poisson(len(trace), rate, args.seed)
            arriving = Trace(trace.name, trace.prompts, trace.outputs, arrivals)
            group: list[Run] = []
            for mode in modes:
                outcome = simulate(arriving, tables[mode], limits, replicas, args.routing)
                group.append(run_of(outcome, mode, rate, args.ttft_target, args.tpot_target))
                print(line(group[-1]), flush=True)
            for other in group[1:]:
                print(gain(group[0], other), flush=True)
            runs += group
    if args.json is not None:
        write_result({**about, "runs": [run.as_json() for run in runs]}, args.json)
    if args.plot is not None:
        plot(about, runs, args.plot)
    return 0


def _costs(config: ModelConfig, args: argparse.Namespace) -> Costs:
    """The machine that the arguments describe; this one as it was measured, if it is meant and was."""
    machine = machine_of(args.gpu, args.tp, args.transport, RUNTIMES[args.launch])
    if args.gpu is not None:
        return machine
    from tokenweave.tuning.find import find_profile

    return find_profile(config, machine) or machine


def _limits(config: ModelConfig, costs: Costs, args: argparse.Namespace) -> Limits:
    rows, running = args.max_batch_tokens, args.max_requests_running
    for option, value in (("--max-batch-tokens", rows), ("--max-requests-running", running)):
        if value < 1:
            raise RequestError(f"{option} {value}; expected at least 1")
    if rows > MOST_TOKENS:
        raise RequestError(f"--max-batch-tokens {rows}; expected at most {MOST_TOKENS}: no GPU holds more at once")
    if not 0 <= args.overhead_us <= MOST_OVERHEAD_US:
        raise RequestError(f"--overhead-us {args.overhead_us:g}; expected 0 to {MOST_OVERHEAD_US:g}")
    if args.kv_tokens is None:
        return Limits(rows, running, kv_tokens(config, costs.gpu, costs.tp, rows, running, args.memory_gib))
    if args.memory_gib is not None:
        raise RequestError("--kv-tokens and --memory-gib both say how large the cache is; give one of them")
    if args.kv_tokens < 1:
        raise RequestError(f"--kv-tokens {args.kv_tokens}; expected at least 1")
    return Limits(rows, running, args.kv_tokens)


def _fitting(trace: Trace, limits: Limits, config: ModelConfig, drop: bool) -> Trace:
    """The requests that can be served: all of them, unless asked to drop others."""
    if not drop:
        refuse_unfit(trace, limits.kv_tokens, "the cache of a replica")
        refuse_unfit(trace, config.context, "the model's context")
        return trace
    keep = fitting(trace, min(limits.kv_tokens, config.context))
    if not keep.any():
        raise RequestError(f"none of the trace's {len(trace)} requests fits the model's context and the cache")
    return trace.kept(keep)


def _modes(text: str) -> list[str]:
    modes = list(dict.fromkeys(text.split(",")))
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise RequestError(f"--modes {unknown[0]!r}; expected some of {', '.join(MODES)}")
    return modes


def _rates(text: str | None) -> list[float | None]:
    if text is None:
        return [None]
    try:
        rates = list(dict.fromkeys(float(rate) for rate in text.split(",")))
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise RequestError(f"--rate {text!r}; expected positive numbers separated by commas")
    return [*rates]
