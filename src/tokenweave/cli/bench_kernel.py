"""``tokenweave bench kernel``: the fused collective against the baselines, on this machine's GPUs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.cli.arguments import check_output, check_picture, check_seed, numbers, some
from tokenweave.cli.ranks import instruments, run_on_ranks, settle_ranks
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.bench.launch import Rank

_TOKENS = "1,16,64,128,256,512,1024,2048,4096,8192,16384,32768"
_QUICK = "16,256,1024,4096"
OPTIONS = (
    "tp",
    "hidden",
    "tokens",
    "ctas",
    "dtype",
    "fp8",
    "rounds",
    "only",
    "seed",
    "quick",
    "json",
    "plot",
    "time_limit",
)


def add_parser(kinds: Any) -> None:
    summary = "the fused collective against the baselines"
    parser = kinds.add_parser("kernel", help=summary, description=f"Measure {summary}, in one run.")
    parser.add_argument("--tp", type=int, help="ranks, a GPU each (default 2; under torchrun: as many as it started)")
    parser.add_argument("--hidden", default="4096", help="row sizes, separated by commas (default %(default)s)")
    parser.add_argument("--tokens", help=f"rows of a call, separated by commas (default {_TOKENS})")
    parser.add_argument("--ctas", default="4,8,12", help="blocks of the two-shot kernel (default %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--fp8", action="store_true", help="ours with fp8 (e4m3) results too, beside --dtype's")
    parser.add_argument("--rounds", type=int, help="paired rounds, at least 20 (default 40, with --quick 20)")
    parser.add_argument("--only", help="families to run, of: tokenweave, nccl, torch, flashinfer (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the order of the modes")
    parser.add_argument("--quick", action="store_true", help=f"20 rounds, and unless --tokens says more: {_QUICK}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, after each size")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (.svg, .png or .pdf)")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds until the ranks are ended (default 900)")


def run(args: argparse.Namespace) -> int:
    """Measures on ranks of its own, or as one rank of torchrun's."""
    _check(args)
    return run_on_ranks(("bench", "kernel"), args, OPTIONS, _run_rank)


def _run_rank(args: argparse.Namespace, me: Rank) -> int:
    import torch

    from tokenweave.bench.kernel import report
    from tokenweave.bench.kernel.bench import Config, KernelBench, link_gbs
    from tokenweave.bench.kernel.implementations import FAMILIES

    gpu = torch.cuda.get_device_properties(me.device)
    config = Config(
        hidden=numbers("--hidden", args.hidden),
        tokens=_tokens(args),
        ctas=numbers("--ctas", args.ctas) if args.ctas else (),
        dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype],
        rounds=_rounds(args),
        link_gbs=link_gbs(gpu.name, f"sm_{gpu.major}{gpu.minor}", gpu.multi_processor_count),
        seed=args.seed,
        fp8=args.fp8,
        json=args.json,
    )
    families = [family for family in FAMILIES if args.only is None or family.name.split()[0] in args.only.split(",")]
    result = KernelBench(config, me.group, me.device, families, *instruments(me)).run()
    if me.rank == 0:
        report.finish(result)
        print(report.text(result), flush=True)
        if args.plot is not None and result["rows"]:
            from tokenweave.bench.kernel.plots import plot_kernel

            plot_kernel(result, args.plot)
    return 0 if result["rows"] else 1


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before any rank starts."""
    from tokenweave.bench.timing import MIN_ROUNDS

    settle_ranks(args)
    wrong = [hidden for hidden in numbers("--hidden", args.hidden) if hidden % 8 or hidden > 16384]
    if wrong:
        raise RequestError(f"--hidden {wrong[0]}; expected multiples of 8 up to 16384")
    _tokens(args)
    if args.ctas and max(numbers("--ctas", args.ctas)) > 256:
        raise RequestError(f"--ctas {args.ctas}; expected numbers from 1 to 256")
    if _rounds(args) < MIN_ROUNDS:
        raise RequestError(f"--rounds {args.rounds}; expected at least {MIN_ROUNDS}")
    check_seed(args.seed)
    check_output("--json", args.json)
    check_picture("--plot", args.plot)
    if args.only is not None:
        asked = some("--only", args.only, ("tokenweave", "nccl", "torch", "flashinfer"))
        if args.fp8 and "tokenweave" not in asked:
            raise RequestError(
                f"--fp8 with --only {args.only}; fp8 results are tokenweave's alone: add it, or leave --fp8 out"
            )


def _rounds(args: argparse.Namespace) -> int:
    return args.rounds if args.rounds is not None else 20 if args.quick else 40


def _tokens(args: argparse.Namespace) -> tuple[int, ...]:
    default = _QUICK if args.quick else _TOKENS
    return numbers("--tokens", default if args.tokens is None else args.tokens)
