"""The result of ``bench vllm``: rows from samples, ratios with their intervals, and text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenweave.bench.environment import machine_line
from tokenweave.bench.timing import Estimate, median_estimate, ratio_estimate
from tokenweave.bench.vllm.table import table

STOCK = ("default", "best")
UNITS = {"prefill": "tokens", "decode": "batch"}
_DRAWS = 2000


def finish(
    result: dict[str, Any], samples: Mapping[tuple[str, int], Mapping[str, Sequence[float]]], paired: bool
) -> dict[str, Any]:
    """A copy of ``result`` with the rows of all samples so far, speed-ups over the stock engines, and compared outputs.

    Args:
        samples: (``"prefill"`` or ``"decode"``, size) -> configuration -> seconds.
        paired: whether samples at the same place belong to the same round.
    """
    names = list(result["config"]["configurations"])
    rows = [
        _row(phase, size, name, times, paired)
        for (phase, size), times in sorted(samples.items())
        for name in sorted(times, key=names.index)
    ]
    trace = [dict(row) for row in result["rows"] if row["phase"] == "trace"]
    for row, stock in itertools.product(trace, STOCK):
        same = [
            other["requests_per_s"]
            for other in trace
            if (other["configuration"], other["trace"]) == (stock, row["trace"])
        ]
        if same and row["configuration"] != stock:
            row[f"throughput_over_{stock}"] = row["requests_per_s"] / (sum(same) / len(same))
    how = (
        "paired: all engines were held side by side, one working at a time; each round measured every one, in random order"
        if paired
        else "not paired: the engines ran one after the other, so clocks and temperature differ between them too"
    )
    environment = {**result["environment"], "while_measuring": _clocks(result["clocks"])}
    finished = {
        **result,
        "environment": environment,
        "machine": _machine(environment, result),
        "pairing": how,
        "rows": rows + trace,
        "compared": compare(result["outputs"]),
    }
    shown = table(finished)
    return finished if shown is None else {**finished, "table": shown}


def _row(phase: str, size: int, name: str, times: Mapping[str, Sequence[float]], paired: bool) -> dict[str, Any]:
    mine = median_estimate([seconds * 1e3 for seconds in times[name]])
    row = {
        "phase": phase,
        "configuration": name,
        UNITS[phase]: size,
        "ms": mine.value,
        "ms_low": mine.low,
        "ms_high": mine.high,
        "samples": len(times[name]),
    }
    for stock in STOCK:
        if stock in times and stock != name:
            ratio = _ratio(times[stock], times[name], paired)
            row |= {
                f"speedup_over_{stock}": ratio.value,
                f"speedup_over_{stock}_low": ratio.low,
                f"speedup_over_{stock}_high": ratio.high,
            }
    return row


def _ratio(theirs: Sequence[float], ours: Sequence[float], paired: bool) -> Estimate:
    """theirs / ours with its 95 % interval; unpaired, of the medians of independent resamplings."""
    if paired and len(theirs) == len(ours):
        return ratio_estimate(theirs, ours)
    random = np.random.default_rng(0)
    drawn = [np.median(random.choice(np.asarray(times), (_DRAWS, len(times))), axis=1) for times in (theirs, ours)]
    low, high = np.percentile(drawn[0] / drawn[1], (2.5, 97.5))
    return Estimate(float(np.median(theirs) / np.median(ours)), float(low), float(high))


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile; None of nothing."""
    if not values:
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}


def served(requests: list[dict[str, Any]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """A trace's throughput and waiting times, from what ``vllm_engine.Server.replay`` took and gave."""
    seconds = max(answer["last"] for answer in answers)
    first = [(answer["first"] - answer["sent"]) * 1e3 for answer in answers]
    later = [(a["last"] - a["first"]) / (a["count"] - 1) * 1e3 for a in answers if a["count"] > 1]
    made = sum(answer["count"] for answer in answers)
    return {
        "requests": len(requests),
        "seconds": seconds,
        "requests_per_s": len(requests) / seconds,
        "output_tokens_per_s": made / seconds,
        "tokens_per_s": (made + sum(request["prompt"] for request in requests)) / seconds,
        "ttft_ms": percentiles(first),
        "tpot_ms": percentiles(later),
    }


def compare(outputs: Mapping[str, Mapping[str, list[list[int]]]]) -> list[dict[str, Any]]:
    """How much greedy tokens differ: between configurations, prompts one by one; and within one, alone against batched."""
    pairs = [((name, "alone"), (name, "batch")) for name in outputs]
    pairs += [((a, "alone"), (b, "alone")) for a, b in itertools.combinations(outputs, 2)]
    found = []
    for (first, how), (second, other) in pairs:
        requests = list(zip(outputs[first][how], outputs[second][other], strict=True))
        same = [
            sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=True))) for a, b in requests
        ]
        total = sum(len(a) for a, _ in requests)
        found.append(
            {
                "first": f"{first}, {how}",
                "second": f"{second}, {other}",
                "requests": len(requests),
                "equal": sum(length == len(a) for length, (a, _) in zip(same, requests, strict=True)),
                "equal_first_token": sum(length > 0 for length in same),
                "tokens_before_a_difference": sum(same) / total if total else 1.0,
            }
        )
    return found


def text(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    parts = [result["machine"], result["pairing"]]
    names = list(result["config"]["configurations"])
    for phase, title in (("prefill", "prefill of one prompt, ms"), ("decode", "decoding, ms a token")):
        rows = [row for row in result["rows"] if row["phase"] == phase]
        if rows:
            parts.append(_table(title, UNITS[phase], rows, names))
    traces = [row for row in result["rows"] if row["phase"] == "trace"]
    for name in dict.fromkeys(row["trace"] for row in traces):
        parts.append(_trace_table(name, [row for row in traces if row["trace"] == name]))
    if result["compared"]:
        lines = [
            f"  {c['first']} and {c['second']}: {c['equal']} of {c['requests']} requests equal, first tokens of "
            f"{c['equal_first_token']}, {c['tokens_before_a_difference']:.0%} of the tokens before a difference"
            for c in result["compared"]
        ]
        parts.append("\n".join(["greedy tokens:", *lines]))
    if any("start_s" in engine for engine in result["engines"]):
        parts.append(_starts(result["engines"]))
    parts += [f"FAILED: {failed['configuration']}" for failed in result["failed"]]
    return "\n\n".join(parts)


def _table(title: str, unit: str, rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    over = [(name, stock) for name in names for stock in STOCK if name not in STOCK and stock in names]
    lines = [[unit, *names, *(f"{name} over {stock}" for name, stock in over)]]
    for size in dict.fromkeys(row[unit] for row in rows):
        same = {row["configuration"]: row for row in rows if row[unit] == size}
        cells = [f"{same[name]['ms']:.2f}" if name in same else "-" for name in names]
        for name, stock in over:
            key = f"speedup_over_{stock}"
            row = same.get(name, {})
            cells.append(f"{row[key]:.3f} ({row[f'{key}_low']:.3f}-{row[f'{key}_high']:.3f})" if key in row else "-")
        lines.append([str(size), *cells])
    return f"{title}; median, speed-up with its 95 % interval\n{_aligned(lines)}"


def _trace_table(name: str, rows: list[dict[str, Any]]) -> str:
    lines = [["", "requests/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99, ms", "over default", "over best"]]
    for row in rows:
        first, later = row["ttft_ms"], row["tpot_ms"] or {"p50": float("nan"), "p99": float("nan")}
        over = [row.get(f"throughput_over_{stock}") for stock in STOCK]
        lines.append(
            [
                row["configuration"],
                f"{row['requests_per_s']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                *(f"{value:.1f}" for value in (first["p50"], first["p99"], later["p50"], later["p99"])),
                *("-" if value is None else f"{value:.3f}" for value in over),
            ]
        )
    counts = "".join(f"\n{row['configuration']}: {_counted(row['plugin'])}" for row in rows if row.get("plugin"))
    return f"{rows[0]['requests']} requests of {name}\n{_aligned(lines)}{counts}"


def _counted(counts: Mapping[str, int]) -> str:
    """``steps mode=woven 179, ...``."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _starts(engines: list[dict[str, Any]]) -> str:
    lines = [["engine", "start, s", "KV cache, tokens", "requests a step", "graphs", "up to", "model class"]]
    for engine in engines:
        if "start_s" in engine:
            lines.append(
                [
                    engine["configuration"],
                    f"{engine['start_s']:.0f}",
                    str(engine["kv_tokens"]),
                    str(engine["max_num_seqs"]),
                    engine["cudagraph_mode"],
                    str(engine["largest_graph"]),
                    str(engine["model_class"]).rpartition(".")[2],
                ]
            )
    return _aligned(lines)


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _machine(environment: dict[str, Any], result: dict[str, Any]) -> str:
    version = next((engine["vllm"] for engine in result["engines"] if "vllm" in engine), "unknown")
    line = machine_line(environment, result["config"]["ranks"])
    return f"{result['config']['model']}, vLLM {version}, {line}"


def _clocks(clocks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Over all phases: lowest, middle and highest clock and power of the watched GPU."""
    found: dict[str, Any] = {}
    for name in ("sm_mhz", "power_w"):
        spans = [entry[name] for entry in clocks if entry.get(name)]
        middle = sorted(span["median"] for span in spans)
        found[name] = (
            {
                "low": min(span["low"] for span in spans),
                "median": middle[len(middle) // 2],
                "high": max(span["high"] for span in spans),
            }
            if spans
            else None
        )
    return found if any(found.values()) else None
