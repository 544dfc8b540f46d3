"""The latency benchmark's result: a row a mode and size, a table, and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenweave.bench.environment import machine_line
from tokenweave.bench.latency.finals import Finals, Times
from tokenweave.bench.steps import Variant
from tokenweave.bench.timing import Estimate, median_estimate, ratio_estimate
from tokenweave.planning import Mode, Plan


@dataclass(frozen=True)
class Measured:
    """What was measured at one number of tokens.

    Attributes:
        layers: that were measured. replays: of the step in a sample, one after the other.
        finals: mode -> the variant that is shown, and the times, on the slowest rank.
        host, errors: by the variant's key. graphs: by it too, what the step's graph takes on this rank: ``mib`` of GPU memory
            (the pool of its activations and its launches), and ``capture_s``, the seconds of its capture.
        clocks: during the rounds that are shown. sustained: mode -> as :func:`tokenweave.bench.latency.measure.sustained`, or None.
    """

    tokens: int
    layers: int
    replays: int
    finals: Finals
    host: Mapping[str, dict[str, float]]
    errors: Mapping[str, float | None]
    graphs: Mapping[str, dict[str, float]]
    clocks: dict[str, Any]
    sustained: Mapping[str, dict[str, Any] | None]

    def of(self, mode: str) -> Sequence[float]:
        """The times of a mode's variant."""
        return self.finals.times[self.finals.chosen[mode].key]


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """A row a mode; "compute" is in the sequential one's shares alone."""
    rows = [_row(measured, mode) for mode in measured.finals.chosen if mode != "compute"]
    for row in rows:
        row["shares"] = _shares(measured) if row["mode"] == "sequential" else None
    return rows


def _row(measured: Measured, mode: str) -> dict[str, Any]:
    variant, mine, sustained = measured.finals.chosen[mode], measured.of(mode), measured.sustained[mode]
    step = median_estimate(mine)

    def against(other: str) -> dict[str, float] | None:
        """How often this mode fits into ``other``'s time, with its 95 % interval."""
        return _plain(ratio_estimate(measured.of(other), mine)) if other in measured.finals.chosen else None

    seen = sustained or measured.clocks
    draw, speed = seen["power_w"], seen["sm_mhz"]
    joules = None if sustained is None else sustained["joules"]
    return {
        "tokens": measured.tokens,
        "mode": mode,
        "variant": variant.name,
        "ms": step.value / 1e3,
        "ms_low": step.low / 1e3,
        "ms_high": step.high / 1e3,
        "ms_per_layer": step.value / 1e3 / measured.layers,
        "speedup": against("sequential"),
        "no_comm_ratio": against("no_comm"),
        "best_single": _best_single(measured) if mode == "auto" else None,
        "replays": measured.replays,
        "plan": None if variant.plan is None else plan_json(variant.plan),
        "host_ms": measured.host[variant.key],
        "host_ms_per_layer": {how: ms / measured.layers for how, ms in measured.host[variant.key].items()},
        "error": measured.errors[variant.key],
        "graph": measured.graphs[variant.key],
        "power_w": draw and draw["median"],
        "sm_mhz": speed and speed["median"],
        "limits": seen.get("limits"),
        "sustained": sustained,
        "joules_per_token": None if joules is None else joules / measured.tokens,
    }


def finalist_rows(tokens: int, among: Sequence[Variant], times: Times) -> list[dict[str, Any]]:
    """The times of everything in the second pass."""
    found = []
    for variant in among:
        step = median_estimate(times[variant.key])
        ms = {"ms": step.value / 1e3, "ms_low": step.low / 1e3, "ms_high": step.high / 1e3}
        found.append({"tokens": tokens, "mode": variant.mode, "variant": variant.name, **ms})
    return found


def _best_single(measured: Measured) -> dict[str, Any] | None:
    """The fastest of the modes that auto picks among, and how often auto's time fits into its."""
    mode = measured.finals.best_single
    if mode is None:
        return None
    return {"mode": mode, "ratio": _plain(ratio_estimate(measured.of(mode), measured.of("auto")))}


def _shares(measured: Measured) -> dict[str, dict[str, float]] | None:
    """Of the sequential step, what goes when collectives do, and then what goes when norms do; in the same rounds."""
    if not {"sequential", "no_comm", "compute"} <= measured.finals.chosen.keys():
        return None
    rounds = list(zip(measured.of("sequential"), measured.of("no_comm"), measured.of("compute"), strict=True))
    return {
        "communication": _plain(median_estimate([1 - bare / whole for whole, bare, _ in rounds])),
        "rmsnorm": _plain(median_estimate([(bare - compute) / whole for whole, bare, compute in rounds])),
    }


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain values; ``gemm_sms`` as "gate_up/prefix" -> SMs, ``start_at`` sorted."""
    return {
        "mode": str(plan.mode),
        "split": plan.split,
        "ctas": plan.ctas,
        "cluster": plan.cluster,
        "gemm_sms": {f"{gemm}/{split}": sms for (gemm, split), sms in plan.gemm_sms.items()},
        "start_at": sorted(plan.start_at),
    }


def plan_of(values: Mapping[str, Any]) -> Plan:
    """The plan that :func:`plan_json` gave."""
    gemm_sms = {tuple(key.split("/")): sms for key, sms in values["gemm_sms"].items()}
    return Plan(
        Mode(values["mode"]),
        values["split"],
        values["ctas"],
        values["cluster"],
        gemm_sms,
        frozenset(values["start_at"]),
    )


def finish(result: dict[str, Any]) -> None:
    """Adds the machine as a line, and the published table: the modes of every size beside each other."""
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
    heads += [head for mode in ours for head in (f"{mode}: speed-up", f"no_comm / {mode}")]
    result["table"] = {
        "title": f"Prefill step, {settings['model']}, {settings['layers']} layers, {settings['ranks']} GPUs, {settings['dtype']}",
        "columns": ["tokens", *heads],
        "rows": cells,
        "note": f"Medians of {settings['rounds']} paired rounds of CUDA-graph replays, the slowest rank's time, with 95 % "
        "intervals. Speed-up: sequential / mode; sequential is the fastest of "
        f"{', '.join(dict.fromkeys(entry['variant'] for entry in result['sequential'])) or 'none'}, each with "
        f"a fused add-RMSNorm, chosen in {settings['first_rounds']} rounds before; no_comm removes the collectives and nothing else.",
    }


def _span(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"low": min(values), "median": sorted(values)[len(values) // 2], "high": max(values)}


def text(result: dict[str, Any]) -> str:
    """A line a size and mode, and what was found of each sequential step."""
    settings = result["config"]
    lines = [
        result.get("machine", ""),
        f"{settings['model']}, {settings['layers']} layers, {settings['ranks']} ranks, {settings['dtype']}, "
        f"transport {settings['transport']}; variants chosen in {settings['first_rounds']} paired rounds, shown by "
        f"{settings['rounds']} others",
        f"{'tokens':>6} {'mode':10} {'ms':>9} {'ms/layer':>9} {'vs sequential':>22} {'no_comm / it':>22} "
        f"{'host eager/graph':>17} {'a layer':>13} {'busy':>5} {'hidden':>6} {'waits':>6} {'W':>5} {'MHz':>5} {'limit':>6} {'mJ/tok':>7}  variant",
    ]
    lines += [_line(row) for row in result["rows"]]
    for row in result["rows"]:
        if row.get("shares"):
            shares = ", ".join(
                f"{name} {100 * share['value']:.1f} % [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"
                for name, share in row["shares"].items()
            )
            lines.append(f"{row['tokens']:>6} of the sequential step: {shares}")
    for row in result["rows"]:
        if row["best_single"]:
            mode, ratio = row["best_single"]["mode"], row["best_single"]["ratio"]
            lines.append(
                f"{row['tokens']:>6} best single mode / auto: {mode} / auto {ratio['value']:.3f} "
                f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
            )
    lines += _graph_lines(result["rows"])
    refused = [row for row in result["rows"] if row["sustained"] and row["sustained"]["energy"]["refused"]]
    if refused:
        first = refused[0]
        lines.append(
            f"no energy a token in {len(refused)} of {len(result['rows'])} rows; first at {first['tokens']} tokens, "
            f"{first['mode']}: {first['sustained']['energy']['refused']}"
        )
    lines += [f"WRONG: {wrong}" for wrong in result["wrong"]]
    return "\n".join(line for line in lines if line)


def _graph_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a size, with what each mode's graph takes; none of results without."""
    lines = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        found = [(row["mode"], row["graph"]) for row in rows if row["tokens"] == tokens and row.get("graph")]
        if found:
            each = ", ".join(f"{mode} {graph['mib']:,.0f} MiB, {graph['capture_s']:.1f} s" for mode, graph in found)
            lines.append(f"{tokens:>6} graphs, memory and time of the capture on rank 0: {each}")
    return lines


def _line(row: dict[str, Any]) -> str:
    ratios = [
        "-" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        for ratio in (row["speedup"], row["no_comm_ratio"])
    ]
    variant = row["variant"]
    if row["plan"] is not None and variant == "planned":
        plan = row["plan"]
        left = sorted(set(plan["gemm_sms"].values()))
        variant += f": {plan['mode']} cut {plan['split']} ctas {plan['ctas']} cluster {plan['cluster']} sms {left}"
        variant += f" start {'+'.join(plan['start_at'])}" if plan["start_at"] else ""
    traced = ["-"] * 3
    if (profile := row.get("profile")) is not None:
        of = profile["span_ms"]
        waits = max(profile["waiting_ms"]) if profile["waiting_ms"] else None
        parts = (profile["busy_ms"], profile["hidden_ms"], waits)
        traced = ["-" if part is None else f"{100 * part / of:.0f}%" for part in parts]
    limit = max(row["limits"], key=row["limits"].get)[:6] if row.get("limits") else "-"
    joules = "-" if row["joules_per_token"] is None else f"{1e3 * row['joules_per_token']:.1f}"
    return (
        f"{row['tokens']:>6} {row['mode']:10} {row['ms']:>9.3f} {row['ms_per_layer']:>9.4f} {ratios[0]:>22} "
        f"{ratios[1]:>22} {row['host_ms']['eager']:>9.2f}/{row['host_ms']['graph']:.3f} "
        f"{row['host_ms_per_layer']['eager']:>7.3f}/{row['host_ms_per_layer']['graph']:.3f} "
        f"{traced[0]:>5} {traced[1]:>6} {traced[2]:>6} "
        f"{row['power_w'] or 0:>5.0f} {row['sm_mhz'] or 0:>5.0f} {limit:>6} {joules:>7}  {variant}"
    )
