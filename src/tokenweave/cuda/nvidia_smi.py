"""The driver's own program, for what no library here says."""

from __future__ import annotations

import subprocess


def nvidia_smi(*arguments: str) -> str | None:
    """What it prints; None where there is none, where it fails or takes longer than 20 seconds."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
