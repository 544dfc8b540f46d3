"""Fills the measured tables of README.md and docs/measured.md from benchmarks/results/*.json, so that no figure is typed by hand.

    python scripts/measured_tables.py           # rewrite them
    python scripts/measured_tables.py --check   # exit 1 if one is out of date

A result file that is to be shown has an object "table": {"title": str, "columns": [str], "rows": [[str or number]],
"note": str (optional)}, and "machine": str, which names hardware, link, clocks or power, and versions. docs/measured.md has
these tables as they are, README.md short forms: of prefill steps (h200x*-latency-*.json), of the collective (h200x*-kernel-*.json)
and of vLLM (h200x*-vllm-*.json), for any number of ranks. Other files, and everything else in these, are left alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated import command

from tokenweave.models import read_config

ROOT = Path(__file__).parent.parent
STEPS, KERNELS, VLLM = "h200x*-latency-*.json", "h200x*-kernel-*.json", "h200x*-vllm-*.json"
NOTHING = "No GPU figures have been published in this repository yet; `benchmarks/results/` is empty of them."


class TableError(ValueError):
    """A result file or a document cannot be used; says which and why."""


def tables(folder: Path) -> str:
    """The section's text: one table a result file that has one, in the order of their names.

    Raises:
        TableError: a file is not JSON, or its table lacks something or has ragged rows.
    """
    parts = [_table(path) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join(part for part in parts if part) or NOTHING


def gains(folder: Path) -> str:
    """What the planner's plans gain in prefill steps of powers of two of tokens, by model, and by GPUs where their numbers differ;
    of sizes measured twice, with more layers, then later.

    Raises:
        TableError: there are no such files.
    """
    cells: dict[tuple[int, str], str] = {}
    parts = set()
    results = _shown(folder, STEPS)
    several = len({result["config"]["ranks"] for result in results}) > 1
    for result in sorted(results, key=lambda of: (of["config"]["layers"], str(of["environment"]["date"]))):
        config = result["config"]
        model, layers = config["model"], config["layers"]
        column = f"{config['ranks']} GPUs, {model}" if several else model
        if layers < (every := read_config(model).layers):
            parts.add(f"{column} with {layers} of {every} layers")
        for row in result["rows"]:
            if row["mode"] == "auto" and row["tokens"] & (row["tokens"] - 1) == 0:
                mark = "†" if layers < every else ""
                cells[row["tokens"], column] = f"{row['speedup']['value']:.2f} {row['plan']['mode']}{mark}"
    note = (
        "How many times as fast as the fastest sequential step, and the mode that the planner took. Of sizes measured twice: "
        "the run with more layers, or the later one."
    )
    return "\n".join([*_crossed(cells), "", note, *([f"† {', '.join(sorted(parts))}."] if parts else [])])


def collectives(folder: Path) -> str:
    """The collective's time over the best baseline's, by rows, and by GPUs and hidden size.

    Raises:
        TableError: there are no such files.
    """
    cells = {}
    for result in _shown(folder, KERNELS):
        for hidden, tokens, *_, ratio in result["table"]["rows"]:
            if tokens in (1, 16, 64, 256, 1024, 4096, 16384):
                cells[tokens, f"{result['rows'][0]['ranks']} GPUs, hidden {hidden}"] = ratio.split()[0]
    return "\n".join(
        [
            *_crossed(cells),
            "",
            "The time of the best of our kernels and numbers of blocks over that of the best baseline, a fused add-RMSNorm included.",
        ]
    )


def inside_vllm(folder: Path) -> str:
    """The plugin over vLLM in its best configuration and as it starts; by GPUs and model where there are several files.

    Raises:
        TableError: there are no such files.
    """
    results = _shown(folder, VLLM)
    columns, cells = [], {}
    for result in results:
        of = f"{result['config']['ranks']} GPUs, {result['config']['model']}: " if len(results) > 1 else ""
        columns += (names := [f"{of}over its best", f"{of}over its defaults"])
        for what, *_, over_defaults, over_best in result["table"]["rows"]:
            cells[what] = cells.get(what, {}) | dict(zip(names, (over_best, over_defaults), strict=True))
    columns = list(dict.fromkeys(columns))
    lines = [_row(["", *columns]), _row(["---", *["---:"] * len(columns)])]
    for what, ratios in cells.items():
        lines.append(_row([what, *(ratios.get(column, "").split(" ")[0] for column in columns)]))
    return "\n".join([*lines, "", "How many times as fast with the plugin; of traces, in requests/s."])


def _shown(folder: Path, pattern: str) -> list[dict[str, Any]]:
    results = [read(path) for path in sorted(folder.glob(pattern))]
    if shown := [result for result in results if "table" in result]:
        return shown
    raise TableError(f"{folder}: no {pattern} has a table")


def _crossed(cells: dict[tuple[int, str], str]) -> list[str]:
    """Lines of a table of tokens by columns."""
    columns = sorted({column for _, column in cells})
    lines = [_row(["tokens", *columns]), _row(["---:"] * (1 + len(columns)))]
    for tokens in sorted({tokens for tokens, _ in cells}):
        lines.append(_row([tokens, *(cells.get((tokens, column), "") for column in columns)]))
    return lines


def filled(document: str, name: str, section: str) -> str:
    """``document`` with the text between the markers of the section ``name`` replaced."""
    first, last = f"<!-- {name}: begin, written by scripts/measured_tables.py -->", f"<!-- {name}: end -->"
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise TableError(f"there are no lines {first!r} and {last!r}, in this order")
    return f"{before}{first}\n{section}\n{last}{after}"


def read(path: Path) -> dict[str, Any]:
    """A result file's object; {} for one that holds something else.

    Raises:
        TableError: it is not JSON.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TableError(f"{path.name} is not JSON: {error}") from None
    return result if isinstance(result, dict) else {}


def _table(path: Path) -> str:
    result = read(path)
    table = result.get("table")
    if table is None:
        return ""
    found = rendered(table, result.get("machine"), path.name, "table")
    return f"{found}\n\n[{path.name}](../benchmarks/results/{path.name})"


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
    results = ROOT / "benchmarks" / "results"
    readme, measured = ROOT / "README.md", ROOT / "docs" / "measured.md"
    text = readme.read_text(encoding="utf-8")
    for name, section in (("gains", gains), ("collectives", collectives), ("vllm", inside_vllm)):
        text = filled(text, name, section(results))
    return {readme: text, measured: filled(measured.read_text(encoding="utf-8"), "measured", tables(results))}


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
