"""GEMMs beside a collective that really runs: what each way of telling them which SMs are free is worth. Two GPUs or more.

PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/sm_budget/measure.py OUT.json [--rows 512,1024,2048,4096]

Held: GEMMs in a row, timed while one collective, long enough to cover them, holds its SMs and its link. Slots: as in a
woven step, a GEMM and a collective of as many rows start together, and the next pair waits for both; in a graph. All conditions of a
shape run in paired rounds. The shapes are Llama-3.1-8B's on 2 ranks, whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from green import split_streams
from tables import tables

from tokenweave.bench.environment import Monitor, describe, machine_line
from tokenweave.bench.timing import MIN_ROUNDS, GraphClock, median_estimate, paired_rounds, slowest_rank
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.cuda.sm_budget import sm_budget
from tokenweave.errors import TokenWeaveError
from tokenweave.files import write_result

HIDDEN = 4096
SHAPES = {"qkv": (3072, 4096), "o": (4096, 2048), "gate_up": (14336, 4096), "down": (4096, 7168)}  # n, k
# Blocks, cluster.
LAUNCHES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (12, 2), (12, 4), (16, 1), (16, 2), (16, 4))
USUAL = (8, 2)
GEMMS = 2  # timed in a row
SLOWEST = 2.5  # times as long as alone: what the collective is made to cover
SLOTS = 8
MOST_ROWS = 98304  # of a collective
TIMED_ROWS = 8192  # of the collectives whose speed says how many rows cover the GEMMs
ROTATED = 150 << 20  # bytes of weights that take turns, more than the L2 cache holds
SLEEP_CYCLES = 1_600_000  # about 0.8 ms: the host queues a sample behind it


@dataclass(frozen=True)
class Condition:
    """What surrounds a GEMM, and what it is told.

    Attributes:
        blocks, cluster: of the collective beside it; 0 blocks: none.
        target: SMs that it plans for; None: it isn't told.
        library: that torch prefers, "cublas" or "cublaslt".
        green: the two run in green contexts of their own.
    """

    blocks: int = 0
    cluster: int = 1
    target: int | None = None
    library: str = "cublas"
    green: bool = False


@dataclass(frozen=True)
class Slot:
    """A GEMM and a collective that start together; ``gemm_first``: in the order of their launches."""

    blocks: int
    cluster: int
    target: int | None
    gemm_first: bool


def conditions(sms: int) -> list[Condition]:
    """All that are measured for a shape."""
    usual = Condition(*USUAL)
    found = [Condition(), *(Condition(target=sms - held) for held in (4, 8, 16))]
    for blocks, cluster in LAUNCHES:
        found += [Condition(blocks, cluster), Condition(blocks, cluster, sms - blocks)]
    targets = {sms - held for held in (4, 12, 16, 20, 28)}
    found += [dataclasses.replace(usual, target=target) for target in sorted(targets)]
    found += [dataclasses.replace(usual, target=target, library="cublaslt") for target in (None, sms - usual.blocks)]
    found += [dataclasses.replace(usual, target=target, green=True) for target in (None, sms - usual.blocks)]
    return found


def slots(sms: int) -> list[Slot]:
    """Launch orders, with and without a target."""
    return [
        Slot(blocks, cluster, target, first)
        for blocks, cluster in ((4, 4), USUAL)
        for target in (None, sms - blocks)
        for first in (False, True)
    ]


class Bench:
    """One rank's side of the measurement."""

    def __init__(self, rounds: int, green: bool) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        group = dist.group.WORLD
        assert group is not None
        self.group, self.rounds = group, rounds
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.monitor = Monitor(self.device.index)
        self.workspace = Workspace(
            group,
            max_tokens=MOST_ROWS,
            hidden=HIDDEN,
            dtype=torch.bfloat16,
            device=self.device,
            channels=1,
            regions=1,
            staging=False,
            time_limit=10.0,
        )
        self.workspace.buffer(MOST_ROWS).normal_()
        self.residual = torch.randn(MOST_ROWS, HIDDEN, dtype=torch.bfloat16, device=self.device)
        self.weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=self.device)
        self.meet = torch.zeros(1, device=self.device)
        self.clock = GraphClock(group, self.device)
        self.gemm_stream, self.comm_stream = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self.green: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self.green_sms = self._make_green() if green else {"error": "switched off"}
        self.us_per_row = {launch: self._collective_us(*launch) / TIMED_ROWS for launch in LAUNCHES}

    def _make_green(self) -> dict[str, Any]:
        """Sets ``green`` if this driver has green contexts that run torch's and our kernels; says what they have, or why not."""
        try:
            comm, gemm, few, rest = split_streams(self.device.index, USUAL[0])
            self.green = gemm, comm
            self.held_us(lambda: self.weight.add(1), Condition(*USUAL, green=True), 64, [])
        except (ImportError, RuntimeError, TokenWeaveError) as error:
            self.green = None
            return {"error": str(error)}
        return {"collective": few, "gemm": rest}

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def collective(self, rows: int, blocks: int, cluster: int) -> None:
        fused_allreduce_rmsnorm(
            self.workspace.buffer(rows),
            self.residual[:rows],
            self.weight,
            1e-5,
            self.workspace,
            ctas=blocks,
            cluster=cluster if cluster > 1 else None,
        )

    def _together(self) -> None:
        """The GPU idles while the host queues a sample, then the ranks meet on the device."""
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(self.meet, group=self.group)

    def _collective_us(self, blocks: int, cluster: int) -> float:
        """Of TIMED_ROWS rows, alone; the median of a few, on the slowest rank."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(5):
            self._together()
            begin.record()
            self.collective(TIMED_ROWS, blocks, cluster)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        (slowest,) = slowest_rank({"": times}, self.group, self.device).values()
        return sorted(slowest)[len(slowest) // 2]

    def streams(self, how: Condition) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Of the GEMMs and of the collective."""
        if how.green:
            assert self.green is not None
            return self.green
        return self.gemm_stream, self.comm_stream

    def held_us(self, gemm: Callable[[], object], how: Condition, rows: int, covered: list[bool]) -> float:
        """us of a GEMM in a row of them; ``covered`` takes whether the collective of ``rows`` rows outlived them."""
        gemms, comm = self.streams(how)
        begin, end, outlived = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._together()
        current = torch.cuda.current_stream()
        for stream in (comm, gemms):
            stream.wait_stream(current)
        if how.blocks:
            with torch.cuda.stream(comm):
                self.collective(rows, how.blocks, how.cluster)
                outlived.record()
        with torch.cuda.stream(gemms), sm_budget(how.target):
            gemm()  # not timed: the collective has its SMs at the latest when this one's blocks end
            begin.record()
            for _ in range(GEMMS):
                gemm()
            end.record()
        torch.cuda.synchronize()
        if how.blocks:
            covered.append(end.elapsed_time(outlived) > 0)
        return begin.elapsed_time(end) * 1e3 / GEMMS

    def pairs(self, gemm: Callable[[], object], how: Slot, rows: int) -> None:
        """Launches SLOTS pairs of a GEMM and a collective of ``rows`` rows, each of which waits for the one before."""
        current = torch.cuda.current_stream()

        def compute() -> None:
            with sm_budget(how.target):
                gemm()

        def communicate() -> None:
            with torch.cuda.stream(self.comm_stream):
                self.collective(rows, how.blocks, how.cluster)

        for _ in range(SLOTS):
            self.comm_stream.wait_stream(current)
            for issue in (compute, communicate) if how.gemm_first else (communicate, compute):
                issue()
            current.wait_stream(self.comm_stream)

    def slot(self, gemm: Callable[[], object], how: Slot, rows: int) -> Callable[[], float]:
        """us of a pair, by a graph of several: the host could not launch short ones as fast as they run."""
        self.clock.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.clock.stream):  # libraries set themselves up on the stream that captures
            self.pairs(gemm, how, rows)
        graph = self.clock.capture(lambda: self.pairs(gemm, how, rows), 1)
        return lambda: self.clock.replay(graph, lambda: None) / SLOTS

    def shape(self, name: str, rows: int, result: dict[str, Any]) -> None:
        """Measures one shape at one number of rows; adds to ``result``'s "held" and "slots"."""
        began = time.monotonic()
        gemm = self._gemm(name, rows)
        chosen = [how for how in conditions(self.sms) if self.green is not None or not how.green]
        alone = self._quick(gemm, Condition())
        covered: dict[Condition, list[bool]] = {how: [] for how in chosen}
        modes: dict[str, Callable[[], float]] = {}
        for how in chosen:
            self._warm(gemm, how)
            expected = (GEMMS + 1) * alone * SLOWEST
            long = 0 if not how.blocks else math.ceil(expected / self.us_per_row[how.blocks, how.cluster])
            modes[repr(how)] = self._held(gemm, how, min(MOST_ROWS, long), covered[how])
        orders = slots(self.sms)
        modes |= {repr(slot): self.slot(gemm, slot, rows) for slot in orders}
        times = self._timed(modes)
        for how in chosen:
            row = {"gemm": name, "rows": rows, **dataclasses.asdict(how), **_estimate(times[repr(how)])}
            result["held"].append(row | {"covered": all(covered[how])})
        for slot in orders:
            result["slots"].append(
                {"gemm": name, "rows": rows, **dataclasses.asdict(slot), **_estimate(times[repr(slot)])}
            )
        self.say(f"{name}, {rows} rows: {alone:.0f} us alone ({time.monotonic() - began:.1f} s)")

    def _held(self, gemm: Callable[[], object], how: Condition, rows: int, covered: list[bool]) -> Callable[[], float]:
        def sample() -> float:
            with _preferred(how.library):
                return self.held_us(gemm, how, rows, covered)

        return sample

    def _timed(self, modes: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
        times = paired_rounds(modes, self.rounds, after_round=self.monitor.sample)
        self.workspace.check()
        return slowest_rank(times, self.group, self.device)

    def _gemm(self, name: str, rows: int) -> Callable[[], object]:
        """The product with weights that take turns, into memory of its own."""
        n, k = SHAPES[name]
        copies = max(2, -(-ROTATED // (2 * n * k)))
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=self.device)
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device=self.device) * k**-0.5 for _ in range(copies)]
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=self.device)
        turn = 0

        def gemm() -> None:
            nonlocal turn
            turn += 1
            torch.mm(x, weights[turn % copies].t(), out=out)

        return gemm

    def _warm(self, gemm: Callable[[], object], how: Condition) -> None:
        """Chooses and loads the kernel: nothing may be loaded beside a collective."""
        stream, _ = self.streams(how)
        with _preferred(how.library), torch.cuda.stream(stream), sm_budget(how.target):
            gemm()
        torch.cuda.synchronize()

    def _quick(self, gemm: Callable[[], object], how: Condition) -> float:
        self._warm(gemm, how)
        (times,) = slowest_rank(
            {"": [self.held_us(gemm, how, 0, []) for _ in range(5)]}, self.group, self.device
        ).values()
        return sorted(times)[2]


@contextlib.contextmanager
def _preferred(library: str) -> Iterator[None]:
    """torch's plain GEMMs go through ``library`` inside."""
    if library == "cublas":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _estimate(times: list[float]) -> dict[str, float]:
    found = median_estimate(times)
    return {"us": round(found.value, 2), "us_low": round(found.low, 2), "us_high": round(found.high, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--rows", default="512,1024,2048,4096", help="of the GEMMs (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--no-green", action="store_true", help="without green contexts")
    args = parser.parse_args()
    began = time.monotonic()
    bench = Bench(args.rounds, not args.no_green)
    bench.say(f"ready after {time.monotonic() - began:.1f} s; green contexts: {bench.green_sms}")
    result: dict[str, Any] = {
        "environment": describe() if bench.rank == 0 else {},
        "config": {
            "ranks": bench.ranks,
            "hidden": HIDDEN,
            "shapes": SHAPES,
            "rounds": args.rounds,
            "sms": bench.sms,
            "green_sms": bench.green_sms,
            "usual": USUAL,
            "transport": bench.workspace.transport,
            "collective_us_per_1024_rows": {f"{b}/{c}": round(us * 1024, 2) for (b, c), us in bench.us_per_row.items()},
        },
        "held": [],
        "slots": [],
    }
    for rows in (int(number) for number in args.rows.split(",")):
        for name in SHAPES:
            bench.shape(name, rows, result)
    if bench.rank == 0:
        environment = result["environment"]
        environment["while_measuring"] = bench.monitor.take()
        result["machine"] = machine_line(environment, bench.ranks)
        result["tables"] = tables(result)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_result(result, args.out)
        uncovered = [row for row in result["held"] if row["blocks"] and not row["covered"]]
        print(
            f"{len(result['held'])} conditions, {len(uncovered)} not covered to the end, {time.monotonic() - began:.1f} s"
        )
    bench.workspace.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
