"""``tokenweave plan``: how batches would be run on given GPUs, with waves and predicted times, before renting any."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from tokenweave.errors import RequestError
from tokenweave.models import read_config
from tokenweave.planning import GPUS, Explanation, Planner, caveat
from tokenweave.planning.comm import TRANSPORTS
from tokenweave.planning.plan import POINTS
from tokenweave.switches import multicast_switched_off
from tokenweave.tuning.find import VARIABLE


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan", help="show how a batch would be run, and why")
    parser.add_argument("--model", required=True, help="Hugging Face folder, GGUF file or built-in name (Llama-3.1-8B)")
    parser.add_argument("--gpu", help=f"{', '.join(GPUS)}; default: this machine's")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    parser.add_argument("--tokens", required=True, help="rows of the step; several separated by commas")
    parser.add_argument("--context", type=int, default=0, help="positions that precede them (default 0)")
    parser.add_argument("--transport", help=f"{', '.join(TRANSPORTS)}; default: the one with the least traffic")
    parser.add_argument(
        "--mode", help="auto, sequential, fused or woven; default: what TOKENWEAVE_MODE says, else auto"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show the best few cuts, too, and where the figures come from"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: an object, or a list for several --tokens")


def run(args: argparse.Namespace) -> int:
    """Prints the plan of each number of tokens."""
    steps = _numbers(args.tokens)
    planner = Planner(read_config(args.model), args.gpu, args.tp, args.transport, args.mode)
    explained = [planner.explain(tokens, context=args.context) for tokens in steps]
    if args.json:
        objects = [explanation.as_json(full=args.explain) for explanation in explained]
        print(json.dumps(objects if len(objects) > 1 else objects[0], indent=2))
        return 0
    model = planner.model
    print(f"{args.model}, tp {args.tp} on {model.gpu.name}, transport {model.transport}, {model.costs.runtime.name}")
    if args.gpu is None and model.gpu.arch == "cpu":
        print("note: no GPU here, so this is for this machine's CPU; name a GPU with --gpu (h200)")
    if args.gpu is not None and os.environ.get(VARIABLE, "off").casefold() not in ("", "off"):
        print(f"note: {VARIABLE} is not used: --gpu asks for the data sheet; leave it out for a table of this machine")
    switch = multicast_switched_off(os.environ)
    if switch is not None and args.gpu is not None and args.transport is None and model.transport == "multimem":
        print(f"note: {switch} is not used: --gpu asks for the data sheet; --transport p2p does without multicast")
    if (note := caveat(model.costs, model.config)) is not None:
        print(f"note: {note}")
    for explanation in explained:
        print("\n" + text(explanation, full=args.explain))
    return 0


def text(explanation: Explanation, full: bool = False) -> str:
    """One plan as a person reads it; ``full``: with the best few cuts."""
    plan, waves = explanation.plan, explanation.waves
    lines = [f"{explanation.tokens} tokens: {plan.mode}" + ("" if plan.split is None else _cut(explanation))]
    lines.append(f"  why        {explanation.reason}")
    if plan.ctas is not None:
        cluster = "" if plan.cluster is None else f", clusters of {plan.cluster}"
        start = f", started at {' or '.join(p for p in POINTS if p in plan.start_at)}" if plan.start_at else ""
        lines.append(f"  collective {plan.ctas} CTAs{cluster}{start}")
    if plan.gemm_sms:
        told = ", ".join(dict.fromkeys(name for name, _ in plan.gemm_sms))
        lines.append(f"  GEMM SMs   {', '.join(map(str, sorted(set(plan.gemm_sms.values()))))} for {told}")
    each = ", ".join(f"{gemm} {_counts(counts)}" for gemm, counts in waves.by_gemm.items())
    total = (
        (waves.whole,) if waves.prefix is None or waves.suffix is None else (waves.whole, waves.prefix, waves.suffix)
    )
    lines.append(f"  waves      {_counts(total)} a layer: {each}")
    sequential = explanation.predicted_ms["sequential"]
    lines.append(f"  predicted  {'step':>13}  speed-up over sequential")
    for mode, ms in explanation.predicted_ms.items():
        note = {"no_comm": "  (no collectives; every rank norms all rows)"}.get(mode, "")
        lines.append(f"  {mode:<10} {ms:10.3f} ms  {sequential / ms:5.2f}x{note}")
    if full:
        lines.append(f"  figures    from {explanation.source}")
        shapes = ", ".join(f"{gemm} {rows} x {columns}" for gemm, (rows, columns) in waves.tiles.items())
        lines.append(f"  tiles      rows x columns: {shapes}")
        for cut in explanation.cuts:
            blocks = "" if cut.ctas is None else f", {cut.ctas} CTAs"
            lines.append(
                f"  cut        {cut.split} + {explanation.tokens - cut.split}{blocks}: {cut.waves[0]} + {cut.waves[1]} waves, "
                f"GEMMs {cut.cost_us:+.0f} us a layer, {cut.ms:.3f} ms"
            )
    return "\n".join(lines)


def _cut(explanation: Explanation) -> str:
    split = explanation.plan.split or 0
    return f", cut {split} + {explanation.tokens - split}"


def _counts(counts: tuple[int, ...]) -> str:
    whole, *halves = counts
    return f"{whole} whole, {' + '.join(map(str, halves))} cut" if halves else f"{whole}"


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise RequestError(f"--tokens {text!r}; expected whole numbers separated by commas, e.g. 512,4096") from None
