"""Fills the measured tables of docs/*.md from benchmarks/results/*.json, so that no figure there is typed by hand.

    python scripts/docs_tables.py           # rewrite them
    python scripts/docs_tables.py --check   # exit 1 if one is out of date

A document says where the table NAME goes with two lines, "<!-- table: NAME -->" and "<!-- end of table -->". A result file
has "tables": {NAME: {...}}, each as scripts/measured_tables.py wants it, and "machine". Of several files with the same table
the last one by name is shown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from generated import command
from measured_tables import ROOT, read, rendered

_PLACE = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
NOTHING = "No figures have been published here yet."


def measured(folder: Path) -> dict[str, str]:
    """Name -> Markdown, of all tables in the folder's result files.

    Raises:
        TableError: a file is not JSON, or a table is not one.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        for name, table in result.get("tables", {}).items():
            found[name] = rendered(table, result.get("machine"), path.name, f"tables.{name}")
    return found


def filled(document: str, tables: dict[str, str]) -> str:
    """``document`` with every table in its place; one that is not measured yet says so."""
    return _PLACE.sub(lambda place: f"{place[1]}{tables.get(place['name'], NOTHING)}\n{place[3]}", document)


def contents() -> dict[Path, str]:
    tables = measured(ROOT / "benchmarks" / "results")
    return {path: filled(path.read_text(encoding="utf-8"), tables) for path in sorted((ROOT / "docs").glob("*.md"))}


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
