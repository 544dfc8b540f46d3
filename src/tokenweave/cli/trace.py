"""``tokenweave trace``: one step as it ran, for Perfetto, and a picture of a layer on its two streams."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.cli.arguments import check_folder, check_seed, numbers
from tokenweave.cli.model import check_model, model_of, planner_of
from tokenweave.cli.ranks import run_on_ranks, settle_ranks
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.bench.launch import Rank
    from tokenweave.bench.steps import PrefillSteps, Variant
    from tokenweave.bench.trace.events import Span
    from tokenweave.bench.trace.record import Recorder

_MODES = ("sequential", "fused", "woven", "auto", "no_comm")
OPTIONS = ("model", "tokens", "mode", "tp", "out", "layers", "layer", "dtype", "seed", "device", "time_limit", "dummy")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("trace", help="record one step of a model, eagerly and as a CUDA graph")
    parser.add_argument("--model", required=True, help="folder, .gguf file, or the name of a built-in configuration")
    parser.add_argument("--tokens", default="2048", help="of the prompt (default %(default)s)")
    parser.add_argument("--mode", default="woven", choices=_MODES, help="default %(default)s")
    parser.add_argument("--tp", type=int, help="ranks (default 2; under torchrun: as many as it started)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for traces and pictures; made if need be"
    )
    parser.add_argument("--layers", type=int, help="so many layers only (default: all)")
    parser.add_argument("--layer", type=int, help="the one in the picture (default: that in the middle)")
    parser.add_argument("--dummy", action="store_true", help="random weights; implied by a name")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: threads instead of streams, gloo"
    )
    parser.add_argument("--time-limit", type=float, default=300, help="seconds until the ranks are ended (default 300)")


def run(args: argparse.Namespace) -> int:
    """Records on ranks of its own, or as one rank of torchrun's; writes to ``--out``."""
    from tokenweave.files import require_matplotlib

    _check(args)
    require_matplotlib()
    check_folder("--out", args.out)
    return run_on_ranks(("trace",), args, OPTIONS, _run_rank, args.device)


def _run_rank(args: argparse.Namespace, me: Rank) -> int:
    import torch

    from tokenweave.bench.steps import PrefillSteps
    from tokenweave.bench.trace import record

    with torch.inference_mode():
        record.prepare()
        model = model_of(args, me)
        tokens = int(args.tokens)
        steps = PrefillSteps(model, tokens, me.group, me.device, args.seed, wrap=record.annotated)
        planner = planner_of(model.config, me, steps.workspace.transport)
        variant = _variant(steps, planner, args.mode, tokens)
        recorder = record.Recorder(me.group, me.device)
        recordings = _recorded(variant, recorder, me, args)
        waiting = {name: recorder.waiting_ms(spans) for name, spans in recordings.items()}
        if me.rank == 0:
            _report(args, variant, recordings, waiting, model.config.layers, me)
        steps.close()
    return 0


def _variant(steps: PrefillSteps, planner: Any, mode: str, tokens: int) -> Variant:
    from tokenweave.bench.steps import norm_alone
    from tokenweave.planning import Mode, Plan

    if mode == "no_comm":
        return steps.of_collective(mode, "norm", None, tokens, norm_alone)
    if mode == "sequential":
        return steps.of_plan(mode, "planned", Plan(Mode.SEQUENTIAL), tokens)
    return steps.of_plan(mode, "planned", planner.plan(tokens, mode=mode), tokens)


def _recorded(variant: Variant, recorder: Recorder, me: Rank, args: argparse.Namespace) -> dict[str, list[Span]]:
    """ "eager", and on a GPU "graph": the spans of each; the second run of each is kept, the first one warms up."""
    import torch

    from tokenweave.bench.timing import GraphClock
    from tokenweave.bench.trace.events import tagged

    def path(name: str) -> Path:
        return Path(args.out) / f"rank{me.rank}-{name}.json.gz"

    if me.device.type == "cpu":
        variant.walk()
        return {"eager": recorder.record(variant.walk, path("eager"))}
    clock = GraphClock(me.group, me.device)
    clock.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(clock.stream):  # libraries set themselves up on the stream that captures
        variant.walk()
    torch.cuda.synchronize()
    graph = clock.capture(variant.walk, 1)
    found = {}
    for name, call in (("eager", variant.walk), ("graph", graph.replay)):
        for _ in range(2):
            found[name] = recorder.record(call, path(name), ahead=name == "graph")
    del graph
    try:
        found["graph"] = tagged(found["graph"], found["eager"])
    except ValueError as error:
        print(f"rank {me.rank}: the graph's kernels are not assigned to stages: {error}", file=sys.stderr)
    return found


def _report(
    args: argparse.Namespace,
    variant: Variant,
    recordings: dict[str, list[Span]],
    waiting: dict[str, list[float] | None],
    layers: int,
    me: Rank,
) -> None:
    """Pictures, summary.json, and both in words."""
    import torch

    from tokenweave.bench.latency.report import plan_json
    from tokenweave.bench.trace.events import layer_of, summary
    from tokenweave.bench.trace.picture import draw_layer
    from tokenweave.files import write_result

    layer = layers // 2 if args.layer is None else args.layer
    gpu = torch.cuda.get_device_name(me.device) if me.device.type == "cuda" else "CPU"
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "layers": layers,
        "tokens": int(args.tokens),
        "mode": args.mode,
        "plan": None if variant.plan is None else plan_json(variant.plan),
        "ranks": me.ranks,
        "device": gpu,
        "steps": {},
    }
    for name, spans in recordings.items():
        figures = {**summary(spans), "waiting_ms": waiting[name]}
        result["steps"][name] = figures
        plan = variant.plan
        cut = "" if plan is None or plan.split is None else f", cut {plan.split}"
        cut += "" if plan is None or plan.ctas is None else f", {plan.ctas} blocks"
        title = (
            f"{result['model']}, {args.tokens} tokens, {args.mode}{cut}, {me.ranks} x {gpu}, "
            f"{'CUDA graph' if name == 'graph' else 'eager'}, layer {layer} on rank 0"
        )
        paths = [Path(args.out) / f"layer-{name}.{suffix}" for suffix in ("svg", "png")]
        if shown := layer_of(spans, layer):
            draw_layer(shown, title, paths)
        else:
            print(f"{name}: no picture, because no kernel is known to belong to layer {layer}", file=sys.stderr)
        kinds = ", ".join(f"{kind} {ms:.3f}" for kind, ms in figures["by_kind_ms"].items())
        waits = (
            "different collectives" if waiting[name] is None else ", ".join(f"{ms:.3f}" for ms in waiting[name] or ())
        )
        print(
            f"{name}: {figures['span_ms']:.3f} ms, busy {figures['busy_ms']:.3f}, collectives hidden "
            f"{figures['hidden_ms']:.3f}; {kinds}; waiting of each rank: {waits}"
        )
    write_result(result, Path(args.out) / "summary.json")
    print(
        f"written to {args.out}: traces for https://ui.perfetto.dev, pictures of layer {layer}, summary.json",
        file=sys.stderr,
    )


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before any rank starts."""
    settle_ranks(args)
    tokens = numbers("--tokens", args.tokens)
    least = 2 if args.mode == "woven" else 1
    if len(tokens) != 1 or tokens[0] < least:
        raise RequestError(f"--tokens {args.tokens}; expected one number, at least {least} for --mode {args.mode}")
    check_seed(args.seed)
    config = check_model(args)
    layers = config.layers if args.layers is None else args.layers
    if args.layer is not None and not 0 <= args.layer < layers:
        raise RequestError(f"--layer {args.layer}; expected 0 to {layers - 1}")
    if tokens[0] > config.context:
        raise RequestError(f"--tokens {tokens[0]}; the model's context is {config.context}")
    if args.dtype == "fp32" and args.device == "cuda":
        raise RequestError(
            "--dtype fp32 --device cuda; fp32 steps are for tests and cannot be captured: take bf16 or fp16"
        )
