"""HBM and NVLink bytes of one collective, read by Nsight Compute on rank 0, beside the bytes that must move.

    python benchmarks/counters.py [OUT.json]        (2 GPUs, `ncu` on the PATH)

Each kernel is profiled in one pass, so that it runs once, with its peer: with several passes it would wait for a peer
that has gone on.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

TOKENS, HIDDEN = 16384, 4096
METRICS = {
    "hbm_read": "dram__bytes_read.sum",
    "hbm_written": "dram__bytes_write.sum",
    "nvlink_received": "nvlrx__bytes.sum",
    "nvlink_sent": "nvltx__bytes.sum",
    "ns": "gpu__time_duration.sum",
}


def rank_main() -> None:
    """One rank: the fused collective, then the sequential path, a few times each."""
    import torch
    import torch.distributed as dist

    from tokenweave import Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    workspace = Workspace(
        dist.group.WORLD,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        device=device,
        regions=1,
        staging=False,
        transport="p2p",
        time_limit=60,
    )
    x = workspace.buffer(TOKENS).normal_()
    residual = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    weight = torch.ones(HIDDEN, device=device).bfloat16()
    for ctas in (8, 16, 64):
        for _ in range(2):
            fused_allreduce_rmsnorm(x, residual, weight, 1e-5, workspace, ctas=ctas)
            torch.cuda.synchronize()
    for _ in range(2):
        allreduce_rmsnorm(x, residual, weight, 1e-5, workspace)
        torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # the profiler and NCCL's teardown do not get along


def main() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    ncu = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--cache-control", "none"]
    ncu += ["--metrics", ",".join(METRICS.values()), "-k", "regex:twoshot|nccl|rmsnorm|rms_norm"]
    script = [sys.executable, __file__, "--rank"]
    peer = subprocess.Popen(script, env={**environment, "RANK": "1"})
    try:
        profiled = subprocess.run(
            ncu + script, env={**environment, "RANK": "0"}, capture_output=True, text=True, timeout=150, check=False
        )
        peer.wait(30)
    finally:
        peer.kill()
    lines = profiled.stdout.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        sys.exit(f"ncu printed no table:\n{profiled.stdout[-2000:]}\n{profiled.stderr[-2000:]}")
    rows = []
    table = csv.DictReader(io.StringIO("\n".join(lines[header:])))
    units = next(table)  # the row below the header
    for line in table:
        values = {name: _number(line.get(metric), units.get(metric)) for name, metric in METRICS.items()}
        rows.append({"kernel": line["Kernel Name"][:60], "grid": line["Grid Size"], **values})
    row_bytes = HIDDEN * 2
    minimum = {
        "hbm_read": TOKENS * row_bytes * 3 // 2,  # every partial row once, the owned rows' residual
        "hbm_written": TOKENS * row_bytes * 3 // 2,  # every result row, the owned rows' residual
        "nvlink_sent": TOKENS * row_bytes,  # half the partials are read by the peer, half the results go to it
    }
    for row in rows:
        print(row)
    print("minimum", minimum)
    if len(sys.argv) > 1:
        from tokenweave.bench.environment import describe

        result = {"environment": describe(), "tokens": TOKENS, "hidden": HIDDEN, "minimum": minimum, "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


def _number(text: str | None, unit: str | None) -> float | None:
    if not text:
        return None
    scale = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "us": 1e3, "ms": 1e6, "usecond": 1e3, "msecond": 1e6}
    try:
        return float(text.replace(",", "")) * scale.get(unit or "", 1.0)
    except ValueError:
        return None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main()
    else:
        main()
