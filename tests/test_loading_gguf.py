"""GGUF files: every architecture as its Hugging Face twin, quantised tensors, damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, write_gguf
from model_ranks import Piece, Runner
from tokenweave.errors import ModelError
from tokenweave.models import Model, load_model, read_config
from tokenweave.models.gguf import GGUFFile

IDS = [1, 17, 140, 3, 99, 58, 21, 76]


def logits(model: Model) -> torch.Tensor:
    return Runner(model, [IDS]).step([Piece(0, 0, len(IDS))], "fused")


@pytest.mark.parametrize(
    "variant", ["llama", "llama-tied", "llama-bias", "llama-odd", "mistral", "qwen2", "qwen3", "mixtral"]
)
def test_fp32_file_gives_the_folders_logits(tmp_path: Path, variant: str) -> None:
    folder = make_checkpoint(tmp_path / "hf", variant)
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert torch.equal(logits(load_model(file)), logits(load_model(folder)))


def test_llama3_scaling_is_read_from_its_divisors(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama3-rope")
    file = write_gguf(folder, tmp_path / "model.gguf")
    torch.testing.assert_close(logits(load_model(file)), logits(load_model(folder)), rtol=1e-4, atol=1e-4)
    assert len(set(read_config(file).rope_divisors)) > 2


def test_linear_scaling(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama-linear-rope")
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(folder, tmp_path / "model.gguf", metadata=scaling)
    assert torch.equal(logits(load_model(file)), logits(load_model(folder)))


def test_experts_in_files_of_old(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "mixtral")
    file = write_gguf(folder, tmp_path / "model.gguf", stacked_experts=False)
    assert torch.equal(logits(load_model(file)), logits(load_model(folder)))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_quantised_shards_are_those_of_the_whole(tmp_path: Path, kind: Kind, world_size: int) -> None:
    # 160 / 3 rounds up to chunks of 56 columns, which begin within a block of 32.
    folder = make_checkpoint(tmp_path / "hf", "llama", intermediate_size=160, num_hidden_layers=1)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    whole = load_model(file).layers[0]
    ranks = [load_model(file, rank=rank, world_size=world_size).layers[0] for rank in range(world_size)]
    downs = torch.cat([layer.mlp.down for layer in ranks], dim=1)
    assert torch.equal(downs[:, :160], whole.mlp.down)
    assert not downs[:, 160:].any()
    gates = torch.cat([layer.mlp.gate_up.chunk(2)[0] for layer in ranks])
    assert torch.equal(gates[:160], whole.mlp.gate_up.chunk(2)[0])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
def test_any_part_is_that_of_the_whole(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(0).standard_normal((2, 10, 128), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "t.gguf")
    whole = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)).reshape(20, 128)
    assert torch.equal(file.read("t").float(), whole)
    for rows in (range(0, 0), range(3, 4), range(7, 20)):
        for columns in (range(0, 128), range(5, 6), range(31, 97), range(64, 64), range(127, 128)):
            part = file.read("t", rows, columns).float()
            assert torch.equal(part, whole[rows.start : rows.stop, columns.start : columns.stop])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(folder, GGUF file)."""
    base = tmp_path_factory.mktemp("llama")
    folder = make_checkpoint(base / "hf", "llama")
    return folder, write_gguf(folder, base / "model.gguf")


def test_file_cut_anywhere_is_an_error(llama: tuple[Path, Path], tmp_path: Path) -> None:
    data = llama[1].read_bytes()
    cuts = [0, 1, 3, 4, 7, 23, 24, 30, 100, 500, len(data) // 3, len(data) - 1]
    for size in cuts:
        cut = tmp_path / f"cut{size}.gguf"
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=rf"cut{size}\.gguf"):
            load_model(cut)


def test_truncated_tensor_is_named_with_both_sizes(llama: tuple[Path, Path], tmp_path: Path) -> None:
    data = llama[1].read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:-100])
    with pytest.raises(ModelError, match=rf"truncated: tensor \S+ ends at byte \d+, the file has {len(data) - 100}"):
        load_model(cut)


def test_damaged_header_is_an_error_never_a_crash(llama: tuple[Path, Path], tmp_path: Path) -> None:
    data = bytearray(llama[1].read_bytes())
    random = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    messages = []
    for _ in range(150):
        copy = bytearray(data)
        for _ in range(4):
            copy[random.integers(0, 1500)] = random.integers(0, 256)
        damaged.write_bytes(copy)
        try:
            load_model(damaged)
        except ModelError as error:
            messages.append(str(error))
    assert all("damaged.gguf" in message for message in messages)
    assert len(messages) > 75  # a changed number or letter may leave a file that loads


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file: it starts with b'PK"):
        read_config(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64, shorter than the context of 256"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary scaling 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.block_count": 2}, r"9 tensors have no place in a model of this configuration: blk\.2\.attn_k"),
        ({"llama.block_count": 4}, r"tensor model\.layers\.3\.\S+ is missing"),
        ({"llama.feed_forward_length": 97}, r"has shape \[96, 64\]; the model's configuration needs \[97, 64\]"),
        ({"split.count": 2}, r"part 0 \(from 0\) of a file split in 2"),
        ({"llama.attention.head_count": 7}, "7 query heads over 4 key/value heads"),
        ({"split.count": "two"}, "of a file split in two"),
        ({"llama.attention.sliding_window": "64"}, "sliding_window is '64'; expected a whole number"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "begin or end a text; expected integers"),
    ],
)
def test_unsupported_or_wrong_metadata(
    llama: tuple[Path, Path], tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    file = write_gguf(llama[0], tmp_path / "changed.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(file)
    assert "changed.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (5, r"tensor model\.layers\.0\.block_sparse_moe\.experts\.4\.w1\.weight is missing"),
        (3, r"tensors have no place in a model of this configuration: blk\.0\.ffn_down_exps\.weight"),
    ],
)
def test_a_stack_of_another_number_of_experts(tmp_path: Path, experts: int, message: str) -> None:
    metadata = {"llama.expert_count": experts}
    folder = make_checkpoint(tmp_path / "hf", "mixtral")
    router = torch.zeros(experts, 64)  # of as many experts as the configuration says
    tensors = load_file(folder / "model.safetensors")
    routers = {name: router.clone() for name in tensors if name.endswith("block_sparse_moe.gate.weight")}
    save_file({**tensors, **routers}, folder / "model.safetensors", {"format": "pt"})
    file = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        load_model(file)


def test_wrong_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.architecture is 'mamba'; supported are llama, qwen2, qwen3"):
        load_model(tmp_path / "m.gguf")


def test_missing_tensor(llama: tuple[Path, Path], tmp_path: Path) -> None:
    file = write_gguf(llama[0], tmp_path / "m.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"m\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(file)
