"""What every implementation has to give: some rows of a call in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tokenweave.bench.kernel.implementations import Fixture, Implementation
from tokenweave.collective import fp8
from tokenweave.collective.fp8 import Fp8
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
        want = self.sum if impl.result == "sum" else self.norm[impl.result]
        if impl.fp8 is None:
            self._close("rows", impl.rows[self.rows], want)
        else:
            self._close_fp8(impl.fp8, want, fixture.dtype)
        if impl.result != "sum":
            owned = impl.residual_rows
            mine = (self.rows >= owned.start) & (self.rows < owned.stop)
            self._close("residual", fixture.residual[self.rows[mine]], self.residual[impl.result][mine])

    def _close_fp8(self, got: Fp8, want: torch.Tensor, dtype: torch.dtype) -> None:
        """Rows times their scales, and scales of their own against the largest value of the row."""
        eps = torch.finfo(dtype).eps  # of the residual, which was rounded before the norm
        if got.scales is not None:
            most = want.abs().amax(1)
            self._within("scales", got.scales[self.rows], most / fp8.MAX, 4 * eps * (1 + most) / fp8.MAX)
        of_all = got.scale if got.scales is None else got.scales[self.rows]
        assert of_all is not None
        scales = of_all.double()[:, None]
        largest = fp8.MAX * scales
        want = torch.minimum(torch.maximum(want, -largest), largest)
        half_a_step = 2.0**-4 * want.abs() + 2.0**-10 * scales  # of e4m3: three bits, and the small ones' 2^-9
        self._within("rows", got.rows[self.rows].double() * scales, want, half_a_step + 4 * eps * (1 + want.abs()))

    def _close(self, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        # Roundings of the sum (several in a ring of ranks), of the residual and of the result.
        self._within(what, got, want, 4 * torch.finfo(got.dtype).eps * (1 + want.abs()))

    def _within(self, what: str, got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> None:
        off = (got.double() - want).abs()
        if not bool((off <= limit).all()):  # also with NaN
            worst = float((off / limit).nan_to_num(nan=float("inf")).max())
            raise CollectiveError(f"{what} differ from float64 by {worst:.3g} times what rounding explains")
