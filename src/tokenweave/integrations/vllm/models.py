"""vLLM's model classes with TokenWeave in their forward pass; vLLM imports them by name when it builds a model.

Only the outer class is replaced: its forward is not compiled, the inner model's call is. A step without a plan goes the
stock way, through the same compiled graph and the same compile cache.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models import llama, mistral, mixtral, qwen2, qwen3

from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.start import start


class _Woven:
    """The first base of each class below."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **more: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **more)  # type: ignore[call-arg]
        self.tokenweave: Runtime | None = start(self, vllm_config, prefix)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """As vLLM's; a planned step is walked by TokenWeave."""
        if self.tokenweave is not None and is_forward_context_available():
            metadata = get_forward_context().attn_metadata
            rows = self.tokenweave.forward(metadata, inputs_embeds)
            if rows is not None:
                return rows
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **more)  # type: ignore[misc]

    def get_model_state_cls(self) -> type:
        """What vLLM's V2 runner asks for: the state that plans steps."""
        from tokenweave.integrations.vllm.state import state_class

        return state_class(self.tokenweave is not None)


class LlamaForCausalLM(_Woven, llama.LlamaForCausalLM):
    """Llama, and what vLLM runs as Llama."""


class MistralForCausalLM(_Woven, mistral.MistralForCausalLM):
    """Mistral."""


class Qwen2ForCausalLM(_Woven, qwen2.Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class Qwen3ForCausalLM(_Woven, qwen3.Qwen3ForCausalLM):
    """Qwen3, dense."""


class MixtralForCausalLM(_Woven, mixtral.MixtralForCausalLM):
    """Mixtral."""
