"""Measures what one SM can store and load, locally and over NVLink: the limit of the fused collective at few blocks.

torchrun --nproc-per-node 2 benchmarks/sm_port/probe.py [OUT.json]
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

from tokenweave.bench.environment import describe
from tokenweave.cuda.compile import HEADERS
from tokenweave.cuda.launch import driver
from tokenweave.files import write_result

ROWS, ROW = 8192, 8192
KERNELS = {"store": 0, "bulk_store": 8 * 8192, "bulk_load": 8 * 24576}  # dynamic shared memory


class Rows(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p * 3), ("n", ctypes.c_int), ("rows", ctypes.c_int))


def main() -> None:
    from cuda.core import Program, ProgramOptions

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    source = Path(__file__).with_name("probe.cu").read_text()
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=[str(HEADERS)])
    cubin = bytes(Program(source, "c++", options).compile("cubin").code)
    shared = symm.empty(ROWS * ROW, dtype=torch.uint8, device=device)
    peers = symm.rendezvous(shared, dist.group.WORLD).buffer_ptrs
    local = torch.zeros(2, ROWS * ROW, dtype=torch.uint8, device=device)
    a, b, peer = local[0].data_ptr(), local[1].data_ptr(), peers[(rank + 1) % len(peers)]
    targets = {
        "local": [a],
        "peer": [peer],
        "2 local": [a, b],
        "peer + local": [peer, a],
        "peer + 2 local": [peer, a, b],
    }
    module = ctypes.c_void_p()
    assert driver().cuModuleLoadData(ctypes.byref(module), cubin) == 0
    rows = []
    for name, shared_bytes in KERNELS.items():
        function = ctypes.c_void_p()
        assert driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()) == 0
        if shared_bytes:
            assert driver().cuFuncSetAttribute(function, 8, shared_bytes) == 0
        for target, addresses in targets.items():
            for blocks in (2, 8):
                ns = _ns_per_row(function, shared_bytes, addresses, blocks)
                mhz = torch.cuda.clock_rate(device)
                per_clock = ROW * len(addresses) / (ns * mhz / 1e3)
                rows.append(
                    {"kernel": name, "to": target, "blocks": blocks, "ns_per_row": round(ns, 1), "mhz": mhz}
                    | {"bytes_per_clock": round(per_clock, 1)}
                )
                if rank == 0:
                    print(
                        f"{name:10s} {target:15s} {blocks} blocks: {ns:6.1f} ns/row, {per_clock:5.1f} B/clock",
                        flush=True,
                    )
    if rank == 0 and len(sys.argv) > 1:
        write_result({"environment": describe(), "rows": rows}, Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()


def _ns_per_row(function: ctypes.c_void_p, shared_bytes: int, addresses: list[int], blocks: int) -> float:
    """Nanoseconds that a block takes for 8 KiB to (or from) each address; both ranks run at once, the slower counts."""
    args = Rows((ctypes.c_void_p * 3)(*addresses), len(addresses), ROWS)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def launch() -> None:
        assert driver().cuLaunchKernel(function, blocks, 1, 1, 512, 1, 1, shared_bytes, stream, pointers, None) == 0

    launch()
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        launch()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor([begin.elapsed_time(end) / 5 * 1e6 / (ROWS / blocks)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
