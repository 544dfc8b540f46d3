"""Hardware counters of the fused collective's kernels: HBM traffic against the minimum, and what limits an SM.

    python3 benchmarks/counters/counters.py [OUT.json]       # needs a GPU and Nsight Compute's `ncu`; half a minute

Rank 0's kernel runs alone under ncu, of two ranks that share this process (tokenweave.bench.kernel.alone): its peer's
memory is on the same GPU, and on a second one too if there is any, where the NVLink counters are read as well. ncu empties
the L2 cache before each of its passes, so all reads come from HBM; what a kernel wrote may still be in the cache when it ends. The
`written_least` of a row must exceed the cache by far for `hbm_written` to mean anything: 192 MiB at 16,384 tokens, 768 MiB
at 65,536, of 60 MB. Times are those of ncu's passes, with cold caches and nothing on the links but this kernel: they are not the
benchmark's. The first reach to another GPU after ncu has emptied the caches takes some 160 us.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenweave.bench.environment import describe
from tokenweave.bench.kernel import alone
from tokenweave.collective.call import Call, Launch
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.collective.rows import owned_rows
from tokenweave.collective.workspace import Workspace
from tokenweave.files import write_result
from tokenweave.stages import Epilogue

HIDDEN, RANKS = 4096, 2
ROW = HIDDEN * 2  # bytes, bf16
KERNELS = "regex:.*(twoshot|oneshot|add_rmsnorm).*"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = [
    "barrier",
    "branch_resolve",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
]
METRICS = {  # ours -> ncu's; sums are over all SMs, slices or links
    "us": "gpu__time_duration.sum",  # nanoseconds until _row
    "hbm_read": "dram__bytes_read.sum",
    "hbm_written": "dram__bytes_write.sum",
    "hbm_percent_of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent_of_peak": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "l2_sectors_written": "lts__t_sectors_op_write.sum",
    "l1_cycles": "l1tex__cycles_active.sum",
    "port_out_cycles": "l1tex__m_l1tex2xbar_req_cycles_active.sum",
    "port_out_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "port_in_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1_wavefronts": "l1tex__data_pipe_lsu_wavefronts.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "sm_cycles": "sm__cycles_active.sum",
    "sms_used": "sm__cycles_active.max",  # cycles of the busiest SM until _row
    "instructions": "smsp__inst_executed.sum",
    "issue_slots_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    **{f"stalled_{name}": STALL.format(name) for name in STALLS},
}
LINK_METRICS = {  # in a pass of their own, because not every machine lets its guests read them
    "nvlink_sent": "nvltx__bytes.sum",
    "nvlink_sent_data": "nvltx__bytes_data_user.sum",
    "nvlink_received": "nvlrx__bytes.sum",
    "nvlink_received_data": "nvlrx__bytes_data_user.sum",
}


@dataclass(frozen=True)
class Case:
    """One launch. ``kind``: ``"sharded"``, ``"replicated"`` or ``"norm"`` (add_rmsnorm of all rows). ``fp8``: e4m3 results,
    ``"static"`` with one scale for all or ``"rows"`` with one a row."""

    kind: str
    tokens: int
    ctas: int | None = None
    peer: str = "same GPU"
    fp8: str | None = None

    def least(self) -> dict[str, int]:
        """Bytes of this kernel if each partial sum, residual and result passes once: of this GPU's HBM, and over NVLink."""
        own = len(owned_rows(self.tokens, 0, RANKS))
        remote = self.peer != "same GPU"
        if self.kind == "norm":
            read, written, sent, received = 2 * self.tokens, 2 * self.tokens, 0, 0
        elif self.kind == "sharded":  # a row of every rank and the residual; the residual and a row to every rank
            read, written = own * (RANKS + 1), own * (RANKS + 1)
            sent = received = own * (RANKS - 1) * remote
            if self.fp8 is not None:  # all that is written but the residual is of bytes; scales count for nothing
                written, sent = own * (RANKS + 2) // 2, sent // 2
        else:  # own sums, the residual and what arrived; the residual, the result and what is pushed
            read, written = self.tokens * (RANKS + 1), self.tokens * (RANKS + 1)
            sent, received = self.tokens * (RANKS - 1) * remote, 0
        least = {"read_least": read - received, "written_least": written - sent, "sent_least": sent}
        return {name: rows * ROW for name, rows in {**least, "received_least": received}.items()}


def cases(gpus: int) -> list[Case]:
    """All launches, in order; those with a peer on another GPU are the last ones."""
    norms = [Case("norm", tokens) for tokens in (1024, 4096, 16384, 65536)]
    fused = [Case("sharded", tokens, ctas) for tokens in (1024, 4096, 16384) for ctas in (4, 8, 16, 64)]
    fused += [Case("sharded", 65536, ctas) for ctas in (8, 64)]
    fused += [Case("sharded", 16384, ctas, fp8=kind) for ctas in (4, 8, 64) for kind in ("static", "rows")]
    fused += [Case("replicated", tokens) for tokens in (64, 512)]
    if gpus > 1:
        fused += [Case("sharded", 16384, ctas, "other GPU") for ctas in (4, 8, 16, 64)]
        fused += [Case("sharded", 1024, 8, "other GPU"), Case("replicated", 512, None, "other GPU")]
    return norms + fused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON to write")
    parser.add_argument("--ncu", default="ncu", help="the profiler (default: %(default)s)")
    parser.add_argument("--launch", choices=("all", "remote"), help="only launch the cases, as ncu's child")
    parsed = parser.parse_args()
    planned = cases(torch.cuda.device_count())
    remote = [case for case in planned if case.peer != "same GPU"]
    if parsed.launch:
        launch_all(planned if parsed.launch == "all" else remote)
        return 0
    ncu = shutil.which(parsed.ncu)
    if ncu is None:
        print(f"counters: {parsed.ncu} is not on the PATH; it comes with Nsight Compute", file=sys.stderr)
        return 2
    known = available_metrics(ncu)
    measured = profile(ncu, METRICS, known, "all", len(planned))
    rows = [_row(case, values) for case, values in zip(planned, measured, strict=True)]
    if remote:
        try:
            links = profile(ncu, LINK_METRICS, known, "remote", len(remote))
        except RuntimeError as error:
            print(f"counters: no figures of the links: {error}", file=sys.stderr)
        else:
            for row, values in zip(rows[-len(remote) :], links, strict=True):
                row |= {name: _number(values.get(metric)) for name, metric in LINK_METRICS.items()}
    for row in rows:
        print(_line(row))
    if parsed.out:
        result = {"environment": describe(), "ncu": _version(ncu), "rows": rows}
        write_result(result, parsed.out)
    return 0


def launch_all(planned: list[Case]) -> None:
    """Launches rank 0's kernel of every case."""
    torch.manual_seed(0)
    home = torch.device("cuda", 0)
    most = max(case.tokens for case in planned)
    residual = torch.randn(most, HIDDEN, device=home).bfloat16()
    sums = torch.randn(most, HIDDEN, device=home).bfloat16()
    weight = torch.rand(HIDDEN, device=home).bfloat16()
    ranks: dict[str, alone.Ranks] = {}
    for case in planned:
        epilogue = Epilogue(weight, 1e-5)
        if case.kind == "norm":
            add_rmsnorm(sums[: case.tokens], residual[: case.tokens], epilogue)
            continue
        if case.peer not in ranks:
            devices = [home, home if case.peer == "same GPU" else torch.device("cuda", 1)]
            ranks.clear()
            options = {"max_tokens": most, "hidden": HIDDEN, "dtype": torch.bfloat16, "fp8_regions": 1}
            ranks[case.peer] = alone.open_ranks(devices, **options)
            for workspace in ranks[case.peer].workspaces:
                workspace.buffer(most).normal_()
        calls = []
        for workspace in ranks[case.peer].workspaces:
            mine = residual[: case.tokens].to(workspace.device)
            there = Epilogue(weight.to(workspace.device), 1e-5)
            launch = Launch(ctas=case.ctas, layout="replicated" if case.kind == "replicated" else "sharded")
            quantised = None if case.fp8 is None else _quantised(case, workspace)
            calls.append(Call(workspace.buffer(case.tokens), mine, there, workspace, launch, fp8=quantised))
        alone.run(calls, only=0)


def _quantised(case: Case, workspace: Workspace) -> Fp8:
    rows = workspace.fp8(case.tokens)
    if case.fp8 == "static":
        return Fp8(rows, None, torch.full((1,), 0.03, device=workspace.device))
    return Fp8(rows, workspace.scales(case.tokens), None)


def available_metrics(ncu: str) -> set[str] | None:
    """Names without their suffix; None if ncu does not say."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60)
    names = {line.split()[0] for line in done.stdout.splitlines() if "__" in line.split(" ")[0]}
    return names if done.returncode == 0 and len(names) > 100 else None


def profile(ncu: str, metrics: dict[str, str], known: set[str] | None, which: str, count: int) -> list[dict[str, str]]:
    """Runs this script with ``--launch which`` under ncu; a dict of metric -> value for each of ``count`` kernels, in order.

    Raises:
        RuntimeError: ncu failed or reports another number of kernels; its output is in the message.
    """
    wanted = [name for name in metrics.values() if known is None or name.partition(".")[0] in known]
    if absent := sorted(set(metrics.values()) - set(wanted)):
        print(f"counters: this GPU or ncu has no {', '.join(absent)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--target-processes", "application-only", "--clock-control", "none", "--cache-control", "all"]
        command += ["--replay-mode", "kernel", "--kernel-name", KERNELS, "--metrics", ",".join(wanted)]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        done = subprocess.run([*command, sys.executable, __file__, "--launch", which], capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels = [row for row in csv.DictReader(lines[start:]) if row["ID"].isdigit()]  # the first is the units'
    if done.returncode or len(kernels) != count:
        output = "\n".join(part[-3000:] for part in (text, done.stdout, done.stderr))
        raise RuntimeError(f"ncu ended with {done.returncode} after {len(kernels)} of {count} kernels:\n{output}")
    return kernels


def _row(case: Case, values: dict[str, str]) -> dict[str, object]:
    """Measured and least bytes, and shares of what the SMs in use could do."""
    numbers = {name: _number(values.get(metric)) for name, metric in METRICS.items()}
    row: dict[str, object] = {"tokens": case.tokens, "hidden": HIDDEN, "ranks": RANKS, "dtype": "bfloat16"}
    row |= {"impl": values["Kernel Name"], "ctas": case.ctas, "peer": case.peer, "fp8": case.fp8, **case.least()}
    stalls = {
        name.removeprefix("stalled_"): numbers.pop(name) or 0.0 for name in list(numbers) if name.startswith("stalled_")
    }
    if (ns := numbers.get("us")) is not None:
        numbers["us"] = ns / 1e3
    cycles, busiest, l1 = (numbers.get(name) for name in ("sm_cycles", "sms_used", "l1_cycles"))
    if cycles and busiest:
        numbers["sms_used"] = cycles / busiest
    row |= {name: value if value is None else round(value, 2) for name, value in numbers.items()}
    for share, of in (("port_out_percent", "port_out_cycles"), ("l1_wavefronts_percent", "l1_wavefronts")):
        if l1 and numbers.get(of) is not None:
            row[share] = round(100 * (numbers[of] or 0) / l1, 1)
    if (total := sum(stalls.values())) > 0:
        top = sorted(stalls.items(), key=lambda item: -item[1])[:4]
        row["stalls_percent"] = {name: round(100 * value / total, 1) for name, value in top}
    return row


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None  # "n/a", "(!) nan"


def _line(row: dict[str, object]) -> str:
    def of(name: str, least: str) -> str:
        have, want = row.get(name), row[least]
        return (
            f"{name} {have / want:5.2f}x" if isinstance(have, float) and isinstance(want, int) and want else f"{name} -"
        )

    parts = [
        f"{row['impl']!s:17s} {row['ctas'] or '-'!s:>4} CTAs {row['tokens']:6} tokens, {row['peer']}, "
        f"{'bf16' if row['fp8'] is None else 'fp8 ' + str(row['fp8'])} results: {row.get('us')} us"
    ]
    parts += [of("hbm_read", "read_least"), of("hbm_written", "written_least"), of("nvlink_received", "received_least")]
    parts += [of("nvlink_sent", "sent_least")]
    names = (
        "hbm_percent_of_peak",
        "port_out_percent",
        "l1_wavefronts_percent",
        "issue_slots_percent",
        "stalls_percent",
    )
    return ", ".join([*parts, *(f"{name} {row.get(name)}" for name in names)])


def _version(ncu: str) -> str:
    lines = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=30).stdout.split("\n")
    return next((line.strip() for line in lines if line.startswith("Version")), "")


if __name__ == "__main__":
    sys.exit(main())
