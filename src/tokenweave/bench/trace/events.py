"""What ran when, out of a Chrome trace of torch.profiler: kernels on a GPU, operations and collectives on a CPU."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["GEMM", "attention", "collective", "norm", "other"]
Lane = Literal["compute", "communication"]

COMPUTE, COLLECTIVE = "compute ", "collective "
"""What annotations of :func:`tokenweave.bench.trace.record.annotated` begin with; the stage and the split follow."""

# The first that matches. Names are those of our kernels and of torch's, NCCL's, cuBLAS's and FlashInfer's.
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "collective",
        re.compile(r"^collective |twoshot|oneshot|two_shot|one_shot|allreduce|all_reduce|nccl|multimem", re.I),
    ),
    ("norm", re.compile(r"rms_?norm|layer_?norm", re.I)),
    ("attention", re.compile(r"flash|fmha|scaled_dot_product|attention", re.I)),
    ("GEMM", re.compile(r"gemm|nvjet|gemv|splitk|grouped_mm|aten::(linear|matmul|mm|addmm|bmm)$", re.I)),
)


@dataclass(frozen=True)
class Span:
    """Something that ran.

    Attributes:
        name: of the kernel, operation or annotation.
        start, end: us, on the trace's clock.
        stream: of the GPU, or the thread's number.
        stage, split: what it belongs to, e.g. "attention_3" and "prefix"; None where that isn't known.
    """

    name: str
    start: float
    end: float
    stream: int
    stage: str | None = None
    split: str | None = None

    @property
    def kind(self) -> Kind:
        return kind_of(self.name)

    @property
    def lane(self) -> Lane:
        """Of the two streams of a woven step: collectives, and only they, run on the one for communication."""
        return "communication" if self.kind == "collective" else "compute"

    @property
    def us(self) -> float:
        return self.end - self.start


def kind_of(name: str) -> Kind:
    """Of a kernel or an operation, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def gpu_spans(trace: dict[str, Any]) -> list[Span]:
    """Kernels, copies and fills in the order of their starts, with the stages of those that were launched inside an
    annotation: all of an eager step's, none of a graph's.

    What ran up to and including the first NCCL kernel is left out: with it the ranks met before the step.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels.sort(key=lambda e: e["ts"])
    met = next((e["ts"] + e["dur"] for e in kernels if e["name"].startswith("nccl")), float("-inf"))
    launches = {
        e["args"]["correlation"]: (e["ts"], e["tid"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    find = _annotations(events)
    spans = []
    for event in kernels:
        if event["ts"] >= met:
            launch = launches.get(event["args"].get("correlation"))
            stage, split = (None, None) if launch is None else find(*launch)
            end = event["ts"] + event["dur"]
            spans.append(Span(event["name"], event["ts"], end, int(event["args"]["stream"]), stage, split))
    return spans


def cpu_spans(trace: dict[str, Any]) -> list[Span]:
    """Collectives, and the outermost operations of the stages, in the order of their starts."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    find = _annotations(events)
    spans = []
    ends: dict[int, float] = defaultdict(lambda: float("-inf"))  # thread -> of the operation that encloses what follows
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        collective = event.get("cat") == "user_annotation" and event["name"].startswith(COLLECTIVE)
        if event.get("cat") != "cpu_op" and not collective:
            continue
        thread, start, end = event["tid"], event["ts"], event["ts"] + event["dur"]
        stage, split = find(start, thread)
        if stage is not None and start >= ends[thread]:
            spans.append(Span(event["name"], start, end, int(thread), stage, split))
            ends[thread] = end
    return spans


def _annotations(events: Iterable[dict[str, Any]]) -> Callable[[float, int], tuple[str | None, str | None]]:
    """(time, thread) -> stage and split of the innermost annotation that the thread was in."""
    by_thread: dict[int, list[tuple[float, float, str, str]]] = defaultdict(list)
    for event in events:
        name = event["name"]
        if event.get("cat") == "user_annotation" and name.startswith((COMPUTE, COLLECTIVE)):
            _, stage, split = name.split(" ")
            by_thread[event["tid"]].append((event["ts"], -event["dur"], stage, split))
    changes = {thread: _changes(sorted(named)) for thread, named in by_thread.items()}

    def find(at: float, thread: int) -> tuple[str | None, str | None]:
        times, inside = changes.get(thread, ([], []))
        index = bisect.bisect_right(times, at) - 1
        return (None, None) if index < 0 else inside[index]

    return find


def _changes(named: list[tuple[float, float, str, str]]) -> tuple[list[float], list[tuple[str | None, str | None]]]:
    """Annotations as (start, -duration, stage, split), outer ones first -> when the innermost changes, and to which.

    They nest where a collective is issued in the middle of a compute.
    """
    times: list[float] = []
    inside: list[tuple[str | None, str | None]] = []
    open_: list[tuple[float, str, str]] = []  # end, stage, split; the innermost is the last

    def close(until: float) -> None:
        while open_ and open_[-1][0] <= until:
            times.append(open_.pop()[0])
            inside.append(open_[-1][1:] if open_ else (None, None))

    for start, negative, stage, split in named:
        close(start)
        open_.append((start - negative, stage, split))
        times.append(start)
        inside.append((stage, split))
    close(float("inf"))
    return times, inside


def tagged(spans: Sequence[Span], eager: Sequence[Span]) -> list[Span]:
    """A replayed graph's spans with the stages of the eager step that launched the same, lane by lane in the same order.

    Raises:
        ValueError: they are not the same kinds in the same order.
    """
    result = []
    for lane in ("compute", "communication"):
        ours = [span for span in spans if span.lane == lane]
        theirs = [span for span in eager if span.lane == lane]
        if [span.kind for span in ours] != [span.kind for span in theirs]:
            raise ValueError(
                f"the graph ran {len(ours)} kernels of the {lane} lane, the eager step {len(theirs)}, or others"
            )
        result += [replace(a, stage=b.stage, split=b.split) for a, b in zip(ours, theirs, strict=True)]
    return sorted(result, key=lambda span: span.start)


def layer_of(spans: Sequence[Span], layer: int) -> list[Span]:
    """What ran between the first kernel of a layer's attention and the end of its MLP's last collective, of other layers
    too; nothing if no span is known to belong to the layer."""
    mine = [span for span in spans if span.stage in (f"attention_{layer}", f"mlp_{layer}")]
    if not mine:
        return []
    start, end = min(span.start for span in mine), max(span.end for span in mine)
    return [span for span in spans if span.end > start and span.start < end]


def union_us(spans: Iterable[Span]) -> float:
    """us in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def summary(spans: Sequence[Span]) -> dict[str, Any]:
    """A step in figures.

    Returns:
        ``span_ms``: from the first start to the last end. ``busy_ms``: of these, with anything running.
        ``hidden_ms``: with a collective beside something else. ``by_kind_ms``: each kind's spans added up.
    """
    lanes = {lane: [span for span in spans if span.lane == lane] for lane in ("compute", "communication")}
    if not spans:
        return {"span_ms": 0.0, "busy_ms": 0.0, "hidden_ms": 0.0, "by_kind_ms": {}}
    busy = union_us(spans)
    kinds: dict[str, float] = defaultdict(float)
    for span in spans:
        kinds[span.kind] += span.us / 1e3
    return {
        "span_ms": (max(span.end for span in spans) - min(span.start for span in spans)) / 1e3,
        "busy_ms": busy / 1e3,
        "hidden_ms": (union_us(lanes["compute"]) + union_us(lanes["communication"]) - busy) / 1e3,
        "by_kind_ms": dict(kinds),
    }
