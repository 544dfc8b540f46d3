"""What the environment switches on, for all that ask; the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",  # FlashInfer's other one makes multicast objects
}
"""Variables with which nobody uses NVLink multicast: neither TokenWeave nor NCCL, PyTorch, NVSHMEM or vLLM."""


def switched_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to anything but ``0``, ``false`` or nothing."""
    return environment.get(name, "0").casefold() not in ("", "0", "false")


def multicast_switched_off(environment: Mapping[str, str]) -> str | None:
    """The setting that keeps everybody from NVSwitch multicast, as ``"NAME=value"``, or None.

    NCCL's own switch counts: who sets it has a machine where multicast must not be used.
    """
    for name in ("TOKENWEAVE_DISABLE_MULTICAST", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        if switched_on(environment, name):
            return f"{name}={environment[name]}"
    return "NCCL_NVLS_ENABLE=0" if environment.get("NCCL_NVLS_ENABLE") == "0" else None
