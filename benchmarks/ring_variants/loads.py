"""The two-shot kernel beside other ways to load its rows: the variants of this folder, in turns, with few blocks.

    torchrun --nproc-per-node 2 benchmarks/ring_variants/loads.py [OUT.json]        # half a minute

Two ranks, bf16, CUDA graphs; results are compared bit by bit; the slower rank counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from copy_engine import HIDDEN, _call, _changed, _graph, _result, _timed

from tokenweave.bench.environment import describe
from tokenweave.bench.launch import joined
from tokenweave.collective import Workspace
from tokenweave.collective.compile import SOURCES

VARIANTS = ("lane_copies",)
SHAPES = [(tokens, ctas) for tokens in (1024, 4096, 16384) for ctas in (2, 4, 8, 12, 16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    with joined() as me:
        with Workspace(
            me.group,
            max_tokens=16384,
            hidden=HIDDEN,
            dtype=torch.bfloat16,
            device=me.device,
            regions=2,
            transport="p2p",
        ) as workspace:
            rows = measure(workspace)
        if me.rank == 0:
            for row in rows:
                print(row, flush=True)
            if parsed.out:
                parsed.out.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


def measure(workspace: Workspace) -> list[dict]:
    """Microseconds of each variant, a row a shape."""
    shipped = (SOURCES / "twoshot_ring.cu").read_text()
    graphs = {"shipped": {shape: _graph(lambda shape=shape: _call(workspace, 0, *shape)) for shape in SHAPES}}
    for name in VARIANTS:
        with _changed(shipped, Path(__file__).with_name(f"{name}.cu").read_text()):
            graphs[name] = {shape: _graph(lambda shape=shape: _call(workspace, 0, *shape)) for shape in SHAPES}
    rows = []
    for tokens, ctas in SHAPES:
        results = {name: _result(workspace, of[tokens, ctas], tokens) for name, of in graphs.items()}
        for name, result in results.items():
            assert torch.equal(result, results["shipped"]), f"{name}, {tokens} rows, {ctas} blocks: wrong"
        times = _timed({name: of[tokens, ctas] for name, of in graphs.items()})
        row = {"tokens": tokens, "hidden": HIDDEN, "ctas": ctas}
        rows.append(row | {name: round(us, 1) for name, us in times.items()})
    return rows


if __name__ == "__main__":
    main()
