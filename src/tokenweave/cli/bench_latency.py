"""``tokenweave bench latency``: a prefill step in every mode, in one run, on this machine's GPUs."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.cli.arguments import check_output, check_picture, check_seed, numbers, some
from tokenweave.cli.model import check_model, model_of, planner_of
from tokenweave.cli.ranks import instruments, run_on_ranks, settle_ranks
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.bench.launch import Rank

_BASELINES = "nccl,torch,flashinfer"
_MODES = "sequential,fused,woven,auto,no_comm"
OPTIONS = (
    "model",
    "tp",
    "tokens",
    "modes",
    "baselines",
    "layers",
    "dtype",
    "rounds",
    "seed",
    "sustain",
    "json",
    "plot",
    "time_limit",
    "dummy",
    "sweep",
    "no_profile",
)


def add_parser(kinds: Any) -> None:
    summary = "a prefill step: sequential, fused, woven, and the reference without communication"
    parser = kinds.add_parser("latency", help=summary, description=f"Measure {summary}, in one run.")
    parser.add_argument("--model", required=True, help="folder, .gguf file, or the name of a built-in configuration")
    parser.add_argument("--tp", type=int, help="ranks, a GPU each (default 2; under torchrun: as many as it started)")
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192", help="of the prompt (default %(default)s)")
    parser.add_argument("--modes", default=_MODES, help="default %(default)s")
    parser.add_argument("--baselines", default=_BASELINES, help="of the sequential step (default %(default)s)")
    parser.add_argument("--layers", type=int, help="so many layers only (default: all)")
    parser.add_argument("--dummy", action="store_true", help="random weights, made on the GPUs; implied by a name")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--sweep", action="store_true", help="try cuts, blocks, clusters and SM budgets; show the best")
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="paired rounds, at least 20 (default %(default)s); half as many more choose the variants",
    )
    parser.add_argument(
        "--sustain",
        type=float,
        default=1.6,
        help="seconds a mode back to back, for power and energy (default %(default)s, more where the GPUs' energy counters "
        "need it; 0: none)",
    )
    parser.add_argument("--no-profile", action="store_true", help="nothing of busy time, overlap and waiting for ranks")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokens and the order of the modes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, after each size")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: PNG, SVG or PDF, by the name's ending")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds until the ranks are ended (default 900)")


def run(args: argparse.Namespace) -> int:
    """Measures on ranks of its own, or as one rank of torchrun's."""
    _check(args)
    return run_on_ranks(("bench", "latency"), args, OPTIONS, _run_rank)


def _run_rank(args: argparse.Namespace, me: Rank) -> int:
    from tokenweave.bench.latency.bench import MODES, Config, LatencyBench
    from tokenweave.bench.latency.plots import plot_latency
    from tokenweave.bench.latency.report import text
    from tokenweave.bench.latency.sequential import BASELINES
    from tokenweave.models import read_config

    model = model_of(args, me)
    config = Config(
        model=Path(args.model).name,
        tokens=numbers("--tokens", args.tokens),
        modes=some("--modes", args.modes, MODES),
        baselines=some("--baselines", args.baselines, BASELINES),
        layers=read_config(args.model).layers,
        rounds=args.rounds,
        seed=args.seed,
        sweep=args.sweep,
        sustain=args.sustain,
        profile=not args.no_profile,
        json=args.json,
    )

    planner = functools.partial(planner_of, model.config, me)
    result = LatencyBench(config, model, planner, me.group, me.device, *instruments(me)).run()
    if me.rank == 0:
        print(text(result), flush=True)
        if args.plot is not None:
            plot_latency(result, args.plot)
    return 1 if result["wrong"] else 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before any rank starts."""
    from tokenweave.bench.latency.bench import MODES
    from tokenweave.bench.latency.sequential import BASELINES
    from tokenweave.bench.timing import MIN_ROUNDS

    settle_ranks(args)
    numbers("--tokens", args.tokens)
    some("--modes", args.modes, MODES)
    some("--baselines", args.baselines, BASELINES)
    if args.rounds < MIN_ROUNDS:
        raise RequestError(f"--rounds {args.rounds}; expected at least {MIN_ROUNDS}")
    if not 0 <= args.sustain < 1e6:
        raise RequestError(f"--sustain {args.sustain:g}; expected 0 or more seconds")
    check_seed(args.seed)
    check_output("--json", args.json)
    check_picture("--plot", args.plot)
    longest = max(numbers("--tokens", args.tokens))
    if longest > (context := check_model(args).context):
        raise RequestError(f"--tokens {longest}; the model's context is {context}")
