"""A planned step on its way from vLLM's preparation of attention to the model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenweave.integrations.vllm.cut import Tables
from tokenweave.planning import Plan


@dataclass(frozen=True)
class Cut:
    """A planned step, before anything of it runs.

    Attributes:
        plan: fused or woven.
        rows: real ones.
        tables: of the step.
        longest_query, longest_sequence: of any request, or more.
    """

    plan: Plan
    rows: int
    tables: Tables
    longest_query: int
    longest_sequence: int


class Planned(dict[str, Any]):
    """vLLM's attention metadata by layer, and the step that was planned on it."""

    def __init__(self, metadata: dict[str, Any], step: Step) -> None:
        super().__init__(metadata)
        self.step = step


@dataclass(frozen=True)
class Step:
    """``graph``: what runs it, or None where it runs launch by launch."""

    cut: Cut
    graph: Any = None
