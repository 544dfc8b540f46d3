"""The GPU transports: which kernel runs for a call, with which launch shape, and what its failures mean."""

from __future__ import annotations

import functools
import struct
import zlib
from ctypes import Structure, c_int
from typing import TYPE_CHECKING

import torch

from tokenweave.collective.compile import ELEMENT_BYTES, Kernel
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.launch import MAX_BLOCKS, Args, PointerTable, loaded
from tokenweave.collective.rows import rows_per_rank
from tokenweave.collective.symmetric import FLAG_BYTES, Symmetric
from tokenweave.collective.workspace import Workspace
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue

if TYPE_CHECKING:
    from tokenweave.collective.op import Launch

HAS_RESIDUAL, BIAS, POST_NORM, WEIGHT_FP32, ROWS, ROW_COUNT, WEIGHT_OFFSET = (1 << i for i in range(7))
FP8, ROW_SCALES, UNQUANTISED = (1 << i for i in range(7, 10))
_SHARED_BYTES = 227 << 10  # a block's shared memory on sm_90 and sm_100, CUDA C++ Programming Guide
_STATIC_SHARED = 2048  # barriers and reduction slots
_IN_FLIGHT = 576 << 10  # bytes; on H200 with 18 links, 12 to 16 blocks were fastest with 512 to 640 KiB
_REASONS = {1: "waited longer than the time limit", 2: "got a different launch from its peer"}
_PHASES = {1: "start", 2: "end"}


class _Inboxes(Structure):
    _fields_ = (("of", PointerTable),)


def ring_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int) -> Kernel | None:
    """The two-shot kernel with a shared-memory ring, or None where fewer than two rows fit."""
    threads, groups = _groups(hidden, dtype)
    room = (_SHARED_BYTES - _STATIC_SHARED) // ((ranks + 1) * hidden * ELEMENT_BYTES[dtype])
    groups = min(groups, 4 if room < 8 else 8, room)
    if groups < 1 or room < 2:
        return None
    stages = min(room // groups, max(1, 32 // groups)) * groups
    return Kernel("twoshot_ring", ranks, rank, hidden, dtype, options, threads, groups, stages)


def register_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int) -> Kernel:
    """The two-shot kernel with plain loads."""
    threads, groups = _groups(hidden, dtype)
    if ranks > 5:  # a row of all of them needs more registers than 512 threads have
        groups = max(1, min(groups, 384 // threads))
    return Kernel("twoshot_registers", ranks, rank, hidden, dtype, options, threads, groups)


def multimem_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int, *, emulated: bool = False) -> Kernel:
    """The two-shot kernel for multicast addresses; ``emulated``: with peer-to-peer loops in their place, for tests."""
    threads, groups = _groups(hidden, dtype)
    return Kernel("twoshot_multimem", ranks, rank, hidden, dtype, options, threads, groups, emulated=int(emulated))


def oneshot_kernel(ranks: int, rank: int, hidden: int, dtype: str, options: int, rows: int = 1) -> Kernel:
    """The one-shot kernel: a block a row.

    A handful of rows is fastest with the other kernels' threads per row, batches up to 2 MiB with a thread per vector
    (5 % at 64 rows of 4096, 9 % at 256), larger ones with fewer threads again (2 H200).
    """
    norm_threads, _ = _groups(hidden, dtype)
    row_bytes = hidden * ELEMENT_BYTES[dtype]
    vectors = row_bytes // 16
    threads = norm_threads
    if rows > 8 and rows * row_bytes <= 2 << 20:
        threads = max(norm_threads, -(-vectors // -(-vectors // 1024) // 32) * 32)
    return Kernel("oneshot", ranks, rank, hidden, dtype, options, threads, norm_threads=norm_threads)


def _groups(hidden: int, dtype: str) -> tuple[int, int]:
    """Threads per row, and rows at a time in at most 512 threads.

    Four 16-byte vectors a thread where the row is short enough. All kernels take the same threads per row, so that the
    norm's sum has the same order, and a row the same bits, in all of them.
    """
    vectors = hidden * ELEMENT_BYTES[dtype] // 16
    per_thread = max(4, -(-vectors // 512))
    threads = -(-vectors // per_thread // 32) * 32
    return threads, min(15, 512 // threads)  # 15 named barriers


def ring_depth(kernel: Kernel, ctas: int) -> int:
    """Stages to use: all blocks together keep about half a MiB of the peers' rows in flight; a multiple of the groups."""
    remote = ctas * (kernel.ranks - 1) * kernel.hidden * ELEMENT_BYTES[kernel.dtype]
    rounds = int(_IN_FLIGHT / remote / kernel.groups + 0.5)
    return kernel.groups * max(1, min(rounds, kernel.stages // kernel.groups))


def default_ctas(tokens: int, workspace: Workspace) -> int:
    """Blocks of a two-shot call that has the GPU to itself: a row per group, at most 64 blocks.

    A pure function of what all ranks know.
    """
    _, groups = _groups(workspace.hidden, _name(workspace.dtype))
    return max(1, min(64, -(-rows_per_rank(tokens, workspace.world_size) // groups)))


def fused(
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    launch: Launch,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    out: torch.Tensor | None,
    fp8: Fp8 | None = None,
) -> torch.Tensor:
    """One fused collective on the current stream. Arguments as ``op`` checked them."""
    check(workspace)
    vectors = {"weight": epilogue.weight, "post_norm": epilogue.post_norm, "bias": epilogue.bias, "rows": rows}
    outputs = {"out": out} if fp8 is None else {"unquantised": out, "out": fp8.rows, "out_scales": fp8.scales}
    for name, tensor in {"residual": residual, **outputs, **vectors}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise CollectiveError(
                f"fused_allreduce_rmsnorm: {name} has strides {tensor.stride()}; it must be contiguous"
            )
    n = partial.shape[0] if rows is None else rows.numel()
    if fp8 is not None:
        _check_fp8(fp8, workspace, remote=launch.layout == "sharded")
    elif out is None:
        out = partial if rows is None else partial.new_empty(n, workspace.hidden)
    if n and partial.shape[0]:  # else all ranks know: nothing is launched
        run = _oneshot if launch.layout == "replicated" else _twoshot
        run(partial, residual, epilogue, workspace, launch, rows, row_count, out, fp8, n)
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
        shape = (workspace.world_size, workspace.rank, workspace.hidden, _name(workspace.dtype))
        kernel = _oneshot_kernel(*shape, HAS_RESIDUAL, tokens)
    else:
        kernel = twoshot_kernel(
            workspace, HAS_RESIDUAL, tokens, default_ctas(tokens, workspace) if ctas is None else ctas
        )
    loaded(kernel, workspace.device.index or 0)


def check(workspace: Workspace) -> None:
    """Raises if a kernel of this workspace has failed.

    Raises:
        CollectiveError: names rank, peer, channel, phase and epoch.
    """
    memory = _symmetric(workspace)
    for channel in range(workspace.channels):
        if (words := memory.failure(channel)) is not None:
            reason, phase, rank, peer, block, want, have, signature = words
            raise CollectiveError(
                f"collective failed: rank {rank} {_REASONS.get(reason, reason)}: peer {peer}, channel {channel}, phase "
                f"{_PHASES.get(phase, phase)}, block {block}, epoch {want} (the peer is at {have}, launch {signature:#010x}). "
                "A peer died or fell behind, or the ranks called with different shapes; the workspace cannot be used any "
                "more: end this process, or close the workspace on all ranks and create a new one"
            )


def _twoshot(
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    launch: Launch,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    out: torch.Tensor | None,
    fp8: Fp8 | None,
    n: int,
) -> None:
    memory = _symmetric(workspace)
    tokens = partial.shape[0]
    x, y = workspace.offset_of(partial), None if out is None else workspace.offset_of(out)
    if launch.channel and (x is None or (out is not None and y is None)):
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: channel={launch.channel} with partial sums or a result outside the workspace; the "
            "staging regions serve channel 0, one collective at a time: use workspace.buffer(tokens) for both"
        )
    if x is None:  # peers read a copy
        staged = workspace.staging(tokens, 0)
        staged.copy_(partial)
        workspace.copies += 1
        x = workspace.offset_of(staged)
    target = y
    if out is not None and y is None:  # peers write where they can
        target = workspace.offset_of(workspace.staging(n, 1))
    quantised = None if fp8 is None else workspace.offset_of(fp8.rows)
    scales = None if fp8 is None or fp8.scales is None else workspace.offset_of(fp8.scales)
    assert x is not None
    blocks = default_ctas(tokens, workspace) if launch.ctas is None else launch.ctas
    if not 1 <= blocks <= MAX_BLOCKS:
        raise CollectiveError(f"fused_allreduce_rmsnorm: ctas={blocks}; expected 1 to {MAX_BLOCKS}")
    if launch.cluster and blocks % launch.cluster:
        raise CollectiveError(f"fused_allreduce_rmsnorm: cluster={launch.cluster} does not divide ctas={blocks}")
    options = _options(epilogue, workspace.dtype, rows, row_count, fp8, out)
    kernel = twoshot_kernel(workspace, options, tokens, blocks)
    function = loaded(kernel, workspace.device.index or 0)
    args = _args(memory, workspace, residual, epilogue, rows, row_count, fp8, launch.channel, tokens, n)
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
    _count(workspace, n, out, fp8)
    if out is not None and y is None:
        result = workspace.staging(n, 1)
        if row_count is not None:  # rows behind it stay as they are
            real = torch.arange(n, device=workspace.device).unsqueeze(1) < row_count
            result = torch.where(real, result, out)
        out.copy_(result)
        workspace.copies += 1


def _oneshot(
    partial: torch.Tensor,
    residual: torch.Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    launch: Launch,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    out: torch.Tensor | None,
    fp8: Fp8 | None,
    n: int,
) -> None:
    memory = _symmetric(workspace)
    if n > memory.inbox_rows and row_count is not None:
        raise CollectiveError(
            f"fused_allreduce_rmsnorm: {n} rows with layout='replicated' and row_count; the inboxes hold "
            f"{memory.inbox_rows} rows: use layout='sharded' for larger batches"
        )
    options = _options(epilogue, workspace.dtype, rows, row_count, fp8, out)
    kernel = _oneshot_kernel(
        workspace.world_size,
        workspace.rank,
        workspace.hidden,
        _name(workspace.dtype),
        options,
        min(n, memory.inbox_rows),
    )
    function = loaded(kernel, workspace.device.index or 0)
    inboxes = _Inboxes()
    base = memory.inboxes + launch.channel * memory.inbox_bytes
    for p, address in enumerate(memory.addresses):
        inboxes.of[p] = address + base
    row_bytes = workspace.hidden * workspace.dtype.itemsize
    for first in range(0, n, memory.inbox_rows):  # larger batches go in several calls
        count = min(memory.inbox_rows, n - first)
        whole = rows is None
        part = rows if rows is None else rows[first : first + count]
        args = _args(
            memory,
            workspace,
            residual,
            epilogue,
            part,
            row_count,
            fp8,
            launch.channel,
            count if whole else partial.shape[0],
            count,
        )
        skip = first * row_bytes if whole else 0
        args.residual = residual.data_ptr() + skip
        args.x[workspace.rank] = partial.data_ptr() + skip
        if out is not None:
            args.out[workspace.rank] = out.data_ptr() + first * row_bytes
        if fp8 is not None:
            args.fp8[workspace.rank] = fp8.rows.data_ptr() + first * workspace.hidden
            if fp8.scales is not None:
                args.scales[workspace.rank] = fp8.scales.data_ptr() + 4 * first
        args.signature = _signature(kernel, count, args.tokens, count)
        stream = torch.cuda.current_stream().cuda_stream
        function.launch(count, stream, args, inboxes, c_int(memory.inbox_rows), overlap=True)
        workspace.collectives += 1
        workspace.bytes_sent += count * row_bytes * (workspace.world_size - 1)


def twoshot_kernel(workspace: Workspace, options: int, tokens: int, ctas: int) -> Kernel:
    """The two-shot kernel for a call. Over peers' memory: the ring where a block has several rows a group, else plain loads.

    Measured on 2 H200, hidden 4096 and 8192: the ring is 10-15 % faster at 4 to 16 blocks, and plain loads are as fast or
    faster from 24 blocks on, and up to 15 % faster while a block has at most two rows a group.
    """
    major, minor = torch.cuda.get_device_capability(workspace.device)
    capable = major * 10 + minor >= 90 and workspace.dtype != torch.float32
    shape = (workspace.world_size, workspace.rank, workspace.hidden, _name(workspace.dtype), options)
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


def _options(
    epilogue: Epilogue,
    dtype: torch.dtype,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    fp8: Fp8 | None = None,
    out: torch.Tensor | None = None,
) -> int:
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
        | ROWS * (rows is not None)
        | ROW_COUNT * (row_count is not None)
        | WEIGHT_OFFSET * (epilogue.weight_offset != 0)
        | FP8 * (fp8 is not None)
        | ROW_SCALES * (fp8 is not None and fp8.scales is not None)
        | UNQUANTISED * (fp8 is not None and out is not None)
    )


def _args(
    memory: Symmetric,
    workspace: Workspace,
    residual: torch.Tensor,
    epilogue: Epilogue,
    rows: torch.Tensor | None,
    row_count: torch.Tensor | None,
    fp8: Fp8 | None,
    channel: int,
    tokens: int,
    n: int,
) -> Args:
    def address(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    args = Args(
        residual=address(residual),
        weight=address(epilogue.weight),
        post_weight=address(epilogue.post_norm),
        bias=address(epilogue.bias),
        scale=None if fp8 is None else address(fp8.scale),
        rows=address(rows),
        row_count=address(row_count),
        state=memory.state[channel].data_ptr(),
        record=memory.record[channel].data_ptr(),
        time_limit=int(workspace.time_limit * 1e9),
        eps=epilogue.eps,
        weight_offset=epilogue.weight_offset,
        rank=workspace.rank,
        tokens=tokens,
        n_rows=n,
    )
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


def _count(workspace: Workspace, n: int, out: torch.Tensor | None, fp8: Fp8 | None) -> None:
    """What a two-shot call sends: partial sums that peers read, then results; a multicast counts as if sent to each."""
    partial_row = workspace.hidden * workspace.dtype.itemsize
    result_row = 0 if out is None else partial_row
    if fp8 is not None:
        result_row += workspace.hidden + (0 if fp8.scales is None else 4)
    workspace.collectives += 1
    owned = -(-n // workspace.world_size)  # about what this rank normalises and sends
    workspace.bytes_sent += (n - owned) * partial_row + owned * (workspace.world_size - 1) * result_row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
