"""What GGUF calls things: metadata -> ModelConfig, and the names and the row order of tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenweave.errors import ModelError
from tokenweave.models.config import ModelConfig
from tokenweave.models.gguf import GGUFFile
from tokenweave.models.gguf_tokenizer import adds_bos, end_tokens

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_LAYER_NAMES = {
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
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERT_NAMES = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}

# Metadata that changes the mathematics and that no stage here computes; without the architecture's prefix.
_UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "attention.clamp_kqv",
)


def read_gguf_config(path: Path) -> ModelConfig:
    """The numbers in a GGUF file's metadata. Raises ModelError as :func:`config_of`."""
    return config_of(GGUFFile(path))


def config_of(file: GGUFFile) -> ModelConfig:
    """The numbers in an open file's metadata.

    Raises:
        ModelError: an architecture or a setting that is not supported, a number that is missing, one part of a split
            file.
    """
    data, path = file.metadata, file.path
    architecture = data.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path}: general.architecture is {architecture!r}; supported are {', '.join(ARCHITECTURES)} "
            f"(Mistral and Mixtral files say llama)"
        )
    if data.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{path}: part {data.get('split.no', 0)} (from 0) of a file split in {data['split.count']}; merge the parts with "
            f"`llama-gguf-split --merge` first"
        )

    def get(key: str, default: Any = None) -> Any:
        return data.get(f"{architecture}.{key}", default)

    def number(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if type(value) is not int or value < 0:
            raise ModelError(f"{path}: {architecture}.{key} is {value!r}; expected a whole number")
        return value

    for key in _UNSUPPORTED:
        if get(key):
            raise ModelError(f"{path}: {architecture}.{key} is {get(key)}, which is not supported")
    hidden, heads, context = number("embedding_length"), number("attention.head_count"), number("context_length")
    head_dim = number("attention.key_length", hidden // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if number(key, head_dim) != head_dim:
            raise ModelError(f"{path}: {architecture}.{key} is {number(key)}; supported is only head_dim, {head_dim}")
    window = number("attention.sliding_window", 0)
    if window and window < context:
        raise ModelError(
            f"{path}: {architecture}.attention.sliding_window is {window}, shorter than the context of {context}; "
            f"sliding-window attention is not supported"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path}: has no tensor token_embd.weight")
    experts = number("expert_count", 0)
    if experts and architecture != "llama":
        raise ModelError(f"{path}: {architecture} with experts is not supported")
    try:
        return ModelConfig(
            family="mixtral" if experts else architecture,
            hidden=hidden,
            intermediate=number("feed_forward_length"),
            layers=number("block_count"),
            heads=heads,
            kv_heads=number("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=embedding.shape[0],
            context=context,
            norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-5)),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            rope_divisors=_rope_divisors(file, architecture, head_dim),
            qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
            qk_norm=architecture == "qwen3",
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            tied_embeddings="output.weight" not in file.tensors,
            experts=experts,
            experts_per_token=number("expert_used_count", 0),
            eos_token_ids=end_tokens(data),
            bos_token_id=data.get("tokenizer.ggml.bos_token_id") if adds_bos(data) else None,
        )
    except (ModelError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _rope_divisors(file: GGUFFile, architecture: str, head_dim: int) -> tuple[float, ...]:
    """Llama-3.x scaling is stored as a tensor of divisors; linear scaling as a factor."""
    if "rope_freqs.weight" in file.tensors:
        return tuple(file.read("rope_freqs.weight").tolist())
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return (float(factor),) * (head_dim // 2)
    if kind != "none":
        raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported; supported are none and linear")
    return ()


def tensor_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face checkpoints call ``name``, such as ``blk.3.attn_q.weight``.

    An expert's matrix comes as ``blk.3.ffn_gate.7.weight``, as old files store it; newer ones stack all experts in
    ``blk.3.ffn_gate_exps.weight`` (see :func:`stacked_experts`).
    """
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])", stem)
    if match:
        layer, expert, matrix = match.groups()
        return f"blk.{layer}.{_EXPERT_NAMES[matrix]}.{expert}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert match is not None, name
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"


def stacked_experts(gguf_name: str) -> tuple[str, int] | None:
    """(name of the stacked tensor, expert) for one expert's matrix; None for any other tensor."""
    match = re.fullmatch(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight", gguf_name)
    return (f"{match[1]}_exps.weight", int(match[2])) if match else None


def is_interleaved(name: str, architecture: str) -> bool:
    """Whether GGUF stores the rows of each head of ``name`` (Hugging Face's) in rotary pairs.

    Llama's query and key rows are stored so that a pair (j, j + head_dim / 2) is adjacent; Qwen's are as trained.
    """
    return architecture == "llama" and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name)
