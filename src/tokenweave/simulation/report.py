"""Simulated runs as a table of text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenweave.simulation.fleet import Outcome
from tokenweave.simulation.metrics import Metrics, Quantiles, measure, tpot_ms, ttft_ms

CURVE = np.linspace(0, 100, 201)
"""Percentiles that a :class:`Run` keeps for pictures."""


@dataclass(frozen=True)
class Run:
    """One simulated run.

    Attributes:
        mode: of its steps.
        replicas: of the fleet.
        rate: requests a second, all replicas together; None where they didn't come at random.
        metrics: its figures.
        ttft_ms, tpot_ms: float64 [201] at :data:`CURVE`'s percentiles; TPOT is empty where no answer has two tokens.
    """

    mode: str
    replicas: int
    rate: float | None
    metrics: Metrics
    ttft_ms: np.ndarray
    tpot_ms: np.ndarray

    def as_json(self) -> dict[str, object]:
        """Plain values, without the percentiles that are there for pictures."""
        return {"mode": self.mode, "replicas": self.replicas, "rate": self.rate, **self.metrics.as_json()}


def run_of(
    outcome: Outcome, mode: str, rate: float | None, ttft_target_ms: float | None, tpot_target_ms: float | None
) -> Run:
    """Sums up what :func:`tokenweave.simulation.simulate` returned."""
    metrics = measure(outcome, ttft_target_ms, tpot_target_ms)
    each = tpot_ms(outcome)
    curves = np.percentile(ttft_ms(outcome), CURVE), np.percentile(each, CURVE) if len(each) else each
    return Run(mode, len(outcome.counts), rate, metrics, *curves)


def header(about: dict[str, Any]) -> str:
    """What was simulated, and the names of the columns of :func:`line`."""
    arrivals = {"poisson": "arriving at random", "trace": "arriving as recorded", "burst": "all at once"}
    return "\n".join(
        [
            f"{about['trace']}: {about['requests']:,} requests {arrivals[about['arrivals']]}, {about['prompt_tokens']:,} prompt "
            f"and {about['output_tokens']:,} output tokens",
            f"{about['model']}, tp {about['tp']} on {about['gpu']}, transport {about['transport']}; a replica: steps of up to "
            f"{about['max_batch_tokens']:,} tokens, {about['max_requests_running']:,} requests running, cache of "
            f"{about['kv_tokens']:,} tokens",
            "",
            "replicas    rate  mode        requests/s  output tok/s   TTFT ms p50       p90       p99  TPOT ms p50    p90    p99"
            "  busy" + ("  in time" if _has_targets(about) else ""),
        ]
    )


def _has_targets(about: dict[str, Any]) -> bool:
    return about["ttft_target_ms"] is not None or about["tpot_target_ms"] is not None


def line(run: Run) -> str:
    """A run's row of the table."""
    m = run.metrics
    rate = "-" if run.rate is None else f"{run.rate:g}"
    each = (
        f"{'-':>13}{'-':>7}{'-':>7}"
        if m.tpot_ms is None
        else f"{m.tpot_ms.p50:13.1f}{m.tpot_ms.p90:7.1f}{m.tpot_ms.p99:7.1f}"
    )
    good = "" if m.within_targets is None else f"{m.within_targets:9.1%}"
    return (
        f"{run.replicas:8d}{rate:>8}  {run.mode:<10}{m.requests_per_s:12.2f}{m.output_tokens_per_s:14,.0f}"
        f"{m.ttft_ms.p50:14.0f}{m.ttft_ms.p90:10.0f}{m.ttft_ms.p99:10.0f}{each}{m.busy:6.0%}{good}"
    )


def gain(first: Run, run: Run) -> str:
    """What ``run`` gains over ``first``, which served the same requests in another mode."""
    ratio = run.metrics.requests_per_s / first.metrics.requests_per_s
    parts = [f"throughput x{ratio:.3f}"]
    for name, before, after in (
        ("TTFT", first.metrics.ttft_ms, run.metrics.ttft_ms),
        ("TPOT", first.metrics.tpot_ms, run.metrics.tpot_ms),
    ):
        if before is not None and after is not None:
            parts.append(f"{name} {_changes(before, after)}")
    return f"{'':18}{run.mode} against {first.mode}: " + "; ".join(parts)


def _changes(before: Quantiles, after: Quantiles) -> str:
    each = [f"{key} {getattr(after, key) / getattr(before, key) - 1:+.1%}" for key in ("p50", "p90", "p99")]
    return ", ".join(each)
