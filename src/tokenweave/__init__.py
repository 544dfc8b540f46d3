"""TokenWeave hides the communication of tensor-parallel LLM inference."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenweave.collective import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm
    from tokenweave.planning import Mode, Plan
    from tokenweave.stages import Epilogue, Split, Stage
    from tokenweave.weave import run_stages

__version__ = "0.1.0"

__all__ = [
    "Epilogue",
    "Mode",
    "Plan",
    "Split",
    "Stage",
    "Workspace",
    "allreduce_rmsnorm",
    "fused_allreduce_rmsnorm",
    "run_stages",
]

# Imported on first use: `tokenweave --help` must not wait for torch, and `tokenweave doctor` must run without it.
_HOMES = {
    "Epilogue": "tokenweave.stages",
    "Mode": "tokenweave.planning",
    "Plan": "tokenweave.planning",
    "Split": "tokenweave.stages",
    "Stage": "tokenweave.stages",
    "Workspace": "tokenweave.collective",
    "allreduce_rmsnorm": "tokenweave.collective",
    "fused_allreduce_rmsnorm": "tokenweave.collective",
    "run_stages": "tokenweave.weave",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
