"""Fills the table of docs/simulation.md by running the two commands that stand above it, so that no figure is typed by hand.

python scripts/simulation_tables.py           # rewrite the table; ten seconds
python scripts/simulation_tables.py --check   # exit 1 if it is out of date
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from generated import command

from tokenweave.cli.main import main as tokenweave

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "simulation.md"
BEGIN = "<!-- fleet: begin, written by scripts/simulation_tables.py -->"
END = "<!-- fleet: end -->"
COLUMNS = "| replicas | requests/s offered | mode | TTFT ms p50, p90, p99 | TPOT ms p50, p90, p99 | both in time |"


def filled(document: str) -> str:
    """``document`` with the text between the markers replaced.

    Raises:
        ValueError: it has no markers, or other commands above them than one of a burst and one of several rates.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs a line {BEGIN!r} and a line {END!r}, in this order")
    shown = re.findall(r"^    tokenweave (simulate .*)$", before.replace("\\\n", " "), re.M)
    if len(shown) != 2 or "--burst" not in shown[0] or "--rate" not in shown[1]:
        raise ValueError(f"expected a command with --burst and one with --rate above the table; found {shown}")
    burst, rates = (_runs(shlex.split(command)) for command in shown)
    return f"{before}{BEGIN}\n{_table(rates)}\n\n{_most(burst)}\n{END}{after}"


def _runs(words: list[str]) -> list[dict[str, Any]]:
    """The runs of a command, as its ``--json`` has them; it writes no other file."""
    for option in ("--json", "--plot"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "runs.json"
        if code := tokenweave([*words, "--json", str(file)]):
            raise RuntimeError(f"`tokenweave {shlex.join(words)}` ended with {code}")
        return json.loads(file.read_text("utf-8"))["runs"]


def _table(runs: list[dict[str, Any]]) -> str:
    lines = [COLUMNS, "|---|---|---|---|---|---|"]
    for run in runs:
        first, further = (
            ", ".join(f"{run[figure][at]:.{digits}f}" for at in ("p50", "p90", "p99"))
            for figure, digits in (("ttft_ms", 0), ("tpot_ms", 1))
        )
        lines.append(
            f"| {run['replicas']} | {run['rate']:g} | {run['mode']} | {first} | {further} | {run['within_targets']:.1%} |"
        )
    return "\n".join(lines)


def _most(runs: list[dict[str, Any]]) -> str:
    """What a replica serves of a burst, which is the most that it can."""
    served = " and ".join(f"{run['requests_per_s']:.1f} in {run['mode']} mode" for run in runs)
    return f"Requests a second that a replica serves of a burst, the first command: {served}."


def contents() -> dict[Path, str]:
    return {DOCUMENT: filled(DOCUMENT.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
