"""What every implementation has to give: some rows of a call in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tokenweave.bench.kernel.implementations import Fixture, Implementation
from tokenweave.errors import CollectiveError

_CHECKED_ROWS = 256


class Expected:
    """Some rows of the right answer in float64: the first, the last and random ones. Collective."""

    def __init__(self, fixture: Fixture, tokens: int) -> None:
        picks = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))[:_CHECKED_ROWS]
        edges = [row for row in (0, 1, tokens - 2, tokens - 1) if 0 <= row < tokens]
        self.rows = torch.unique(torch.cat([picks, torch.tensor(edges)])).to(fixture.device)
        mine = fixture.partials[self.rows]
        parts = [torch.empty_like(mine) for _ in range(fixture.ranks)]
        dist.all_gather(parts, mine, group=fixture.group)
        residual = fixture.residuals[self.rows].double()
        self.sum = torch.stack(parts).double().sum(0)
        self.residual = {"fused": self.sum + residual, "norm": mine.double() + residual}
        e = fixture.epilogue
        self.norm = {
            name: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + e.eps) * e.weight.double()
            for name, h in self.residual.items()
        }

    def compare(self, impl: Implementation, fixture: Fixture) -> None:
        """Raises CollectiveError where rows or the residual that ``impl`` left differ by more than rounding."""
        self._close("rows", impl.rows[self.rows], self.sum if impl.result == "sum" else self.norm[impl.result])
        if impl.result != "sum":
            owned = impl.residual_rows
            mine = (self.rows >= owned.start) & (self.rows < owned.stop)
            self._close("residual", fixture.residual[self.rows[mine]], self.residual[impl.result][mine])

    def _close(self, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        # Roundings of the sum (several in a ring of ranks), of the residual and of the result.
        limit = 4 * torch.finfo(got.dtype).eps * (1 + want.abs())
        off = (got.double() - want).abs()
        if not bool((off <= limit).all()):  # also with NaN
            worst = float((off / limit).nan_to_num(nan=float("inf")).max())
            raise CollectiveError(f"{what} differ from float64 by {worst:.3g} times what rounding explains")
