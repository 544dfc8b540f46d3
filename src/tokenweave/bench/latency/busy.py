"""Every mode once more under torch.profiler: how busy the GPU is, what collectives hide, how long ranks wait for each other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.steps import Variant
from tokenweave.bench.trace import record
from tokenweave.bench.trace.events import summary


def profiled(
    chosen: Mapping[int, Mapping[str, Variant]],
    captured: Callable[[Variant], torch.cuda.CUDAGraph],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, dict[str, dict[str, Any]]]:
    """Replays each variant's graph under the profiler; all ranks at once.

    Args:
        chosen: tokens -> mode -> the variant.
        captured: gives a variant's graph. They are captured anew, because CUPTI has to be there before.

    Returns:
        tokens -> mode -> as :func:`tokenweave.bench.trace.events.summary`, of this rank, and all ranks' ``waiting_ms``.
        The times are a traced step's, a little longer than others: shares of ``span_ms`` are what they are for.
    """
    record.prepare()
    recorder = record.Recorder(group, device)
    result: dict[int, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tokens, variants in chosen.items():
            for mode, variant in variants.items():
                graph = captured(variant)
                for _ in range(2):  # the first one sets the profiler up
                    spans = recorder.record(graph.replay, Path(folder) / "trace.json", ahead=True)
                waiting = recorder.waiting_ms(spans)
                result.setdefault(tokens, {})[mode] = {**summary(spans), "waiting_ms": waiting}
                del graph
    return result
