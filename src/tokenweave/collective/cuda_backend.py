"""The GPU transports: which kernel runs for a call, with which launch shape, and what its failures mean."""

from __future__ import annotations

import dataclasses
import functools
import logging
import struct
import zlib
from ctypes import Structure, c_int

import torch

from tokenweave.collective.arguments import Args, PointerTable
from tokenweave.collective.call import Call
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.kernels import (
    BIAS,
    FP8,
    HAS_RESIDUAL,
    POST_NORM,
    ROW_COUNT,
    ROW_SCALES,
    ROWS,
    UNQUANTISED,
    WEIGHT_FP32,
    WEIGHT_OFFSET,
    Kernel,
    groups_of,
    multimem_kernel,
    oneshot_kernel,
    register_kernel,
    ring_depth,
    ring_kernel,
)
from tokenweave.collective.rows import rows_per_rank
from tokenweave.collective.symmetric import FLAG_BYTES, Symmetric
from tokenweave.collective.workspace import Workspace
from tokenweave.cuda.launch import loaded
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue

log = logging.getLogger(__name__)


class _Inboxes(Structure):
    _fields_ = (("of", PointerTable),)


def default_ctas(tokens: int, workspace: Workspace) -> int:
    """Blocks of a two-shot call that has the GPU to itself: a row per group, at most 64 blocks, or 32 for multimem, whose
    published times on 8 H100 grow again from there on (benchmarks/published).

    A pure function of what all ranks know.
    """
    _, groups = groups_of(workspace.hidden, _name(workspace.dtype))
    most = 32 if workspace.transport == "multimem" else 64
    return max(1, min(most, -(-rows_per_rank(tokens, workspace.world_size) // groups)))


def fused(call: Call) -> torch.Tensor:
    """One fused collective on the current stream. The call is checked already, but for what only kernels ask."""
    workspace, epilogue, fp8, out = call.workspace, call.epilogue, call.fp8, call.out
    workspace.check()
    vectors = {"weight": epilogue.weight, "post_norm": epilogue.post_norm, "bias": epilogue.bias, "rows": call.rows}
    outputs = {"out": out} if fp8 is None else {"unquantised": out, "out": fp8.rows, "out_scales": fp8.scales}
    for name, tensor in {"residual": call.residual, **outputs, **vectors}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise CollectiveError(
                f"fused_allreduce_rmsnorm: {name} has strides {tensor.stride()}; it must be contiguous"
            )
    if fp8 is not None:
        _check_fp8(fp8, workspace, remote=not call.replicated)
    elif out is None:
        out = call.partial if call.rows is None else call.partial.new_empty(call.results, workspace.hidden)
        call = dataclasses.replace(call, out=out)
    if call.results and call.tokens:  # else all ranks know: nothing is launched
        (_oneshot if call.replicated else _twoshot)(call)
    result = out if fp8 is None else fp8.rows
    assert result is not None
    return result


def _check_fp8(fp8: Fp8, workspace: Workspace, *, remote: bool) -> None:
    """``remote``: whether peers write the result."""
    if torch.cuda.get_device_capability(workspace.device) < (8, 9):
        raise CollectiveError(
            "fused_allreduce_rmsnorm: out_dtype=torch.float8_e4m3fn needs GPUs of compute capability 8.9 or newer, and "
            f"{torch.cuda.get_device_name(workspace.device)} has less; use transport='torch', or quantise afterwards"
        )
    for name, tensor in (("out", fp8.rows), ("out_scales", fp8.scales)):
        if remote and tensor is not None and tensor.numel() and workspace.offset_of(tensor) is None:
            source = "fp8" if name == "out" else "scales"
            raise CollectiveError(
                f"fused_allreduce_rmsnorm: {name} is outside the workspace, where peers cannot write it; use "
                f"workspace.{source}(rows, start=..., region=...), or layout='replicated'"
            )
    if fp8.rows.data_ptr() % (16 if workspace.hidden % 16 == 0 else 8):
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: out starts at {fp8.rows.data_ptr():#x}; expected 16-byte alignment"
        )


def prepare(workspace: Workspace, layout: str, tokens: int, ctas: int | None) -> None:
    """Compiles and loads the kernel that a plain call (residual, weights in the rows' dtype) of this shape takes."""
    if layout == "replicated":
        kernel = _oneshot_kernel(*_shape(workspace), HAS_RESIDUAL, tokens)
    else:
        kernel = twoshot_kernel(
            workspace, HAS_RESIDUAL, tokens, default_ctas(tokens, workspace) if ctas is None else ctas
        )
    loaded(kernel, workspace.device.index or 0)


def _twoshot(call: Call) -> None:
    partial, workspace, launch, out, fp8 = call.partial, call.workspace, call.launch, call.out, call.fp8
    memory = _symmetric(workspace)
    tokens, n = call.tokens, call.results
    x, y = workspace.offset_of(partial), None if out is None else workspace.offset_of(out)
    if launch.channel and (x is None or (out is not None and y is None)):
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: channel={launch.channel} with partial sums or a result outside the workspace; the "
            "staging regions serve channel 0, one collective at a time: use workspace.buffer(tokens) for both, outside of "
            "torch.compile, which computes them elsewhere"
        )
    if x is None:  # peers read a copy
        staged = workspace.staging(tokens, 0)
        staged.copy_(partial)
        _count_copy(workspace)
        x = workspace.offset_of(staged)
    target = y
    if out is not None and y is None:  # peers write where they can
        target = workspace.offset_of(workspace.staging(n, 1))
    quantised = None if fp8 is None else workspace.offset_of(fp8.rows)
    scales = None if fp8 is None or fp8.scales is None else workspace.offset_of(fp8.scales)
    assert x is not None
    blocks = default_ctas(tokens, workspace) if launch.ctas is None else launch.ctas
    if launch.cluster and blocks % launch.cluster:
        raise CollectiveError(f"fused_allreduce_rmsnorm: cluster={launch.cluster} does not divide ctas={blocks}")
    kernel = twoshot_kernel(workspace, _options(call), tokens, blocks)
    function = loaded(kernel, workspace.device.index or 0)
    args = _args(call, memory)
    # The switch has one address for the memory of all ranks.
    addresses = [memory.multicast] if workspace.transport == "multimem" else memory.addresses
    for p, address in enumerate(addresses):
        tables = ((args.x, x), (args.out, target), (args.fp8, quantised), (args.scales, scales))
        for table, offset in tables:
            table[p] = None if offset is None else address + offset
    args.signature = _signature(kernel, blocks, tokens, n, x, target, quantised, scales)
    params = [args, c_int(ring_depth(kernel, blocks))] if kernel.stages else [args]
    # A call that has the GPU to itself starts while its predecessor ends. One that runs beside GEMMs must not: its blocks
    # would hold their SMs while they wait for the collective before it.
    alone = launch.ctas is None
    stream = torch.cuda.current_stream().cuda_stream
    function.launch(blocks, stream, *params, cluster=launch.cluster or 1, overlap=alone)
    _count(call)
    if out is not None and y is None:
        result = workspace.staging(n, 1)
        if call.row_count is not None:  # rows behind it stay as they are
            real = torch.arange(n, device=workspace.device).unsqueeze(1) < call.row_count
            result = torch.where(real, result, out)
        out.copy_(result)
        _count_copy(workspace)


def _count_copy(workspace: Workspace) -> None:
    workspace.copies += 1
    if workspace.copies == 1 and workspace.rank == 0:
        log.info(
            "partial sums or rows outside of %s are copied through its staging; those in workspace.buffer(tokens) are not "
            "(torch.compile computes them elsewhere)",
            workspace.handle,
        )


def _oneshot(call: Call) -> None:
    workspace, launch, n = call.workspace, call.launch, call.results
    memory = _symmetric(workspace)
    if n > memory.inbox_rows and call.row_count is not None:
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: {n} rows with layout='replicated' and row_count; the inboxes hold "
            f"{memory.inbox_rows} rows: use layout='sharded' for larger batches"
        )
    kernel = _oneshot_kernel(*_shape(workspace), _options(call), min(n, memory.inbox_rows))
    function = loaded(kernel, workspace.device.index or 0)
    inboxes = _Inboxes()
    base = memory.inboxes + launch.channel * memory.inbox_bytes
    for p, address in enumerate(memory.addresses):
        inboxes.of[p] = address + base
    row_bytes = workspace.hidden * workspace.dtype.itemsize
    stream = torch.cuda.current_stream().cuda_stream
    for first in range(0, n, memory.inbox_rows):  # larger batches go in several calls
        args = _args(_part(call, first, min(n, first + memory.inbox_rows)), memory)
        args.signature = _signature(kernel, args.n_rows, args.tokens, args.n_rows)
        function.launch(args.n_rows, stream, args, inboxes, c_int(memory.inbox_rows), overlap=True)
        workspace.collectives += 1
        workspace.bytes_sent += args.n_rows * row_bytes * (workspace.world_size - 1)


def _part(call: Call, first: int, stop: int) -> Call:
    """The call for rows ``first`` to ``stop`` of its result."""
    run, fp8 = slice(first, stop), call.fp8
    if fp8 is not None:
        fp8 = Fp8(fp8.rows[run], None if fp8.scales is None else fp8.scales[run], fp8.scale)
    out = None if call.out is None else call.out[run]
    if call.rows is not None:
        return dataclasses.replace(call, rows=call.rows[run], out=out, fp8=fp8)
    return dataclasses.replace(call, partial=call.partial[run], residual=call.residual[run], out=out, fp8=fp8)


def twoshot_kernel(workspace: Workspace, options: int, tokens: int, ctas: int) -> Kernel:
    """The two-shot kernel for a call. Over peers' memory: the ring where a block has several rows a group, else plain loads.

    Measured on 2 H200, hidden 4096 and 8192: the ring is 10-15 % faster at 4 to 16 blocks, and plain loads are as fast or
    faster from 24 blocks on, and up to 15 % faster while a block has at most two rows a group.
    """
    major, minor = torch.cuda.get_device_capability(workspace.device)
    capable = major * 10 + minor >= 90 and workspace.dtype != torch.float32
    shape = (*_shape(workspace), options)
    if workspace.transport.startswith("multimem"):
        return _multimem_kernel(*shape, emulated=workspace.transport == "multimem-emulated")
    plain = _register_kernel(*shape)
    rows = -(-rows_per_rank(tokens, workspace.world_size) // ctas)
    if capable and ctas < 24 and rows > 2 * plain.groups:
        return _ring_kernel(*shape) or plain
    return plain


_ring_kernel = functools.lru_cache(maxsize=256)(ring_kernel)
_register_kernel = functools.lru_cache(maxsize=256)(register_kernel)
_multimem_kernel = functools.lru_cache(maxsize=256)(multimem_kernel)
_oneshot_kernel = functools.lru_cache(maxsize=1024)(oneshot_kernel)


def norm_options(epilogue: Epilogue, dtype: torch.dtype) -> int:
    """The option bits that an epilogue asks of a kernel for rows of ``dtype``.

    Raises:
        CollectiveError: its vectors are neither all in ``dtype`` nor all in float32.
    """
    vectors = {v.dtype for v in (epilogue.weight, epilogue.post_norm, epilogue.bias) if v is not None}
    if len(vectors) > 1 or not vectors <= {dtype, torch.float32}:
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: weight, post_norm and bias are {sorted(map(str, vectors))}; the GPU kernels take "
            f"all of them in {dtype} or all in torch.float32"
        )
    return (
        HAS_RESIDUAL * epilogue.has_residual
        | BIAS * (epilogue.bias is not None)
        | POST_NORM * (epilogue.post_norm is not None)
        | WEIGHT_FP32 * (vectors == {torch.float32} and dtype != torch.float32)
        | WEIGHT_OFFSET * (epilogue.weight_offset != 0)
    )


def _options(call: Call) -> int:
    fp8 = call.fp8
    return (
        norm_options(call.epilogue, call.workspace.dtype)
        | ROWS * (call.rows is not None)
        | ROW_COUNT * (call.row_count is not None)
        | FP8 * (fp8 is not None)
        | ROW_SCALES * (fp8 is not None and fp8.scales is not None)
        | UNQUANTISED * (fp8 is not None and call.out is not None)
    )


def _args(call: Call, memory: Symmetric) -> Args:
    """Everything but the signature; addresses of partial sums and results are this rank's own."""
    workspace, epilogue, fp8 = call.workspace, call.epilogue, call.fp8
    channel, rank = call.launch.channel, workspace.rank

    def address(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    args = Args(
        residual=address(call.residual),
        weight=address(epilogue.weight),
        post_weight=address(epilogue.post_norm),
        bias=address(epilogue.bias),
        scale=None if fp8 is None else address(fp8.scale),
        rows=address(call.rows),
        row_count=address(call.row_count),
        state=memory.state[channel].data_ptr(),
        record=memory.record[channel].data_ptr(),
        time_limit=int(workspace.time_limit * 1e9),
        eps=epilogue.eps,
        weight_offset=epilogue.weight_offset,
        rank=rank,
        tokens=call.tokens,
        n_rows=call.results,
    )
    args.x[rank], args.out[rank] = address(call.partial), address(call.out)
    if fp8 is not None:
        args.fp8[rank], args.scales[rank] = address(fp8.rows), address(fp8.scales)
    for p, base in enumerate(memory.addresses):
        args.flags[p] = base + memory.flags + channel * FLAG_BYTES
    return args


def _signature(kernel: Kernel, blocks: int, tokens: int, n: int, *offsets: int | None) -> int:
    """32 bits that differ between calls that must not meet. ``offsets``: of what is read and written, or None."""
    text = f"{kernel.name} {kernel.options} {kernel.groups} {kernel.stages}".encode()
    numbers = [blocks, tokens, n, *(-1 if offset is None else offset for offset in offsets)]
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers), zlib.crc32(text)) or 1


def _symmetric(workspace: Workspace) -> Symmetric:
    if workspace.symmetric is None:
        raise CollectiveError("this workspace is closed, or has no symmetric memory; create a new one")
    return workspace.symmetric


def _count(call: Call) -> None:
    """What a two-shot call sends: partial sums that peers read, then results; a multicast counts as if sent to each."""
    workspace, fp8, n = call.workspace, call.fp8, call.results
    partial_row = workspace.hidden * workspace.dtype.itemsize
    result_row = 0 if call.out is None else partial_row
    if fp8 is not None:
        result_row += workspace.hidden + (0 if fp8.scales is None else 4)
    workspace.collectives += 1
    owned = -(-n // workspace.world_size)  # about what this rank normalises and sends
    workspace.bytes_sent += (n - owned) * partial_row + owned * (workspace.world_size - 1) * result_row


def _shape(workspace: Workspace) -> tuple[int, int, int, str]:
    return workspace.world_size, workspace.rank, workspace.hidden, _name(workspace.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
