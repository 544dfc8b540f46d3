"""What a measurement ran on: hardware, link, versions, and the clocks and power while it ran."""

from __future__ import annotations

import datetime
import importlib
import os
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tokenweave.bench.energy import EnergyWatch
from tokenweave.cuda.nvidia_smi import nvidia_smi
from tokenweave.doctor.machine import examine, version_of


def describe() -> dict[str, Any]:
    """The machine as JSON-ready values; None where it cannot be read. Creates nothing on a GPU; takes a second or two."""
    report = examine()
    limits = _cells("power.limit,clocks.max.sm,clocks.max.mem")
    power, sm, memory = (_number(cell) for cell in limits[0]) if limits else (None, None, None)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tokenweave": report.tokenweave,
        "commit": _commit(),
        "python": report.python,
        "torch": report.torch,
        "cuda": report.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if report.gpus else None,
        "driver": report.driver,
        "packages": {**report.cuda_packages, **{name: version_of(name) for name in ("flashinfer-python", "triton")}},
        "gpus": [gpu.name for gpu in report.gpus],
        "sms": report.gpus[0].sms if report.gpus else None,
        "nvlinks": [link.nvlinks for link in report.links],
        "power_limit_w": power,
        "max_sm_mhz": sm,
        "max_memory_mhz": memory,
        "multicast": {"value": report.multicast.value, "why": report.multicast.why},
        "attention": {"value": report.attention.value, "why": report.attention.why},
        "environment": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(("NCCL_", "TORCH_SYMM_MEM", "TOKENWEAVE_ATTENTION"))
        },
    }


def machine_line(environment: dict[str, Any], ranks: int) -> str:
    """One line that names hardware, link, power limit, measured clocks and versions, for a table's caption."""
    gpus, links = environment["gpus"], environment["nvlinks"]
    parts = [f"{ranks}x {gpus[0]}" if gpus else "no GPU"]
    if links and links[0]:
        parts.append(f"{links[0]} NVLinks")
    parts.append("multicast off" if environment["multicast"]["value"] != "yes" else "multicast on")
    if environment["power_limit_w"]:
        parts.append(f"{environment['power_limit_w']:.0f} W limit")
    clocks = environment.get("while_measuring")
    if clocks and clocks["sm_mhz"]:
        parts.append(f"SM clock {clocks['sm_mhz']['median']:.0f} MHz")
    parts += [f"torch {environment['torch']}", f"NCCL {environment['nccl']}", f"driver {environment['driver']}"]
    return ", ".join(parts)


# Bits of NVML's reasons for a clock below the highest (NVML API reference, nvmlClocksEventReasons).
_LIMITS = {"power": 0x04 | 0x80, "temperature": 0x20 | 0x40, "hardware": 0x08}


class Monitor:
    """Samples the SM clock, the power and the temperature of one GPU, and through NVML, not nvidia-smi, what limits the
    clock.

    Args:
        device: index as torch counts.
    """

    def __init__(self, device: int) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._reasons: list[int] = []
        self._next = 0.0
        self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._samples.append(self._read())
            self._reasons.append(self._limits())
        except Exception:  # not installed, or no permission: nvidia-smi may still answer
            self._nvml = None

    def sample(self) -> None:
        """Takes one sample; with nvidia-smi at most one every two seconds, because starting it disturbs the host."""
        if self._nvml is not None:
            self._samples.append(self._read())
            self._reasons.append(self._limits())
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + 2.0
            rows = _cells("clocks.sm,power.draw,temperature.gpu", self._uuid)
            values = [_number(cell) for cell in rows[0]] if rows else []
            if len(values) == 3 and None not in values:
                self._samples.append((float(values[0] or 0), float(values[1] or 0), float(values[2] or 0)))

    def _read(self) -> tuple[float, float, float]:
        sm = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        milliwatts = self._nvml.nvmlDeviceGetPowerUsage(self._handle)
        celsius = self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU)
        return float(sm), milliwatts / 1e3, float(celsius)

    def _limits(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        except self._nvml.NVMLError:  # not every GPU says
            return 0

    def energy(self) -> EnergyWatch | None:
        """A watch of what the GPU takes, to be entered while it is busy; None where it has no counter that can be read."""
        if self._nvml is None:
            return None
        try:
            self._joules()
        except self._nvml.NVMLError:
            return None
        return EnergyWatch(self._joules)

    def _joules(self) -> float:
        """Since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def limit_w(self) -> float | None:
        """The power limit that the GPU keeps to; None where it can't be read."""
        if self._nvml is None:
            return None
        try:
            return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def take(self) -> dict[str, dict[str, float] | None]:
        """Lowest, median and highest of the samples since the last call; and under "limits" the share of them in which
        power, temperature or the hardware kept the clock down."""
        columns = list(zip(*self._samples, strict=True)) or [(), (), ()]
        reasons, self._samples, self._reasons = self._reasons, [], []
        taken: dict[str, dict[str, float] | None] = {
            name: {"low": min(column), "median": median(column), "high": max(column)} if column else None
            for name, column in zip(("sm_mhz", "power_w", "celsius"), columns, strict=True)
        }
        shares = {
            name: sum(bool(seen & bits) for seen in reasons) / max(1, len(reasons)) for name, bits in _LIMITS.items()
        }
        taken["limits"] = {name: share for name, share in shares.items() if share} if reasons else None
        return taken


def _cells(fields: str, gpu: str | None = None) -> list[list[str]]:
    """nvidia-smi's answer, a row a GPU; no rows where there is none."""
    which = ("-i", gpu) if gpu else ()
    answer = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", *which)
    return [[cell.strip() for cell in line.split(",")] for line in (answer or "").splitlines() if line.strip()]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None  # "[N/A]"


def _commit() -> str | None:
    """Of the checkout that this package is imported from, with "+" if it has changes; None if it is installed."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "") or None
