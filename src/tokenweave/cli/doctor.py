"""``tokenweave doctor``: what this machine has, which transport would be used, what is missing and how to get it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tokenweave.doctor import Report, examine


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="show what this machine has")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0, or 2 where nothing can run."""
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
    for advice in report.advice:
        lines += ["", f"{'PROBLEM' if advice.fatal else 'hint'}: {advice.what}", f"    {advice.remedy}"]
    return "\n".join(lines)


def _versions(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items()) or "unknown"
