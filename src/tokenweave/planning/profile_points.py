"""What `tokenweave tune` measures a time of: the parts of a step, and whole steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenweave.planning.plan import Scheme


@dataclass(frozen=True)
class GemmPoint:
    """One of a layer's GEMMs.

    Attributes:
        name: "qkv", "o", "gate_up" or "down". rows: of the input; of each expert's, for mixtures of experts.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class CollectivePoint:
    """The fused collective of ``tokens`` rows.

    Attributes:
        kind: "default" (alone on the GPU, the transport chooses its blocks), "oneshot" (for few rows), "alone" (with
            ``ctas`` blocks) or "beside" (the same while GEMMs run on the other SMs).
        ctas: thread blocks; 0 where the kind chooses them. cluster: blocks of a cluster, 1 for none.
    """

    kind: str
    tokens: int
    ctas: int = 0
    cluster: int = 1


@dataclass(frozen=True)
class AllReducePoint:
    """The sequential mode's all-reduce, residual add and RMSNorm of ``tokens`` rows, one after the other."""

    tokens: int


@dataclass(frozen=True)
class AttentionPoint:
    """Attention of ``rows`` query rows in ``sequences`` equal sequences, each behind ``context`` positions."""

    rows: int
    context: int
    sequences: int = 1


@dataclass(frozen=True)
class StreamPoint:
    """A kernel that memory bounds: "rope" (with the cache write), "activation", "norm" (residual add + RMSNorm)."""

    name: str
    rows: int


@dataclass(frozen=True)
class StagePoint:
    """The compute of a whole stage, one prompt: "embedding", "attention" or "mlp"."""

    name: str
    rows: int


@dataclass(frozen=True)
class StepPoint:
    """A whole step of one prompt, run again and again for so long that the power limit has settled the clocks.

    Attributes:
        mode: "sequential", "fused", "woven" or "no_comm".
        tokens: of the prompt. layers: of the step, which ends with the final norm of the last row.
        split: rows of a woven step's prefix. ctas, cluster, told, late: of its scheme, with 0 blocks for the transport's
            choice, 1 for no clusters, and the GEMMs' names joined by "+".
    """

    mode: str
    tokens: int
    layers: int
    split: int | None = None
    ctas: int = 0
    cluster: int = 1
    told: str = ""
    late: bool = False

    @classmethod
    def woven(cls, tokens: int, layers: int, split: int, scheme: Scheme) -> StepPoint:
        """A woven step."""
        told = "+".join(scheme.told)
        return cls("woven", tokens, layers, split, scheme.ctas or 0, scheme.cluster or 1, told, scheme.late)

    @property
    def scheme(self) -> Scheme:
        """Of a woven step."""
        told = tuple(self.told.split("+")) if self.told else ()
        return Scheme(self.ctas or None, self.cluster if self.cluster > 1 else None, told, self.late)


@dataclass(frozen=True)
class OverheadPoint:
    """A fixed cost: "kernel" (an empty kernel in a graph), "fork" (a second stream joins in and is waited for, in a graph),
    "replay_host" (the host starts a graph), "layer_host" and "woven_layer_host" (the host issues a layer's launches)."""

    name: str


Point = (
    GemmPoint | CollectivePoint | AllReducePoint | AttentionPoint | StreamPoint | StagePoint | StepPoint | OverheadPoint
)
KINDS: Mapping[str, type[Any]] = {
    "gemm": GemmPoint,
    "collective": CollectivePoint,
    "all_reduce": AllReducePoint,
    "attention": AttentionPoint,
    "stream": StreamPoint,
    "stage": StagePoint,
    "step": StepPoint,
    "overhead": OverheadPoint,
}
"""Key in the file -> its points' type."""
