"""vLLM 0.30 to 0.33: as 0.26, but for when graphs can be made."""

from __future__ import annotations

from tokenweave.integrations.vllm.compat.v0_26 import (
    SAME_PATTERN,
    activate,
    cut_metadata,
    experts_problem,
    flash_version,
    forward_context,
    metadata_problem,
    normalise_queries_keys,
    partial_experts,
    rotate,
    stock_context,
)

__all__ = [
    "SAME_PATTERN",
    "WARMS_UP_AFTER_CAPTURE",
    "activate",
    "cut_metadata",
    "experts_problem",
    "flash_version",
    "forward_context",
    "metadata_problem",
    "normalise_queries_keys",
    "partial_experts",
    "rotate",
    "stock_context",
]

WARMS_UP_AFTER_CAPTURE = False
"""vLLM's step of its own runs before its graphs are captured, or not at all: ours are made when first needed."""
