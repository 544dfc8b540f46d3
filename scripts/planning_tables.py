"""Fills the tables of docs/planning.md and docs/ranks.md: what the planner predicts, beside what was measured where something was, so
that no figure is typed by hand.

python scripts/planning_tables.py           # rewrite the tables
python scripts/planning_tables.py --check   # exit 1 if they are out of date
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from generated import command

from tokenweave.models import read_config
from tokenweave.models.config import ModelConfig
from tokenweave.planning import EAGER, GPUS, GRAPH, Mode, Planner, Predictor, comm, machine_of, predict_step

ROOT = Path(__file__).parent.parent
DOCUMENT, RANKS = ROOT / "docs" / "planning.md", ROOT / "docs" / "ranks.md"
PUBLISHED = ROOT / "benchmarks" / "published"
RESULTS = ROOT / "benchmarks" / "results"


def filled(document: str, sections: Mapping[str, Callable[[], str]] | None = None) -> str:
    """``document`` with the text between each section's markers replaced. Raises ValueError where one has no markers.

    Args:
        sections: name in the markers -> text; None for docs/planning.md's.
    """
    for name, section in (SECTIONS if sections is None else sections).items():
        begin, end = f"<!-- {name}: begin, written by scripts/planning_tables.py -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(document)) != 1:
            raise ValueError(f"the document needs one pair of lines {begin!r} and {end!r}, in this order")
        text = f"{begin}\n{section()}\n{end}"
        document = pattern.sub(lambda _, text=text: text, document)
    return document


def _published_prefill() -> str:
    config, errors, lines = read_config("Llama-3.3-70B"), [], []
    for row in _csv("llama-3.3-70b.csv"):
        tp, tokens = int(row["tp"]), int(row["tokens"])
        step = predict_step(config, machine_of("h100", tp, "multimem", EAGER), [(tokens, 0)])
        pairs = [
            (row["baseline_ms"], step.sequential_us),
            (row["no_comm_ms"], step.no_comm_us),
            (row["tokenweave_ms"], step.woven_us or 0.0),
        ]
        errors += [us / 1e3 / ms - 1 for ms, us in pairs]
        lines.append([str(tp), str(tokens), *[_pair(ms, us / 1e3) for ms, us in pairs]])
    table = _table(["ranks", "tokens", "sequential", "no_comm", "woven"], lines)
    return f"{table}\n\n{_summary(errors)}"


def _published_kernel() -> str:
    errors, lines = [], []
    for row in _csv("fused_kernel.csv"):
        tokens = int(row["tokens"])
        cells = [str(tokens)]
        for key, us in row.items():
            if key.startswith("ctas_"):
                ours = float(comm.fused_us(tokens, 8192, 8, GPUS["h100"], "multimem", int(key[5:])))
                errors.append(ours / us - 1)
                cells.append(_pair(us, ours))
        lines.append(cells)
    ctas = [key[5:] for key in _csv("fused_kernel.csv")[0] if key.startswith("ctas_")]
    return f"{_table(['tokens', *[f'{n} CTAs' for n in ctas]], lines)}\n\n{_summary(errors)}"


def _collective() -> str:
    """p2p, any number of H200, as this package's kernels run."""
    kinds = {"tokenweave one-shot": "one-shot", "tokenweave two-shot default": "alone", "tokenweave two-shot": ""}
    columns = ("4 CTAs", "8 CTAs", "alone", "one-shot")
    errors, lines = [], []
    for path in sorted(RESULTS.glob("h200x*-kernel-*.json")):
        cells: dict[tuple[int, int, int], dict[str, str]] = {}
        for row in json.loads(path.read_text())["rows"]:
            if (kind := kinds.get(row["impl"])) is None:
                continue
            tokens, hidden, ranks = row["tokens"], row["hidden"], row["ranks"]
            if kind == "one-shot":
                ours = float(comm.one_shot_us(tokens, hidden, ranks, GPUS["h200"]))
            else:
                ctas, alone = (None, True) if kind else (row["ctas"], False)
                ours = float(comm.two_shot_us(tokens, hidden, ranks, GPUS["h200"], "p2p", ctas, alone=alone))
            errors.append(ours / row["us"] - 1)
            key = kind or f"{row['ctas']} CTAs"
            cells.setdefault((ranks, hidden, tokens), {})[key] = _pair(row["us"], ours)
        lines += [
            [*map(str, key), *[row.get(column, "") for column in columns]]
            for key, row in cells.items()
            if key[2] in (1, 64, 512, 2048, 16384)
        ]
    lines.sort(key=lambda line: [int(cell) for cell in line[:3]])
    table = _table(["ranks", "hidden", "tokens", *columns], lines)
    return f"{table}\n\nOf all sizes and numbers of blocks measured, {_summary(errors)}"


def _layers() -> str:
    """Llama-3.1-8B on 2 and 4 H200, a prototype's layers in one graph."""
    config, lines, errors = read_config("Llama-3.1-8B"), [], []
    result = json.loads((RESULTS / "h200-prototype-layers.json").read_text())
    modes = ("sequential", "fused", "woven", "no_comm")
    for row in result["rows"]:
        planner = Planner(config, mode="auto", costs=machine_of("h200", row["ranks"], "p2p"))
        explained = planner.explain(row["tokens"])
        ours = {mode: explained.predicted_ms[mode] / config.layers for mode in modes}
        errors += [ours[mode] / row[mode] - 1 for mode in modes]
        plan = explained.plan
        chosen = f"{plan.mode}" + (f" {plan.split}, {plan.ctas} CTAs" if plan.split else "")
        lines.append(
            [str(row["ranks"]), str(row["tokens"]), *[_pair(row[mode], ours[mode], 3) for mode in modes], chosen]
        )
    return f"{_table(['ranks', 'tokens', *modes, 'chosen'], lines)}\n\n{_summary(errors)}"


def _models() -> str:
    """Whole models with this package's engine, the vocabulary's projection left out as the benchmark does. Ranks are named where
    there are other numbers than two."""
    modes, lines = ("sequential", "fused", "woven", "no_comm"), []
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("h200x*-latency-*.json"))]
    several = {result["config"]["ranks"] for result in results} != {2}
    errors: dict[str, list[float]] = {}
    for result in results:
        name, layers, ranks = (result["config"][key] for key in ("model", "layers", "ranks"))
        config = dataclasses.replace(read_config(name), layers=layers)
        attention = (result["environment"].get("attention") or {"value": "torch"})["value"]
        runtime = dataclasses.replace(GRAPH, flash3=attention != "torch")
        planner = Planner(config, mode="auto", costs=machine_of("h200", ranks, "p2p", runtime))
        head = planner.model.head_us(1) / 1e3
        measured: dict[int, dict[str, float]] = {}
        for row in result["rows"]:
            of_mode = measured.setdefault(row["tokens"], {})
            of_mode[row["mode"]] = min(row["ms"], of_mode.get(row["mode"], row["ms"]))
        for tokens, ms in measured.items():
            explained = planner.explain(tokens)
            ours = {mode: explained.predicted_ms[mode] - head for mode in modes}
            on = f", {ranks} ranks" if several else ""
            kind = ("Mixtures of experts" if config.experts else "Dense models") + on
            errors.setdefault(kind, []).extend(ours[mode] / ms[mode] - 1 for mode in modes if mode in ms)
            cells = [_pair(ms[mode], ours[mode]) if mode in ms else "" for mode in modes]
            lines.append([f"{name}, {layers} layers{on}", attention, str(tokens), *cells, str(explained.plan.mode)])
    summaries = " ".join(f"{kind}: {_summary(of_kind)}" for kind, of_kind in errors.items())
    return f"{_table(['model', 'attention', 'tokens', *modes, 'chosen'], lines)}\n\n{summaries}"


def _gemms() -> str:
    sys.path.insert(0, str(ROOT / "benchmarks" / "gemm_waves"))
    import compare

    return compare.table(json.loads(compare.RESULT.read_text()))


MORE = (512, 1024, 2048, 4096, 8192, 16384, 32768)
AIMS: dict[tuple[str, int], dict[int, float]] = {
    ("Llama-3.1-8B", 4): {512: 1.35, 1024: 1.35, 2048: 1.35, 4096: 1.35, 8192: 1.25},
    ("Llama-3.3-70B", 8): {1024: 1.25, 2048: 1.40, 4096: 1.40, 8192: 1.40, 16384: 1.40},
}
"""Model and ranks -> tokens -> auto over the fastest sequential step, as aimed at."""


def _more_ranks() -> str:
    """What `tokenweave predict --gpu h200 --transport p2p --launch graph` says at 4 and 8 ranks, as ratios."""
    lines, other = [], []
    for name in ("Llama-3.1-8B", "Llama-3.3-70B", "Qwen2.5-72B"):
        config = read_config(name)
        for ranks in (4, 8):
            predictor = Predictor(config, machine_of("h200", ranks, "p2p", GRAPH))
            steps = {tokens: predictor.step([(tokens, 0)]) for tokens in MORE}
            other += [
                f"{name}, {ranks} ranks, {n} tokens: {of.mode}" for n, of in steps.items() if of.mode != Mode.WOVEN
            ]
            saved = {n: us for n in MORE if (us := _saved_us(config, ranks, n)) is not None}
            rows = {
                "sequential / auto": {n: of.sequential_us / of.auto_us for n, of in steps.items()},
                "the same, fastest all-reduce": {
                    n: (steps[n].sequential_us - us) / steps[n].auto_us for n, us in saved.items()
                },
                "aim": AIMS.get((name, ranks), {}),
                "no_comm / auto": {n: of.no_comm_us / of.auto_us for n, of in steps.items()},
            }
            for what, ratios in rows.items():
                if ratios:
                    lines.append([name, str(ranks), what, *[f"{ratios[n]:.2f}" if n in ratios else "" for n in MORE]])
    modes = "The planner takes woven at all of these." if not other else f"Woven, but {'; '.join(other)}."
    return f"{_table(['model', 'ranks', '', *map(str, MORE)], lines)}\n\n{modes}"


def _collective_aims() -> str:
    """8 blocks at 4 ranks beside 5 us + 1.15 wire: measured, the aim, and by how much it was missed."""
    lines = []
    for hidden in (4096, 8192):
        rows = json.loads((RESULTS / f"h200x4-kernel-{hidden}.json").read_text())["rows"]
        measured = {
            row["tokens"]: row["us"] for row in rows if row["impl"] == "tokenweave two-shot" and row["ctas"] == 8
        }
        cells = []
        for tokens in MORE[1:]:
            aim = 5 + 1.15 * tokens * hidden * 2 * 2 * 3 / 4 / 390e3
            shown = [f"{us:.3g}" if us < 1000 else f"{us:.0f}" for us in (aim, measured[tokens])]
            cells.append(f"{', '.join(shown)} ({measured[tokens] / aim - 1:+.0%})")
        lines.append([str(hidden), *cells])
    return _table(["hidden", *map(str, MORE[1:])], lines)


def _two_ranks() -> str:
    """The same ratios on 2 H200, beside the measured ones: Llama-3.1-8B, as measured with FlashAttention-3."""
    result = json.loads((RESULTS / "h200x2-latency-llama-3.1-8b.json").read_text())
    config = read_config(result["config"]["model"])
    predictor = Predictor(config, machine_of("h200", 2, "p2p", dataclasses.replace(GRAPH, flash3=True)))
    lines = []
    for row in result["rows"]:
        if row["mode"] == "auto":
            tokens, step = row["tokens"], predictor.step([(row["tokens"], 0)])
            saved = _saved_us(config, 2, tokens)
            ratios = [step.sequential_us / step.auto_us]
            ratios += [] if saved is None else [(step.sequential_us - saved) / step.auto_us]
            cells = [f"{ratio:.2f}" for ratio in ratios] + [""] * (2 - len(ratios))
            lines.append([str(tokens), *cells, f"{row['speedup']['value']:.2f}"])
    columns = ["tokens", "sequential / auto", "the same, fastest all-reduce", "measured"]
    return _table(columns, lines)


def _saved_us(config: ModelConfig, ranks: int, tokens: int) -> float | None:
    """us of a sequential step that the fastest all-reduce and add-RMSNorm measured saves, of those that steps are measured with,
    over the formulas' NCCL. None where the collective was not measured."""
    path = RESULTS / f"h200x{ranks}-kernel-{config.hidden}.json"
    if not path.exists():
        return None
    rivals = [
        row["us"]
        for row in json.loads(path.read_text())["rows"]
        if row["kind"] == "rival" and "scatter" not in row["impl"] and row["tokens"] == tokens
    ]
    gpu, where = GPUS["h200"], (tokens, config.hidden)
    ours = comm.all_reduce_us(*where, ranks, gpu, "p2p") + comm.norm_us(*where, gpu)
    return (1 + 2 * config.layers) * (float(ours) - min(rivals)) if rivals else None


SECTIONS: dict[str, Callable[[], str]] = {
    "GEMMs": _gemms,
    "collective": _collective,
    "published kernel": _published_kernel,
    "published prefill": _published_prefill,
    "models": _models,
    "layers": _layers,
}
RANKS_SECTIONS: dict[str, Callable[[], str]] = {
    "collective aims": _collective_aims,
    "more ranks": _more_ranks,
    "two ranks": _two_ranks,
}
"""Name in the markers -> text, of docs/planning.md and of docs/ranks.md."""


def _csv(name: str) -> list[dict[str, float]]:
    with (PUBLISHED / name).open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _pair(measured: float, ours: float, digits: int = 1) -> str:
    return f"{measured:.{digits}f} / {ours:.{digits}f} ({ours / measured - 1:+.0%})"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---:" if i else "---" for i in range(len(columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *lines))


def _summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{len(errors)} values: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}."


def contents() -> dict[Path, str]:
    return {
        DOCUMENT: filled(DOCUMENT.read_text(encoding="utf-8")),
        RANKS: filled(RANKS.read_text(encoding="utf-8"), RANKS_SECTIONS),
    }


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
