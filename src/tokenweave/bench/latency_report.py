"""The latency benchmark's result: a row a mode and size, the README's table, and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenweave.bench.environment import machine_line
from tokenweave.bench.latency_steps import Variant
from tokenweave.bench.timing import Estimate, median_estimate, ratio_estimate
from tokenweave.planning import Plan


def row_of(
    tokens: int,
    variant: Variant,
    chosen: dict[str, Variant],
    times: dict[str, list[float]],
    host: dict[str, dict[str, float]],
    errors: dict[str, float | None],
    clocks: dict[str, Any],
    sustained: dict[str, Any] | None,
    layers: int,
) -> dict[str, Any]:
    mine = times[variant.key]
    step = median_estimate(mine)

    def against(mode: str) -> dict[str, float] | None:
        """How often this mode fits into ``mode``'s time, with its 95 % interval."""
        if mode not in chosen:
            return None
        return _plain(ratio_estimate(times[chosen[mode].key], mine))

    draw = (sustained or clocks)["power_w"]
    speed = (sustained or clocks)["sm_mhz"]
    return {
        "tokens": tokens,
        "mode": variant.mode,
        "variant": variant.name,
        "ms": step.value / 1e3,
        "ms_low": step.low / 1e3,
        "ms_high": step.high / 1e3,
        "ms_per_layer": step.value / 1e3 / layers,
        "speedup": against("sequential"),
        "no_comm_ratio": against("no_comm"),
        "plan": None if variant.plan is None else plan_json(variant.plan),
        "host_ms": host[variant.key],
        "error": errors[variant.key],
        "power_w": draw and draw["median"],
        "sm_mhz": speed and speed["median"],
        "sustained": sustained,
        "joules_per_token": draw["median"] * sustained["ms"] / 1e3 / tokens if sustained and draw else None,
    }


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain values; ``gemm_sms`` as "gate_up/prefix" -> SMs."""
    return {
        "mode": str(plan.mode),
        "split": plan.split,
        "ctas": plan.ctas,
        "cluster": plan.cluster,
        "gemm_sms": {f"{gemm}/{split}": sms for (gemm, split), sms in plan.gemm_sms.items()},
    }


def finish(result: dict[str, Any]) -> None:
    """Adds the machine as a line, and the README's table: the modes of every size beside each other."""
    rows = result["rows"]
    if not rows or not result["environment"]:
        return
    settings, environment = result["config"], result["environment"]
    speeds = [row["sm_mhz"] for row in rows if row["sm_mhz"]]
    draws = [row["power_w"] for row in rows if row["power_w"]]
    environment["while_measuring"] = {"sm_mhz": _span(speeds), "power_w": _span(draws)}
    result["machine"] = machine_line(environment, settings["ranks"])
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    ours = [mode for mode in modes if mode not in ("sequential", "no_comm")]
    cells = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        same = {row["mode"]: row for row in rows if row["tokens"] == tokens}
        line = [tokens, *(round(same[mode]["ms"], 3) if mode in same else "-" for mode in modes)]
        for mode in ours:
            ratios = (same.get(mode, {}).get(name) for name in ("speedup", "no_comm_ratio"))
            line += [
                "-" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
                for ratio in ratios
            ]
        cells.append(line)
    heads = [f"{mode}, ms" for mode in modes]
    heads += [head for mode in ours for head in (f"sequential / {mode}", f"no_comm / {mode}")]
    result["readme"] = {
        "title": f"Prefill step, {settings['model']}, {settings['layers']} layers, {settings['ranks']} GPUs, {settings['dtype']}",
        "columns": ["tokens", *heads],
        "rows": cells,
        "note": f"Medians of {settings['rounds']} paired rounds of CUDA-graph replays, the slowest rank's time, with 95 % "
        "intervals of the ratios. sequential is the fastest of NCCL and torch's symmetric-memory all-reduces, each with "
        "a fused add-RMSNorm; no_comm removes the collectives and nothing else.",
    }


def _span(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"low": min(values), "median": sorted(values)[len(values) // 2], "high": max(values)}


def text(result: dict[str, Any]) -> str:
    """A line a size and mode."""
    settings = result["config"]
    lines = [
        result.get("machine", ""),
        f"{settings['model']}, {settings['layers']} layers, {settings['ranks']} ranks, {settings['dtype']}, "
        f"transport {settings['transport']}",
        f"{'tokens':>6} {'mode':10} {'ms':>9} {'ms/layer':>9} {'vs sequential':>22} {'no_comm / it':>22} "
        f"{'host eager/graph':>17} {'W':>5} {'MHz':>5}  variant",
    ]
    for row in result["rows"]:
        ratios = [
            "-" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            for ratio in (row["speedup"], row["no_comm_ratio"])
        ]
        variant = row["variant"]
        if row["plan"] is not None and variant == "planned":
            plan = row["plan"]
            left = sorted(set(plan["gemm_sms"].values()))
            variant += f": {plan['mode']} cut {plan['split']} ctas {plan['ctas']} cluster {plan['cluster']} sms {left}"
        lines.append(
            f"{row['tokens']:>6} {row['mode']:10} {row['ms']:>9.3f} {row['ms_per_layer']:>9.4f} {ratios[0]:>22} "
            f"{ratios[1]:>22} {row['host_ms']['eager']:>9.2f}/{row['host_ms']['graph']:.3f} "
            f"{row['power_w'] or 0:>5.0f} {row['sm_mhz'] or 0:>5.0f}  {variant}"
        )
    lines += [f"WRONG: {wrong}" for wrong in result["wrong"]]
    return "\n".join(line for line in lines if line)
