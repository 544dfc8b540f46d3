"""``tokenweave predict``: how long a model's prefill takes in each mode on GPUs that need not be at hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tokenweave.cli.arguments import numbers
from tokenweave.errors import RequestError
from tokenweave.models import read_config
from tokenweave.planning import GPUS, Predictor, StepTimes, caveat, machine_of
from tokenweave.planning.comm import TRANSPORTS
from tokenweave.planning.cost import MOST_TOKENS
from tokenweave.planning.runtime import EAGER, RUNTIMES

NO_COMM_NOTE = "no_comm has no collectives, and every rank normalises all rows: a woven step, whose ranks share that, can be faster"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("predict", help="predict prefill times on given GPUs")
    parser.add_argument("--model", required=True, help="Hugging Face folder, GGUF file or built-in name (Llama-3.1-8B)")
    parser.add_argument("--gpu", required=True, help=", ".join(GPUS))
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    parser.add_argument("--tokens", required=True, help="prompt tokens of the step; several separated by commas")
    parser.add_argument("--context", type=int, default=0, help="positions that precede them (default 0)")
    parser.add_argument(
        "--transport",
        help=f"{', '.join(TRANSPORTS)}; also says what sequential's all-reduce is: multimem's, or NCCL's; default: the one "
        "with the least traffic",
    )
    parser.add_argument(
        "--launch",
        default=EAGER.name,
        choices=list(RUNTIMES),
        help="eager: kernel by kernel in a serving engine with FlashAttention-3 where the GPU has it (default); graph: this "
        "package's engine, whose steps are CUDA graphs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the times of each number of tokens."""
    steps = numbers("--tokens", args.tokens)
    if max(steps) > MOST_TOKENS:
        raise RequestError(f"--tokens {max(steps)}; expected at most {MOST_TOKENS}: no GPU holds more at once")
    machine = machine_of(args.gpu, args.tp, args.transport, RUNTIMES[args.launch])
    config = read_config(args.model)
    predictor = Predictor(config, machine)
    rows = [predictor.step([(tokens, args.context)]) for tokens in steps]
    if args.json:
        print(json.dumps(as_json(args.model, machine.gpu.name, machine.tp, machine.transport, rows), indent=2))
        return 0
    print(
        f"{args.model}, tp {machine.tp} on {machine.gpu.name}, transport {machine.transport}, {args.launch}: predicted ms"
    )
    print(f"{'tokens':>8} {'sequential':>11} {'fused':>11} {'woven':>11} {'no_comm':>11}  chosen")
    for row in rows:
        woven = f"{'-':>11}" if row.woven_us is None else f"{row.woven_us / 1e3:11.2f}"
        gain = row.sequential_us / row.auto_us
        print(
            f"{row.tokens:8d} {row.sequential_us / 1e3:11.2f} {row.fused_us / 1e3:11.2f} {woven} {row.no_comm_us / 1e3:11.2f}"
            f"  {row.mode}, {gain:.2f}x sequential"
        )
    for reason, tokens in _passed_over(predictor, rows, args.context).items():
        print(f"woven is the fastest at {', '.join(map(str, tokens))} tokens, but not chosen: {reason}")
    if machine.tp > 1:
        print(NO_COMM_NOTE)
    if (note := caveat(machine, config)) is not None:
        print(note)
    return 0


def _passed_over(predictor: Predictor, rows: Sequence[StepTimes], context: int) -> dict[str, list[int]]:
    """Why the planner takes another mode -> tokens, of steps that are predicted to be faster woven."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row.woven_us is not None and row.woven_us < row.auto_us:
            reason = predictor.planner.explain(row.tokens, context=context).reason
            found.setdefault(reason, []).append(row.tokens)
    return found


def as_json(model: str, gpu: str, tp: int, transport: str, rows: list[StepTimes]) -> dict[str, object]:
    """Plain values; ``woven_ms`` is None for a step of one row."""

    def ms(us: float | None) -> float | None:
        return None if us is None else round(us / 1e3, 4)

    return {
        "model": model,
        "gpu": gpu,
        "tp": tp,
        "transport": transport,
        "rows": [
            {
                "tokens": row.tokens,
                "sequential_ms": ms(row.sequential_us),
                "fused_ms": ms(row.fused_us),
                "woven_ms": ms(row.woven_us),
                "no_comm_ms": ms(row.no_comm_us),
            }
            for row in rows
        ],
    }
