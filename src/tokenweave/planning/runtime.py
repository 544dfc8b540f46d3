"""How the software around the kernels runs a step: launched kernel by kernel or replayed, and with which attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """What a step costs beside its kernels.

    Attributes:
        name: for people.
        step_us: once a step, the GPU idle: scheduling, preparing inputs, sampling, replaying a graph.
        gap_us: of each kernel, on the GPU, over what it has in a graph.
        host_us: of each kernel, on the host; a step cannot be shorter than its launches. 0 where nothing is launched.
        flash3: the attention kernel is FlashAttention-3's, where the GPU can run it.
    """

    name: str
    step_us: float
    gap_us: float
    host_us: float
    flash3: bool


GRAPH = Runtime("graph", step_us=0.0, gap_us=0.0, host_us=0.0, flash3=False)
"""A step replayed as a CUDA graph with torch's attention: this package's engine."""

EAGER = Runtime("eager", step_us=6000.0, gap_us=1.0, host_us=5.0, flash3=True)
"""A serving engine that launches each kernel of a prefill, with FlashAttention-3 on Hopper: what the published figures ran."""

RUNTIMES = {runtime.name: runtime for runtime in (GRAPH, EAGER)}
"""Name -> runtime."""
