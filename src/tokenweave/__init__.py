"""TokenWeave hides the communication of tensor-parallel LLM inference."""

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
