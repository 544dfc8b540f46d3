"""The schedule: one loop over (stage, split).

Sequential, fused and woven differ in how many splits there are, which collective runs and on which stream; the loop is
the same. In-order streams give the overlap: attention(prefix) runs beside collective(suffix, previous stage), then
attention(suffix) beside collective(prefix, attention), and so on. The suffix's attention reads the K/V that the prefix
wrote one call earlier on the same compute stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tokenweave.collective.workspace import Workspace
from tokenweave.errors import RequestError
from tokenweave.overlap import Overlap
from tokenweave.stages import Split, Stage

Collective = Callable[..., torch.Tensor]
"""(partial, residual, epilogue, rows) -> normalised rows, the same on every rank; ``rows`` as ``Split.sampled``. Where a
split has a ``row_count`` it is given too, as ``row_count=``."""


def run_stages(
    stages: Sequence[Stage],
    splits: Sequence[Split],
    collective: Collective,
    workspace: Workspace,
    overlap: Overlap,
) -> list[torch.Tensor]:
    """Walks ``stages`` over ``splits`` (one: sequential or fused; two: woven). All ranks of the workspace's group call it.

    Args:
        stages: the whole model; the first one's ``compute`` gets no rows.
        splits: of this step, in the order of their rows, which are disjoint; made anew for each step, since the walk leaves
            its state in them.
        collective: what each stage ends with: :func:`tokenweave.collective_of`.
        workspace: with room for all splits' rows.
        overlap: runs the collectives, in order. :class:`tokenweave.CudaStream` or :class:`tokenweave.CpuThread`, for any
            number of steps.

    Returns:
        per split, the final-norm rows named by ``Split.sampled``, [n, hidden], ready on the current stream. Where that is
        None: all rows, which are the workspace's memory until its next step.

    Raises:
        RequestError: a split was walked before.
        CollectiveError: a split is not within the workspace, or the collective's contract is broken
            (:func:`tokenweave.fused_allreduce_rmsnorm`).
    """
    for split in splits:
        if split.pending is not None:
            raise RequestError(
                f"run_stages: rows {split.start}..{split.start + split.tokens} were walked already, or begun; make a Split "
                f"anew for each step"
            )
    last = len(stages) - 1
    collectives = [
        collective if split.row_count is None else functools.partial(collective, row_count=split.row_count)
        for split in splits
    ]
    for index, stage in enumerate(stages):
        for split, reduce in zip(splits, collectives, strict=True):
            x = None if split.pending is None else overlap.wait(split.pending)
            if x is not None and not stage.in_place:
                split.region = 1 - split.region
            out = workspace.buffer(split.tokens, start=split.start, region=split.region)
            stage.compute(x, split.inputs, out)
            rows = split.sampled if index == last else None
            split.pending = overlap.run(reduce, out, split.residual, stage.epilogue, rows)
    return [overlap.wait(split.pending) for split in splits]
