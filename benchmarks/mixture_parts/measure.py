"""What the parts of a mixture of experts take, of one rank of Mixtral-8x7B at tensor parallel 2: where the price of a cut MLP comes from.

    python3 benchmarks/mixture_parts/measure.py [OUT.json]        # one GPU of Hopper or newer, 15 GB, half a minute

Every part of ``MixtureMLP.compute`` (models/mixtral.py) in a CUDA graph of its own, on the real inputs of the part before it, 8 layers'
weights in turn so that none is found in a cache; ``whole`` is the MLP as it is, and ``add_by_...`` are other ways to add, with weights
rounded to bf16. Rows go to experts as a random router sends them (``random``), or the same number to each (``even``, without ``whole``).
bf16, medians of 30 rounds of three replays in random order, microseconds a layer.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import embedding_bag, linear

from tokenweave.bench.environment import describe
from tokenweave.bench.timing import GraphClock, take_turns
from tokenweave.files import write_result
from tokenweave.models.inputs import Launches
from tokenweave.models.llama import gated
from tokenweave.models.mixtral import MixtureMLP, add_weighted, by_expert, places_of, route

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, RANKS = 4096, 14336, 8, 2, 2
LAYERS, ROUNDS = 8, 30
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    layers = [layer(device) for _ in range(LAYERS)]
    clock = GraphClock(None, device)
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        for routing in ("random", "even"):
            parts = parts_of(layers, tokens, routing == "even")
            pool = torch.cuda.graph_pool_handle()
            sample = {}
            for name, calls in parts.items():
                for call in calls:
                    call()
                graph = clock.capture(functools.partial(run_all, calls), 1, pool)
                sample[name] = functools.partial(clock.replay, graph, lambda: None, 3)
            times = {name: median(found) / LAYERS for name, found in take_turns(sample, ROUNDS).items()}
            row = {"tokens": tokens, "routing": routing, **{name: round(us, 1) for name, us in times.items()}}
            print(row, flush=True)
            rows.append(row)
            del sample, parts
    if parsed.out:
        shape = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": EXPERTS, "ranks": RANKS, "layers": LAYERS}
        write_result({"environment": describe(), "shape": shape, "rows": rows}, parsed.out)


def layer(device: torch.device) -> MixtureMLP:
    """Random weights of one rank."""

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

    share = INTERMEDIATE // RANKS
    return MixtureMLP(
        weights(EXPERTS, HIDDEN), weights(EXPERTS, 2 * share, HIDDEN), weights(EXPERTS, HIDDEN, share), CHOSEN
    )


def parts_of(layers: list[MixtureMLP], tokens: int, even: bool) -> dict[str, list[Callable[[], Any]]]:
    """Part -> a call a layer, in the order in which ``compute`` has them."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    every = torch.arange(tokens * CHOSEN, device="cuda").view(tokens, CHOSEN) % EXPERTS
    parts: dict[str, list[Callable[[], Any]]] = {}

    def part(name: str, call: Callable[[], Any]) -> Any:
        parts.setdefault(name, []).append(call)
        return call()

    for mlp in layers:
        weights, chosen = part("route", functools.partial(routed, x, mlp))
        if even:
            chosen = every
        order, ends = part("sort", functools.partial(by_expert, chosen, EXPERTS))
        rows = part("gather", functools.partial(gathered, x, order))
        gate_up = part("gate_up", functools.partial(grouped, rows, mlp.gate_up, ends))
        activations = part("activation", functools.partial(gated, gate_up))
        down = part("down", functools.partial(grouped, activations, mlp.down, ends))
        part("add", functools.partial(add_weighted, down, order, weights, out))
        for way in (added_by_bag, added_by_matmul, added_in_turn):
            part(way.__name__.replace("added", "add"), functools.partial(way, down, order, weights, out))
        if not even:
            part("whole", functools.partial(mlp.compute, x, Launches(), out))  # type: ignore[arg-type]
    return parts


def routed(x: torch.Tensor, mlp: MixtureMLP) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's GEMM, softmax and choice."""
    return route(linear(x, mlp.router), CHOSEN)


def gathered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A row for each choice, in the order of experts."""
    return x.index_select(0, order // CHOSEN)


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One GEMM for all experts."""
    return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def added_by_bag(parts: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """torch's operation for sums of an embedding's rows, which adds in float32."""
    places, scaled = places_of(order).view(weights.shape), weights.to(parts.dtype)
    out.copy_(embedding_bag(places, parts, mode="sum", per_sample_weights=scaled))


def added_by_matmul(parts: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """A product of matrices for each row, [1, choices] by [choices, hidden], which adds in float32."""
    rows = parts.index_select(0, places_of(order)).view(*weights.shape, -1)
    torch.bmm(weights.to(parts.dtype).unsqueeze(1), rows, out=out.unsqueeze(1))


def added_in_turn(parts: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """One choice after the other, each sum rounded to bf16."""
    places, scaled = places_of(order).view(weights.shape), weights.to(parts.dtype)
    torch.mul(parts.index_select(0, places[:, 0]), scaled[:, 0, None], out=out)
    for choice in range(1, weights.shape[1]):
        out.addcmul_(parts.index_select(0, places[:, choice]), scaled[:, choice, None])


def run_all(calls: list[Callable[[], Any]]) -> None:
    """All layers' calls."""
    for call in calls:
        call()


if __name__ == "__main__":
    main()
