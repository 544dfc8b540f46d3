"""``tokenweave bench WHAT``: each of its subcommands is a module beside this one."""

from __future__ import annotations

import argparse
from typing import Any

from tokenweave.cli import bench_kernel, bench_latency, bench_vllm

_KINDS = {"kernel": bench_kernel, "latency": bench_latency, "vllm": bench_vllm}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure on this machine's GPUs")
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for kind in _KINDS.values():
        kind.add_parser(kinds)


def run(args: argparse.Namespace) -> int:
    """Runs the one that was asked for; its exit code."""
    return _KINDS[args.bench].run(args)
