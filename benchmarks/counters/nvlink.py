"""Bytes that the fused collective moves over NVLink, by the GPUs' own counters (NVML), against the minimum.

    torchrun --nproc-per-node 2 benchmarks/counters/nvlink.py [OUT.json]     # needs nvidia-ml-py; ten seconds

Per call and direction a rank receives the peers' partial sums of the rows that it owns and the results of the others' rows,
and sends as much: the minimum counts each once. The counters are of the whole GPU, so nothing else may use its links, and
may be refreshed only now and then, so each case runs for half a second. Loads put their requests on the link too, and packets have headers: the raw
counters say how much that is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.environment import describe
from tokenweave.bench.launch import joined
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.files import write_result

HIDDEN, SECONDS = 4096, 0.4
ROW = HIDDEN * 2  # bytes, bf16
CASES: list[tuple[str, int, int | None]] = [
    ("sharded", tokens, ctas) for tokens in (1024, 16384) for ctas in (4, 8, 16, 64)
]
CASES += [("replicated", 64, None), ("replicated", 512, None), ("nccl all_reduce", 16384, None)]
FIELDS = ("DATA_TX", "DATA_RX", "RAW_TX", "RAW_RX")


class Counters:
    """The NVLink byte counters of one GPU, summed over its links.

    Raises:
        RuntimeError: the driver does not show them.
    """

    def __init__(self, device: int) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        everything = 0xFFFFFFFF
        # Some drivers answer for the GPU, some for each link.
        links = range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18))
        for scopes in ([everything], list(links)):
            self._scopes = scopes
            if any(value is not None for value in self._values("DATA_TX")):
                break
        else:
            raise RuntimeError("NVML does not show this GPU's NVLink counters")

    def read(self) -> dict[str, int | None]:
        """Bytes since the driver was loaded, by field; None where it has none."""
        sums = {}
        for field in FIELDS:
            values = [value for value in self._values(field) if value is not None]
            sums[field] = sum(values) * 1024 if values else None  # NVML counts KiB
        return sums

    def _values(self, field: str) -> list[int | None]:
        number = getattr(self._nvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_{field}")
        answers = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(number, scope) for scope in self._scopes])
        return [a.value.ullVal if a.nvmlReturn == self._nvml.NVML_SUCCESS else None for a in answers]


def least(kind: str, tokens: int, ranks: int) -> int:
    """Bytes a call and direction."""
    if kind == "replicated":  # every rank pushes all of its partial sums to all others
        return tokens * (ranks - 1) * ROW
    return 2 * -(-tokens // ranks) * (ranks - 1) * ROW  # two shots: partial sums one way, results the other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parsed = parser.parse_args()
    with joined() as me:
        rows = measure(me.group, me.device)
        if me.rank == 0:
            for row in rows:
                print(
                    f"{row['impl']:15s} {row['ctas'] or '-'!s:>3} CTAs {row['tokens']:6} tokens: "
                    + ", ".join(f"{name} {row[name] or float('nan'):.3f}x" for name in FIELDS)
                    + f" of {row['least'] / 2**20:.3f} MiB",
                    flush=True,
                )
            if parsed.out:
                write_result({"environment": describe(), "rows": rows}, parsed.out)


def measure(group: dist.ProcessGroup, device: torch.device) -> list[dict]:
    """A row per case, of this rank's GPU: bytes a call over the least, by field."""
    counters, ranks = Counters(device.index), dist.get_world_size(group)
    rows = []
    with Workspace(
        group, max_tokens=16384, hidden=HIDDEN, dtype=torch.bfloat16, device=device, transport="p2p"
    ) as workspace:
        residual = torch.zeros(16384, HIDDEN, device=device).bfloat16()
        weight = torch.ones(HIDDEN, device=device).bfloat16()
        for kind, tokens, ctas in CASES:
            partial = workspace.buffer(tokens).normal_()

            def call(kind=kind, partial=partial, tokens=tokens, ctas=ctas) -> None:
                if kind.startswith("nccl"):
                    dist.all_reduce(partial, group=group)
                else:
                    fused_allreduce_rmsnorm(partial, residual[:tokens], weight, 1e-5, workspace, ctas=ctas, layout=kind)

            seconds = _run(call, 20, group)
            count = torch.tensor([max(20, int(SECONDS / (seconds / 20)))], device=device)
            dist.broadcast(count, 0, group=group)  # all ranks make the same calls
            number = int(count)
            before = counters.read()
            _run(call, number, group)
            after = counters.read()
            row: dict[str, Any] = {
                "impl": kind,
                "tokens": tokens,
                "hidden": HIDDEN,
                "ranks": ranks,
                "dtype": "bfloat16",
                "ctas": ctas,
            }
            row |= {"calls": number, "least": least(kind, tokens, ranks)}
            for name in FIELDS:
                a, b = before[name], after[name]
                row[name] = None if a is None or b is None else round((b - a) / number / row["least"], 4)
            rows.append(row)
    return rows


def _run(call: Callable[[], None], number: int, group: dist.ProcessGroup) -> float:
    """Seconds that so many calls take; before and after them the links are idle for a moment on all ranks."""
    torch.cuda.synchronize()
    dist.barrier(group)
    torch.cuda.synchronize()
    time.sleep(0.1)
    began = time.perf_counter()
    for _ in range(number):
        call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    dist.barrier(group)
    torch.cuda.synchronize()
    time.sleep(0.1)
    return seconds


if __name__ == "__main__":
    main()
