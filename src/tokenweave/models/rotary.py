"""Rotary position embedding, in float32, of the halves (j, j + head_dim / 2) of each head."""

from __future__ import annotations

import math

import torch

from tokenweave.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2], after the configuration's scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        return _llama3(frequencies, config.rope_scaling)
    if config.rope_divisors:
        return frequencies / torch.tensor(config.rope_divisors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those between blended linearly by the number
    of turns they make within the original context."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class Rotary:
    """Cosines and sines of all positions.

    Args:
        config: of the model.
        positions: table length; positions 0..positions-1 can be rotated.
        device: of the tables.

    Attributes:
        cosines, sines: float32 [positions, head_dim / 2] each.
    """

    def __init__(self, config: ModelConfig, positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config))
        self.cosines, self.sines = angles.cos().to(device), angles.sin().to(device)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head_dim] in float32, positions int64 [tokens] -> the same shape, float32."""
        cos, sin = self.cosines[positions].unsqueeze(1), self.sines[positions].unsqueeze(1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
