"""The tables of docs/gpu-execution.md out of what ``measure.py`` measured; ``scripts/docs_tables.py`` puts them there."""

from __future__ import annotations

from typing import Any

_NOTE = "us, medians of paired rounds, the slowest rank; in brackets, how often it takes the GEMM's time alone."


def tables(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> table, as ``scripts/readme_tables.py`` wants it described."""
    return {
        "sm-budget-ways": _ways(result),
        "sm-budget-launches": _launches(result),
        "sm-budget-targets": _targets(result),
        "sm-budget-order": _order(result),
    }


def _ways(result: dict[str, Any]) -> dict[str, Any]:
    """Every way of telling a GEMM, beside the usual collective."""
    blocks, cluster = result["config"]["usual"]
    left = result["config"]["sms"] - blocks
    beside = {"blocks": blocks, "cluster": cluster}
    ways = {
        "nothing": {**beside, "target": None, "library": "cublas", "green": False},
        f"SM target {left}": {**beside, "target": left, "library": "cublas", "green": False},
        "cublasLt": {**beside, "target": None, "library": "cublaslt", "green": False},
        f"cublasLt, carve-out {blocks}": {**beside, "target": left, "library": "cublaslt", "green": False},
        "green contexts": {**beside, "target": None, "library": "cublas", "green": True},
        f"green contexts, target {left}": {**beside, "target": left, "library": "cublas", "green": True},
    }
    return {
        "title": f"GEMMs beside a collective of {blocks} blocks in clusters of {cluster}, by what they are told",
        "columns": ["GEMM", "rows", "alone", *ways],
        "rows": [
            [gemm, rows, alone, *(_cell(_find(result, gemm, rows, **way), alone) for way in ways.values())]
            for gemm, rows, alone in _shapes(result)
        ],
        "note": _NOTE,
    }


def _launches(result: dict[str, Any]) -> dict[str, Any]:
    """The collective's blocks and clusters, with nothing told and with the SMs that they leave."""
    sms, rows = result["config"]["sms"], _longest(result)
    launches = list(dict.fromkeys((row["blocks"], row["cluster"]) for row in result["held"] if row["blocks"]))
    shapes = [(gemm, alone) for gemm, of, alone in _shapes(result) if of == rows]
    lines = []
    for blocks, cluster in launches:
        line: list[Any] = [blocks, cluster, result["config"]["collective_us_per_1024_rows"][f"{blocks}/{cluster}"]]
        for gemm, alone in shapes:
            for target in (None, sms - blocks):
                found = _find(result, gemm, rows, blocks=blocks, cluster=cluster, target=target)
                line.append(_cell(found, alone))
        lines.append(line)
    heads = [f"{gemm}, {told}" for gemm, _ in shapes for told in ("not told", "told")]
    return {
        "title": f"GEMMs of {rows} rows beside a collective, by its blocks and clusters",
        "columns": ["blocks", "cluster", "collective, us per 1024 rows", *heads],
        "rows": lines,
        "note": f"told: an SM target of {sms} minus the blocks. {_NOTE}",
    }


def _targets(result: dict[str, Any]) -> dict[str, Any]:
    """SM targets beside the usual collective."""
    blocks, cluster = result["config"]["usual"]
    rows = _longest(result)
    usual = {"blocks": blocks, "cluster": cluster, "library": "cublas", "green": False}
    targets = {row["target"] for row in result["held"] if all(row[name] == value for name, value in usual.items())}
    ordered = [None, *sorted((target for target in targets if target is not None), reverse=True)]
    shapes = [(gemm, alone) for gemm, of, alone in _shapes(result) if of == rows]
    return {
        "title": f"GEMMs of {rows} rows beside a collective of {blocks} blocks in clusters of {cluster}, by their SM target",
        "columns": ["target", *(gemm for gemm, _ in shapes)],
        "rows": [
            ["none" if target is None else target]
            + [_cell(_find(result, gemm, rows, **usual, target=target), alone) for gemm, alone in shapes]
            for target in ordered
        ],
        "note": _NOTE,
    }


def _order(result: dict[str, Any]) -> dict[str, Any]:
    """Pairs of a GEMM and a collective, by which of them is launched first."""
    keys = list(dict.fromkeys((row["blocks"], row["cluster"], row["target"]) for row in result["slots"]))
    orders = [(key, first) for key in keys for first in (False, True)]

    def head(key: tuple[int, int, int | None], first: bool) -> str:
        blocks, _, target = key
        return f"{blocks} blocks, {'no target' if target is None else f'target {target}'}, {'GEMM' if first else 'collective'} first"

    by_key = {
        (row["gemm"], row["rows"], row["blocks"], row["cluster"], row["target"], row["gemm_first"]): row["us"]
        for row in result["slots"]
    }
    return {
        "title": "A GEMM and a collective of as many rows that start together, until both are done, us",
        "columns": ["GEMM", "rows", "GEMM alone", *(head(*order) for order in orders)],
        "rows": [
            [gemm, rows, alone, *(by_key[(gemm, rows, *key, first)] for key, first in orders)]
            for gemm, rows, alone in _shapes(result)
        ],
        "note": "A pair's share of a row of pairs, each waiting for the one before; medians of paired rounds, the slowest rank.",
    }


def _shapes(result: dict[str, Any]) -> list[tuple[str, int, float]]:
    """GEMM, rows, us alone."""
    return [
        (row["gemm"], row["rows"], row["us"]) for row in result["held"] if not row["blocks"] and row["target"] is None
    ]


def _longest(result: dict[str, Any]) -> int:
    return max(row["rows"] for row in result["held"])


def _find(result: dict[str, Any], gemm: str, rows: int, **how: Any) -> dict[str, Any] | None:
    wanted = {"library": "cublas", "green": False, "gemm": gemm, "rows": rows, **how}
    same = (row for row in result["held"] if all(row[name] == value for name, value in wanted.items()))
    return next(same, None)


def _cell(row: dict[str, Any] | None, alone: float) -> str:
    return "-" if row is None else f"{row['us']:.0f} ({row['us'] / alone:.2f})"
