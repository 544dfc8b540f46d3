"""``tokenweave compile``: compiles the GPU kernels, with no GPU, and shows registers, spills and shared memory."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.cuda.compile import Instantiation

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_COLUMNS = (
    "kernel",
    "ranks",
    "rank",
    "hidden",
    "dtype",
    "options",
    "threads",
    "registers",
    "spills",
    "static",
    "dynamic",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compile", help="compile the GPU kernels, with no GPU")
    parser.add_argument("--arch", default="sm_90a", help="sm_80, sm_90a or sm_100a; default %(default)s")
    parser.add_argument("--ranks", default="2,4,8", help="sizes of the group, from 2 to 8; default %(default)s")
    parser.add_argument("--hidden", help="row sizes, multiples of 8; default: those of the models in use")
    parser.add_argument("--dtype", default="bf16,fp16", help="of bf16, fp16, fp32; default %(default)s")
    parser.add_argument(
        "--all",
        action="store_true",
        help="the options of every family of models, and all rank indices, not the main variants alone",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints what each kernel takes; 2 if a main variant spills registers."""
    from tokenweave.collective.instantiations import ARCHITECTURES, HIDDEN, instantiations
    from tokenweave.models.instantiations import model_kernels

    if args.arch not in ARCHITECTURES:
        raise RequestError(f"--arch {args.arch!r}; expected one of {', '.join(ARCHITECTURES)}")
    ranks = _numbers("--ranks", args.ranks, range(2, 9))
    hidden = _numbers("--hidden", args.hidden, range(8, 16385, 8)) if args.hidden is not None else None
    dtypes = _dtypes(args.dtype)
    if args.jobs < 1:
        raise RequestError(f"--jobs {args.jobs}; expected 1 or more")
    kernels: list[Instantiation] = [
        *instantiations(args.arch, ranks, hidden or HIDDEN, dtypes, every=args.all),
        *model_kernels(ranks, hidden, dtypes),
    ]
    rows: list[dict[str, Any]] = []
    for kernel, (registers, spills, static) in zip(kernels, _compiled(kernels, args.arch, args.jobs), strict=True):
        if not rows and not args.json:  # not before the compiler is known to work
            print(_line(_COLUMNS))
        row = {
            "kernel": kernel.name,
            "threads": kernel.threads,
            "registers": registers,
            "spills": spills,
            "static": static,
            "dynamic": kernel.dynamic_shared_bytes,
        }
        rows.append({**_sizes(kernel), **row})
        if not args.json:
            print(_line([str(rows[-1][column]) for column in _COLUMNS]), flush=True)
    spilling = [row for row in rows if row["main"] and row["spills"]]
    if args.json:
        print(json.dumps({"arch": args.arch, "kernels": rows, "spilling_main_variants": len(spilling)}, indent=2))
    else:
        print(f"{len(rows)} kernels for {args.arch}; sizes in bytes; {len(spilling)} main variants spill")
    if spilling:
        worst = max(spilling, key=lambda row: row["spills"])
        print(
            f"tokenweave: {len(spilling)} main variants spill registers, most of all {worst['kernel']} with "
            f"{worst['ranks']} ranks, hidden {worst['hidden']}, {worst['dtype']}, {worst['options']}: "
            f"{worst['spills']} bytes",
            file=sys.stderr,
        )
    return 2 if spilling else 0


def _sizes(kernel: Instantiation) -> dict[str, Any]:
    """What the kernel is compiled for; "-" where it has no such number."""
    from tokenweave.collective.instantiations import MAIN_OPTIONS, option_names
    from tokenweave.collective.kernels import Kernel
    from tokenweave.models.instantiations import sizes_text
    from tokenweave.models.kernels import RowKernel

    if isinstance(kernel, Kernel):
        named = {"options": option_names(kernel.options), "main": kernel.options == MAIN_OPTIONS}
        return {**asdict(kernel), **named}
    assert isinstance(kernel, RowKernel)
    return {
        **dict.fromkeys(("ranks", "rank", "hidden"), "-"),
        "dtype": kernel.dtype,
        "options": sizes_text(kernel),
        "main": True,
    }


def _compiled(kernels: list[Instantiation], arch: str, jobs: int) -> Iterator[tuple[int, int, int]]:
    """(registers a thread, spilled bytes, static shared bytes) of each, in order. NVRTC gains nothing from threads."""
    resources = functools.partial(_resources, arch=arch)
    jobs = min(jobs, len(kernels), os.cpu_count() or 1)
    if jobs == 1:
        yield from map(resources, kernels)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(resources, kernels, chunksize=1)


def _resources(kernel: Instantiation, arch: str) -> tuple[int, int, int]:
    from tokenweave.cuda.compile import compile_kernel

    compiled = compile_kernel(kernel, arch)
    return compiled.registers, compiled.spill_bytes, compiled.shared_bytes


def _numbers(option: str, text: str, allowed: range) -> list[int]:
    try:
        numbers = list(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        numbers = []
    if not numbers or not all(number in allowed for number in numbers):
        raise RequestError(
            f"{option} {text!r}; expected numbers from {allowed.start} to {allowed.stop - 1} in steps of {allowed.step}, "
            "separated by commas"
        )
    return numbers


def _dtypes(text: str) -> list[str]:
    names = list(dict.fromkeys(_DTYPES.get(name, name) for name in text.split(",")))
    if not set(names) <= set(_DTYPES.values()):
        raise RequestError(f"--dtype {text!r}; expected some of {', '.join(_DTYPES)}, separated by commas")
    return names


def _line(cells: Any) -> str:
    widths = (17, 5, 4, 6, 8, 30, 7, 9, 6, 6, 8)
    return " ".join(
        f"{cell:<{w}}" if i in (0, 4, 5) else f"{cell:>{w}}"
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
