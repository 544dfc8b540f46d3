"""``torch.library`` ops, so that ``torch.compile`` sees one opaque call with honest mutations.

The workspace travels as its string handle. Several ops, because a custom op may not return what it was given: in place of
the partial sums, into ``out``, (sampled rows) into a new tensor, and quantised into ``out``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from tokenweave.collective.call import NO_BACKWARD, Call, Launch, Layout
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.op import run
from tokenweave.collective.workspace import find
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue

_COMMON = (
    "Tensor weight, Tensor? post_norm, Tensor? bias, Tensor? rows, Tensor? row_count, float eps, float weight_offset, "
    "bool has_residual, str layout, int channel, int? ctas, int? cluster, str workspace"
)
_library = torch.library.Library("tokenweave", "DEF")
_library.define(f"fused_allreduce_rmsnorm_(Tensor(a!) partial, Tensor(b!) residual, {_COMMON}) -> ()")
_library.define(f"fused_allreduce_rmsnorm_out(Tensor partial, Tensor(a!) residual, Tensor(b!) out, {_COMMON}) -> ()")
_library.define(f"fused_allreduce_rmsnorm(Tensor partial, Tensor(a!) residual, {_COMMON}) -> Tensor")
_library.define(
    "fused_allreduce_rmsnorm_fp8(Tensor partial, Tensor(a!) residual, Tensor(b!) out, Tensor(c!)? out_scales, "
    f"Tensor(d!)? unquantised, Tensor? scale, {_COMMON}) -> ()"
)


def _run(
    partial: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor | None,
    fp8: Fp8 | None,
    weight: torch.Tensor,
    post_norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    has_residual: bool,
    layout: str,
    channel: int,
    ctas: int | None,
    cluster: int | None,
    workspace: str,
) -> torch.Tensor:
    epilogue = Epilogue(weight, eps, has_residual, post_norm, weight_offset, bias)
    launch = Launch(channel, ctas, cluster, cast(Layout, layout))
    return run(Call(partial, residual, epilogue, find(workspace), launch, rows, row_count, out, fp8))


def _in_place(partial, residual, *rest):
    _run(partial, residual, None, None, *rest)


def _into(partial, residual, out, *rest):
    _run(partial, residual, out, None, *rest)


def _quantised(partial, residual, out, out_scales, unquantised, scale, *rest):
    _run(partial, residual, unquantised, Fp8(out, out_scales, scale), *rest)


def _new(partial, residual, weight, post_norm, bias, rows, *rest):
    n = partial.shape[0] if rows is None else rows.shape[0]
    out = partial.new_empty(n, partial.shape[1])
    return _run(partial, residual, out, None, weight, post_norm, bias, rows, *rest)


def _new_fake(partial, residual, weight, post_norm, bias, rows, *rest):
    n = partial.shape[0] if rows is None else rows.shape[0]
    return partial.new_empty(n, partial.shape[1])


def _without_backward(op: torch._ops.OpOverload) -> Callable[..., torch.Tensor | None]:
    """``op`` for tensors that may require grad. Compiled code comes here, where an eager call is refused by its checks; without this,
    autograd would take the op for the identity."""

    def run_op(*args: Any) -> torch.Tensor | None:
        if torch.is_grad_enabled():
            for argument, arg in zip(op._schema.arguments, args, strict=False):
                if isinstance(arg, torch.Tensor) and arg.requires_grad:
                    raise CollectiveError(f"fused_allreduce_rmsnorm: {NO_BACKWARD.format(argument.name)}")
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run_op


for _key in ("CPU", "CUDA"):
    _library.impl("fused_allreduce_rmsnorm_", _in_place, _key)
    _library.impl("fused_allreduce_rmsnorm_out", _into, _key)
    _library.impl("fused_allreduce_rmsnorm", _new, _key)
    _library.impl("fused_allreduce_rmsnorm_fp8", _quantised, _key)
for _name in (
    "fused_allreduce_rmsnorm_",
    "fused_allreduce_rmsnorm_out",
    "fused_allreduce_rmsnorm",
    "fused_allreduce_rmsnorm_fp8",
):
    _library.impl(_name, _without_backward(getattr(torch.ops.tokenweave, _name).default), "Autograd")
torch.library.register_fake("tokenweave::fused_allreduce_rmsnorm_", lambda *a, **k: None, lib=_library)
torch.library.register_fake("tokenweave::fused_allreduce_rmsnorm_out", lambda *a, **k: None, lib=_library)
torch.library.register_fake("tokenweave::fused_allreduce_rmsnorm_fp8", lambda *a, **k: None, lib=_library)
torch.library.register_fake("tokenweave::fused_allreduce_rmsnorm", _new_fake, lib=_library)


def traced(call: Call) -> torch.Tensor:
    """The call as ops, for a compiler that is tracing."""
    partial, residual, epilogue, launch, out, fp8 = (
        call.partial,
        call.residual,
        call.epilogue,
        call.launch,
        call.out,
        call.fp8,
    )
    rest = (
        epilogue.weight,
        epilogue.post_norm,
        epilogue.bias,
        call.rows,
        call.row_count,
        epilogue.eps,
        epilogue.weight_offset,
        epilogue.has_residual,
        launch.layout,
        launch.channel,
        launch.ctas,
        launch.cluster,
        call.workspace.handle,
    )
    ops = torch.ops.tokenweave
    if fp8 is not None:
        ops.fused_allreduce_rmsnorm_fp8(partial, residual, fp8.rows, fp8.scales, out, fp8.scale, *rest)
        return fp8.rows
    if out is not None:
        ops.fused_allreduce_rmsnorm_out(partial, residual, out, *rest)
        return out
    if call.rows is None:
        ops.fused_allreduce_rmsnorm_(partial, residual, *rest)
        return partial
    return cast(torch.Tensor, ops.fused_allreduce_rmsnorm(partial, residual, *rest))
