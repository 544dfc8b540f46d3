"""Tiny random checkpoints as Hugging Face folders and GGUF files, and the logits that transformers computes for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (config class, settings beside SIZES). Each is a case that some real model has.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-odd": (  # SmolLM2's 9 query and 3 key/value heads; a vocabulary and an MLP that nothing divides
        "LlamaConfig",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 101,
            "vocab_size": 163,
        },
    ),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-mqa": ("LlamaConfig", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"head_dim": 24, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-odd": (
        "MixtralConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 52,
            "sliding_window": None,
        },
    ),
}


def make_checkpoint(
    folder: Path, variant: str, *, seed: int = 0, max_shard_size: str | None = None, **more: Any
) -> Path:
    """Saves a random fp32 model of ``VARIANTS[variant]`` (with ``more`` settings) in ``folder``, and returns it.

    Weights are larger than at an ordinary initialisation, and norms and biases are random, so that every one of them
    shows in the logits.
    """
    kind, settings = VARIANTS[variant]
    config: PretrainedConfig = getattr(transformers, kind)(**{**SIZES, **settings, **more})
    generator = torch.Generator().manual_seed(seed)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return folder


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' fp32 logits of every position, [tokens, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor([token_ids])).logits[0]


# GGUF's name of each tensor, written out (not taken from the code under test).
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GGUF_EXPERT = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}


def write_gguf(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    stacked_experts: bool = True,
    metadata: dict[str, Any] | None = None,
    leave_out: str | None = None,
) -> Path:
    """Writes the checkpoint in ``folder`` as llama.cpp's converter does; matrices stored as ``kind``.

    Args:
        metadata: further integer, float, bool or string entries, or replacements.
        leave_out: a GGUF tensor name that is not written.
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    architecture = "llama" if config["model_type"] in ("mistral", "mixtral") else config["model_type"]
    entries: dict[str, Any] = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.rope.dimension_count": config["head_dim"],
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    if "num_local_experts" in config:
        entries[f"{architecture}.expert_count"] = config["num_local_experts"]
        entries[f"{architecture}.expert_used_count"] = config["num_experts_per_tok"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**entries, **(metadata or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, dict[int, np.ndarray]] = {}

    def add_tensor(name: str, values: np.ndarray) -> None:
        if name == leave_out:
            return
        if values.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        stem, suffix = name.rsplit(".", 1)
        projection = stem.rsplit(".", 1)[-1]
        if architecture == "llama" and projection in heads:
            pairs = values.reshape(heads[projection], 2, config["head_dim"] // 2, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        if not name.startswith("model.layers."):
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            add_tensor(f"{top[stem]}.{suffix}", values)
        elif ".experts." in name:
            layer, expert, matrix = stem.split(".")[2], stem.split(".")[5], stem.split(".")[6]
            if stacked_experts:
                stacks.setdefault(f"blk.{layer}.{_GGUF_EXPERT[matrix]}_exps.weight", {})[int(expert)] = values
            else:
                add_tensor(f"blk.{layer}.{_GGUF_EXPERT[matrix]}.{expert}.weight", values)
        else:
            _, _, layer, rest = stem.split(".", 3)
            add_tensor(f"blk.{layer}.{_GGUF_LAYER[rest]}.{suffix}", values)
    for name, experts in stacks.items():
        add_tensor(name, np.stack([experts[index] for index in range(len(experts))]))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What llama.cpp's converter writes for Llama-3.x: one divisor per frequency."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)
