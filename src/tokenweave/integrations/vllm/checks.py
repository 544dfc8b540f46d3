"""Whether TokenWeave can run a model as vLLM has set it up. The first thing that it cannot do is the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tokenweave.integrations.vllm.linear import plain_vocabulary
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.walk import attentions
from tokenweave.switches import switched_on

Finding = tuple[Reason, str]
"""The reason, and what was found."""


def engine_problem(vllm_config: Any, prefix: str, platform: str) -> Finding | None:
    """What in the engine's configuration keeps TokenWeave off; None if nothing does.

    Args:
        prefix: of the model's name; empty for the engine's own model.
        platform: ``"cuda"`` or ``"cpu"``.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config

    def size(name: str) -> int:
        return getattr(parallel, name, 1) or 1

    tests: list[tuple[Reason, Callable[[], object]]] = [
        (Reason.SUBMODEL, lambda: prefix or getattr(model, "is_multimodal_model", False)),
        (Reason.NOT_GENERATING, lambda: model.runner_type != "generate"),
        (Reason.ONE_RANK, lambda: size("tensor_parallel_size") < 2),
        (Reason.PIPELINE_PARALLEL, lambda: size("pipeline_parallel_size") > 1),
        (Reason.CONTEXT_PARALLEL, lambda: size("decode_context_parallel_size") > 1),
        (Reason.CONTEXT_PARALLEL, lambda: size("prefill_context_parallel_size") > 1),
        (Reason.EXPERT_PARALLEL, lambda: getattr(model, "is_moe", False) and parallel.enable_expert_parallel),
        (Reason.EXPERT_PARALLEL, lambda: getattr(model, "is_moe", False) and size("data_parallel_size") > 1),
        (Reason.MICROBATCHING, lambda: getattr(parallel, "use_ubatching", False)),
        (Reason.LORA, lambda: vllm_config.lora_config is not None),
        (Reason.SPECULATIVE, lambda: vllm_config.speculative_config is not None),
        (Reason.KV_CONNECTOR, lambda: vllm_config.kv_transfer_config is not None),
        (Reason.PROMPT_EMBEDS, lambda: getattr(model, "enable_prompt_embeds", False)),
        (Reason.SLEEP_MODE, lambda: getattr(model, "enable_sleep_mode", False)),
        (Reason.OFFLOADING, lambda: _offloads(vllm_config)),
        (Reason.KV_CACHE_DTYPE, lambda: vllm_config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16")),
        (Reason.KV_CACHE_DTYPE, lambda: getattr(vllm_config.cache_config, "calculate_kv_scales", False)),
        (Reason.ROUTED_EXPERTS, lambda: _returns_routed_experts(vllm_config)),
        (Reason.RUNNER, lambda: _wrong_runner(vllm_config, platform)),
        (Reason.BREAKABLE_GRAPHS, lambda: switched_on(os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH")),
        (Reason.BATCH_INVARIANT, lambda: switched_on(os.environ, "VLLM_BATCH_INVARIANT")),
    ]
    for reason, test in tests:
        if found := test():
            return reason, found if isinstance(found, str) else ""
    return None


def model_problem(model: Any, compat: ModuleType) -> Finding | None:
    """What in a built ``LlamaModel`` (or alike) cannot be walked; None if nothing.

    It is the shape of the layers that counts, so that a layer that a version or a checkpoint adds is not walked past.
    """
    if not plain_vocabulary(model.embed_tokens):
        return Reason.VOCABULARY, type(model.embed_tokens.quant_method).__name__
    for name, module in model.named_modules():
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return Reason.LAYERS, f"{name or 'the model'} has a forward or hooks of its own, which the walk may pass by"
    for index, layer in enumerate(model.layers):
        if found := _layer_problem(layer, compat):
            return found[0], f"layer {index}: {found[1]}"
    for layer in attentions(model):
        if layer.sliding_window is not None:
            return Reason.SLIDING_WINDOW, f"{layer.layer_name} sees {layer.sliding_window} positions"
        if layer.kv_sharing_target_layer_name is not None or type(layer).__name__ != "Attention":
            return Reason.LAYERS, f"{layer.layer_name} is {type(layer).__name__}"
    return None


def _offloads(vllm_config: Any) -> bool:
    """Prefetched weights are there within a layer's forward alone. Mapped ones (UVA) would be read once by each half."""
    config = getattr(vllm_config, "offload_config", None)
    return config is not None and (config.prefetch.offload_group_size > 0 or config.uva.cpu_offload_gb > 0)


def _returns_routed_experts(vllm_config: Any) -> bool:
    """vLLM 0.31 moved the setting."""
    homes = (vllm_config.model_config, getattr(vllm_config, "aux_output_config", None))
    return any(getattr(home, "enable_return_routed_experts", False) for home in homes)


def _wrong_runner(vllm_config: Any, platform: str) -> str | None:
    """GPUs have the hooks of the V2 runner, CPUs those of the V1 runner; either platform may run either."""
    needed = platform == "cuda"
    return None if vllm_config.use_v2_model_runner == needed else f"set VLLM_USE_V2_MODEL_RUNNER={needed:d}"


_LAYER = {"self_attn", "mlp", "block_sparse_moe", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"qkv_proj", "o_proj", "rotary_emb", "attn", "q_norm", "k_norm"}
_MLP = {"gate_up_proj", "down_proj", "act_fn"}


def _layer_problem(layer: Any, compat: ModuleType) -> Finding | None:
    attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
    for module, known in ((layer, _LAYER), (attention, _ATTENTION), (mlp, _MLP)):
        if module is not None and (more := {name for name, _ in module.named_children()} - known):
            return Reason.LAYERS, f"{type(module).__name__} has {', '.join(sorted(more))}"
    if getattr(attention, "do_llama_4_scaling", False):
        return Reason.LAYERS, "queries are scaled by position"
    if mlp is not None and type(mlp.act_fn).__name__ != "SiluAndMul":
        return Reason.LAYERS, f"its activation is {type(mlp.act_fn).__name__}"
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        if type(norm).__name__ != "RMSNorm" or getattr(norm, "variance_size_override", None) is not None:
            return Reason.LAYERS, f"its norm is {type(norm).__name__}"
    for linear in (attention.o_proj, *([] if mlp is None else [mlp.down_proj])):
        if not getattr(linear, "reduce_results", False) or linear.quant_method is None:
            return Reason.QUANTISATION, f"{type(linear).__name__} with {type(linear.quant_method).__name__}"
    if (experts := getattr(layer, "block_sparse_moe", None)) is not None:
        if problem := compat.experts_problem(experts):
            return Reason.LAYERS, problem
    elif mlp is None:
        return Reason.LAYERS, f"{type(layer).__name__} has no MLP"
    return None
