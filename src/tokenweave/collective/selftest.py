"""Whether a GPU transport does on this machine what the ``torch`` transport does; asked before it is first used.

All ranks of the group take part and reach the same verdict. It takes a second where the kernels have to be compiled, and
milliseconds where they are cached; a group asks once for each kind of workspace.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tokenweave.collective import torch_backend
from tokenweave.collective.agreement import first_problem
from tokenweave.collective.call import Call, Launch, Layout
from tokenweave.collective.op import run
from tokenweave.collective.workspace import Workspace
from tokenweave.errors import CollectiveError, CudaError
from tokenweave.stages import Epilogue

log = logging.getLogger(__name__)
_Passed = dict[tuple[str, int, torch.dtype], int]
"""(transport, hidden, dtype) -> rows of the largest case."""
# By group, because all its ranks have the same history of workspaces: a rank of two groups must not skip alone.
_passed: weakref.WeakKeyDictionary[dist.ProcessGroup, _Passed] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Case:
    tokens: int
    layout: Layout
    ctas: int | None = None


def failure(workspace: Workspace) -> str | None:
    """Runs the workspace's transport beside ``torch``; every rank of the group calls it.

    Args:
        workspace: its buffers are overwritten, and its counters end as they were.

    Returns:
        None if all results are right on all ranks, else what is wrong, by the first rank that it is wrong on.
    """
    assert workspace.group is not None
    passed = _passed.setdefault(workspace.group, {})
    kind, cases = (workspace.transport, workspace.hidden, workspace.dtype), _cases(workspace)
    rows = max(case.tokens for case in cases)
    if passed.get(kind, 0) >= rows:  # a larger workspace may run kernels that a smaller one does not
        return None
    began = time.perf_counter()
    counters = workspace.collectives, workspace.bytes_sent, workspace.copies
    # Everything is compiled before anything runs: where one rank cannot, the others must not wait for it in a kernel.
    found = first_problem(_compile(workspace, cases), workspace.group, workspace.device)
    if found is None:  # all cases whatever is found: the ranks stay in step
        findings = [_wrong(workspace, case, number) for number, case in enumerate(cases)]
        found = first_problem(next(filter(None, findings), None), workspace.group, workspace.device)
    workspace.collectives, workspace.bytes_sent, workspace.copies = counters
    if found is None:
        passed[kind] = rows
        log.debug("the %s transport passed its self-test in %.2f s", workspace.transport, time.perf_counter() - began)
    return found


def _cases(workspace: Workspace) -> list[_Case]:
    """One-shot and two-shot, fewer rows than ranks, and a block that works on row after row."""
    most, world = workspace.max_tokens, workspace.world_size
    small, large = min(most, world + 1), min(most, 40 * world + 1)
    return [
        _Case(1, "replicated"),
        _Case(small, "replicated"),
        _Case(small, "sharded"),
        _Case(large, "sharded", 1),
        _Case(large, "sharded"),
    ]


def _compile(workspace: Workspace, cases: Sequence[_Case]) -> str | None:
    from tokenweave.collective import cuda_backend

    try:
        for case in cases:
            cuda_backend.prepare(workspace, case.layout, case.tokens, case.ctas)
    except (CollectiveError, CudaError) as error:
        return str(error)
    return None


def _wrong(workspace: Workspace, case: _Case, seed: int) -> str | None:
    device, hidden, dtype = workspace.device, workspace.hidden, workspace.dtype
    mine = torch.Generator().manual_seed(1000 * seed + workspace.rank + 1)
    ours = torch.Generator().manual_seed(1000 * seed)

    def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)

    start = normal(case.tokens, hidden, generator=mine)
    residuals = [normal(case.tokens, hidden, generator=ours)]
    residuals.append(residuals[0].clone())
    epilogue = Epilogue(normal(hidden, generator=ours), 1e-5)
    partial = workspace.buffer(case.tokens)
    partial.copy_(start)
    call = Call(partial, residuals[0], epilogue, workspace, Launch(ctas=case.ctas, layout=case.layout))
    broken = None
    try:
        _launch(call)
    except (CollectiveError, CudaError) as error:
        broken = str(error)
    expected = torch.full_like(start, float("nan"))
    torch_backend.fused(dataclasses.replace(call, partial=start, residual=residuals[1], out=expected))
    if broken:
        return broken
    # The residual has the same bits: the same sums in the same order. A switch rounds its sum before the residual add.
    ulp = torch.finfo(dtype).eps
    exact = not workspace.transport.startswith("multimem")
    checks = (
        ("the residual", 0.0 if exact else 8 * ulp, residuals[0], residuals[1]),
        ("the rows", max(1e-5, 2 * ulp if exact else 8 * ulp), partial, expected),
    )
    for name, limit, got, wanted in checks:
        # Elements are of about unit size; a sum that cancels keeps the error of its terms, hence the 1.
        excess = (got.float() - wanted.float()).abs() - limit * (1 + wanted.float().abs())
        if not bool((excess <= 0).all()):  # NaN is not
            what = (
                f"{name} of {case.tokens} {case.layout} rows (hidden {hidden}, {dtype}, {case.ctas or 'default'} CTAs)"
            )
            return f"{what} on rank {workspace.rank} is not what the torch transport makes of the same data"
    return None


def _launch(call: Call) -> None:
    """The call in place, done and without a failure on its record."""

    run(call)
    torch.cuda.synchronize(call.workspace.device)
    call.workspace.check()
