"""A model's numbers, independent of the file they came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.x rotary scaling. Frequencies whose wavelength exceeds ``original_context / low_freq_factor`` are divided
    by ``factor``; those under ``original_context / high_freq_factor`` are kept; between, the two are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
        family: ``"llama"``, ``"qwen2"``, ``"qwen3"`` or ``"mixtral"``.
        hidden, intermediate, layers, vocab: sizes; ``intermediate`` is one expert's for mixture-of-experts.
        heads, kv_heads, head_dim: attention.
        context: longest sequence, tokens.
        norm_eps: of every RMSNorm.
        rope_theta, rope_scaling: rotary embedding.
        qkv_bias: Qwen2. qk_norm: Qwen3 (RMSNorm over head_dim of q and k, before the rotary embedding).
        tied_embeddings: the head reuses the embedding's weight.
        experts, experts_per_token: mixture-of-experts, 0 for dense.
        eos_token_ids: any of these ends a request.
        bos_token_id: None where the tokenizer adds none.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
