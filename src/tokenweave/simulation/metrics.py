"""What a simulated run comes to: throughput, and how long requests waited for their first and for each further token."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from tokenweave.simulation.fleet import Outcome


@dataclass(frozen=True)
class Quantiles:
    """Of milliseconds over requests."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Metrics:
    """One run.

    Attributes:
        seconds: from the first arrival to the last token.
        requests_per_s, prompt_tokens_per_s, output_tokens_per_s: of the whole run, its start and its end included.
        ttft_ms: time to first token: from a request's arrival to the end of the step that completed its prompt.
        tpot_ms: time per output token after the first, a mean over each request; None where no answer is longer than one.
        latency_ms: from arrival to last token.
        wait_ms: from arrival to the start of a request's first step.
        within_targets: share of requests whose TTFT and TPOT meet the targets; None without any.
        steps, mixed_steps: of all replicas, and how many of them had prompts in them.
        rows_per_step: mean.
        busy: share of the time in which a replica computed, a mean over replicas.
        most_kv_tokens, most_running: the peaks of any replica.
        most_requests: that one replica was given.
    """

    seconds: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Quantiles
    tpot_ms: Quantiles | None
    latency_ms: Quantiles
    wait_ms: Quantiles
    within_targets: float | None
    steps: int
    mixed_steps: int
    rows_per_step: float
    busy: float
    most_kv_tokens: int
    most_running: int
    most_requests: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def ttft_ms(outcome: Outcome) -> np.ndarray:
    """float64 [requests]: time to first token."""
    return 1e3 * (outcome.first_token - _arrivals(outcome))


def tpot_ms(outcome: Outcome) -> np.ndarray:
    """float64 [requests with at least two output tokens]: time per output token after the first."""
    several = outcome.trace.outputs > 1
    return 1e3 * (outcome.finished - outcome.first_token)[several] / (outcome.trace.outputs[several] - 1)


def measure(outcome: Outcome, ttft_target_ms: float | None = None, tpot_target_ms: float | None = None) -> Metrics:
    """Sums up a run. A request with one output token has no TPOT and meets every target for it."""
    trace, arrivals = outcome.trace, _arrivals(outcome)
    seconds = float(outcome.finished.max() - arrivals.min())
    first, each = ttft_ms(outcome), tpot_ms(outcome)
    counts = outcome.counts
    steps = sum(c.steps for c in counts)
    within = None
    if ttft_target_ms is not None or tpot_target_ms is not None:
        good = first <= (np.inf if ttft_target_ms is None else ttft_target_ms)
        good[trace.outputs > 1] &= each <= (np.inf if tpot_target_ms is None else tpot_target_ms)
        within = float(good.mean())
    return Metrics(
        seconds=seconds,
        requests_per_s=len(trace) / seconds,
        prompt_tokens_per_s=float(trace.prompts.sum()) / seconds,
        output_tokens_per_s=float(trace.outputs.sum()) / seconds,
        ttft_ms=_quantiles(first),
        tpot_ms=_quantiles(each) if len(each) else None,
        latency_ms=_quantiles(1e3 * (outcome.finished - arrivals)),
        wait_ms=_quantiles(1e3 * (outcome.started - arrivals)),
        within_targets=within,
        steps=steps,
        mixed_steps=sum(c.mixed_steps for c in counts),
        rows_per_step=sum(c.prompt_tokens + c.decode_tokens for c in counts) / steps,
        busy=sum(c.busy for c in counts) / seconds / len(counts),
        most_kv_tokens=max(c.most_kv_tokens for c in counts),
        most_running=max(c.most_running for c in counts),
        most_requests=int(np.bincount(outcome.replica).max()),
    )


def _arrivals(outcome: Outcome) -> np.ndarray:
    assert outcome.trace.arrivals is not None  # simulate() fills them in
    return outcome.trace.arrivals


def _quantiles(ms: np.ndarray) -> Quantiles:
    return Quantiles(float(ms.mean()), *(float(q) for q in np.percentile(ms, (50, 90, 99))))
