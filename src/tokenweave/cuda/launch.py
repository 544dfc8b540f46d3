"""Launching compiled kernels through the CUDA driver, on the current context and stream."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_uint, c_void_p

import torch

from tokenweave.cuda.compile import Compiled, Instantiation, compile_kernel
from tokenweave.errors import CudaError

log = logging.getLogger(__name__)


class _Attribute(Structure):
    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class _Config(Structure):
    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("n_attributes", c_uint),
    )


_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_driver: ctypes.CDLL | None = None


def driver() -> ctypes.CDLL:
    """libcuda, loaded at first use."""
    global _driver
    if _driver is None:
        _driver = ctypes.CDLL("libcuda.so.1")
    return _driver


def checked(status: int, what: str) -> None:
    """CudaError for any status of the driver but success; ``what`` says what was being done."""
    if status:
        text = c_char_p()
        driver().cuGetErrorString(status, byref(text))
        raise CudaError(f"{what}: CUDA driver error {status} ({(text.value or b'unknown').decode()})")


class Function:
    """A kernel loaded into the current context.

    Attributes:
        function: its CUfunction.
    """

    def __init__(self, kernel: Instantiation, compiled: Compiled) -> None:
        self.kernel = kernel
        module, self.function = c_void_p(), c_void_p()
        checked(driver().cuModuleLoadData(byref(module), compiled.cubin), f"loading {kernel.name}")
        checked(driver().cuModuleGetFunction(byref(self.function), module, kernel.name.encode()), kernel.name)
        if kernel.dynamic_shared_bytes:  # 48 KiB without asking, and the static part counts too
            status = driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, kernel.dynamic_shared_bytes)
            checked(status, f"{kernel.name}: {kernel.dynamic_shared_bytes} bytes of shared memory")

    def launch(
        self, blocks: int, stream: int, *params: Structure | c_int, cluster: int = 1, overlap: bool = False
    ) -> None:
        """Launches.

        Args:
            blocks: grid size. stream: CUDA stream handle.
            params: kernel parameters by value.
            cluster: blocks per cluster; only places them in one GPC.
            overlap: allow programmatic dependent launch (the kernel itself waits for its predecessor).
        """
        pointers = (c_void_p * len(params))(*(ctypes.addressof(p) for p in params))
        attributes = (_Attribute * 2)()
        n = 0
        if cluster > 1:
            attributes[n].id = _CLUSTER_DIMENSION
            attributes[n].value[0], attributes[n].value[1], attributes[n].value[2] = cluster, 1, 1
            n += 1
        if overlap:
            attributes[n].id = _PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[n].value[0] = 1
            n += 1
        config = _Config(
            blocks, 1, 1, self.kernel.threads, 1, 1, self.kernel.dynamic_shared_bytes, stream, attributes, n
        )
        status = driver().cuLaunchKernelEx(byref(config), self.function, pointers, None)
        checked(status, f"launching {self.kernel.name} with {blocks} blocks in clusters of {cluster}")


@functools.cache
def loaded(kernel: Instantiation, device: int) -> Function:
    """The kernel, compiled for a GPU (its number as torch counts) and loaded into its context; at first use that takes
    half a second, or milliseconds from the cache on disk."""
    major, minor = torch.cuda.get_device_capability(device)
    suffix = "a" if major >= 9 else ""
    with torch.cuda.device(device):
        current = c_void_p()
        checked(driver().cuCtxGetCurrent(byref(current)), "asking for the CUDA context")
        if not current:  # torch creates it late, and loading needs one
            torch.cuda.synchronize()
        return Function(kernel, compile_kernel(kernel, f"sm_{major}{minor}{suffix}"))


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for ``device`` and launched there; where they can't on a GPU, says why in the log."""
    if device.type != "cuda":
        return False
    missing = None
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        missing = "cuda-core is not installed (pip install '.[cuda]' in TokenWeave's checkout)"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        missing = f"{torch.cuda.get_device_name(device)} has less than compute capability 8.0"
    if missing:
        log.warning("chains of torch operations run in place of TokenWeave's kernels, which is slow: %s", missing)
    return missing is None
