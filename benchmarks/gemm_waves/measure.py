"""Measures the saw-tooth of GEMMs over rows, free and beside held SMs, and which kernels the library ran. One GPU, under a minute.

PYTHONPATH=src python3 benchmarks/gemm_waves/measure.py OUT.json

The shapes are those of Llama-3.1-8B and Llama-3.3-70B on two ranks, bf16, 64 to 8192 rows in steps of 64. Weights rotate
through more memory than the L2 cache holds, as they do in a model. ``compare.py`` sets the wave model beside the result.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tokenweave.bench.environment import Monitor, describe, machine_line
from tokenweave.cuda.launch import loaded
from tokenweave.cuda.sm_budget import sm_budget

STEP, MOST = 64, 8192
SHAPES = {  # (n, k)
    "8B qkv": (3072, 4096),
    "8B o": (4096, 2048),
    "8B gate_up": (14336, 4096),
    "8B down": (4096, 7168),
    "70B qkv": (5120, 8192),
    "70B o": (8192, 4096),
    "70B gate_up": (28672, 8192),
    "70B down": (8192, 14336),
}
SHARED = 200 << 10  # bytes of dynamic shared memory of a holding block: a GEMM's block finds no room beside it
ROTATED = 150 << 20  # bytes of weights that take turns
CHAIN_US = 250.0
BUDGET_S = 50.0


@dataclass(frozen=True)
class Condition:
    """What surrounds a GEMM: ``held`` SMs in ``cluster``-sized groups, the SM target it is told, every how many rows it is
    measured."""

    held: int
    cluster: int
    target: int | None
    step: int


@dataclass(frozen=True)
class Hold:
    """The holding kernel, as :func:`tokenweave.cuda.compile.compile_kernel` wants it described."""

    name: str = "hold"
    threads: int = 512
    dynamic_shared_bytes: int = SHARED

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("hold.cu")

    def defines(self) -> list[tuple[str, str]]:
        return [("TW_THREADS", str(self.threads))]


class _HoldArgs(ctypes.Structure):
    _fields_ = (("flag", ctypes.c_void_p), ("limit_ns", ctypes.c_uint64))


class Bench:
    """GEMM times on the current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._hold = loaded(Hold(), self.device.index)
        self._flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._one = torch.ones(1, dtype=torch.int32, device=self.device)
        self._side = torch.cuda.Stream(priority=-1)

    def operands(self, n: int, k: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Inputs [MOST, k], as many weights [n, k] as rotate, and outputs [MOST, n]; standard normal, scaled."""
        copies = max(2, -(-ROTATED // (2 * n * k)))
        x = torch.randn(MOST, k, dtype=torch.bfloat16, device=self.device)
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device=self.device) * k**-0.5 for _ in range(copies)]
        return x, weights, torch.empty(MOST, n, dtype=torch.bfloat16, device=self.device)

    def gemm_us(self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, how: Condition) -> float:
        """us of one GEMM in a chain of them: the median of the chains' means."""
        with sm_budget(how.target):
            torch.mm(x, weights[1].t(), out=out)  # chooses and loads the kernel: nothing may be loaded beside the hold
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.mm(x, weights[0].t(), out=out)
            end.record()
            torch.cuda.synchronize()
            calls = min(20, max(2, round(CHAIN_US / (begin.elapsed_time(end) * 1e3))))
            chains = 3 if calls > 2 else 2  # long GEMMs vary less
            return median(self._chain(x, weights, out, how, calls) for _ in range(chains))

    def _chain(
        self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, how: Condition, calls: int
    ) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flag.zero_()
        torch.cuda.synchronize()
        if how.held:
            args = _HoldArgs(self._flag.data_ptr(), 500_000_000)
            self._hold.launch(how.held, self._side.cuda_stream, args, cluster=how.cluster)
        torch.cuda._sleep(400_000)  # 0.2 ms: the host queues the chain meanwhile, and the holding blocks are placed
        torch.mm(x, weights[-1].t(), out=out)
        begin.record()
        for call in range(calls):
            torch.mm(x, weights[call % len(weights)].t(), out=out)
        end.record()
        self._flag.copy_(self._one)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    def kernels(
        self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, targets: list[int | None]
    ) -> list[dict[str, Any]]:
        """The library's kernels for every number of rows, a dict for each SM target; see :func:`kernels_of`."""
        sizes = range(STEP, MOST + 1, STEP)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for target in targets:
                with sm_budget(target):
                    for rows in sizes:
                        torch.mm(x[:rows], weights[0].t(), out=out[:rows])
                        self._flag.fill_(0)  # the mark between two GEMMs
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        launches = split_at_marks(events, len(targets) * len(sizes))
        return [
            {"target": target, "rows": list(sizes)} | kernels_of(launches[i * len(sizes) :][: len(sizes)])
            for i, target in enumerate(targets)
        ]


def split_at_marks(events: list[dict[str, Any]], calls: int) -> list[list[dict[str, Any]]]:
    """A profiler's events on the GPU -> what each call launched. A mark is torch's fill kernel."""
    on_gpu = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memset")), key=lambda e: e["ts"])
    found: list[list[dict[str, Any]]] = [[]]
    for event in on_gpu:
        if "FillFunctor" in event["name"]:
            found.append([])
        else:
            found[-1].append(event)
    if len(found) != calls + 1 or not all(found[:-1]):
        raise RuntimeError(f"the profiler saw {len(found) - 1} of {calls} GEMMs")
    return found[:-1]


def kernels_of(calls: list[list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """What each call launched: the GEMM kernel's name and blocks, and whether a memset came first (of the tiles' counter)."""
    gemms = [next(event for event in launches if event["cat"] == "kernel") for launches in calls]
    return {
        "kernel": [re.sub(r"\(.*", "", gemm["name"]) for gemm in gemms],
        "blocks": [math.prod(gemm["args"]["grid"]) for gemm in gemms],
        "memset": [int(launches[0]["cat"] == "gpu_memset") for launches in calls],
    }


def conditions(sms: int) -> list[Condition]:
    """Free, as the library finds it; beside held SMs without and with a target; free with a target."""
    return [
        Condition(0, 1, None, STEP),
        Condition(8, 1, sms - 8, STEP),
        Condition(8, 1, None, 4 * STEP),
        Condition(4, 4, sms - 4, 2 * STEP),
        Condition(4, 1, sms - 4, 4 * STEP),
        Condition(16, 4, sms - 16, 2 * STEP),
        Condition(0, 1, sms - 8, 4 * STEP),
    ]


def main() -> None:
    out = Path(sys.argv[1])
    start = time.monotonic()
    environment = describe()
    bench, monitor = Bench(), Monitor(torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
    chosen = conditions(sms)
    times: list[dict[str, Any]] = []
    kernels: dict[str, Any] = {}
    skipped: list[str] = []
    for name, (n, k) in SHAPES.items():
        x, weights, y = bench.operands(n, k)
        for how in chosen:
            if time.monotonic() - start > BUDGET_S and how.step > STEP:
                skipped.append(f"{name}, {how}")
                continue
            sizes = list(range(how.step, MOST + 1, how.step))
            us = [round(bench.gemm_us(x[:rows], weights, y[:rows], how), 2) for rows in sizes]
            row = {"shape": name, "held": how.held, "cluster": how.cluster, "target": how.target}
            times.append(row | {"rows": sizes, "us": us})
            monitor.sample()
        try:
            kernels[name] = bench.kernels(x, weights, y, sorted({c.target for c in chosen}, key=lambda t: t or 0))
        except (
            RuntimeError,
            OSError,
            KeyError,
        ) as error:  # no permission to trace, say: the times are worth having alone
            kernels[name] = f"not traced: {error}"
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    environment["while_measuring"] = monitor.take()
    result = {
        "machine": machine_line(environment, 1),
        "environment": environment,
        "shapes": {name: {"n": n, "k": k} for name, (n, k) in SHAPES.items()},
        "times": times,
        "kernels": kernels,
        "skipped": skipped,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    print(
        f"{sum(len(row['us']) for row in times)} times, {len(skipped)} skipped, {time.monotonic() - start:.1f} s -> {out}"
    )


if __name__ == "__main__":
    main()
