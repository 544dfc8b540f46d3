"""Result rows as fp8 (e4m3): where they go, what a scale is, and the arithmetic that all transports share.

A stored value is ``y * (1 / scale)``, with y the normalised value in fp32 (not rounded before), rounded to nearest even
and saturated at +-448. Static: one scale for all rows, given. Dynamic: each row has its own, max|y| / 448, at least
``LEAST_SCALE``, so that an all-zero row has one too. NaN stays NaN: a row with one has a NaN as its dynamic scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPE = torch.float8_e4m3fn
MAX = 448.0
LEAST_SCALE = 2.0**-40


@dataclass(frozen=True)
class Fp8:
    """The quantised result of one call.

    Attributes:
        rows: e4m3 [n, hidden], to write.
        scales: float32 [n], to write: of each row; None with a static scale.
        scale: float32 [1], the static scale of all rows, or None.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    scale: torch.Tensor | None

    def first(self, n: int) -> Fp8:
        """The same for the first n rows."""
        return Fp8(self.rows[:n], None if self.scales is None else self.scales[:n], self.scale)


def quantise(y: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised rows in fp32 to e4m3.

    Args:
        y: [n, hidden], float32.
        scale: [1], float32; None for one scale a row.

    Returns:
        (e4m3 [n, hidden], scales: ``scale``, or float32 [n]).
    """
    scales = (y.abs().amax(dim=1) / MAX).clamp_min(LEAST_SCALE) if scale is None else scale
    # A conversion alone does not saturate: it would make NaNs.
    return (y * (1.0 / scales)[:, None]).clamp(-MAX, MAX).to(DTYPE), scales
