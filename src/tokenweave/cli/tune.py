"""``tokenweave tune``: measures what a model's parts take on this machine's GPUs, for the planner; says how well it predicts."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.cli.arguments import check_output, numbers
from tokenweave.cli.model import planner_of
from tokenweave.cli.ranks import instruments, run_on_ranks, settle_ranks
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.bench.launch import Rank
    from tokenweave.planning import Planner
    from tokenweave.planning.profile_table import Identity, Table
    from tokenweave.tuning.tuner import Tuner

MAX_TOKENS, SECONDS, LAYERS = 16384, 68.0, 4  # where --max-tokens, --seconds and --layers aren't given
OPTIONS = ("model", "tp", "out", "max_tokens", "seconds", "time_limit", "tokens", "layers", "json", "verify", "sweep")
_OF_TUNING, _OF_VERIFY = ("max_tokens", "seconds"), ("tokens", "layers", "sweep", "json")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tune", help="measure a model's parts on this machine's GPUs, for the planner")
    parser.add_argument("--model", required=True, help="folder, .gguf file, or the name of a built-in configuration")
    parser.add_argument("--tp", type=int, help="ranks, a GPU each (default 2; under torchrun: as many as it started)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the table to write, or to --verify (default: where the planner looks for it)",
    )
    parser.add_argument("--max-tokens", type=int, help=f"rows of the longest step (default {MAX_TOKENS})")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of measuring; then steps of sizes between powers of two are left out (default {SECONDS})",
    )
    parser.add_argument(
        "--verify", action="store_true", help="measure nothing but steps, and compare them with the table's predictions"
    )
    parser.add_argument("--tokens", help="with --verify: of the prompts (default: 12 numbers from 72 to 15500)")
    parser.add_argument("--layers", type=int, help=f"with --verify: of the model (default {LAYERS})")
    parser.add_argument("--sweep", action="store_true", help="with --verify: look for faster plans than the planner's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --verify: write the comparison")
    parser.add_argument(
        "--time-limit", type=float, default=300, help="seconds until the ranks are ended (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures on ranks of its own, or as one rank of torchrun's."""
    _check(args)
    work = _verify if args.verify else functools.partial(_tune, began=time.monotonic())
    return run_on_ranks(("tune",), args, OPTIONS, work)


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before any rank starts."""
    from tokenweave.models import read_config
    from tokenweave.models.attention_choice import asked_attention
    from tokenweave.models.sharding import shard_of
    from tokenweave.planning.cost import MOST_TOKENS
    from tokenweave.planning.profile_table import read_table

    settle_ranks(args)
    asked_attention()
    given = [name for name in (_OF_TUNING if args.verify else _OF_VERIFY) if getattr(args, name) not in (None, False)]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        if args.verify:
            raise RequestError(
                f"{option} is for measuring a table, and --verify measures none: leave one of the two out"
            )
        raise RequestError(f"{option} is for --verify, which measures steps; add that, or leave it out")
    if args.max_tokens is not None and args.max_tokens < 512:
        raise RequestError(f"--max-tokens {args.max_tokens}; expected at least 512")
    if args.max_tokens is not None and args.max_tokens > MOST_TOKENS:
        raise RequestError(f"--max-tokens {args.max_tokens}; expected at most {MOST_TOKENS}: no GPU holds more at once")
    if args.seconds is not None and not 0 < args.seconds < 1e7:
        raise RequestError(f"--seconds {args.seconds:g}; expected a positive number of seconds")
    check_output("--json", args.json)
    config = read_config(args.model)
    shard_of(config, 0, args.tp)
    if args.layers is not None and not 1 <= args.layers <= config.layers:
        raise RequestError(f"--layers {args.layers}; expected at least 1, and the model has {config.layers}")
    if not args.verify:
        check_output("--out", args.out, streams=False)
        return
    if args.out is not None:
        read_table(args.out)
    longest = max(_tokens(args), default=None)
    if longest is None or longest > config.context:
        raise RequestError(f"--tokens {longest}; the model's context is {config.context}")


def _tune(args: argparse.Namespace, me: Rank, began: float) -> int:
    from tokenweave.bench import environment
    from tokenweave.models import read_config
    from tokenweave.planning.machine import machine_of
    from tokenweave.tuning.gpu import GpuPieces
    from tokenweave.tuning.identity import identity_here
    from tokenweave.tuning.run import progress_bar, tune

    config = read_config(args.model)
    machine = functools.partial(machine_of, None, me.ranks)
    pieces = GpuPieces(config, args.max_tokens or MAX_TOKENS, me.group, me.device, machine)
    identity = identity_here(config, me.ranks, pieces.machine.transport)
    path = args.out or _default_path(identity)
    ours = args.out is not None or path.name == f"{identity.key}.json"
    monitor = environment.Monitor(me.local)

    def info(tuner: Tuner) -> dict[str, Any]:
        return {
            **environment.describe(),
            "model": Path(args.model).name,
            "seconds": round(time.monotonic() - began, 1),
            "while_measuring": monitor.take(),
            "left_out": tuner.skipped,
            "uncovered": pieces.uncovered,
        }

    def progress(done: int, total: int, name: str) -> None:
        if me.rank == 0 and done % 64 == 0:
            monitor.sample()
        show(done, total, name)

    pieces.warm_up()
    with progress_bar(me.rank == 0) as show:
        where = (path, me.group, me.device)
        seconds = args.seconds or SECONDS
        table = tune(
            pieces.setting, pieces, identity, *where, time.monotonic, seconds, progress, info, replaces_any=ours
        )
    pieces.close()
    if me.rank == 0:
        print(summary(table, path), flush=True)
    return 0


def _verify(args: argparse.Namespace, me: Rank) -> int:
    """Steps of a few layers in every mode, as `tokenweave bench latency` runs them, beside their predictions."""
    from tokenweave.bench.latency.bench import Config, LatencyBench
    from tokenweave.files import write_result
    from tokenweave.models import read_config
    from tokenweave.models.dummy import dummy_model
    from tokenweave.tuning.verify import MODES, checks, conclusions, text

    whole = read_config(args.model)
    layers = args.layers or min(LAYERS, whole.layers)
    config = dataclasses.replace(whole, layers=layers)
    planners: list[Planner] = []

    def planner(transport: str) -> Planner:
        planners.append(planner_of(config, me, transport, args.out))
        costs = planners[0].model.costs
        me.say(f"predictions: {'measured table' if costs.measured else 'analytical model'}, {costs.source}")
        return planners[0]

    where: dict[str, Any] = {"rank": me.rank, "world_size": me.ranks, "group": me.group, "device": me.device}
    model = dummy_model(config, layers=layers, alike_experts=True, **where)
    measured = Config(
        model=Path(args.model).name,
        tokens=_tokens(args),
        modes=MODES,
        layers=whole.layers,
        sweep=args.sweep,
        sustain=0.0,
        profile=False,
        baselines=("nccl",),
    )
    result = LatencyBench(measured, model, planner, me.group, me.device, *instruments(me)).run()
    if me.rank:
        return 0
    found = checks(result, planners[0])
    print(text(found), flush=True)
    if args.json is not None:
        kept = {key: result[key] for key in ("environment", "config", "sweep", "rows", "wrong")}
        write_result({**kept, "machine": result.get("machine"), **conclusions(found, result)}, args.json)
    return 0


def _tokens(args: argparse.Namespace) -> tuple[int, ...]:
    from tokenweave.models import read_config
    from tokenweave.tuning.verify import TOKENS

    if args.tokens is not None:
        return numbers("--tokens", args.tokens)
    return tuple(tokens for tokens in TOKENS if tokens <= read_config(args.model).context)


def _default_path(identity: Identity) -> Path:
    from tokenweave.cache import cache_dir
    from tokenweave.tuning.find import profile_path

    return profile_path(identity) or cache_dir("profiles") / f"{identity.key}.json"


def summary(table: Table, path: Path) -> str:
    """What was measured, in a few lines."""
    from tokenweave.planning.profile_points import KINDS

    counts = ", ".join(f"{len(table.of(kind))} {name}" for name, kind in KINDS.items())
    identity, info = table.identity, table.info
    lines = [
        f"{info.get('model', 'model')} on {identity.tp} x {identity.gpu}, {identity.transport}: {len(table.times)} points "
        f"({counts}) in {info.get('seconds', '?')} s",
        f"driver {identity.driver}, torch {identity.torch}, cuBLAS {identity.cublas}, NCCL {identity.nccl}",
    ]
    if clocks := info.get("while_measuring"):
        values = {name: clocks[name]["median"] for name in ("sm_mhz", "power_w", "celsius") if clocks.get(name)}
        lines.append(", ".join(f"{name} {value:.0f}" for name, value in values.items()))
    if info.get("left_out"):
        lines.append(f"left out for lack of time: {', '.join(info['left_out'])}")
    if info.get("uncovered"):
        lines.append(f"{info['uncovered']} samples ran longer than the work beside them")
    return "\n".join([*lines, f"written to {path}"])
