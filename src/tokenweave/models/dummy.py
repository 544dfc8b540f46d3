"""Models of random weights, made on the device: for measuring speed where there is no checkpoint."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tokenweave.models.config import ModelConfig
from tokenweave.models.loading import Part
from tokenweave.models.model import Model, assemble
from tokenweave.models.sharding import Shard, shard_of

_SCALE = 0.02


class RandomTensors:
    """Draws what :class:`tokenweave.models.loading.Loader` reads: norms near 1, everything else near 0.

    Args:
        rank: what is cut differs between ranks; what each of them holds whole is the same.
        dtype, device: of the tensors. seed: of all of them.
        alike: a layer's experts have the same values.
    """

    def __init__(self, rank: int, dtype: torch.dtype, device: torch.device, seed: int, *, alike: bool = False) -> None:
        self._rank, self._dtype, self._device, self._seed, self._alike = rank, dtype, device, seed, alike

    def vector(self, name: str, size: int) -> torch.Tensor:
        values = self._normal(name, size)
        return values + 1 if "norm" in name else values

    def rows(self, parts: Sequence[Part]) -> torch.Tensor:
        whole = all(part.rows.size == part.shape[0] for part in parts)
        height = sum(part.rows.size for part in parts)
        return self._normal(parts[0].name + ("" if whole else f" {self._rank}"), height, *parts[0].shape[1:])

    def columns(self, name: str, shape: tuple[int, int], columns: Shard) -> torch.Tensor:
        return self._normal(f"{name} {self._rank}", shape[0], columns.size)

    def _normal(self, name: str, *shape: int) -> torch.Tensor:
        if self._alike:
            name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        return out.normal_(0, _SCALE, generator=generator)


def dummy_model(
    config: ModelConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    layers: int | None = None,
    seed: int = 0,
    alike_experts: bool = False,
) -> Model:
    """A model of this configuration with random weights; each rank makes its own part alone.

    Args:
        layers: how many; None for the configuration's.
        alike_experts: a layer's experts have the same values, each in memory of its own. Rounding moves a row that two experts
            want about equally from one to the other; with different ones the rows of two right steps would be unrelated.
        rank, world_size, group, dtype, device: as :func:`tokenweave.models.load_model`.

    Raises:
        ModelError: ``world_size`` exceeds the query heads.
    """
    if layers is not None:
        config = dataclasses.replace(config, layers=layers)
    device = torch.device(device)
    shard = shard_of(config, rank, world_size)
    tensors = RandomTensors(rank, dtype, device, seed, alike=alike_experts)
    return assemble(tensors, config, shard, group, dtype, device)
