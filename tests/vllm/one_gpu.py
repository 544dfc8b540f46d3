"""vLLM's ranks on one GPU, where the tests' ranks are to share one (:mod:`shared_gpu`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shared_gpu import shares_gpu, side_by_side

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Sharing:
    """What vLLM needs for it; nothing where each rank has a GPU of its own.

    Attributes:
        engine: arguments of ``vllm.LLM``. environment: variables of its processes.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether a GPU is shared."""
        return bool(self.engine)

    @property
    def arguments(self) -> list[str]:
        """``engine``, of ``vllm serve``."""
        return [word for name, value in self.engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@contextlib.contextmanager
def sharing(ranks: int) -> Iterator[Sharing]:
    """For engines of so many ranks within this context; data-parallel engines beside each other are not meant."""
    if not (shares_gpu() and torch.cuda.device_count()):
        yield Sharing()
        return
    engine = {
        "worker_cls": "one_gpu_worker.Worker",
        "distributed_executor_backend": "mp",  # vLLM's default wants a GPU a rank
        "gpu_memory_utilization": round(0.6 / ranks, 3),
    }
    path = [str(_HERE), str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with side_by_side(ranks) as environment:
        yield Sharing(engine, {**environment, "PYTHONPATH": os.pathsep.join(path)})
