"""Continuous batching simulated: what a fleet serves of a trace, and how long its requests wait."""

from tokenweave.simulation.fleet import ROUTINGS, Outcome, fitting, refuse_unfit, simulate
from tokenweave.simulation.memory import kv_tokens
from tokenweave.simulation.metrics import Metrics, measure
from tokenweave.simulation.replica import Limits
from tokenweave.simulation.table import StepTable
from tokenweave.simulation.trace import Trace, poisson, read_trace, sized

__all__ = [
    "ROUTINGS",
    "Limits",
    "Metrics",
    "Outcome",
    "StepTable",
    "Trace",
    "fitting",
    "kv_tokens",
    "measure",
    "poisson",
    "read_trace",
    "refuse_unfit",
    "simulate",
    "sized",
]
