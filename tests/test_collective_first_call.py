"""The first collective of a process, however it is called: whatever it needs is set up, and nothing depends on order.

Each case has rank processes of its own: those of other tests have imported, registered and compiled before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from ranks import run_fresh_ranks
from tokenweave import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm

TOKENS, HIDDEN, EPS = 7, 64, 1e-5


def _rows(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _op(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    return fused_allreduce_rmsnorm(partial, residual, weight, EPS, workspace, layout="replicated")[0]


def _compiled(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, workspace: Workspace
) -> torch.Tensor:
    function = torch.compile(lambda p, r, w: _op(p * 1.0, r, w, workspace) + 0.0, backend="aot_eager", fullgraph=True)
    return function(partial, residual, weight)


def _sequential(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, workspace: Workspace
) -> torch.Tensor:
    return allreduce_rmsnorm(partial, residual, weight, EPS, workspace)


ENTRIES = {"op": _op, "compiled": _compiled, "sequential": _sequential}


def _in_order(names: tuple[str, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rows, residual) of each entry point, all given the same."""
    with Workspace(dist.group.WORLD, max_tokens=TOKENS, hidden=HIDDEN, dtype=torch.float32) as workspace:
        results = []
        for name in names:
            residual = _rows(100)
            rows = ENTRIES[name](_rows(dist.get_rank()), residual, _rows(200)[0], workspace).clone()
            results.append((rows, residual))
        assert workspace.collectives >= len(names)
        return results


@pytest.mark.parametrize(
    "names", [("op", "sequential"), ("sequential", "op"), ("compiled", "op", "sequential")], ids="-".join
)
def test_any_entry_point_may_be_the_first(names: tuple[str, ...]) -> None:
    total = _rows(100).double() + _rows(0) + _rows(1)
    expected = total * (total.square().mean(dim=1, keepdim=True) + EPS).rsqrt() * _rows(200)[0]
    for results in run_fresh_ranks(2, _in_order, names):
        for name, (rows, residual) in zip(names, results, strict=True):
            torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(residual.double(), total, rtol=1e-6, atol=1e-6)
        if "compiled" in names:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], results[1], strict=True))


def _from_compile_cache(folder: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(compilations found in the cache, rows, residual) of a compiled function, the process's first use of all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(folder, f"rank{dist.get_rank()}")))
        with Workspace(dist.group.WORLD, max_tokens=TOKENS, hidden=HIDDEN, dtype=torch.float32) as workspace:
            residual = _rows(100)
            compiled = torch.compile(lambda p, r, w: _op(p, r, w, workspace), fullgraph=True)  # no code of its own
            rows = compiled(_rows(dist.get_rank()), residual, _rows(200)[0])
            assert workspace.collectives
    return counters["inductor"]["fxgraph_cache_hit"], rows, residual


def test_what_a_compile_cache_holds_may_be_the_first(tmp_path: Path) -> None:
    """The second processes don't compile: nothing that a call needs is set up by the compilation alone."""
    cold, warm = (run_fresh_ranks(2, _from_compile_cache, str(tmp_path), timeout=120) for _ in range(2))
    for (missed, *first), (hits, *second) in zip(cold, warm, strict=True):
        assert (missed, hits) == (0, 1)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
