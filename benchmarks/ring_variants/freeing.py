"""Ways for the readers of the ring kernel to free a stage, in turns: who arrives at its mbarrier, and who runs a proxy fence.

    torchrun --nproc-per-node 2 benchmarks/ring_variants/freeing.py [OUT.json]        # half a minute

The shipped kernel has one thread arrive for a group, behind the group's barrier and a fence of that thread alone
(``one_arrival_fenced``). racecheck follows the ways in which each reader arrives for itself (docs/collective.md, "How it is
tested"). Two ranks, bf16, CUDA graphs; the slower rank counts. Results are compared bit by bit.
"""

from __future__ import annotations

import torch
from common import HIDDEN, captured, changed_sources, collective, main, result_of, timed

from tokenweave.collective import Workspace

SHAPES = [(tokens, ctas) for ctas in (4, 8, 12, 16) for tokens in (1024, 4096, 16384)]
SHIPPED = "one_arrival_fenced"

COUNT = "mbarrier_init(&empty[threadIdx.x], 1);"
READ = "math.reduce(h, squares, staged, [&](int v) { return staged(N, v); });\n"
FREE = """\
      if (math.t == 0) {
        fence_proxy_async_shared();  // the group's reads were generic accesses; the copies to come are not
        mbarrier_arrive(&empty[s]);
      }
"""


def _freed(arrivals: str, free: str, *, all_fence: bool = False) -> list[tuple[str, str]]:
    """The edits: arrivals at a stage's mbarrier, the lines that arrive, and whether each reader runs a fence."""
    fence = "      fence_proxy_async_shared();\n" if all_fence else ""
    return [(COUNT, COUNT.replace("1", arrivals)), (READ, READ + fence), (FREE, free)]


ONE, WARP, READER = (
    f"      {line}mbarrier_arrive(&empty[s]);\n"
    for line in ("if (math.t == 0) ", "__syncwarp();\n      if (lane == 0) ", "")
)
WAYS: dict[str, list[tuple[str, str]]] = {
    "one_arrival": _freed("1", ONE),
    SHIPPED: [],
    "one_arrival_all_fence": _freed("1", ONE, all_fence=True),
    "warp_arrivals_all_fence": _freed("S::WARPS", WARP, all_fence=True),
    "reader_arrivals": _freed("S::GT", READER),
    "reader_arrivals_all_fence": _freed("S::GT", READER, all_fence=True),
}


def measure(workspace: Workspace) -> list[dict]:
    """Microseconds of every way, a row a shape."""
    graphs = {}
    for name, edits in WAYS.items():
        with changed_sources(*edits):
            for shape in SHAPES:
                graphs[name, shape] = captured(lambda shape=shape: collective(workspace, 0, *shape))
    rows = []
    for shape in SHAPES:
        tokens, ctas = shape
        ways = {name: graphs[name, shape] for name in WAYS}
        expected = result_of(workspace, ways[SHIPPED], tokens)
        for name, graph in ways.items():
            assert torch.equal(result_of(workspace, graph, tokens), expected), f"{name}, {shape}: wrong"
        times = {name: round(us, 1) for name, us in timed(ways).items()}
        rows.append({"tokens": tokens, "hidden": HIDDEN, "ctas": ctas, **times})
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
