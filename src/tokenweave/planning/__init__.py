"""Chooses mode, cut, CTAs and SM budgets for every batch."""

from tokenweave.planning.asked import asked_mode
from tokenweave.planning.explanation import Explanation
from tokenweave.planning.hardware import GPUS, Gpu, gpu_by_name, local_gpu
from tokenweave.planning.machine import Costs, Machine, caveat, machine_of
from tokenweave.planning.plan import Mode, Plan, StepTimes
from tokenweave.planning.planner import Planner, plan
from tokenweave.planning.predict import Predictor, predict_step
from tokenweave.planning.runtime import EAGER, GRAPH, Runtime

__all__ = [
    "EAGER",
    "GPUS",
    "GRAPH",
    "Costs",
    "Explanation",
    "Gpu",
    "Machine",
    "Mode",
    "Plan",
    "Planner",
    "Predictor",
    "Runtime",
    "StepTimes",
    "asked_mode",
    "caveat",
    "gpu_by_name",
    "local_gpu",
    "machine_of",
    "plan",
    "predict_step",
]
