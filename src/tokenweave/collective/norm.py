"""Residual add + RMSNorm as one CUDA kernel: what follows the all-reduce on the sequential path."""

from __future__ import annotations

import torch

from tokenweave.collective import cuda_backend
from tokenweave.collective.arguments import Args
from tokenweave.collective.kernels import Kernel
from tokenweave.cuda.dtypes import DTYPES, ELEMENT_BYTES
from tokenweave.cuda.launch import loaded
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue


def norm_kernel(hidden: int, dtype: str, options: int) -> Kernel:
    """A block a row, two 16-byte vectors a thread where 1024 threads are enough for that."""
    vectors = hidden * ELEMENT_BYTES[dtype] // 16
    per_thread = max(2, -(-vectors // 1024))
    threads = -(-vectors // per_thread // 32) * 32
    return Kernel("add_rmsnorm", 1, 0, hidden, dtype, options, threads)


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The epilogue of rows that are reduced already, on the current stream; same arithmetic as the fused collective.

    Args:
        x: [tokens, hidden] bf16, fp16 or fp32 on an NVIDIA GPU (sm_80+), contiguous: the all-reduced sums.
        residual: [tokens, hidden], same dtype, contiguous; updated in place with the sum (without
            ``epilogue.has_residual`` it only receives it).
        epilogue: its vectors in x's dtype, or all in float32.
        out: [tokens, hidden] for the normalised rows; default: in place of ``x``.

    Returns:
        ``out``.

    Raises:
        CollectiveError: a tensor's shape, dtype, device or memory layout is another one.
    """
    out = x if out is None else out
    hidden = x.shape[-1]
    dtype = str(x.dtype).removeprefix("torch.")
    if x.dim() != 2 or dtype not in DTYPES or not x.is_cuda or hidden % 8 or not 8 <= hidden <= 16384:
        raise CollectiveError(
            f"add_rmsnorm: x is {list(x.shape)} {x.dtype} on {x.device}; expected [tokens, hidden] bfloat16, float16 or "
            "float32 on an NVIDIA GPU, hidden a multiple of 8 up to 16384"
        )
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        if (tensor.shape, tensor.dtype, tensor.device) != (x.shape, x.dtype, x.device) or not tensor.is_contiguous():
            raise CollectiveError(
                f"add_rmsnorm: {name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides "
                f"{tensor.stride()}; expected x's {list(x.shape)} {x.dtype} on {x.device}, contiguous"
            )
        if tensor.data_ptr() % 16:
            raise CollectiveError(f"add_rmsnorm: {name} starts at {tensor.data_ptr():#x}; expected 16-byte alignment")
    if not x.shape[0]:
        return out
    kernel = norm_kernel(hidden, dtype, cuda_backend.norm_options(epilogue, x.dtype))
    args = Args(
        residual=residual.data_ptr(),
        weight=epilogue.weight.data_ptr(),
        post_weight=None if epilogue.post_norm is None else epilogue.post_norm.data_ptr(),
        bias=None if epilogue.bias is None else epilogue.bias.data_ptr(),
        eps=epilogue.eps,
        weight_offset=epilogue.weight_offset,
        tokens=x.shape[0],
    )
    args.x[0], args.out[0] = x.data_ptr(), out.data_ptr()
    with torch.cuda.device(x.device):
        function = loaded(kernel, torch.cuda.current_device())
        function.launch(x.shape[0], torch.cuda.current_stream().cuda_stream, args)
    return out
