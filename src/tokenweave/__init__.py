"""TokenWeave hides the communication of tensor-parallel LLM inference.

The public names are loaded when they are first used, so that ``import tokenweave`` costs nothing (torch takes seconds).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenweave.collective import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm
    from tokenweave.engine.sampling import SamplingParams
    from tokenweave.errors import (
        CollectiveError,
        CudaError,
        ModelError,
        ProfileError,
        RankDied,
        RequestError,
        TokenWeaveError,
    )
    from tokenweave.execution import collective_of
    from tokenweave.llm import LLM, CompletionOutput, RequestOutput, Token
    from tokenweave.overlap import CpuThread, CudaStream
    from tokenweave.planning import Mode, Plan, Planner
    from tokenweave.stages import Epilogue, Split, Stage
    from tokenweave.weave import run_stages

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CollectiveError",
    "CompletionOutput",
    "CpuThread",
    "CudaError",
    "CudaStream",
    "Epilogue",
    "Mode",
    "ModelError",
    "Plan",
    "Planner",
    "ProfileError",
    "RankDied",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Split",
    "Stage",
    "Token",
    "TokenWeaveError",
    "Workspace",
    "allreduce_rmsnorm",
    "collective_of",
    "fused_allreduce_rmsnorm",
    "run_stages",
]

_HOMES = {
    "LLM": "llm",
    "CollectiveError": "errors",
    "CompletionOutput": "llm",
    "CpuThread": "overlap",
    "CudaError": "errors",
    "CudaStream": "overlap",
    "Epilogue": "stages",
    "Mode": "planning",
    "ModelError": "errors",
    "Plan": "planning",
    "Planner": "planning",
    "ProfileError": "errors",
    "RankDied": "errors",
    "RequestError": "errors",
    "RequestOutput": "llm",
    "SamplingParams": "engine.sampling",
    "Split": "stages",
    "Stage": "stages",
    "Token": "llm",
    "TokenWeaveError": "errors",
    "Workspace": "collective",
    "allreduce_rmsnorm": "collective",
    "collective_of": "execution",
    "fused_allreduce_rmsnorm": "collective",
    "run_stages": "weave",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
