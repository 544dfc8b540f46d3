"""Chooses mode, cut, CTAs and SM budgets for every batch."""

from tokenweave.planning.hardware import GPUS, Gpu, gpu_by_name, local_gpu
from tokenweave.planning.plan import Mode, Plan
from tokenweave.planning.planner import Explanation, Planner, asked_mode, plan

__all__ = ["GPUS", "Explanation", "Gpu", "Mode", "Plan", "Planner", "asked_mode", "gpu_by_name", "local_gpu", "plan"]
