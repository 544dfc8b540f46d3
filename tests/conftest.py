"""Fixtures and markers that every test may use. ``run_ranks`` is in ``ranks.py``: ``from ranks import run_ranks``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: rank processes share the cores with the tests

import pytest
import torch

from ranks import close_pools
from shared_gpu import shares_gpu

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; fails, rather than skips, where it cannot be had."""
    from fetch_smollm2 import FetchError, fetch_smollm2

    try:
        return fetch_smollm2()
    except FetchError as error:
        pytest.fail(f"this test needs SmolLM2's weights: {error}", pytrace=False)


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2_gguf: Path) -> Any:
    """SmolLM2 as transformers reads it from the GGUF file, in float32; it takes 15 s, so all tests share it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``@pytest.mark.gpu`` or ``@pytest.mark.gpu(count=2)``: skipped, with a reason, where there are fewer GPUs.

    With ``TOKENWEAVE_TEST_SHARE_GPU=1`` one GPU stands for any number."""
    gpus = torch.cuda.device_count()
    if gpus and shares_gpu():
        gpus = 8
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.kwargs.get("count", 1)
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s); torch.cuda sees {gpus}"))


def pytest_sessionfinish() -> None:
    close_pools()
