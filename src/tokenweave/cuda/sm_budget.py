"""How many SMs a GEMM plans for, because a collective that runs beside it holds the others.

cuBLAS's kernels for Hopper are one persistent wave of as many blocks as the GPU has SMs. With 8 SMs held, the blocks that
find no place run as a second wave, and the GEMM takes twice as long; told of 124 SMs it takes 5 to 31 % longer
(docs/sm-budgets.md). The choice is made when the GEMM is launched, so a captured graph keeps it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tokenweave.errors import CudaError


@contextmanager
def sm_budget(sms: int | None) -> Iterator[None]:
    """GEMMs that this thread launches inside use at most ``sms`` SMs of the current GPU; None changes nothing.

    Raises:
        CudaError: the library refuses, e.g. more SMs than there are.
    """
    if sms is None:
        yield
        return
    _target(sms)
    # GEMMs with a bias go through cublasLt, which has a setting of its own: the SMs to leave free.
    torch._C._set_sm_carveout_experimental(_sms(torch.cuda.current_device()) - sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        _target(0)


def _target(sms: int) -> None:
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    status = cublas_library().cublasSetSmCountTarget(handle, ctypes.c_int(sms))
    if status:
        raise CudaError(f"cublasSetSmCountTarget({sms}) failed with status {status}; expected 1 to the GPU's SMs")


@functools.cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def cublas_library() -> ctypes.CDLL:
    """The very library that torch has loaded."""
    torch.cuda.current_blas_handle()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublas.so" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    raise CudaError("torch has loaded no libcublas.so; SM budgets need it: use plans without gemm_sms")
