"""The fused collective: reduce-scatter by rows, residual add, RMSNorm, all-gather."""

from tokenweave.collective.op import allreduce_rmsnorm, fused_allreduce_rmsnorm
from tokenweave.collective.workspace import Workspace

__all__ = ["Workspace", "allreduce_rmsnorm", "fused_allreduce_rmsnorm"]
