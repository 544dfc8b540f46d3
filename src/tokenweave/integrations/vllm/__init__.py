"""TokenWeave inside unmodified vLLM: a plugin that vLLM loads in every process. See docs/vllm.md.

Nothing here is imported until ``TOKENWEAVE=1`` is set, and nothing needs a GPU until a model is built.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from typing import Any

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
    _name_others(ModelRegistry)
    if multiprocessing.parent_process() is None:
        log.info("TokenWeave: %s; models: %s", found.why, ", ".join(sorted(overridden)))


def _name_others(registry: Any) -> None:
    """Has the registry say in the log, when vLLM builds a model that is none of ours, that it runs as stock. Safe to repeat.

    Nothing of the plugin is in such a model, so that no other place hears of it.
    """
    original, said = getattr(registry, "resolve_model_cls", None), set[str]()
    if original is None or hasattr(original, "tokenweave"):
        return

    @functools.wraps(original)
    def resolve_model_cls(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        try:
            model_class, architecture = found
            config = kwargs["model_config"] if "model_config" in kwargs else args[1]
            ours = model_class.__module__ == f"{__name__}.models"
            if not ours and config.runner_type != "draft" and architecture not in said and _builds_first_rank():
                said.add(architecture)
                known = ", ".join(CLASSES.values())
                log.warning("TokenWeave: stock vLLM runs: %s is none of %s, nor run as one", architecture, known)
        except Exception:  # whatever it is: vLLM goes on
            log.debug("TokenWeave: a model's class was not looked at", exc_info=True)
        return found

    resolve_model_cls.tokenweave = True  # type: ignore[attr-defined]
    registry.resolve_model_cls = resolve_model_cls


def _builds_first_rank() -> bool:
    """Whether this process builds the model of a tensor-parallel group's first rank; others only look at its class."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    return model_parallel_is_initialized() and get_tp_group().rank_in_group == 0
