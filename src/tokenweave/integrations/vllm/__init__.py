"""TokenWeave inside unmodified vLLM: a plugin that vLLM loads in every process. See docs/vllm.md.

Nothing here is imported until ``TOKENWEAVE=1`` is set, and nothing needs a GPU until a model is built.
"""

from __future__ import annotations

import logging
import multiprocessing

log = logging.getLogger("vllm.tokenweave")  # below vLLM's own logger, so that its handlers and level apply

# vLLM's classes whose forward pass can be walked; every architecture that vLLM maps to one of them is overridden.
CLASSES = {
    ("llama", "LlamaForCausalLM"): "LlamaForCausalLM",
    ("mistral", "MistralForCausalLM"): "MistralForCausalLM",
    ("qwen2", "Qwen2ForCausalLM"): "Qwen2ForCausalLM",
    ("qwen3", "Qwen3ForCausalLM"): "Qwen3ForCausalLM",
    ("mixtral", "MixtralForCausalLM"): "MixtralForCausalLM",
}


def register() -> None:
    """vLLM's ``vllm.general_plugins`` entry point: overrides the models above if TOKENWEAVE is set. Safe to repeat."""
    from tokenweave.integrations.vllm import switch

    found = switch.current()
    if found.module is None:
        if found.why and multiprocessing.parent_process() is None:
            log.warning("TokenWeave: %s", found.why)
        return
    from vllm.model_executor.models.registry import ModelRegistry

    from tokenweave.integrations.vllm import environment, prometheus

    environment.reach_ray_workers()
    prometheus.serve()
    overridden = []
    for architecture, entry in list(ModelRegistry.models.items()):
        key = (getattr(entry, "module_name", "").rpartition(".")[2], getattr(entry, "class_name", ""))
        if key in CLASSES and architecture.endswith("ForCausalLM"):
            ModelRegistry.register_model(architecture, f"{__name__}.models:{CLASSES[key]}")
            overridden.append(architecture)
    if multiprocessing.parent_process() is None:
        log.info("TokenWeave: %s; models: %s", found.why, ", ".join(sorted(overridden)))
