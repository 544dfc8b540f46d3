"""The tables of docs/sm-budgets.md out of what ``measure.py`` measured; ``scripts/docs_tables.py`` puts them there."""

from __future__ import annotations

from typing import Any

_NOTE = (
    "us, medians of paired rounds, the slowest rank; in brackets, how often it takes the GEMM's time alone; "
    ">: the collective was over before the last of the GEMMs."
)


def tables(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> table, as ``scripts/measured_tables.py`` wants it described."""
    found = {
        "sm-budget-ways": _ways(result),
        "sm-budget-fits": _fits(result),
        "sm-budget-launches": _launches(result),
        "sm-budget-targets": _targets(result),
    }
    return found | ({"sm-budget-order": _order(result)} if result["slots"] else {})


def _ways(result: dict[str, Any]) -> dict[str, Any]:
    """Every way of limiting a GEMM, beside the usual collective."""
    blocks, cluster = result["config"]["usual"]
    left = result["config"]["sms"] - blocks
    beside = {"blocks": blocks, "cluster": cluster}
    ways = {
        "no limit": {**beside, "target": None, "library": "cublas", "green": False},
        f"SM target {left}": {**beside, "target": left, "library": "cublas", "green": False},
        "cublasLt": {**beside, "target": None, "library": "cublaslt", "green": False},
        f"cublasLt, carve-out {blocks}": {**beside, "target": left, "library": "cublaslt", "green": False},
        "green contexts": {**beside, "target": None, "library": "cublas", "green": True},
        f"green contexts, target {left}": {**beside, "target": left, "library": "cublas", "green": True},
    }
    return {
        "title": f"GEMMs beside a collective of {blocks} blocks in clusters of {cluster}, by what limits them",
        "columns": ["GEMM", "rows", "alone", *ways],
        "rows": [
            [gemm, rows, alone, *(_cell(_find(result, gemm, rows, **way), alone) for way in ways.values())]
            for gemm, rows, alone in _shapes(result)
        ],
        "note": _NOTE,
    }


def _fits(result: dict[str, Any]) -> dict[str, Any]:
    """GEMMs that are limited to what each number of blocks leaves."""
    sms = result["config"]["sms"]
    launches = dict.fromkeys((row["blocks"], row["cluster"]) for row in result["held"] if row["cluster"] > 1)

    def cells(gemm: str, rows: int, alone: float) -> list[str]:
        hows = ({"blocks": blocks, "cluster": cluster, "target": sms - blocks} for blocks, cluster in launches)
        return [_cell(_find(result, gemm, rows, **how), alone) for how in hows]

    return {
        "title": f"GEMMs with an SM target of {sms} minus the collective's blocks, by blocks / cluster",
        "columns": ["GEMM", "rows", "alone", *(f"{blocks} / {cluster}" for blocks, cluster in launches)],
        "rows": [[gemm, rows, alone, *cells(gemm, rows, alone)] for gemm, rows, alone in _shapes(result)],
        "note": _NOTE,
    }


def _launches(result: dict[str, Any]) -> dict[str, Any]:
    """The collective's blocks and clusters, with GEMMs that plan for all SMs, and for those that they leave."""
    sms, rows = result["config"]["sms"], _shown(result)
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
    heads = [f"{gemm}, {sms_for}" for gemm, _ in shapes for sms_for in ("all SMs", "limited")]
    return {
        "title": f"GEMMs of {rows} rows beside a collective, by its blocks and clusters",
        "columns": ["blocks", "cluster", "collective, us per 1024 rows", *heads],
        "rows": lines,
        "note": f"limited: an SM target of {sms} minus the blocks. {_NOTE}",
    }


def _targets(result: dict[str, Any]) -> dict[str, Any]:
    """SM targets beside the usual collective."""
    blocks, cluster = result["config"]["usual"]
    usual = {"blocks": blocks, "cluster": cluster, "library": "cublas", "green": False}
    targets = {row["target"] for row in result["held"] if all(row[name] == value for name, value in usual.items())}
    ordered = [None, *sorted((target for target in targets if target is not None), reverse=True)]
    return {
        "title": f"GEMMs beside a collective of {blocks} blocks in clusters of {cluster}, by their SM target",
        "columns": ["GEMM", "rows", "alone", *("none" if target is None else str(target) for target in ordered)],
        "rows": [
            [gemm, rows, alone]
            + [_cell(_find(result, gemm, rows, **usual, target=target), alone) for target in ordered]
            for gemm, rows, alone in _shapes(result)
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


def _shown(result: dict[str, Any]) -> int:
    """The number of rows whose tables are shown, where one is enough."""
    measured = {row["rows"] for row in result["held"]}
    return 2048 if 2048 in measured else max(measured)


def _find(result: dict[str, Any], gemm: str, rows: int, **how: Any) -> dict[str, Any] | None:
    wanted = {"library": "cublas", "green": False, "gemm": gemm, "rows": rows, **how}
    same = (row for row in result["held"] if all(row[name] == value for name, value in wanted.items()))
    return next(same, None)


def _cell(row: dict[str, Any] | None, alone: float) -> str:
    if row is None:
        return "-"
    return f"{'' if row['covered'] else '> '}{row['us']:.0f} ({row['us'] / alone:.2f})"
