"""The two-shot kernel with few blocks beside variants of it, in turns: other loads, other stores, and stores left out.

    torchrun --nproc-per-node 2 benchmarks/ring_variants/ring.py [OUT.json]        # a minute

Two ranks, bf16, CUDA graphs; the slower rank counts. Results are compared bit by bit, but for the variants that leave out a
store: those say what it costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from copy_engine import HIDDEN, TO_PEER, TO_RESIDUAL, _call, _changed, _graph, _result, _timed

from tokenweave.bench.environment import describe
from tokenweave.bench.launch import joined
from tokenweave.collective import Workspace
from tokenweave.collective.compile import ELEMENT_BYTES, SOURCES, Kernel

SHAPES = [(1024, 4), (1024, 8), *((tokens, ctas) for tokens in (4096, 16384) for ctas in (4, 8, 12))]
WRITE = "math.write<Everyone>(h, inv, row_of(i));"
OWN = "st_global(a.out[RANK] + (size_t)row_of(i) * S::ROW_BYTES + math.t * 16 + math.step(v), y);"
PEER = "st_global(a.out[1 - RANK] + (size_t)row_of(i) * S::ROW_BYTES + math.t * 16 + math.step(v), y);"


@dataclass(frozen=True)
class Variant:
    """``text``: of csrc/twoshot_ring.cu. ``rows``: of shared memory more per group. ``right``: whether results are."""

    text: str
    rows: int = 0
    right: bool = True


def variants() -> dict[str, Variant]:
    """By name."""
    shipped = (SOURCES / "twoshot_ring.cu").read_text()
    folder = Path(__file__).parent
    bulk = (folder / "bulk_stores.cu").read_text()

    def instead(line: str, other: str) -> str:
        assert shipped.count(line) == 1, f"the source has changed, update this probe: {line}"
        return shipped.replace(line, other)

    def scaled(*stores: str) -> str:
        return instead(WRITE, " ".join(f"math.scale(h, inv, [&](int v, const Vec& y) {{ {s} }});" for s in stores))

    return {
        "each lane copies its vectors": Variant((folder / "lane_copies.cu").read_text()),
        "results by bulk stores": Variant(bulk, rows=1),
        "the peer's by bulk stores": Variant(bulk.replace("BULK_OWN = true", "BULK_OWN = false"), rows=1),
        "own row first": Variant(instead(TO_PEER, TO_PEER.replace("int k = 1; k <= N; ++k", "int k = N; k > 0; --k"))),
        "all own, then all the peer's": Variant(scaled(OWN, PEER)),
        "all the peer's, then all own": Variant(scaled(PEER, OWN)),
        "no residual": Variant(instead(TO_RESIDUAL, ";"), right=False),
        "nothing to the peer": Variant(scaled(OWN), right=False),
        "nothing to itself": Variant(scaled(PEER), right=False),
        "no results": Variant(instead(WRITE, "if (inv < 0) " + WRITE), right=False),
        "no stores": Variant(
            instead(WRITE, "if (inv < 0) " + WRITE).replace(
                TO_RESIDUAL, TO_RESIDUAL.replace("inside(v)", "inside(v) && squares[v] < 0")
            ),
            right=False,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    with joined() as me:
        assert me.ranks == 2, "variants store to one peer"
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
    known = variants()
    for name, variant in known.items():
        with _changed(shipped, variant.text), _more_shared(variant.rows):
            graphs[name] = {shape: _graph(lambda shape=shape: _call(workspace, 0, *shape)) for shape in SHAPES}
    rows = []
    for tokens, ctas in SHAPES:
        expected = _result(workspace, graphs["shipped"][tokens, ctas], tokens)
        for name, variant in known.items():
            result = _result(workspace, graphs[name][tokens, ctas], tokens)
            assert not variant.right or torch.equal(result, expected), f"{name}, {tokens} rows, {ctas} blocks: wrong"
        times = _timed({name: of[tokens, ctas] for name, of in graphs.items()})
        row = {"tokens": tokens, "hidden": HIDDEN, "ctas": ctas}
        rows.append(row | {name: round(us, 1) for name, us in times.items()})
    return rows


@contextlib.contextmanager
def _more_shared(rows: int) -> Iterator[None]:
    """The ring's blocks have so many rows of shared memory more for each group."""
    before = Kernel.dynamic_shared_bytes

    def bytes_(kernel: Kernel) -> int:
        more = rows * kernel.groups * kernel.hidden * ELEMENT_BYTES[kernel.dtype] if kernel.stages else 0
        return before.fget(kernel) + more  # type: ignore[attr-defined]

    Kernel.dynamic_shared_bytes = property(bytes_)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Kernel.dynamic_shared_bytes = before  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
