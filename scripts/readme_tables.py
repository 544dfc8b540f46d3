"""Fills README.md's measured sections from benchmarks/results/*.json, so that no figure there is typed by hand.

    python scripts/readme_tables.py           # rewrite the sections
    python scripts/readme_tables.py --check   # exit 1 if one is out of date

A result file that is to be shown has an object "readme": {"title": str, "columns": [str], "rows": [[str or number]],
"note": str (optional)}, and "machine": str, which names hardware, link, clocks or power, and versions. Other files, and
everything else in these, are left alone. Of prefill steps (h200x2-latency-*.json) the section "gains" is the short form.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated import command

from tokenweave.models import read_config

ROOT = Path(__file__).parent.parent
NOTHING = "No GPU figures have been published in this repository yet; `benchmarks/results/` is empty of them."


class TableError(ValueError):
    """A result file or the README cannot be used; says which and why."""


def tables(folder: Path) -> str:
    """The section's text: one table a result file that has one, in the order of their names.

    Raises:
        TableError: a file is not JSON, or its table lacks something or has ragged rows.
    """
    parts = [_table(path) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join(part for part in parts if part) or NOTHING


def gains(folder: Path) -> str:
    """What the planner's plans gain in prefill steps, by tokens and model; of sizes measured twice, with more layers, then later.

    Raises:
        TableError: there are no such files.
    """
    results = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("h200x2-latency-*.json")]
    shown = [result for result in results if "readme" in result]
    if not shown:
        raise TableError(f"{folder}: no h200x2-latency-*.json has a table for the README")
    cells: dict[tuple[int, str], str] = {}
    parts = set()
    for result in sorted(shown, key=lambda of: (of["config"]["layers"], str(of["environment"]["date"]))):
        model, layers = result["config"]["model"], result["config"]["layers"]
        if layers < (every := read_config(model).layers):
            parts.add(f"{model} with {layers} of {every} layers")
        for row in result["rows"]:
            if row["mode"] == "auto":
                gain, of_no_comm = row["speedup"]["value"], row["no_comm_ratio"]["value"]
                mark = "†" if layers < every else ""
                cells[row["tokens"], model] = f"{row['plan']['mode']} {gain:.2f}, {of_no_comm:.2f}{mark}"
    models = sorted({model for _, model in cells})
    lines = [_row(["tokens", *models]), _row(["---:"] * (1 + len(models)))]
    for tokens in sorted({tokens for tokens, _ in cells}):
        lines.append(_row([tokens, *[cells.get((tokens, model), "") for model in models]]))
    note = (
        "Mode that the planner takes, times as fast as the fastest sequential step, times as fast as the step without "
        "communication; of sizes measured twice, the run with more layers, or the later one."
    )
    return "\n".join([*lines, "", note, *([f"† {', '.join(sorted(parts))}."] if parts else [])])


def filled(readme: str, section: str, name: str = "measured") -> str:
    """``readme`` with the text between the markers of the section ``name`` replaced."""
    first, last = f"<!-- {name}: begin, written by scripts/readme_tables.py -->", f"<!-- {name}: end -->"
    before, begin, rest = readme.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise TableError(f"README.md has no lines {first!r} and {last!r}, in this order")
    return f"{before}{first}\n{section}\n{last}{after}"


def _table(path: Path) -> str:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TableError(f"{path.name} is not JSON: {error}") from None
    table = result.get("readme") if isinstance(result, dict) else None
    if table is None:
        return ""
    return rendered(table, result.get("machine"), path.name, "readme")


def rendered(table: dict[str, Any], machine: object, file: str, key: str) -> str:
    """A table in Markdown, with its machine. ``file`` and ``key`` say in errors where it is from.

    Raises:
        TableError: it lacks something or has ragged rows.
    """
    if not isinstance(machine, str) or not machine:
        raise TableError(f"{file}: a table needs the machine that it was measured on, as text in 'machine'")
    for part in ("title", "columns", "rows"):
        if not table.get(part):
            raise TableError(f"{file}: {key!r} has no {part!r}")
    columns = table["columns"]
    ragged = [row for row in table["rows"] if len(row) != len(columns)]
    if ragged:
        raise TableError(f"{file}: row {ragged[0]} has {len(ragged[0])} cells; there are {len(columns)} columns")
    lines = [f"**{table['title']}** ({machine})", "", _row(columns), _row(["---"] + ["---:"] * (len(columns) - 1))]
    lines += [_row(row) for row in table["rows"]]
    if table.get("note"):
        lines += ["", table["note"]]
    return "\n".join(lines)


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(_number(cell) if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def _number(x: float) -> str:
    """Three digits that mean something, and no exponent: 4.26, 29.8, 405.7, 1086."""
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"


def contents() -> dict[Path, str]:
    readme, results = ROOT / "README.md", ROOT / "benchmarks" / "results"
    text = filled(readme.read_text(encoding="utf-8"), tables(results))
    return {readme: filled(text, gains(results), "gains")}


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
