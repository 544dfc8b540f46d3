"""Hugging Face's config.json -> ModelConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenweave.errors import ModelError
from tokenweave.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
}

# Settings that change the mathematics and that no stage here computes. Absent, null, false or 0 is fine.
_UNSUPPORTED = {
    "quantization_config": "quantised Hugging Face checkpoints are not supported; use the unquantised model, or GGUF",
    "attn_logit_softcapping": "soft-capped attention logits are not supported",
    "final_logit_softcapping": "soft-capped output logits are not supported",
    "attention_sinks": "attention sinks are not supported",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model's folder; ModelError if it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: no {path.name} in this folder; expected a Hugging Face model") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value


def read_hf_config(folder: Path) -> ModelConfig:
    """The numbers in ``folder``/config.json, with the end-of-text tokens of generation_config.json where it exists.

    Raises:
        ModelError: config.json is missing or damaged, or the model needs something that is not supported.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = _family(raw, path)
    for key, why in _UNSUPPORTED.items():
        if raw.get(key):
            raise ModelError(f"{path}: {key} is {_short(raw[key])}: {why}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act is {activation!r}; only silu is supported")
    heads = _number(raw, "num_attention_heads", path)
    hidden = _number(raw, "hidden_size", path)
    if raw.get("head_dim") is not None:
        head_dim = _number(raw, "head_dim", path)
    else:
        head_dim = 128 if family == "qwen3" else hidden // max(heads, 1)
    context = _number(raw, "max_position_embeddings", path)
    _check_window(raw, family, context, path)
    theta, scaling, divisors = _rope(raw, head_dim, path)
    bias = bool(raw.get("attention_bias", False))
    ends = end_tokens(folder)
    try:
        return ModelConfig(
            family=family,
            hidden=hidden,
            intermediate=_number(raw, "intermediate_size", path),
            layers=_number(raw, "num_hidden_layers", path),
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab=_number(raw, "vocab_size", path),
            context=context,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_divisors=divisors,
            qkv_bias=family == "qwen2" or bias,
            qk_norm=family == "qwen3",
            output_bias=family in ("llama", "qwen3") and bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            experts=_number(raw, "num_local_experts", path) if family == "mixtral" else 0,
            experts_per_token=_number(raw, "num_experts_per_tok", path) if family == "mixtral" else 0,
            eos_token_ids=ends,
            bos_token_id=raw.get("bos_token_id"),
        )
    except (ModelError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _family(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: architectures is {_short(names)}; expected a list of names")
    if not names:  # folders saved without a model class still name their type
        names = [name for name in ARCHITECTURES if name == f"{str(raw.get('model_type', '')).title()}ForCausalLM"]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ModelError(
        f"{path}: architectures is {raw.get('architectures')!r}, model_type {raw.get('model_type')!r}; supported are "
        f"{', '.join(ARCHITECTURES)}"
    )


def _number(raw: dict[str, Any], key: str, path: Path) -> int:
    value = raw.get(key)
    if type(value) is not int or value < 0:
        raise ModelError(f"{path}: {key} is {value!r}; expected a whole number")
    return value


def _check_window(raw: dict[str, Any], family: str, context: int, path: Path) -> None:
    """A sliding window that some layer uses and that is shorter than the context would be computed wrongly."""
    window = raw.get("sliding_window")
    if window is not None:
        window = _number(raw, "sliding_window", path)
    on = bool(raw.get("use_sliding_window", False)) if family in ("qwen2", "qwen3") else True
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise ModelError(f"{path}: layer_types is {_short(kinds)}; expected a list of names")
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(f"{path}: layer_types has {unknown}; only full attention is supported")
        on = "sliding_attention" in kinds
        if on and not window:
            raise ModelError(f"{path}: layer_types has 'sliding_attention'; only full attention is supported")
    if on and window and window < context:
        raise ModelError(
            f"{path}: sliding_window is {window}, shorter than max_position_embeddings {context}; sliding-window "
            f"attention is not supported. For sequences of up to {window} tokens the window does nothing: set "
            f"max_position_embeddings to {window} to use the model so"
        )


def _rope(raw: dict[str, Any], head_dim: int, path: Path) -> tuple[float, RopeScaling | None, tuple[float, ...]]:
    """(theta, Llama-3 scaling, divisors). Newer files hold ``rope_parameters``, older ones ``rope_scaling``."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: the rotary embedding's parameters are {_short(rope)}; expected an object")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelError(
            f"{path}: partial_rotary_factor is {partial}; only rotary embedding of whole heads is supported"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        if kind == "default":
            return float(theta), None, ()
        if kind == "linear":
            return float(theta), None, (float(rope["factor"]),) * (head_dim // 2)
        if kind == "llama3":
            scaling = RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_context=int(rope["original_max_position_embeddings"]),
            )
            return float(theta), scaling, ()
    except KeyError as error:
        raise ModelError(f"{path}: rotary scaling {kind!r} lacks {error}") from None
    except (ModelError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path}: the rotary embedding's parameters: {error}") from error
    raise ModelError(f"{path}: rotary scaling {kind!r} is not supported; supported are default, linear and llama3")


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end a text. generation_config.json's list is the fuller one: chats end with another token than documents."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            found = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token) is int for token in found):
                raise ModelError(
                    f"{folder / name}: eos_token_id is {_short(value)}; expected a token id or a list of them"
                )
            ids += found
    return tuple(dict.fromkeys(ids))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
