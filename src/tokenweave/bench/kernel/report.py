"""The kernel benchmark's result as text and as a published table."""

from __future__ import annotations

from typing import Any

from tokenweave.bench.environment import machine_line

_SHORT = {
    "tokenweave two-shot default": "ours auto",
    "tokenweave two-shot": "ours",
    "tokenweave one-shot": "ours 1-shot",
    "nccl all-reduce + add-rmsnorm": "NCCL+norm",
    "nccl reduce-scatter + add-rmsnorm + all-gather": "RS+norm+AG",
    "nccl all-reduce alone": "(NCCL AR)",
    "add-rmsnorm alone": "(norm)",
    "torch two-shot + add-rmsnorm": "torch 2s+n",
    "torch one-shot + add-rmsnorm": "torch 1s+n",
    "flashinfer one-shot": "FI 1-shot",
    "flashinfer two-shot": "FI 2-shot",
}


FP8 = ("fp8 static", "fp8 rows")
"""How the names of implementations with fp8 results end: one static scale, a scale a row."""


def key_of(impl: str, ctas: int | None) -> str:
    """What an implementation is known by within a number of tokens."""
    return impl if ctas is None else f"{impl}-{ctas}"


def short_name(row: dict[str, Any]) -> str:
    """A column's heading for a row's implementation; the default's blocks vary with the tokens and are left out."""
    name = _SHORT.get(row["impl"], row["impl"])
    return f"{name} {row['ctas']}" if row["impl"] == "tokenweave two-shot" else name


def progress(rows: list[dict[str, Any]]) -> str:
    """One line for one number of tokens: ours and the best baseline."""
    first, best, rival = rows[0], _best(rows, "ours"), _best(rows, "rival")
    text = f"hidden {first['hidden']}, {first['tokens']} tokens:"
    if best is not None:
        text += f" {short_name(best)} {best['us']:.1f} us"
    if rival is not None:
        text += f", {short_name(rival)} {rival['us']:.1f} us"
    if best is not None and rival is not None:
        text += f", ratio {best['ratio_to_best_rival']:.3f} [{best['ratio_low']:.3f}, {best['ratio_high']:.3f}]"
    return text


def text(result: dict[str, Any]) -> str:
    """A table a hidden size: microseconds of all implementations, and ours over the best baseline with its interval."""
    parts = [machine_line(result["environment"], result["rows"][0]["ranks"])] if result["rows"] else []
    for hidden in result["config"]["hidden"]:
        rows = [row for row in result["rows"] if row["hidden"] == hidden]
        if rows:
            parts.append(_table(hidden, [row for row in rows if row["kind"] != "fp8"]))
            if any(row["kind"] == "fp8" for row in rows):
                parts.append(_fp8_table(hidden, rows))
    skipped: dict[tuple[str, str], list[str]] = {}
    for skip in result["skipped"]:
        skipped.setdefault((skip["impl"], skip["error"]), []).append(
            str(skip.get("tokens", f"hidden {skip['hidden']}"))
        )
    if skipped:
        lines = [f"  {impl} at {', '.join(at)}: {error}" for (impl, error), at in skipped.items()]
        parts.append("not measured:\n" + "\n".join(lines))
    return "\n\n".join(parts)


def finish(result: dict[str, Any]) -> None:
    """Adds what published tables are made of: the machine as a line, and ours beside the best baseline of every size."""
    rows = result["rows"]
    if not rows:
        return
    environment = result["environment"]
    clocks = [row["clocks"]["sm_mhz"] for row in rows if row["clocks"] and row["clocks"]["sm_mhz"]]
    power = [row["clocks"]["power_w"] for row in rows if row["clocks"] and row["clocks"]["power_w"]]
    environment["while_measuring"] = {"sm_mhz": _span(clocks), "power_w": _span(power)}
    result["machine"] = machine_line(environment, rows[0]["ranks"])
    cells = []
    for hidden, tokens in dict.fromkeys((row["hidden"], row["tokens"]) for row in rows):
        same = [row for row in rows if (row["hidden"], row["tokens"]) == (hidden, tokens)]
        ours, rival = _best(same, "ours"), _best(same, "rival")
        if ours is None or rival is None:
            continue
        interval = f"{ours['ratio_to_best_rival']:.2f} ({ours['ratio_low']:.2f}-{ours['ratio_high']:.2f})"
        cells.append([hidden, tokens, ours["us"], short_name(ours), rival["us"], short_name(rival), interval])
    if cells:
        sizes = ", ".join(str(hidden) for hidden in dict.fromkeys(row["hidden"] for row in rows))
        result["table"] = {
            "title": f"Fused all-reduce + residual + RMSNorm, {rows[0]['ranks']} GPUs, hidden {sizes}, {rows[0]['dtype']}",
            "columns": [
                "hidden",
                "tokens",
                "ours, us",
                "which",
                "best baseline, us",
                "which",
                "ours / baseline (95 %)",
            ],
            "rows": cells,
            "note": f"Medians of {result['config']['rounds']} paired rounds of CUDA-graph replays, the slowest rank's time; "
            "the best of ours beside the best baseline, below 1 ours is faster.",
        }


def _table(hidden: int, rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(short_name(row) for row in rows))
    order = {kind: i for i, kind in enumerate(("ours", "rival", "part"))}
    kinds = {short_name(row): row["kind"] for row in rows}
    names.sort(key=lambda name: order[kinds[name]])
    lines = [["tokens", *names, "ours/baseline", "95 %", ""]]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        same = {short_name(row): row for row in rows if row["tokens"] == tokens}
        cells = [f"{same[name]['us']:.1f}" if name in same else "-" for name in names]
        ours = _best(list(same.values()), "ours")
        ratio = ["-", "-", ""]
        if ours is not None and ours["ratio_to_best_rival"] is not None:
            verdict = "slower" if ours["ratio_low"] > 1 else "faster" if ours["ratio_high"] < 1 else "equal"
            ratio = [f"{ours['ratio_to_best_rival']:.3f}", f"{ours['ratio_low']:.3f}-{ours['ratio_high']:.3f}", verdict]
        lines.append([str(tokens), *cells, *ratio])
    best = _best(rows, "ours", by="percent_of_wire")
    most = f"; at most {best['percent_of_wire']:.0f} % of wire, {best['gb_s']:.0f} GB/s" if best is not None else ""
    return (
        f"hidden {hidden}, {rows[0]['dtype']}, {rows[0]['ranks']} ranks, us (lower is better){most}\n{_aligned(lines)}"
    )


def _fp8_table(hidden: int, rows: list[dict[str, Any]]) -> str:
    """A line a kernel, number of blocks and tokens: unquantised and both kinds of fp8, with their times over it."""
    dtype = rows[0]["dtype"]
    lines = [
        [
            "tokens",
            "kernel",
            "CTAs",
            f"{dtype}, us",
            *(head for kind in FP8 for head in (f"{kind}, us", "ratio", "95 %")),
        ]
    ]
    keys = {(row["tokens"], key_of(row["impl"], row["ctas"])): row for row in rows}
    quantised = [row for row in rows if row["kind"] == "fp8"]
    for tokens, key in dict.fromkeys((row["tokens"], row["unquantised"]) for row in quantised):
        same = [row for row in quantised if (row["tokens"], row["unquantised"]) == (tokens, key)]
        plain, name = keys.get((tokens, key)), same[0]["impl"].removeprefix("tokenweave ").split(" fp8")[0]
        line = [str(tokens), name, str(same[0]["ctas"] or "-"), "-" if plain is None else f"{plain['us']:.1f}"]
        for kind in FP8:
            row = next((row for row in same if row["impl"].endswith(kind)), None)
            line += _fp8_cells(row)
        lines.append(line)
    title = f"hidden {hidden}, {rows[0]['ranks']} ranks: fp8 results over {dtype} ones of as many blocks, below 1 fp8 is faster"
    return f"{title}\n{_aligned(lines)}"


def _fp8_cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    ratio, low, high = (row[f"ratio_to_unquantised{end}"] for end in ("", "_low", "_high"))
    compared = ["-"] * 2 if ratio is None else [f"{ratio:.3f}", f"{low:.3f}-{high:.3f}"]
    return [f"{row['us']:.1f}", *compared]


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _best(rows: list[dict[str, Any]], kind: str, by: str = "us") -> dict[str, Any] | None:
    among = [row for row in rows if row["kind"] == kind]
    sign = 1 if by == "us" else -1
    return min(among, key=lambda row: sign * row[by], default=None)


def _span(spans: list[dict[str, float]]) -> dict[str, float] | None:
    if not spans:
        return None
    middle = sorted(span["median"] for span in spans)[len(spans) // 2]
    return {"low": min(s["low"] for s in spans), "median": middle, "high": max(s["high"] for s in spans)}
