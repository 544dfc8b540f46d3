"""One step under torch.profiler: who ran when on each stream, eagerly and as a graph, and how long ranks waited.

A collective ends on all ranks at about the same time, but starts when its rank gets there: the rank that comes last does
not wait. So a rank's waiting is what its collectives took beyond the same collectives on the rank where they were the
shortest, added up over the step. What they lose to the GEMMs beside them is in both and cancels.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from tokenweave.bench.trace.events import COLLECTIVE, COMPUTE, Span, cpu_spans, gpu_spans
from tokenweave.files import write_whole
from tokenweave.stages import Epilogue, Split, Stage
from tokenweave.weave import Collective

_SLEEP_CYCLES = 2_000_000  # about a millisecond


def prepare() -> None:
    """Before the first CUDA graph is captured: lets CUPTI see the graph's kernels, and stay for all of them."""
    os.environ.setdefault(
        "DISABLE_CUPTI_LAZY_REINIT", "1"
    )  # else a graph that outlives a profile can crash the next one
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True):
            torch.cuda.synchronize()


def annotated(
    stages: Sequence[Stage], splits: Sequence[Split], collective: Collective
) -> tuple[list[Stage], Collective]:
    """The same stages and collective, each call named in the trace: "compute attention_3 prefix", and so on.

    Args:
        splits: of the step; copies of them share inputs and residual.
    """
    names = ("step",) if len(splits) == 1 else ("prefix", "suffix")
    by_inputs = {id(split.inputs): name for split, name in zip(splits, names, strict=True)}
    by_residual = {split.residual.data_ptr(): name for split, name in zip(splits, names, strict=True)}
    by_epilogue = {id(stage.epilogue): stage.name for stage in stages}

    def compute_of(stage: Stage) -> Callable[[torch.Tensor | None, Any, torch.Tensor], None]:
        def compute(x: torch.Tensor | None, inputs: Any, out: torch.Tensor) -> None:
            with record_function(f"{COMPUTE}{stage.name} {by_inputs[id(inputs)]}"):
                stage.compute(x, inputs, out)

        return compute

    def reduce(
        partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: torch.Tensor | None
    ) -> torch.Tensor:
        with record_function(f"{COLLECTIVE}{by_epilogue[id(epilogue)]} {by_residual[residual.data_ptr()]}"):
            return collective(partial, residual, epilogue, rows)

    return [replace(stage, compute=compute_of(stage)) for stage in stages], reduce


@dataclass(frozen=True)
class Recorder:
    """Profiles steps on all ranks of ``group`` at once.

    Attributes:
        device: of this rank.
    """

    group: dist.ProcessGroup
    device: torch.device

    def record(self, call: Callable[[], object], path: Path, ahead: bool = False) -> list[Span]:
        """Profiles one call, which has run before; the ranks meet right before it, on the GPU where there is one.

        Args:
            path: of the Chrome trace, ``.json`` or ``.json.gz``; Perfetto opens both. A file of before is replaced once the
                new one is whole.
            ahead: the GPU sleeps until the host has issued the call, if that takes no longer than about a millisecond:
                for graphs, so that the ranks start together.

        Raises:
            OSError: the trace cannot be written.
        """
        gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        meet = torch.zeros(1, device=self.device)
        with contextlib.ExitStack() as stack:
            # The CPU's communication stream is a thread that was there before.
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True) if not gpu else None
            profiler = stack.enter_context(profile(activities=activities, experimental_config=config, acc_events=True))
            if gpu and ahead:
                torch.cuda._sleep(_SLEEP_CYCLES)
            dist.all_reduce(meet, group=self.group)
            call()
            if gpu:
                torch.cuda.synchronize(self.device)
        trace = _exported(profiler, path)
        return gpu_spans(trace) if gpu else cpu_spans(trace)

    def waiting_ms(self, spans: Sequence[Span]) -> list[float] | None:
        """Of each rank over the step, as the module says. Collective over the group.

        Returns:
            None if ranks ran different numbers of collectives.
        """
        mine = [span.us for span in spans if span.lane == "communication"]
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, mine, group=self.group)
        if len({len(times) for times in every}) != 1:
            return None
        shortest = [min(times) for times in zip(*every, strict=True)]
        return [(sum(times) - sum(shortest)) / 1e3 for times in every]


def _exported(profiler: profile, path: Path) -> dict[str, Any]:
    """Writes the trace to ``path``, and reads it."""
    with tempfile.TemporaryDirectory() as folder:  # where it is left half written, if the disk is full
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        try:
            written = whole.read_bytes()
            trace: dict[str, Any] = json.loads(written)
        except (OSError, ValueError) as error:  # the profiler itself does not say that it could not write
            raise OSError(
                errno.ENOSPC, f"the profiler's trace is not whole ({error})", tempfile.gettempdir()
            ) from error
    write_whole(path, gzip.compress(written) if path.suffix == ".gz" else written)
    return trace
