"""Safetensors folders: one file or shards with an index, damaged and incomplete ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from tokenweave.errors import ModelError
from tokenweave.models import load_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"), "llama")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_shards_with_an_index_are_as_one_file(source: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load_model(source, rank=1, world_size=2), load_model(sharded, rank=1, world_size=2)
    assert torch.equal(one.embedding, many.embedding)
    assert torch.equal(one.head, many.head)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.attention.qkv, b.attention.qkv)
        assert torch.equal(a.mlp.gate_up, b.mlp.gate_up)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(
        ModelError, match=rf"1 of the \d+ files that model\.safetensors\.index\.json names are missing: {victim.name}"
    ):
        load_model(sharded)


def test_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    other = sorted(file.name for file in sharded.glob("*.safetensors"))[-1]

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"]["model.embed_tokens.weight"] = other

    edit_json(sharded / "model.safetensors.index.json", edit)
    with pytest.raises(ModelError, match=rf"{other}: tensor model\.embed_tokens\.weight is missing"):
        load_model(sharded)


def test_index_that_names_no_possible_file(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "x" * 5000}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 of the 1 files that .* names are missing: xxx"):
        load_model(folder)


def test_index_without_a_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(ModelError, match="has no weight_map"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_file_says_so(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int(len(data) * keep) if 0 < keep < 1 else int(keep)
    file.write_bytes(data[:size])
    left = len(data[:size])
    with pytest.raises(ModelError, match=rf"model\.safetensors: truncated or damaged \({left} bytes\)"):
        load_model(folder)


def test_garbage_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or damaged"):
        load_model(folder)


def test_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.weight"))
    with pytest.raises(
        ModelError,
        match=r"model\.safetensors: tensor model\.layers\.2\.self_attn\.k_proj\.weight is missing; expected one of shape \[64, 64\]",
    ):
        load_model(folder)


def test_missing_head_of_an_untied_model(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        load_model(folder)


def test_tensors_of_another_model_are_an_error(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)

    edit_tensors(folder, edit)
    with pytest.raises(ModelError, match=r"1 tensors have no place in .*: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_model(folder)


def test_fewer_layers_than_the_file_has(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=2))
    with pytest.raises(
        ModelError, match=r"9 tensors have no place in a model of this configuration: model\.layers\.2\."
    ):
        load_model(folder)


def test_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_tensors(folder, edit)
    assert load_model(folder).config.layers == 3


def test_wrong_shape_is_told_with_both(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 95)

    edit_tensors(folder, edit)
    with pytest.raises(
        ModelError, match=r"model\.layers\.0\.mlp\.down_proj\.weight has shape \[64, 95\]; .* needs \[64, 96\]"
    ):
        load_model(folder)


def test_integer_tensor(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)

    edit_tensors(folder, edit)
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is stored as I8; supported are BF16"):
        load_model(folder)


def test_stored_precision_is_converted(folder: Path, source: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    edit_tensors(folder, edit)
    stored, whole = load_model(folder), load_model(source)
    assert stored.layers[0].mlp.down.dtype == torch.float32
    assert torch.equal(stored.layers[0].mlp.down, whole.layers[0].mlp.down.bfloat16().float())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_model(folder)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing': there is no such file or folder; expected a Hugging Face folder"):
        load_model(tmp_path / "nothing")
