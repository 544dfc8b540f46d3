"""``tokenweave doctor``: what this machine has, which transport would be used, what is missing and how to get it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenweave.doctor.machine import Report, examine
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.doctor.vllm import VllmReport


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="show what this machine has")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--vllm", metavar="MODEL", help="instead: what the vLLM plugin would do with this model, and why"
    )
    parser.add_argument("--tp", type=int, help="with --vllm: tensor parallel size (default 2)")
    parser.add_argument("--gpu", help="with --vllm: the planner's name of a GPU (default: this machine's, or h200)")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0, or 2 where nothing can run."""
    if args.vllm is not None:
        return _run_vllm(args)
    if unused := [option for option in ("tp", "gpu") if getattr(args, option) is not None]:
        raise RequestError(f"--{unused[0]} is for --vllm MODEL; add that, or leave it out")
    report = examine()
    print(json.dumps({**dataclasses.asdict(report), "broken": report.broken}, indent=2) if args.json else text(report))
    return 2 if report.broken else 0


def text(report: Report) -> str:
    """The report as a person reads it."""
    lines = [
        f"tokenweave  {report.tokenweave}",
        f"python      {report.python} on {report.system}",
        f"torch       {report.torch or 'missing'}" + (f", CUDA {report.cuda}" if report.cuda else ""),
        f"backends    {', '.join(report.backends) or 'none'}",
        f"packages    {_versions(report.packages)}",
        f"for GPUs    {_versions(report.cuda_packages)}",
        f"driver      {report.driver or 'none: no NVIDIA driver, TokenWeave runs on the CPU'}",
    ]
    if not report.gpus:
        lines.append("GPUs        none that torch can use")
    for gpu in report.gpus:
        capability = "sm_{}{}".format(*gpu.capability)
        lines.append(f"GPU {gpu.index}       {gpu.name}, {capability}, {gpu.sms} SMs, {gpu.memory / 2**30:.0f} GiB")
    for link in report.links:
        nvlinks = {None: "NVLinks unknown", 0: "no NVLink"}.get(link.nvlinks, f"{link.nvlinks} NVLinks")
        peer = "peer access" if link.peer_access else "no peer access"
        lines.append(f"GPU {link.first}-{link.second}     {peer}, {nvlinks}")
    lines.append(f"multicast   {report.multicast.value}: {report.multicast.why}")
    lines.append(f"transport   {report.transport.value}: {report.transport.why}")
    lines.append(f"attention   {report.attention.value}: {report.attention.why}")
    lines.append(f"cache       {report.cache.value}: {report.cache.why}")
    for advice in report.advice:
        lines += ["", f"{'PROBLEM' if advice.fatal else 'hint'}: {advice.what}", f"    {advice.remedy}"]
    return "\n".join(lines)


def _run_vllm(args: argparse.Namespace) -> int:
    from tokenweave.doctor.vllm import examine_vllm

    tp = 2 if args.tp is None else args.tp
    if tp < 1:
        raise RequestError(f"--tp {tp}; expected at least 1")
    report = examine_vllm(args.vllm, tp=tp, gpu=args.gpu)
    print(json.dumps(dataclasses.asdict(report), indent=2) if args.json else vllm_text(report))
    return 0


def vllm_text(report: VllmReport) -> str:
    """The vLLM report as a person reads it."""
    found = report.vllm
    version = "not installed" if found is None else found.version + (", the build for CPUs" if found.cpu else "")
    unseen = "NOT FOUND: no installed package has the one that vLLM looks for: pip install . in TokenWeave's checkout"
    lines = [
        f"vLLM        {version}",
        f"plugin      {report.plugin.value}: {report.plugin.why}",
        f"entry point {'found' if report.visible else unseen}",
        f"model       {report.model.value}: {report.model.why}",
    ]
    if report.steps:
        lines += ["", f"steps once the plugin is on, expected on {report.tp}x {report.gpu}:"]
        lines += [f"{step.tokens:>8} tokens  {step.mode:<6} {step.why}" for step in report.steps]
    return "\n".join([*lines, "", *(f"note: {note}" for note in report.notes)])


def _versions(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items()) or "unknown"
