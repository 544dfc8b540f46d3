"""``tokenweave bench latency``: a prefill step in every mode, in one run, on this machine's GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.cli.arguments import PICTURES, check_output, check_seed, check_time_limit, command_line, numbers, some
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tokenweave.models import Model
    from tokenweave.models.config import ModelConfig

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
    summary = "a prefill step: sequential, fused, woven, and the bound without communication"
    parser = kinds.add_parser("latency", help=summary, description=f"Measure {summary}, in one run.")
    parser.add_argument("--model", required=True, help="folder, .gguf file, or the name of a built-in configuration")
    parser.add_argument("--tp", type=int, default=2, help="ranks, a GPU each (default 2); under torchrun: its own")
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192", help="of the prompt (default %(default)s)")
    parser.add_argument("--modes", default=_MODES, help="default %(default)s")
    parser.add_argument("--baselines", default=_BASELINES, help="of the sequential step (default %(default)s)")
    parser.add_argument("--layers", type=int, help="so many layers only (default: all)")
    parser.add_argument("--dummy", action="store_true", help="random weights, made on the GPUs; implied by a name")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--sweep", action="store_true", help="try cuts, blocks, clusters and SM budgets; show the best")
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds, at least 20 (default %(default)s)")
    parser.add_argument(
        "--sustain",
        type=float,
        default=1.0,
        help="seconds a mode back to back, for power and energy (default 1; 0: none)",
    )
    parser.add_argument("--no-profile", action="store_true", help="nothing of busy time, overlap and waiting for ranks")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokens and the order of the modes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, after each size")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: PNG, SVG or PDF, by the name's ending")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds until the ranks are ended (default 900)")


def run(args: argparse.Namespace) -> int:
    """Measures on ranks of its own, or as one rank of torchrun's."""
    from tokenweave.bench import launch
    from tokenweave.bench.plots import require_matplotlib

    _check(args)
    if args.plot is not None:
        require_matplotlib()
    return launch.on_ranks(
        lambda: _run_rank(args), command_line(("bench", "latency"), args, OPTIONS), args.tp, args.time_limit
    )


def _run_rank(args: argparse.Namespace) -> int:
    from tokenweave.bench import environment, launch
    from tokenweave.bench.latency.bench import MODES, Config, LatencyBench
    from tokenweave.bench.latency.plots import plot_latency
    from tokenweave.bench.latency.report import text
    from tokenweave.bench.latency.sequential import BASELINES
    from tokenweave.bench.timing import GraphClock
    from tokenweave.planning import Planner

    with launch.joined() as me:
        rank, ranks, device, group = me.rank, me.ranks, me.device, me.group

        def say(line: str) -> None:
            if rank == 0:
                print(line, file=sys.stderr, flush=True)

        model = model_of(args, rank, ranks, group, device)
        config = Config(
            model=Path(args.model).name,
            tokens=numbers("--tokens", args.tokens),
            modes=some("--modes", args.modes, MODES),
            baselines=some("--baselines", args.baselines, BASELINES),
            rounds=args.rounds,
            seed=args.seed,
            sweep=args.sweep,
            sustain=args.sustain,
            profile=not args.no_profile,
            json=args.json,
        )
        bench = LatencyBench(
            config,
            model,
            lambda transport: Planner(model.config, None, ranks, transport),
            group,
            device,
            GraphClock(group, device),
            environment.Monitor(me.local),
            environment.describe() if rank == 0 else {},
            say,
        )
        result = bench.run()
        if rank == 0:
            print(text(result), flush=True)
            if args.plot is not None:
                plot_latency(result, args.plot)
        del bench  # and its graphs
    return 1 if result["wrong"] else 0


def model_of(args: argparse.Namespace, rank: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Model:
    """This rank's part of what ``--model``, ``--layers``, ``--dummy``, ``--dtype`` and ``--seed`` name."""
    import torch

    from tokenweave.models import load_model, read_config
    from tokenweave.models.dummy import dummy_model

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    where: dict[str, Any] = {"rank": rank, "world_size": ranks, "group": group, "dtype": dtype, "device": device}
    config = read_config(args.model)
    if args.dummy or not Path(args.model).exists():
        return dummy_model(config, layers=args.layers, seed=args.seed, **where)
    model = load_model(args.model, **where)
    if args.layers is None:
        return model
    config = dataclasses.replace(model.config, layers=args.layers)
    return dataclasses.replace(model, config=config, layers=model.layers[: args.layers])


def check_model(args: argparse.Namespace) -> ModelConfig:
    """The numbers of the model; refuses one that :func:`model_of` could not make, before any rank starts and says so itself."""
    from tokenweave.models import read_config
    from tokenweave.models.hf_weights import HfWeights
    from tokenweave.models.sharding import shard_of

    config = read_config(args.model)
    shard_of(config, 0, args.tp)
    if args.layers is not None and not 1 <= args.layers <= config.layers:
        raise RequestError(f"--layers {args.layers}; expected at least 1, and the model has {config.layers}")
    if Path(args.model).is_dir() and not args.dummy:
        HfWeights(Path(args.model))
    return config


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before any rank starts."""
    from tokenweave.bench.latency.bench import MODES
    from tokenweave.bench.latency.sequential import BASELINES
    from tokenweave.bench.timing import MIN_ROUNDS

    if not 2 <= args.tp <= 8:
        raise RequestError(f"--tp {args.tp}; expected 2 to 8")
    numbers("--tokens", args.tokens)
    some("--modes", args.modes, MODES)
    some("--baselines", args.baselines, BASELINES)
    if args.rounds < MIN_ROUNDS:
        raise RequestError(f"--rounds {args.rounds}; expected at least {MIN_ROUNDS}")
    if not 0 <= args.sustain < 1e6:
        raise RequestError(f"--sustain {args.sustain:g}; expected 0 or more seconds")
    check_seed(args.seed)
    check_time_limit(args.time_limit)
    check_output("--json", args.json)
    check_output("--plot", args.plot, PICTURES)
    longest = max(numbers("--tokens", args.tokens))
    if longest > (context := check_model(args).context):
        raise RequestError(f"--tokens {longest}; the model's context is {context}")
