"""What a two-shot collective with few blocks takes beside its rows: launch, barriers, filling and emptying the ring.

    python3 benchmarks/kernel_constant/measure.py [OUT.json]        # one GPU, half a minute

Rank 0's kernel, of two ranks that share this process and its GPU (tokenweave.bench.kernel.alone): the flags are as of a peer that is
ahead, and the peer's rows are in the memory of the same GPU, so that nothing waits and nothing crosses NVLink. What two GPUs take beyond
it is the links' part. ``rows`` 0 launches a kernel that finds no row: a call whose row count, in device memory, is 0. bf16, CUDA graphs
of 16 calls, medians of 40 rounds of three replays in random order. ``dependent`` launches start while their predecessor ends; the shipped
kernel does so only where no number of blocks is asked for.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

from tokenweave.bench.environment import describe
from tokenweave.bench.kernel import alone
from tokenweave.bench.timing import GraphClock, take_turns
from tokenweave.collective import op
from tokenweave.collective.call import Call, Launch
from tokenweave.cuda import launch
from tokenweave.files import write_result
from tokenweave.stages import Epilogue

HIDDEN, RANKS, CALLS, ROUNDS = 4096, 2, 16, 40
ROWS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384)
BLOCKS = (4, 8, 12, 16)
LINE = (1024, 16384)  # between these the time is a constant and a time a row, by least squares
BYTES_PER_S = 390e9  # of a direction of the link: docs/collective.md, "Aims"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    times = measured(device)
    rows = [
        {"ctas": b, "rows": r, "dependent": dependent, "us": round(us, 2)} for (b, r, dependent), us in times.items()
    ]
    lines = [line(times, blocks, dependent) for blocks in BLOCKS for dependent in (False, True)]
    for row in rows + lines:
        print(row, flush=True)
    if parsed.out:
        result = {"environment": describe(), "hidden": HIDDEN, "ranks": RANKS, "rows": rows, "lines": lines}
        write_result(result, parsed.out)


def measured(device: torch.device) -> dict[tuple[int, int, bool], float]:
    """(blocks, rows, whether dependent) -> us of a call."""
    most = max(ROWS)
    group = alone.open_ranks([device] * RANKS, max_tokens=most, hidden=HIDDEN, dtype=torch.bfloat16)
    for workspace in group.workspaces:
        workspace.buffer(most).normal_()
    residual = torch.randn(most, HIDDEN, device=device).bfloat16()
    epilogue = Epilogue(torch.ones(HIDDEN, device=device).bfloat16(), 1e-5)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    clock, sample = GraphClock(None, device), {}
    for blocks, rows in itertools.product(BLOCKS, ROWS):
        tokens, count, how = rows or 1024, None if rows else none, Launch(ctas=blocks)
        calls = [
            Call(workspace.buffer(tokens), residual[:tokens], epilogue, workspace, how, row_count=count)
            for workspace in group.workspaces
        ]
        alone.run(calls, only=0)  # compiles, and sets the flags once: no run reaches the epoch that they hold
        for dependent in (False, True):
            with launched(dependent):
                graph = clock.capture(functools.partial(op.run, calls[0]), CALLS)
            sample[blocks, rows, dependent] = functools.partial(clock.replay, graph, lambda: None, 3)
    return {key: median(found) / CALLS for key, found in take_turns(sample, ROUNDS).items()}


def line(times: dict[tuple[int, int, bool], float], blocks: int, dependent: bool) -> dict[str, Any]:
    """The time as a constant and a time a row, the latter as a multiple of the wire's."""
    counts = [count for count in ROWS if LINE[0] <= count <= LINE[1]]
    slope, constant = np.polyfit(counts, [times[blocks, count, dependent] for count in counts], 1)
    wire = slope / (HIDDEN * 2 / BYTES_PER_S * 1e6)
    return {
        "ctas": blocks,
        "dependent": dependent,
        "constant_us": round(float(constant), 2),
        "wire": round(float(wire), 3),
    }


def launched(dependent: bool) -> AbstractContextManager[object]:
    """Kernels are launched so within, whatever the call says."""
    before = launch.Function.launch

    def instead(self: launch.Function, *args: Any, overlap: bool = False, **more: Any) -> None:
        before(self, *args, overlap=dependent, **more)

    return mock.patch.object(launch.Function, "launch", instead)


if __name__ == "__main__":
    main()
