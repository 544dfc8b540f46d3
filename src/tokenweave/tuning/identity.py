"""This machine as a measured table names it."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import torch

from tokenweave.cuda.nvidia_smi import nvidia_smi
from tokenweave.cuda.sm_budget import cublas_library
from tokenweave.models.attention_choice import choose
from tokenweave.models.config import ModelConfig
from tokenweave.planning.profile_table import Identity, shape_of

_VERSION_FILE = Path("/proc/driver/nvidia/version")


def identity_here(config: ModelConfig, tp: int, transport: str, *, own_attention: bool = True) -> Identity:
    """What a table has to be measured with to serve here: the current GPU, the libraries that are loaded.

    Args:
        config: the model. tp, transport: ranks, and what their workspace runs on.
        own_attention: this package's kernels run; False: another engine's, which no table was measured with.
    """
    attention = choose(torch.device("cuda"), torch.bfloat16, config.head_dim) if own_attention else None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Identity(
        gpu=device.name,
        sms=device.multi_processor_count,
        driver=_driver(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        cublas=_cublas(),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        attention=(attention.label if attention else "none") if own_attention else None,
        tp=tp,
        transport=transport,
        shape=shape_of(config),
    )


@functools.cache
def _driver() -> str:
    """The kernel module's version, without starting a process where the file says it."""
    if _VERSION_FILE.exists() and (version := driver_version(_VERSION_FILE.read_text())):
        return version
    lines = (nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or "").split()
    return lines[0] if lines else "unknown"


def driver_version(text: str) -> str | None:
    """``/proc/driver/nvidia/version`` -> "580.65.06"; None if there is no version in it."""
    found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)
    return found and found[1]


@functools.cache
def _cublas() -> str:
    """Version of the library that torch has loaded."""
    parts = []
    for which in range(3):  # major, minor, patch
        value = ctypes.c_int()
        if cublas_library().cublasGetProperty(which, ctypes.byref(value)):
            return "unknown"
        parts.append(str(value.value))
    return ".".join(parts)
