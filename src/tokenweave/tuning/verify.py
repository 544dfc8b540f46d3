"""How far a planner's predictions are from measured steps, and its plans from the best that a sweep finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from tokenweave.bench.latency.report import plan_of
from tokenweave.bench.latency.sweep import aligned
from tokenweave.planning import Planner

TOKENS = (72, 160, 330, 700, 1000, 1500, 2300, 3500, 5200, 7600, 11000, 15500)
"""No powers of two, from few tokens to many: what graphs and cuts round up and split unevenly."""
MODES = ("sequential", "fused", "woven", "auto", "no_comm")
PREDICTED = ("sequential", "fused", "woven", "no_comm")
SEQUENTIAL = "nccl"  # the all-reduce that is predicted; a rival's may be faster


@dataclass(frozen=True)
class Check:
    """One number of tokens.

    Attributes:
        predicted, measured: ms of a step by mode: with the plans that were measured, and up to the final norm (no vocabulary
            projection).
        chosen: the mode that the planner took.
        best: ms of the fastest of all that was measured beside it in the same rounds; with a sweep its winners too.
        chosen_ms: of the planner's choice in those rounds.
        winner: what was the fastest.
    """

    tokens: int
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    chosen: str
    chosen_ms: float
    best: float
    winner: str

    def error(self, mode: str) -> float | None:
        """Of the prediction: +0.05 is 5 % too long. None if the mode was not measured."""
        if mode not in self.measured or mode not in self.predicted:
            return None
        return self.predicted[mode] / self.measured[mode] - 1

    @property
    def loss(self) -> float:
        """How much longer the choice takes than the fastest."""
        return self.chosen_ms / self.best - 1

    def as_json(self) -> dict[str, Any]:
        errors = {mode: self.error(mode) for mode in PREDICTED}
        return {
            "tokens": self.tokens,
            "predicted_ms": dict(self.predicted),
            "measured_ms": dict(self.measured),
            "errors": {mode: error for mode, error in errors.items() if error is not None},
            "chosen": self.chosen,
            "chosen_ms": self.chosen_ms,
            "best_ms": self.best,
            "winner": self.winner,
            "loss": self.loss,
        }


def checks(result: Mapping[str, Any], planner: Planner) -> list[Check]:
    """A :mod:`tokenweave.bench.latency.bench` result, beside what its planner predicts.

    Args:
        result: of the modes sequential (NCCL's all-reduce among them), fused, woven, auto and no_comm.
        planner: that predicts the plans that were measured, for as many layers.
    """
    found = []
    for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
        rows = {row["mode"]: row for row in result["rows"] if row["tokens"] == tokens}
        explanation = planner.explain(tokens, mode="auto")
        predicted = {mode: ms for mode, ms in explanation.predicted_ms.items() if mode in PREDICTED}
        measured = {mode: row["ms"] for mode, row in rows.items() if mode in PREDICTED}
        if "sequential" in rows and (ms := _sequential(result, rows["sequential"])) is not None:
            measured["sequential"] = ms
        for mode in ("fused", "woven"):
            if mode in rows:
                plan, measured[mode] = _planned(result, rows, mode)
                predicted[mode] = planner.plan_us(tokens, plan_of(plan)) / 1e3
        head = planner.model.head_us(1) / 1e3
        predicted = {mode: ms - head for mode, ms in predicted.items()}
        auto = rows["auto"]
        rivals = {f"{mode} {row['variant']}": row["ms"] for mode, row in rows.items() if mode != "no_comm"}
        winner = min(rivals, key=lambda name: rivals[name])
        found.append(Check(tokens, predicted, measured, auto["plan"]["mode"], auto["ms"], rivals[winner], winner))
    return found


def _sequential(result: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
    """ms of the planner's own all-reduce in the rounds of ``row``, that of the fastest one; None if it was not measured.

    An all-reduce that was out after the first pass has its time there, in the ratio of the fastest one's two times.
    """
    if row["variant"] == SEQUENTIAL:
        return float(row["ms"])
    for entry in result.get("finalists", ()):  # results of one pass have none
        if (entry["tokens"], entry["mode"], entry["variant"]) == (row["tokens"], "sequential", SEQUENTIAL):
            return float(entry["ms"])
    first = {entry["variant"]: entry["ms"] for entry in result["sequential"] if entry["tokens"] == row["tokens"]}
    if SEQUENTIAL not in first:
        return None
    return float(first[SEQUENTIAL] * row["ms"] / first.get(row["variant"], row["ms"]))


def _planned(
    result: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], mode: str
) -> tuple[Mapping[str, Any], float]:
    """A mode's planned step: its plan, and its ms beside the others.

    After a sweep the mode's row is of the fastest plan that was tried. If that is another one than planned and auto's too, the
    planned one's few replays are taken, as the row is to its own: GPUs under a power limit run faster in few replays than in
    the rounds of many.
    """
    row = rows[mode]
    quick = {
        entry["variant"]: entry
        for entry in reversed(result["sweep"])
        if (entry["tokens"], entry["mode"]) == (row["tokens"], mode)
    }
    if row["variant"] == "planned" or "planned" not in quick:
        return row["plan"], float(row["ms"])
    plan = quick["planned"]["plan"]
    for same in (row, rows["auto"]):
        if same["plan"] == plan:
            return plan, float(same["ms"])
    return plan, float(quick["planned"]["ms"] * row["ms"] / quick[row["variant"]]["ms"])


def summary(found: Sequence[Check]) -> dict[str, dict[str, float]]:
    """Median and largest of the errors' sizes by mode, and of the losses (``"choice"``)."""
    sizes = {mode: [abs(e) for check in found if (e := check.error(mode)) is not None] for mode in PREDICTED}
    sizes["choice"] = [check.loss for check in found]
    return {name: {"median": median(values), "largest": max(values)} for name, values in sizes.items() if values}


def conclusions(found: Sequence[Check], result: Mapping[str, Any]) -> dict[str, Any]:
    """What a result file says beside what was measured, of JSON's types: "checks", "summary" and "tables".

    Args:
        result: as :func:`checks`.
    """
    return {
        "checks": [check.as_json() for check in found],
        "summary": summary(found),
        "tables": tables(found, result),
    }


def tables(found: Sequence[Check], result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For documents: "verify-MODEL", predictions beside what they are of; with a sweep "schemes-MODEL" too.

    Args:
        result: as :func:`checks`.
    """
    config = result["config"]
    name = str(config["model"])
    what = f"{name}, {config['layers']} layers, {config['ranks']} GPUs"
    modes = [mode for mode in PREDICTED if any(mode in check.measured for check in found)]
    sizes = summary(found)
    made = {
        f"verify-{name.lower()}": {
            "title": f"Steps of {what}, measured / predicted",
            "columns": ["tokens", *modes, "chosen", "slower than the fastest"],
            "rows": [
                [check.tokens, *(_cell(check, mode) for mode in modes), check.chosen, f"{check.loss:.1%}"]
                for check in found
            ],
            "note": "ms. Errors: "
            + "; ".join(
                f"{mode} median {each['median']:.1%}, largest {each['largest']:.1%}" for mode, each in sizes.items()
            )
            + ". The fastest is that of every mode and of all that a sweep tried.",
        }
    }
    if (schemes := _schemes(result["sweep"])) is not None:
        made[f"schemes-{name.lower()}"] = schemes | {"title": f"Woven steps of {what}, cut in the middle, by scheme"}
    return made


def _cell(check: Check, mode: str) -> str:
    error = check.error(mode)
    return "-" if error is None else f"{check.measured[mode]:.3f} / {check.predicted[mode]:.3f} ({error:+.1%})"


def _schemes(sweep: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How often every scheme takes the fastest one's time, by tokens; the best on average first. None without any."""
    times: dict[str, dict[int, float]] = {}
    for entry in sweep:
        if entry["mode"] != "woven" or entry["variant"] == "planned":
            continue
        plan = plan_of(entry["plan"])
        if plan.split == aligned(entry["tokens"] // 2, entry["tokens"]):
            of = times.setdefault(str(plan.scheme), {})
            of[entry["tokens"]] = min(entry["ms"], of.get(entry["tokens"], entry["ms"]))
    tokens = list(dict.fromkeys(n for of in times.values() for n in of))
    best = {n: min(of[n] for of in times.values() if n in of) for n in tokens}
    ratios = {scheme: {n: of[n] / best[n] for n in of} for scheme, of in times.items()}
    rows = [
        [scheme, f"{mean(of.values()):.3f}", *(f"{of[n]:.2f}" if n in of else "-" for n in tokens)]
        for scheme, of in sorted(ratios.items(), key=lambda pair: mean(pair[1].values()))
    ]
    if not rows:
        return None
    return {
        "columns": ["blocks / cluster, GEMMs", "mean", *(str(n) for n in tokens)],
        "rows": rows,
        "note": "Times the fastest scheme's time at so many tokens.",
    }


def text(found: Sequence[Check]) -> str:
    """A line a number of tokens: measured / predicted ms (error) by mode, the choice and what it loses."""
    modes = [mode for mode in PREDICTED if any(mode in check.measured for check in found)]
    lines = ["tokens  " + "".join(f"{mode:>28}" for mode in modes) + "  chosen      loss  fastest"]
    for check in found:
        cells = [f"{_cell(check, mode):>28}" for mode in modes]
        lines.append(
            f"{check.tokens:>6}  " + "".join(cells) + f"  {check.chosen:10} {check.loss:>5.1%}  {check.winner}"
        )
    for name, sizes in summary(found).items():
        lines.append(f"{name}: median {sizes['median']:.1%}, largest {sizes['largest']:.1%}")
    return "\n".join(lines)
