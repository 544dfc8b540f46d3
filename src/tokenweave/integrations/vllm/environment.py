"""What the plugin needs of the environment in workers that do not inherit it."""

from __future__ import annotations

import os

RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_OURS = ("TOKENWEAVE", "TORCH_SYMM_MEM_")


def reach_ray_workers() -> None:
    """Has vLLM copy the plugin's variables to its Ray workers; before engines are started, safe to repeat.

    By vLLM's own switch for that: its older Ray executor and its data-parallel actors of Ray copy variables by prefix
    (``vllm/ray/ray_env.py``); its newer Ray executor, the default from 0.26 on, copies all of them.
    """
    prefixes = [prefix for prefix in os.environ.get(RAY_PREFIXES, "").split(",") if prefix.strip()]
    os.environ[RAY_PREFIXES] = ",".join([*prefixes, *(prefix for prefix in _OURS if prefix not in prefixes)])
