"""Reads from a checkpoint what one rank keeps, and nothing else, into fused and padded weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from tqdm import tqdm

from tokenweave.errors import ModelError
from tokenweave.models import gguf_config
from tokenweave.models.gguf import GGUFFile
from tokenweave.models.hf_weights import HfWeights
from tokenweave.models.sharding import Segment, Shard

Progress = Callable[[int, int], None]
"""(done, total): called after each part of the model (the embedding, a layer, the head) is loaded."""

# Elements of one read: bounds the memory beside the weights themselves (dequantising takes some 12 bytes an element).
_READ_ELEMENTS = 1 << 24


class Weights(Protocol):
    """A checkpoint's tensors under Hugging Face's names."""

    def file_of(self, name: str) -> Path:
        """The file that holds, or should hold, a tensor."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if there is no such tensor."""

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Rows and columns of a matrix, or a whole vector."""

    def others(self, names: Set[str]) -> list[str]:
        """The checkpoint's own names of tensors that are none of ``names`` and that a model computes with."""


class GGUFWeights:
    """A GGUF file's tensors under Hugging Face's names and in Hugging Face's row order.

    Args:
        file: the open file.
        head_dim: rows of a head, to undo the order of llama's query and key rows.
    """

    def __init__(self, file: GGUFFile, head_dim: int) -> None:
        self._file, self._head_dim = file, head_dim
        self._architecture = file.metadata["general.architecture"]

    def file_of(self, name: str) -> Path:
        return self._file.path

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor, expert = self._find(name)
        if tensor not in self._file.tensors:
            return None
        shape = self._file.tensors[tensor].shape
        if expert is None:
            return shape
        return shape[1:] if expert < shape[0] else None

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor, expert = self._find(name)
        if expert is not None:
            height = self._file.tensors[tensor].shape[-2]
            rows = range(height) if rows is None else rows
            rows = range(rows.start + expert * height, rows.stop + expert * height)
        values = self._file.read(tensor, rows, columns)
        if not gguf_config.is_interleaved(name, self._architecture):
            return values
        # A head's rows come as (0, d/2, 1, d/2 + 1, ...); the reader asks for whole heads.
        heads = values.view(-1, self._head_dim // 2, 2, *values.shape[1:])
        return heads.transpose(1, 2).reshape(values.shape)

    def others(self, names: Set[str]) -> list[str]:
        # The divisors of the rotary frequencies are part of the configuration.
        asked = Counter(self._find(name)[0] for name in names)

        def whole(name: str, shape: tuple[int, ...]) -> bool:  # every expert of a stack was asked for
            return asked[name] >= (shape[0] if len(shape) == 3 else 1)

        tensors = self._file.tensors.items()
        return sorted(n for n, t in tensors if n != "rope_freqs.weight" and not whole(n, t.shape))

    def _find(self, name: str) -> tuple[str, int | None]:
        tensor = gguf_config.tensor_name(name)
        stacked = gguf_config.stacked_experts(tensor)
        return stacked if stacked is not None and stacked[0] in self._file.tensors else (tensor, None)


def open_weights(path: Path, head_dim: int) -> Weights:
    """A model's folder or .gguf file. Raises ModelError as :class:`HfWeights` and :class:`GGUFFile`."""
    return HfWeights(path) if path.is_dir() else GGUFWeights(GGUFFile(path), head_dim)


class Part(NamedTuple):
    """One tensor of a fused weight: its name, its full shape, and the rows that the rank keeps."""

    name: str
    shape: tuple[int, ...]
    rows: Shard


class Tensors(Protocol):
    """One rank's shards of a model's tensors; :class:`Loader` reads them from a checkpoint."""

    def vector(self, name: str, size: int) -> torch.Tensor:
        """[size], whole: norm weights and biases that are added once."""

    def rows(self, parts: Sequence[Part]) -> torch.Tensor:
        """The parts' rows one below the other, [sum of shard sizes, columns] (vectors: [sum of shard sizes])."""

    def columns(self, name: str, shape: tuple[int, int], columns: Shard) -> torch.Tensor:
        """[rows, shard size] of a row-parallel weight."""


class Loader:
    """Reads one rank's shards of a checkpoint's tensors.

    Args:
        weights: the checkpoint.
        dtype, device: of the tensors that are returned.
        unit_rows: row ranges are only split at multiples of this (whole heads).
    """

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, unit_rows: int) -> None:
        self._weights, self._dtype, self._device, self._unit_rows = weights, dtype, device, unit_rows
        self._names: set[str] = set()

    def vector(self, name: str, size: int) -> torch.Tensor:
        """[size], whole: norm weights and biases that are added once."""
        self._check(name, (size,))
        return self._weights.read(name).to(self._device, self._dtype)

    def rows(self, parts: Sequence[Part]) -> torch.Tensor:
        """The parts' rows one below the other, [sum of shard sizes, columns] (vectors: [sum of shard sizes])."""
        for part in parts:
            self._check(part.name, part.shape)
        height = sum(part.rows.size for part in parts)
        out = torch.zeros(height, *parts[0].shape[1:], dtype=self._dtype, device=self._device)
        for part, view in zip(parts, out.split([part.rows.size for part in parts]), strict=True):
            for piece in self._pieces(part):
                rows = slice(piece.source, piece.source + piece.length)
                if len(part.shape) == 1:
                    values = self._weights.read(part.name)[rows]
                else:
                    values = self._weights.read(part.name, range(rows.start, rows.stop))
                view[piece.target : piece.target + piece.length] = values
        return out

    def columns(self, name: str, shape: tuple[int, int], columns: Shard) -> torch.Tensor:
        """[rows, shard size] of a row-parallel weight."""
        self._check(name, shape)
        out = torch.zeros(shape[0], columns.size, dtype=self._dtype, device=self._device)
        step = max(1, _READ_ELEMENTS // max(1, columns.size))
        for start in range(0, shape[0], step):
            rows = range(start, min(start + step, shape[0]))
            for part in columns.segments:
                values = self._weights.read(name, rows, range(part.source, part.source + part.length))
                out[rows.start : rows.stop, part.target : part.target + part.length] = values
        return out

    def _pieces(self, part: Part) -> Iterator[Segment]:
        """The part's segments, cut to reads of bounded size."""
        width = part.shape[1] if len(part.shape) > 1 else 1
        step = max(1, _READ_ELEMENTS // (width * self._unit_rows)) * self._unit_rows
        for segment in part.rows.segments:
            for offset in range(0, segment.length, step):
                length = min(step, segment.length - offset)
                yield Segment(segment.target + offset, segment.source + offset, length)

    def finish(self) -> None:
        """Raises ModelError if the checkpoint has tensors that were not asked for: the model computes something else."""
        others = self._weights.others(self._names)
        if others:
            raise ModelError(
                f"{self._weights.file_of(others[0])}: {len(others)} tensors have no place in a model of this "
                f"configuration: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}; the weights belong to "
                f"another configuration, or the model is a variant that is not supported"
            )

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        self._names.add(name)
        found = self._weights.shape(name)
        if found is None:
            raise ModelError(
                f"{self._weights.file_of(name)}: tensor {name} is missing; expected one of shape {list(expected)}"
            )
        if found != expected:
            raise ModelError(
                f"{self._weights.file_of(name)}: tensor {name} has shape {list(found)}; the model's configuration needs "
                f"{list(expected)}"
            )


@contextmanager
def progress_bar(show: bool = True) -> Iterator[Progress]:
    """A bar on stderr for ``load_model(progress=...)``; give ``show`` on one rank only."""
    with tqdm(desc="Loading weights", unit="layer", disable=not show, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
