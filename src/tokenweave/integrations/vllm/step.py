"""A planned step on its way from vLLM's preparation of attention to the model's forward pass."""

from __future__ import annotations

from collections.abc import Callable
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
    """A planned step, in the place of vLLM's attention metadata by layer: nothing is in it unless they are needed after all.

    Args:
        step: what was planned. stock: builds the metadata.
    """

    def __init__(self, step: Step, stock: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.step, self._stock = step, stock

    def restore(self) -> None:
        """Becomes the metadata, for vLLM's own forward pass."""
        self.update(self._stock())


@dataclass(frozen=True)
class Step:
    """``graph``: what runs it, or None where it runs launch by launch."""

    cut: Cut
    graph: Any = None
