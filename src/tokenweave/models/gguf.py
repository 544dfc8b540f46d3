"""The GGUF file format: metadata, and tensors dequantised row range by row range from a memory map.

The header is parsed here rather than by ``gguf.GGUFReader``, which makes a numpy array of every vocabulary entry
(seconds per rank) and fails on damaged files with errors of numpy. The ``gguf`` package knows the quantised formats.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tokenweave.errors import ModelError

MAGIC = b"GGUF"

# Metadata value types by number: struct's letter for each scalar.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_NATIVE = {
    GGMLQuantizationType.F32: (np.float32, torch.float32),
    GGMLQuantizationType.F16: (np.float16, torch.float16),
    GGMLQuantizationType.BF16: (np.int16, torch.bfloat16),  # numpy has no bfloat16: the bits are reinterpreted
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: outermost dimension first (the file lists the innermost first).
        kind: how its values are stored.
        offset, nbytes: within the file. The innermost dimension of ``shape`` is whole blocks of ``kind``.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: of the file.
        metadata: key -> number, bool, string or list.
        tensors: name -> where it lies.

    Raises:
        ModelError: not a GGUF file, a version or a byte order that is not supported, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"{path}: cannot be read: {error}") from error
        header = _Header(path, self._bytes)
        self.metadata, tensors = header.metadata, header.tensors
        for tensor in tensors:
            if tensor.offset + tensor.nbytes > len(self._bytes):
                raise ModelError(
                    f"{path}: truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.nbytes}, the file "
                    f"has {len(self._bytes)}; download it again"
                )
        self.tensors = {tensor.name: tensor for tensor in tensors}

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Part of a matrix, or a whole vector.

        Args:
            name: of a tensor of one, two or three dimensions; the rows of three are those of [d0 * d1, d2].
            rows: of the outer dimension(s), all by default.
            columns: of the innermost, all by default.

        Returns:
            [rows, columns] (a vector: [columns]), float32 or as stored where that is a torch dtype; a copy.

        Raises:
            ModelError: the tensor's format has no dequantisation.
        """
        tensor = self.tensors[name]
        width = tensor.shape[-1]
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        table = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, width // block * block_bytes)
        rows = range(table.shape[0]) if rows is None else rows
        columns = range(width) if columns is None else columns
        # Whole blocks that cover the columns, then the columns out of them.
        first = columns.start // block
        stop = max(first, -(-columns.stop // block))
        part = np.array(
            table[rows.start : rows.stop, first * block_bytes : stop * block_bytes]
        )  # writable, unlike the map
        values = _decode(part, tensor, self.path)
        values = values[:, columns.start - first * block : columns.stop - first * block]
        return values[0].clone() if len(tensor.shape) == 1 else values.contiguous()


def _decode(part: np.ndarray, tensor: GGUFTensor, path: Path) -> torch.Tensor:
    """[rows, bytes] of whole blocks -> [rows, values]."""
    if tensor.kind in _NATIVE:
        numpy_dtype, dtype = _NATIVE[tensor.kind]
        return torch.from_numpy(part.view(numpy_dtype)).view(dtype)
    if part.size == 0:
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        return torch.empty(part.shape[0], part.shape[1] // block_bytes * block)
    try:
        return torch.from_numpy(np.asarray(dequantize(part, tensor.kind), dtype=np.float32))
    except NotImplementedError:
        raise ModelError(
            f"{path}: tensor {tensor.name} is stored as {tensor.kind.name}, which the gguf package cannot dequantise; "
            f"use a file with another quantisation (Q4_0 ... Q8_0, Q2_K ... Q6_K, F16, BF16, F32)"
        ) from None


class _Header:
    """Parses everything before the tensor data. ``at`` is the position within ``data``."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.data, self.at = path, data.data, 0
        magic = bytes(self._take(4))
        if magic != MAGIC:
            raise ModelError(f"{path}: not a GGUF file: it starts with {magic!r}; expected {MAGIC!r}")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version}; supported are 2 and 3, little endian")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ModelError(f"{path}: general.alignment is {alignment!r}; expected a positive integer")
        base = -(-self.at // alignment) * alignment
        self.tensors = [self._located(base, *info) for info in infos]

    def _take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise ModelError(
                f"{self.path}: truncated or damaged: the header needs {count} bytes at byte {self.at}, the file has "
                f"{len(self.data)}; download it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _string(self) -> str:
        raw = self._take(self._scalar("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: damaged: the text before byte {self.at} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                letter = _SCALARS[item]
                return list(struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize("<" + letter))))
            if item == _STRING:
                return [self._string() for _ in range(count)]
            kind = item
        raise ModelError(f"{self.path}: damaged: metadata type {kind} before byte {self.at} is not known")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= 4:
            raise ModelError(f"{self.path}: damaged: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _located(self, base: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} has the unknown storage type {number}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(f"{self.path}: damaged: tensor {name} {list(shape)} is not whole {kind.name} blocks")
        count = 1
        for size in shape:
            count *= size
        return GGUFTensor(name, shape, kind, base + offset, count // block * block_bytes)
