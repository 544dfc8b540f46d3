"""The planner's numbers of a model that vLLM has loaded."""

from __future__ import annotations

from typing import Any

from tokenweave.models.config import ModelConfig

_FAMILIES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "MixtralForCausalLM": "mixtral"}


def model_numbers(config: Any, class_name: str) -> ModelConfig:
    """vLLM's (transformers') configuration of a text model -> the sizes that a plan depends on.

    Args:
        config: ``vllm_config.model_config.hf_text_config``.
        class_name: vLLM's class.

    Raises:
        ModelError: sizes that no such model has.
    """
    family = _FAMILIES.get(class_name, "llama")
    heads = config.num_attention_heads
    return ModelConfig(
        family=family,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        experts=getattr(config, "num_local_experts", 0) if family == "mixtral" else 0,
        experts_per_token=getattr(config, "num_experts_per_tok", 0) if family == "mixtral" else 0,
    )
