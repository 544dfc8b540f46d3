"""The result of ``bench vllm`` as the rows of the documents' table: three engines, and the plugin over either stock one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLUMNS = ("default", "vLLM's defaults"), ("best", "its best"), ("tokenweave", "with the plugin")
_TRACES = {"sharegpt": "ShareGPT", "arxiv_summarization": "arXiv"}


def table(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """What docs/measured.md shows of a result (``scripts/measured_tables.py``); None before the plugin was measured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(_what(row, result["config"]), {})[row["configuration"]] = row
    rows = [_row(what, of) for what, of in found.items() if "tokenweave" in of]
    if not rows:
        return None
    version = next((engine["vllm"] for engine in result["engines"] if "vllm" in engine), "")
    config = result["config"]
    return {
        "title": f"Inside vLLM {version}, {config['model']}, {config['ranks']} GPUs",
        "columns": ["wall time", *(name for _, name in _COLUMNS), "over defaults (95 %)", "over best (95 %)"],
        "rows": rows,
        "note": f"{result['pairing'].capitalize()}. Of each trace one replay. Best is vLLM with CUDA graphs of whole steps. "
        "Over: how many times as fast the plugin is.",
    }


def _what(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if row["phase"] == "prefill":
        return f"prefill of {row['tokens']} tokens"
    if row["phase"] == "decode":
        return f"{row['batch']} requests decode, a token"
    last = dict(zip(config["traces"], config["arrivals_last_s"], strict=False)).get(row["trace"])
    return f"{_TRACES.get(row['trace'], row['trace'])}, {row['requests']} requests{' at once' if last == 0 else ''}"


def _row(what: str, of: Mapping[str, Mapping[str, Any]]) -> list[str]:
    ours, digits = of["tokenweave"], 2 if "decode" in what else 1
    cells = []
    for name, _ in _COLUMNS:
        row = of.get(name, {})
        cells.append(f"{row['ms']:.{digits}f} ms" if "ms" in row else f"{row['requests_per_s']:.1f}/s" if row else "")
    for stock in ("default", "best"):
        key = f"speedup_over_{stock}"
        if key in ours:
            cells.append(f"{ours[key]:.2f} ({ours[f'{key}_low']:.2f}-{ours[f'{key}_high']:.2f})")
        else:
            ratio = ours.get(f"throughput_over_{stock}")
            cells.append("" if ratio is None else f"{ratio:.2f}")
    return [what, *cells]
