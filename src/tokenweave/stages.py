"""A model is a flat list of stages: embedding, attention_0, mlp_0, attention_1, ..., mlp_last.

Each stage computes *partial sums* of a row range; its epilogue says what the collective does with them. Sequential,
fused and woven execution walk the same list (see :mod:`tokenweave.weave`), so a model never knows how it is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Epilogue:
    """What follows a stage's all-reduce: ``[post-norm] -> residual add -> [norm]``.

    Attributes:
        weight: RMSNorm weight, [hidden], of the norm that feeds the *next* stage (the last stage: the final norm).
        eps: epsilon of both norms, added to the mean square.
        has_residual: False for the embedding, whose reduced sum *becomes* the residual.
        post_norm: RMSNorm weight, [hidden], applied to the reduced sum before the residual add (Gemma-2, OLMo-2), or None.
        weight_offset: added to both weights before use (Gemma stores ``w`` and multiplies by ``1 + w``).
        bias: row-parallel bias, [hidden], added once to the reduced sum, or None.
    """

    weight: torch.Tensor
    eps: float
    has_residual: bool = True
    post_norm: torch.Tensor | None = None
    weight_offset: float = 0.0
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Stage:
    """One half of a layer up to its all-reduce.

    Attributes:
        name: unique within the model, e.g. ``"attention_3"``; appears in traces and errors.
        compute: ``compute(x, inputs, out)`` reads ``x`` [tokens, hidden] (None for the embedding) and ``inputs``
            (positions, cache slots, ...: the model family's own batch description for these rows), and writes this
            rank's partial sums into ``out`` [tokens, hidden]. It runs on the current stream and must not synchronise.
        epilogue: what the collective does with the partial sums.
        in_place: True if compute's last read of ``x`` precedes its first write of ``out``, so that both may be the
            same memory. Mixture-of-experts stages, which still read rows while they write, say False and get ``out``
            in the workspace's other region.
    """

    name: str
    compute: Callable[[torch.Tensor | None, Any, torch.Tensor], None]
    epilogue: Epilogue
    in_place: bool = True


@dataclass
class Split:
    """A contiguous row range of one step on its way through the stages: the whole step, its prefix or its suffix.

    Attributes:
        start: first row of the step that belongs to this split.
        tokens: number of rows.
        inputs: passed to ``Stage.compute``.
        residual: [tokens, hidden] view of the step's residual buffer.
        sampled: int64 [n], rows of this split (0 = its first) whose final norm is wanted, ascending; None for all.
        row_count: int32 [1] on the device, how many of the rows are real, for collectives that are captured in a graph
            and replayed with other batches; None if all are.
        pending: the collective in flight for this split; the overlap backend turns it into the rows that the next stage
            reads. None before the embedding.
        region: the workspace region that holds those rows.
    """

    start: int
    tokens: int
    inputs: Any
    residual: torch.Tensor
    sampled: torch.Tensor | None = None
    row_count: torch.Tensor | None = None
    pending: Any = field(default=None, repr=False)
    region: int = 0
