"""All ranks' calls in one process on one GPU (tokenweave.bench.kernel.alone), against float64, in watched memory.

    PYTHONPATH=src python3 tests/alone_cases.py [--part I/N] [--each-reader-frees] [--rank 0|1 --store FILE]
    PYTHONPATH=src python3 tests/alone_cases.py --plant memory|sum|refill

runs a small set of them, or of N equal parts of it part I, for compute-sanitizer (test_gpu_sanitizer.py).
``--each-reader-frees`` compiles the ring kernel as racecheck can follow it. ``--plant`` makes a mistake in the kernels and runs
one case. With ``--rank`` the process is one of two, each with a GPU, and runs those that need nothing of :mod:`alone`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

import fp8_cases
import rounding_cases
from collective_cases import EPS, Case, Data, bits, call, check, is_poison, make, on, open_workspace, poisoned
from kernel_edits import EACH_READER_FREES, MISTAKES, Mistake, compiled_from
from tokenweave.bench.kernel import alone
from tokenweave.collective import Workspace, cuda_backend, selftest
from tokenweave.collective.call import Call, Launch
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.kernels import Kernel
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.collective.rows import owned_rows
from tokenweave.cuda.compile import compile_kernel
from tokenweave.stages import Epilogue

GAP = 64 << 10  # bytes


@dataclass(frozen=True)
class Alone:
    """A case and how it is launched.

    Attributes:
        fp8: ``"static"``, ``"row"`` for a scale a row, or None. both: the rows unquantised as well.
        real: the row count in device memory, or None for none.
        fine: vectors in float32, whose every bit counts (:mod:`rounding_cases`).
        kernel: the one that has to run, as a check of this list.
    """

    case: Case
    kernel: str
    ranks: int = 2
    transport: str = "p2p"
    fp8: str | None = None
    both: bool = False
    real: int | None = None
    fine: bool = False


def small() -> list[Alone]:
    """Every kernel, and every option in at least one of them."""
    bf16, fp16 = torch.bfloat16, torch.float16
    ring, plain, once = "twoshot_ring", "twoshot_registers", "oneshot"
    return [
        Alone(Case(71, 4096, ctas=2), ring),
        Alone(Case(70, 2880, fp16, post_norm=True, ctas=2, cluster=2), ring),
        Alone(Case(71, 4096, bias=True, weight_offset=1.0, ctas=1), ring, fine=True),
        Alone(Case(64, 4096, rows=tuple(range(1, 64, 2)), use_out=True, ctas=1), ring),
        Alone(Case(90, 4096, ctas=1), ring, real=67),
        Alone(Case(71, 4096, ctas=2), ring, fp8="row", both=True),
        Alone(Case(71, 4096, has_residual=False, ctas=1), ring, fp8="static"),
        Alone(Case(71, 2880, ctas=1), ring, ranks=4),
        Alone(Case(33, 4096), plain),
        Alone(Case(1, 4096), plain),
        Alone(Case(9, 4096, rows=(0, 3, 8), post_norm=True), plain),
        Alone(Case(5, 72, torch.float32), plain),
        Alone(Case(33, 4096, fp16), plain, fp8="row"),
        Alone(Case(33, 2880, bf16), "twoshot_multimem", transport="multimem-emulated"),
        Alone(Case(1, 4096, replicated=True), once),
        Alone(Case(33, 4096, replicated=True), once),
        Alone(Case(9, 2880, fp16, replicated=True, post_norm=True, bias=True), once),
        Alone(Case(33, 4096, replicated=True, rows=(0, 3, 8, 32)), once, fp8="row", both=True),
        Alone(Case(33, 4096, replicated=True), once, real=20),
        Alone(Case(9, 4096, replicated=True), once, ranks=4),
        Alone(Case(33, 4096), "add_rmsnorm"),
        Alone(Case(5, 72, fp16, post_norm=True), "add_rmsnorm"),
    ]


def fine() -> list[Alone]:
    """Every kernel with vectors in float32, beside the one of :func:`small`."""
    fp16, plain, once = torch.float16, "twoshot_registers", "oneshot"
    every = {"post_norm": True, "bias": True, "weight_offset": 1.0}
    cases = [
        Alone(Case(71, 2880, fp16, ctas=1, **every), "twoshot_ring"),
        Alone(Case(33, 4096), plain),
        Alone(Case(33, 2880, fp16, **every), plain),
        Alone(Case(33, 4096, replicated=True), once),
        Alone(Case(9, 2880, fp16, replicated=True, **every), once),
        Alone(Case(17, 7168, replicated=True, bias=True), once, ranks=4),
        Alone(Case(33, 4096, bias=True), "twoshot_multimem", transport="multimem-emulated"),
        Alone(Case(33, 2880, fp16, **every), "twoshot_multimem", transport="multimem-emulated"),
        Alone(Case(33, 4096, bias=True), "add_rmsnorm"),
        Alone(Case(33, 2880, fp16, **every), "add_rmsnorm"),
    ]
    return [dataclasses.replace(what, fine=True) for what in cases]


def run(what: Alone, seed: int, rounds: int = 2) -> None:
    """Some rounds of one case with fresh inputs, each checked on all ranks."""
    if what.kernel == "add_rmsnorm":
        _norm(what, seed)
        return
    ranks = open_ranks(what, torch.device("cuda", torch.cuda.current_device()))
    for number in range(rounds):
        data = make_inputs(what, seed + number)
        calls = [_call(what, data, workspace) for workspace in ranks.workspaces]
        kernels = [kernel_of(call) for call in calls]
        assert {kernel.name for kernel in kernels} == {what.kernel}, f"{what} runs {kernels[0].name}"
        _compile(kernels)
        results = alone.run(calls)
        for workspace, of, result in zip(ranks.workspaces, calls, results, strict=True):
            workspace.check()
            assert torch.equal(_bits(result[: what.real]), _bits(results[0][: what.real])), f"ranks differ: {what}"
            _check(what, data, of, result, seed + number)
            _expect_untouched(workspace._data[1, 0 if of.out is None else of.results :])
    for gap in ranks.gaps:
        _expect_untouched(gap)
    for workspace in ranks.workspaces:
        workspace.close()


def make_inputs(what: Alone, seed: int) -> Data:
    """Fresh ones of all ranks."""
    return (rounding_cases.make if what.fine else make)(what.case, what.ranks, seed)


def open_ranks(what: Alone, device: torch.device) -> alone.Ranks:
    """All ranks of a case on one device."""
    return alone.open_ranks(
        [device] * what.ranks,
        max_tokens=max(1, what.case.tokens),
        hidden=what.case.hidden,
        dtype=what.case.dtype,
        transport=what.transport,
        regions=2,
        fp8_regions=int(what.fp8 is not None),
        gap=GAP,
    )


def kernel_of(call: Call) -> Kernel:
    """The kernel that the call takes."""
    workspace, options = call.workspace, cuda_backend._options(call)
    if call.replicated:
        return cuda_backend._oneshot_kernel(*cuda_backend._shape(workspace), options, call.results)
    ctas = call.launch.ctas or cuda_backend.default_ctas(call.tokens, workspace)
    return cuda_backend.twoshot_kernel(workspace, options, call.tokens, ctas)


def _compile(kernels: list[Kernel]) -> None:
    """All ranks' kernels at once: they differ."""
    major, minor = torch.cuda.get_device_capability()
    with ThreadPoolExecutor(max_workers=min(len(kernels), os.cpu_count() or 1)) as pool:
        list(pool.map(lambda kernel: compile_kernel(kernel, f"sm_{major}{minor}{'a' * (major >= 9)}"), kernels))


def _call(what: Alone, data: Data, workspace: Workspace) -> Call:
    """This rank's call. What it must not read is poison; data comes from the host, so that few other kernels run."""
    case, device = what.case, workspace.device
    real = case.tokens if what.real is None else what.real
    partial = workspace.buffer(case.tokens)
    partial.copy_(data.partials[workspace.rank])
    residual = poisoned(data.residual)
    mine = range(real) if case.replicated else owned_rows(real, workspace.rank, workspace.world_size)
    if case.has_residual:
        residual[mine.start : mine.stop] = data.residual[mine.start : mine.stop]
    weight, post_norm, bias = (None if v is None else v.to(device) for v in (data.weight, data.post_norm, data.bias))
    assert weight is not None
    n = case.tokens if case.rows is None else len(case.rows)
    fp8 = out = None
    if what.fp8 is not None:
        scale = torch.tensor([0.03]).to(device) if what.fp8 == "static" else None
        fp8 = Fp8(workspace.fp8(n), workspace.scales(n) if scale is None else None, scale)
    if what.both or (fp8 is None and (case.use_out or case.rows is not None)):
        out = workspace.buffer(n, region=1)
        out.copy_(poisoned(torch.empty(n, case.hidden, dtype=case.dtype)))
    return Call(
        partial,
        residual.to(device),
        Epilogue(weight, EPS, case.has_residual, post_norm, case.weight_offset, bias),
        workspace,
        Launch(ctas=case.ctas, cluster=case.cluster, layout="replicated" if case.replicated else "sharded"),
        rows=None if case.rows is None else torch.tensor(case.rows).to(device),
        row_count=None if what.real is None else torch.tensor([what.real], dtype=torch.int32).to(device),
        out=out,
        fp8=fp8,
    )


def _check(what: Alone, data: Data, call: Call, result: torch.Tensor, seed: int) -> None:
    case, workspace = what.case, call.workspace
    rounded = workspace.transport != "p2p"
    if what.fp8 is not None:
        scales = call.fp8.scale if call.fp8.scales is None else call.fp8.scales
        quantised = fp8_cases.Quantised(case, 0.03 if what.fp8 == "static" else None, what.both)
        fp8_cases.check(quantised, fp8_cases.Result(call.residual, result, scales, call.out), workspace, seed)
        assert torch.equal(call.partial.cpu(), data.partials[workspace.rank]), "partial is only read"
        return
    residual, result = call.residual.cpu(), result.cpu()
    if what.fine:
        rounding_cases.check(case, data, residual, result, workspace)
    if what.real is None:
        check(case, data, residual, result, workspace, rounded_sum=rounded)
        return
    first = dataclasses.replace(case, tokens=what.real)
    some = dataclasses.replace(data, partials=data.partials[:, : what.real], residual=data.residual[: what.real])
    check(first, some, residual[: what.real], result[: what.real], workspace, rounded_sum=rounded)
    assert is_poison(residual[what.real :]), "a row behind the real ones was written"
    assert torch.equal(result[what.real :], data.partials[workspace.rank, what.real :])


def _norm(what: Alone, seed: int) -> None:
    case, place = what.case, SimpleNamespace(rank=0, world_size=1)
    data = make_inputs(dataclasses.replace(what, ranks=1), seed)
    x, residual, gpu = data.partials[0].to("cuda"), data.residual.to("cuda"), on(data, torch.device("cuda"))
    rows = add_rmsnorm(x, residual, Epilogue(gpu.weight, EPS, True, gpu.post_norm, case.weight_offset, gpu.bias))
    torch.cuda.synchronize()
    if what.fine:
        rounding_cases.check(case, data, residual, rows, place)
    check(case, data, residual, rows, place, sequential=True)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).cpu() if x.element_size() == 1 else bits(x.cpu())


def _expect_untouched(memory: torch.Tensor) -> None:
    """Looked at on the host, where no further kernel runs."""
    there = memory.cpu().contiguous().flatten().view(torch.uint8)
    assert (there == alone.GAP_BYTE).all(), "memory around the rows was written"


def run_mistake(mistake: Mistake) -> None:
    """One call of two ranks. What comes out is wrong too, and not looked at: the sanitizer has to say why."""
    what = Alone(mistake.case, mistake.kernel)
    ranks = open_ranks(what, torch.device("cuda", torch.cuda.current_device()))
    calls = [_call(what, make(what.case, 2, 1), workspace) for workspace in ranks.workspaces]
    assert {kernel_of(call).name for call in calls} == {what.kernel}
    alone.run(calls)


def run_as_rank(rank: int, store: str) -> None:
    """The plain ones of the cases, as one of two ranks. Nothing but our kernels communicates on the GPUs."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    selftest.failure = lambda workspace: None  # it compares with NCCL, whose kernels the tool would look at too
    for number, what in enumerate(small()):
        case = what.case
        if what.kernel == "add_rmsnorm" or what.ranks != 2 or what.fp8 or what.real or what.fine:
            continue
        device = torch.device("cuda", rank)
        options = {"device": device, "transport": what.transport, "time_limit": 60.0}
        with open_workspace(case, dist.group.WORLD, **options) as workspace:
            data = make(case, 2, number)
            residual, rows = call(case, data, workspace)
            torch.cuda.synchronize()
            workspace.check()
            check(case, data, residual, rows, workspace, rounded_sum=what.transport != "p2p")
            dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--each-reader-frees", action="store_true")
    parser.add_argument("--plant", choices=tuple(MISTAKES))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    parser.add_argument(
        "--tell-after", type=float, default=60, help="seconds, after which it says every so often where it is"
    )
    parsed = parser.parse_args()
    faulthandler.dump_traceback_later(parsed.tell_after, repeat=True)
    if parsed.rank is not None:
        run_as_rank(parsed.rank, parsed.store)
        return
    if parsed.plant:
        mistake = MISTAKES[parsed.plant]
        with compiled_from(*mistake.edits):
            run_mistake(mistake)
        return
    part, parts = map(int, parsed.part.split("/"))
    with compiled_from(*EACH_READER_FREES) if parsed.each_reader_frees else contextlib.nullcontext():
        began = time.perf_counter()
        for what in small()[part::parts]:
            print(f"{time.perf_counter() - began:6.2f} s  begins {what}", flush=True)
            run(what, 1)
        print(f"{time.perf_counter() - began:6.2f} s  all done", flush=True)


if __name__ == "__main__":
    main()
