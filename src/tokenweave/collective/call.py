"""One call of a collective: its arguments as one value, and the contract that they are checked against."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import torch

from tokenweave.collective import fp8 as quantisation
from tokenweave.collective.arguments import MAX_BLOCKS
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.workspace import Workspace
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue

Layout = Literal["sharded", "replicated"]


@dataclass(frozen=True)
class Launch:
    """How a call is launched; the fields are documented at :func:`tokenweave.fused_allreduce_rmsnorm`."""

    channel: int = 0
    ctas: int | None = None
    cluster: int | None = None
    layout: Layout = "sharded"


@dataclass(frozen=True)
class Call:
    """The arguments of a collective, documented at :func:`tokenweave.fused_allreduce_rmsnorm`.

    With ``fp8``, ``out`` is where the rows go unquantised as well, or None.
    """

    partial: torch.Tensor
    residual: torch.Tensor
    epilogue: Epilogue
    workspace: Workspace
    launch: Launch  # no default: torch 2.11's tracer cannot wrap an instance that is a default
    rows: torch.Tensor | None = None
    row_count: torch.Tensor | None = None
    out: torch.Tensor | None = None
    fp8: Fp8 | None = None

    @property
    def tokens(self) -> int:
        """Rows of ``partial``."""
        return self.partial.shape[0]

    @property
    def results(self) -> int:
        """Rows of the result: the sampled ones, or all."""
        return self.tokens if self.rows is None else self.rows.shape[0]

    @property
    def replicated(self) -> bool:
        """Whether every rank holds, reduces and updates all rows of the residual."""
        return self.launch.layout == "replicated"


def check(op: str, call: Call) -> None:
    """Raises, with the name of the public function ``op``, if the call breaks the contract.

    Raises:
        CollectiveError: says what was given and what is expected.
    """
    problem = _shape_problem(call) or _vector_problem(call) or _rows_problem(call) or _memory_problem(call)
    if problem is not None:
        raise CollectiveError(f"{op}: {problem}")


def check_shapes(op: str, call: Call) -> None:
    """The part of :func:`check` that what is made for a call, such as its default results, may count on.

    Raises:
        CollectiveError: as of :func:`check`.
    """
    problem = _shape_problem(call) or _rows_problem(call)
    if problem is not None:
        raise CollectiveError(f"{op}: {problem}")


NO_BACKWARD = "{} requires grad, and this has no backward: call it under torch.no_grad()"


def _kind(value: object) -> str:
    return "None" if value is None else f"{value!r}, a {type(value).__name__}"


# Each gives the first thing that is wrong, or None. A sentence is made only where it is said: calls are as frequent as kernels.


def _shape_problem(call: Call) -> str | None:
    """Of the batch, its residual, and the launch."""
    partial, residual, workspace, launch = call.partial, call.residual, call.workspace, call.launch
    if not isinstance(workspace, Workspace):
        return f"workspace is {_kind(workspace)}; expected a tokenweave.Workspace"
    hidden, dtype = workspace.hidden, workspace.dtype
    if workspace.closed:
        return f"{workspace.handle} is closed; create a new workspace"
    if workspace.process != os.getpid():
        return (
            f"{workspace.handle} belongs to process {workspace.process}, of which this one ({os.getpid()}) is a fork, with no "
            "place in the group; start processes anew (spawn) and create a workspace in each"
        )
    for name, tensor in (("partial", partial), ("residual", residual)):
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is {_kind(tensor)}; expected a tensor [tokens, {hidden}] {dtype}"
    if not (partial.dim() == 2 and partial.shape[1] == hidden and partial.dtype == dtype):
        return f"partial is {list(partial.shape)} {partial.dtype}; this workspace takes [tokens, {hidden}] {dtype}"
    if partial.shape[0] > workspace.max_tokens:
        return f"partial has {partial.shape[0]} rows; this workspace holds {workspace.max_tokens}: raise max_tokens"
    if partial.stride(1) != 1:
        return f"partial has strides {partial.stride()}; its rows must be contiguous"
    if partial.device != workspace.device:
        return f"partial is on {partial.device}; this workspace is on {workspace.device}"
    if not (residual.shape == partial.shape and residual.dtype == dtype and residual.device == partial.device):
        return (
            f"residual is {list(residual.shape)} {residual.dtype} on {residual.device}; expected partial's "
            f"{list(partial.shape)} {dtype} on {partial.device}"
        )
    if residual.stride(1) != 1:
        return f"residual has strides {residual.stride()}; its rows must be contiguous"
    if not isinstance(launch.channel, Integral) or not 0 <= launch.channel < workspace.channels:
        return f"channel={launch.channel}; this workspace has channels 0..{workspace.channels - 1}"
    if launch.layout not in ("sharded", "replicated"):
        return f"layout={launch.layout!r}; expected 'sharded' or 'replicated'"
    ctas, cluster = launch.ctas, launch.cluster
    if ctas is not None and not (isinstance(ctas, Integral) and 1 <= ctas <= MAX_BLOCKS):
        return f"ctas={ctas}; expected 1 to {MAX_BLOCKS}"
    if cluster is not None and not (isinstance(cluster, Integral) and cluster >= 1):
        return f"cluster={cluster}; expected 1 or more, or None for none"
    return None


def _vector_problem(call: Call) -> str | None:
    """Of the epilogue."""
    partial, epilogue, hidden = call.partial, call.epilogue, call.workspace.hidden
    for name, vector in (("weight", epilogue.weight), ("post_norm", epilogue.post_norm), ("bias", epilogue.bias)):
        if vector is None and name != "weight":
            continue
        if not isinstance(vector, torch.Tensor):
            return f"{name} is {_kind(vector)}; expected a tensor [{hidden}]"
        if tuple(vector.shape) != (hidden,):
            return f"{name} has shape {list(vector.shape)}; expected [{hidden}]"
        if not vector.is_floating_point() or vector.device != partial.device:
            return f"{name} is {vector.dtype} on {vector.device}; expected floats on {partial.device}"
        if vector.requires_grad and torch.is_grad_enabled():
            return NO_BACKWARD.format(name)
    if not (isinstance(epilogue.eps, Real) and epilogue.eps >= 0):
        return f"eps={epilogue.eps!r}; expected a number >= 0"
    if not isinstance(epilogue.weight_offset, Real):
        return f"weight_offset={epilogue.weight_offset!r}; expected a number"
    return None


def _rows_problem(call: Call) -> str | None:
    """Of the choice of rows."""
    partial, rows, row_count = call.partial, call.rows, call.row_count
    for name, tensor, kind in (("rows", rows, "[n] int64"), ("row_count", row_count, "[1] int32")):
        if not (tensor is None or isinstance(tensor, torch.Tensor)):
            return f"{name} is {_kind(tensor)}; expected a tensor {kind} on {partial.device}"
    if rows is not None:
        if not (rows.dim() == 1 and rows.dtype == torch.int64 and rows.device == partial.device):
            return f"rows is {list(rows.shape)} {rows.dtype} on {rows.device}; expected [n] int64 on {partial.device}"
        if rows.shape[0] > call.workspace.max_tokens:
            return (
                f"rows names {rows.shape[0]} rows; this workspace holds {call.workspace.max_tokens}: raise max_tokens"
            )
        if rows.device.type == "cpu" and rows.numel():  # elsewhere a look at the values would stall the stream
            within = int(rows[0]) >= 0 and int(rows[-1]) < partial.shape[0]
            if not (within and bool((rows[1:] > rows[:-1]).all())):
                return f"rows={rows.tolist()}; expected ascending rows from 0 to {partial.shape[0] - 1}, none of them twice"
    if row_count is not None and not (
        row_count.numel() == 1 and row_count.dtype == torch.int32 and row_count.device == partial.device
    ):
        return (
            f"row_count is {list(row_count.shape)} {row_count.dtype} on {row_count.device}; expected [1] int32 on "
            f"{partial.device}"
        )
    return None


def _memory_problem(call: Call) -> str | None:
    """Of the results, and of what may share memory."""
    partial, residual, hidden, out, fp8 = call.partial, call.residual, call.workspace.hidden, call.out, call.fp8
    n = call.results
    outputs: list[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype]]
    outputs = [("out" if fp8 is None else "unquantised", out, (n, hidden), call.workspace.dtype)]
    if fp8 is not None:
        outputs += [
            ("out", fp8.rows, (n, hidden), quantisation.DTYPE),
            ("out_scales", fp8.scales, (n,), torch.float32),
            ("scale", fp8.scale, (1,), torch.float32),
        ]
    for name, tensor, shape, kind in outputs:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is {_kind(tensor)}; expected a tensor {list(shape)} {kind}"
        if not (tuple(tensor.shape) == shape and tensor.dtype == kind and tensor.device == partial.device):
            return (
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; expected {list(shape)} {kind} on "
                f"{partial.device}"
            )
        if not (tensor.stride(-1) == 1 or tensor.numel() <= 1):
            return f"{name} has strides {tensor.stride()}; its rows must be contiguous"
    rows_of = [("partial", partial), ("residual", residual), (outputs[0][0], out)]
    if fp8 is not None:
        rows_of.append(("out", fp8.rows))
    for name, tensor in rows_of:
        if tensor is None:
            continue
        if tensor.shape[0] > 1 and tensor.stride(0) < hidden:
            return f"{name} has strides {tensor.stride()}; its rows must not overlap"
        if tensor.requires_grad and torch.is_grad_enabled():
            return NO_BACKWARD.format(name)
        # Kernels of our own write what torch would not.
        if call.workspace.transport == "torch" and tensor.is_inference() and not torch.is_inference_mode_enabled():
            return f"{name} was made under torch.inference_mode(), where alone it may be written: call this there too"
    size = call.workspace.dtype.itemsize
    spans = [_span("partial", partial, hidden * size), _span("residual", residual, hidden * size)]
    if out is not None and not (call.rows is None and _is_same(out, partial)):
        spans.append(_span(outputs[0][0], out, hidden * size))
    if fp8 is not None:
        spans.append(_span("out", fp8.rows, hidden))
        if fp8.scales is not None:
            spans.append(_span("out_scales", fp8.scales, 4))
    spans.sort()
    if all(one[1] <= other[0] for one, other in itertools.pairwise(spans)):
        return None
    for one, other in itertools.combinations(spans, 2):
        if _meet(one, other):
            return (
                f"{one[2]} and {other[2]} share memory; each is written with its own result, and only {outputs[0][0]} may be "
                "partial itself, where rows is None"
            )
    return None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have every element at the same address."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


_Span = tuple[int, int, str, int, int]
"""Addresses of the first row's start and the last row's end, name, bytes from row to row (0: there is one row) and of a row."""


def _span(name: str, tensor: torch.Tensor, row_bytes: int) -> _Span:
    start, rows = tensor.data_ptr(), tensor.shape[0]
    if rows > 1:
        pitch = tensor.stride(0) * tensor.element_size()
        return start, start + (rows - 1) * pitch + row_bytes, name, pitch, row_bytes
    return start, start + rows * row_bytes, name, 0, row_bytes


def _meet(one: _Span, other: _Span) -> bool:
    """Whether a row of the one overlaps a row of the other, which does not start before it."""
    if other[0] >= one[1] or other[0] == other[1]:
        return False
    pitches = {one[3], other[3]} - {0}
    if len(pitches) != 1:  # two rows; or rows that are not equally far apart, which is nobody's layout
        return True
    (pitch,) = pitches
    column = (other[0] - one[0]) % pitch  # side by side in the columns of one larger tensor they share nothing
    return column < one[4] or column + other[4] > pitch
