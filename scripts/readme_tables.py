"""Fills README.md's measured section from benchmarks/results/*.json, so that no figure there is typed by hand.

    python scripts/readme_tables.py           # rewrite the section
    python scripts/readme_tables.py --check   # exit 1 if it is out of date

A result file that is to be shown has an object "readme": {"title": str, "columns": [str], "rows": [[str or number]],
"note": str (optional)}, and "machine": str, which names hardware, link, clocks or power, and versions. Other files, and
everything else in these, are left alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated import command

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- measured: begin, written by scripts/readme_tables.py -->"
END = "<!-- measured: end -->"
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


def filled(readme: str, section: str) -> str:
    """``readme`` with the text between the markers replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise TableError(f"README.md has no lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


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
    readme = ROOT / "README.md"
    return {readme: filled(readme.read_text(encoding="utf-8"), tables(ROOT / "benchmarks" / "results"))}


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
