"""The tensors of a Hugging Face folder: one model.safetensors, or shards with an index. Only what is asked for is read."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenweave.errors import ModelError
from tokenweave.models.hf_config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {"F64", "F32", "F16", "BF16"}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a damaged index: the name is too long for a file
        return False


class HfWeights:
    """An open folder of safetensors files.

    Args:
        folder: with model.safetensors, or with model.safetensors.index.json and the files that it names.

    Raises:
        ModelError: no weights, a shard of the index is missing, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            files = read_json(folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise ModelError(f"{folder / INDEX}: has no weight_map of tensor names to file names")
            self._file_of: dict[str, str] = files
            missing = sorted({name for name in files.values() if not _is_file(folder / name)})
            if missing:
                raise ModelError(
                    f"{folder}: {len(missing)} of the {len(set(files.values()))} files that {INDEX} names are missing: "
                    f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}; download them"
                )
            for name in sorted(set(files.values())):
                self._open(name)
        elif (folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise ModelError(
                f"{folder}: no weights; expected {SINGLE} or {INDEX} with its files (PyTorch .bin files are not read: "
                f"they can run code; convert them to safetensors)"
            )

    def _open(self, name: str) -> Any:
        path = self._folder / name
        try:
            # Opening maps the file and checks that its size is what its header says.
            self._files[name] = safe_open(path, framework="pt", device="cpu").__enter__()
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: truncated or damaged ({path.stat().st_size} bytes): {error}; download it again"
            ) from error
        return self._files[name]

    def file_of(self, name: str) -> Path:
        """The file that holds, or should hold, a tensor."""
        return self._folder / self._file_of.get(name, INDEX if len(self._files) > 1 else SINGLE)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if there is no such tensor."""
        if name not in self._file_of:
            return None
        tensor = self._slice(name)
        if tensor is None:
            return None
        if tensor.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{self.file_of(name)}: tensor {name} is stored as {tensor.get_dtype()}; supported are "
                f"{', '.join(sorted(_DTYPES))} (quantised checkpoints: use GGUF)"
            )
        return tuple(tensor.get_shape())

    def _slice(self, name: str) -> Any:
        try:
            return self._files[self._file_of[name]].get_slice(name)
        except SafetensorError:  # the index names a file that does not hold the tensor
            return None

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Rows and columns of a matrix, or a whole vector, as stored; ``shape`` was checked before."""
        tensor = self._slice(name)
        if len(tensor.get_shape()) == 1:
            return tensor[:]
        rows = range(tensor.get_shape()[0]) if rows is None else rows
        columns = range(tensor.get_shape()[1]) if columns is None else columns
        return tensor[rows.start : rows.stop, columns.start : columns.stop]

    def others(self, names: Set[str]) -> list[str]:
        """Tensors that are none of ``names``, but for tables that old checkpoints hold and a second copy of tied weights."""
        rest = set(self._file_of) - names - {"lm_head.weight"}
        return sorted(name for name in rest if not name.endswith(".rotary_emb.inv_freq"))
