"""Whether the plugin is on, and for which versions of vLLM it was written."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from types import ModuleType

SWITCH = "TOKENWEAVE"


@dataclass(frozen=True)
class Range:
    """Versions of vLLM that share a compatibility module.

    Attributes:
        first, last: (major, minor), both included.
        module: of :mod:`tokenweave.integrations.vllm.compat`.
        measured: whether these versions were run on GPUs; others need ``TOKENWEAVE=force``.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    module: str
    measured: bool


RANGES = (
    Range((0, 26), (0, 26), "v0_26", measured=True),
    Range((0, 27), (0, 29), "v0_26", measured=False),
    Range((0, 30), (0, 33), "v0_30", measured=False),
)


@dataclass(frozen=True)
class Verdict:
    """``module``: of the compatibility layer, or None where the plugin stays off. ``why``: a sentence for the log; empty
    where the plugin was not asked for."""

    module: str | None
    why: str


def verdict(switch: str | None, version: str, platform: str) -> Verdict:
    """Whether the plugin works with this vLLM.

    Args:
        switch: the value of TOKENWEAVE: ``"1"`` on, ``"force"`` also where it was never measured; absent, empty or ``"0"``
            off.
        version: of vLLM, e.g. ``"0.26.0"``. platform: ``"cuda"`` or ``"cpu"``; any other is refused.
    """
    switch = (switch or "0").strip().casefold()
    if switch == "0":
        return Verdict(None, "")
    if switch not in ("1", "force"):
        return Verdict(None, f"{SWITCH}={switch!r}; expected 0, 1 or force: stays off")
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    known = next((r for r in RANGES if r.first <= number <= r.last), None)
    if known is None:
        spans = f"{RANGES[0].first[0]}.{RANGES[0].first[1]} to {RANGES[-1].last[0]}.{RANGES[-1].last[1]}"
        return Verdict(None, f"vLLM {version} is outside {spans}: stays off, vLLM runs as it is")
    if platform not in ("cuda", "cpu"):
        return Verdict(None, f"vLLM's platform is {platform}; expected cuda or cpu: stays off")
    if switch != "force" and (not known.measured or platform == "cpu"):
        what = "vLLM's CPU build" if platform == "cpu" else f"vLLM {version}"
        return Verdict(None, f"{what} was never measured with TokenWeave: {SWITCH}=force turns it on")
    return Verdict(known.module, f"on for vLLM {version} ({known.module})")


def current() -> Verdict:
    """The verdict for this process."""
    switch = os.environ.get(SWITCH)
    if verdict(switch, "0.26", "cuda").why == "":
        return Verdict(None, "")  # off: nothing of vLLM is looked at
    from vllm.platforms import current_platform

    import vllm

    platform = "cuda" if current_platform.is_cuda() else "cpu" if current_platform.is_cpu() else "another"
    return verdict(switch, vllm.__version__, platform)


def compat(module: str) -> ModuleType:
    """The compatibility module of this name."""
    return importlib.import_module(f"tokenweave.integrations.vllm.compat.{module}")
