"""What a two-shot collective with few blocks takes beside its rows: launch, barriers, filling and emptying the ring.

    python3 benchmarks/kernel_constant/measure.py [OUT.json]        # one GPU, half a minute

Rank 0's kernel, of two ranks that share this process and its GPU (tokenweave.bench.kernel.alone): the flags are as of a peer that is
ahead, and the peer's rows are in the memory of the same GPU, so that nothing waits and nothing crosses NVLink. What two GPUs take beyond
it is the links' part. ``rows`` 0 launches a kernel that finds no row: a call whose row count, in device memory, is 0. bf16, CUDA graphs
of 16 calls, medians of 40 rounds of three replays in random order. ``dependent`` launches start while their predecessor ends; the shipped kernel does
so only where no number of blocks is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

from tokenweave.bench.environment import describe
from tokenweave.bench.kernel import alone
from tokenweave.bench.timing import GraphClock, take_turns
from tokenweave.collective import op
from tokenweave.collective.call import Call, Launch
from tokenweave.cuda import launch
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
    most = max(ROWS)
    group = alone.open_ranks([device] * RANKS, max_tokens=most, hidden=HIDDEN, dtype=torch.bfloat16)
    for workspace in group.workspaces:
        workspace.buffer(most).normal_()
    residual = torch.randn(most, HIDDEN, device=device).bfloat16()
    epilogue = Epilogue(torch.ones(HIDDEN, device=device).bfloat16(), 1e-5)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    clock, graphs = GraphClock(None, device), {}
    for blocks in BLOCKS:
        for rows in ROWS:
            tokens = rows or 1024
            calls = [
                Call(
                    workspace.buffer(tokens),
                    residual[:tokens],
                    epilogue,
                    workspace,
                    Launch(ctas=blocks),
                    row_count=None if rows else none,
                )
                for workspace in group.workspaces
            ]
            alone.run(calls, only=0)  # compiles, and sets the flags once: no run reaches the epoch that they hold
            for dependent in (False, True):
                with launched(dependent):
                    graphs[blocks, rows, dependent] = clock.capture(functools.partial(op.run, calls[0]), CALLS)
    sample = {key: functools.partial(clock.replay, graph, lambda: None, 3) for key, graph in graphs.items()}
    times = {key: median(found) / CALLS for key, found in take_turns(sample, ROUNDS).items()}
    rows = [
        {"ctas": b, "rows": r, "dependent": dependent, "us": round(us, 2)} for (b, r, dependent), us in times.items()
    ]
    lines = []
    for blocks in BLOCKS:
        for dependent in (False, True):
            counts = [count for count in ROWS if LINE[0] <= count <= LINE[1]]
            slope, constant = np.polyfit(counts, [times[blocks, count, dependent] for count in counts], 1)
            wire = slope / (HIDDEN * 2 / BYTES_PER_S * 1e6)
            lines.append(
                {
                    "ctas": blocks,
                    "dependent": dependent,
                    "constant_us": round(float(constant), 2),
                    "wire": round(float(wire), 3),
                }
            )
    for row in rows + lines:
        print(row, flush=True)
    if parsed.out:
        result = {"environment": describe(), "hidden": HIDDEN, "ranks": RANKS, "rows": rows, "lines": lines}
        parsed.out.write_text(json.dumps(result, indent=1) + "\n")


@contextlib.contextmanager
def launched(dependent: bool) -> Iterator[None]:
    """Kernels are launched so, whatever the call says."""
    before = launch.Function.launch

    def instead(
        self: launch.Function, blocks: int, stream: int, *params: object, cluster: int = 1, overlap: bool = False
    ) -> None:
        before(self, blocks, stream, *params, cluster=cluster, overlap=dependent)  # type: ignore[arg-type]

    launch.Function.launch = instead  # type: ignore[method-assign]
    try:
        yield
    finally:
        launch.Function.launch = before  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
