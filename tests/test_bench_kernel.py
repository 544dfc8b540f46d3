"""``tokenweave bench kernel``: its checks of every implementation, its files, and its arguments."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.bench import environment
from tokenweave.bench.kernel import implementations, report
from tokenweave.bench.kernel.bench import Config, KernelBench, chain, link_gbs, wire_bytes
from tokenweave.bench.kernel.expected import Expected
from tokenweave.bench.kernel.implementations import Family, Implementation, Prepared, Skipped
from tokenweave.bench.kernel.plots import plot_kernel
from tokenweave.cli.arguments import command_line
from tokenweave.cli.main import main
from tokenweave.collective import Workspace, allreduce_rmsnorm, cuda_backend, fp8, fused_allreduce_rmsnorm
from tokenweave.collective.rows import owned_rows
from tokenweave.collective.torch_backend import normalised, reduced_rows
from tokenweave.errors import CollectiveError
from tokenweave.stages import Epilogue

TOKENS = (1, 3, 8)


def test_wire_and_chain():
    assert wire_bytes(4096, 4096, 2, 2) / link_gbs("NVIDIA H200", "sm_90", 132) / 1e3 == pytest.approx(86.0, abs=0.1)
    assert link_gbs("NVIDIA A100-SXM4-80GB", "sm_80", 108) == 300.0
    assert chain(wire_bytes(1, 4096, 2, 2)) == 20
    assert chain(wire_bytes(32768, 4096, 2, 2)) == 10


class WallClock:
    """GraphClock without graphs, and with chains of two calls at most: gloo takes milliseconds for each."""

    def capture(self, call, calls):
        return lambda: [call() for _ in range(min(calls, 2))]

    def replay(self, graph, reset):
        reset()
        dist.barrier()
        began = time.perf_counter()
        graph()
        return (time.perf_counter() - began) * 1e6


class Counter:
    """A monitor of no GPU."""

    samples = 0

    def sample(self):
        self.samples += 1

    def take(self):
        return {"sm_mhz": {"low": 1.0, "median": 2.0, "high": 3.0}, "power_w": None, "celsius": None}


def _implementation(f, name, kind, call, rows, **options):
    return Implementation(name, kind, call, rows, "fused", owned_rows(rows.shape[0], f.rank, f.ranks), **options)


def _ours(f):
    workspace = Workspace(None, max_tokens=f.max_tokens, hidden=f.hidden, dtype=f.dtype)
    e = f.epilogue

    def choices(tokens):
        rows, residual = workspace.buffer(tokens), f.residual[:tokens]
        call = functools.partial(fused_allreduce_rmsnorm, rows, residual, e.weight, e.eps, workspace)
        return [_implementation(f, "tokenweave two-shot", "ours", call, rows, ctas=n, rows_per_cta=1) for n in f.ctas]

    return Prepared(choices, workspace.close)


def _rivals(f):
    workspace = Workspace(None, max_tokens=f.max_tokens, hidden=f.hidden, dtype=f.dtype)
    e = f.epilogue

    def choices(tokens):
        rows, residual = f.x[:tokens], f.residual[:tokens]
        right = functools.partial(allreduce_rmsnorm, rows, residual, e.weight, e.eps, workspace)

        def wrong():
            right()
            rows[-1, -1] += 1

        def grows():
            right()
            rows.mul_(1e30)

        def fails_on_rank_1():
            right()
            if f.rank == 1:
                raise RuntimeError("no such\nkernel")

        return [
            _implementation(f, "right", "rival", right, rows),
            _implementation(f, "wrong", "rival", wrong, rows),
            _implementation(f, "fails", "rival", fails_on_rank_1, rows),
            Skipped("never", "too small"),
            Implementation("sum", "part", lambda: dist.all_reduce(rows), rows, "sum", range(0), max_calls=2),
        ] + ([_implementation(f, "nan", "rival", lambda: rows.fill_(float("nan")), rows)] if tokens == 3 else [])

    return Prepared(choices)


def _absent_on_rank_0():
    if dist.get_rank() == 0:
        raise ModuleNotFoundError("No module named 'rival'")


def _never(f):
    raise AssertionError("prepared though a rank lacks it")


FAKES = (
    Family("ours", lambda: None, _ours),
    Family("rivals", lambda: None, _rivals),
    Family("absent", _absent_on_rank_0, _never),
)


def _bench(path: str) -> dict:
    group = dist.group.WORLD
    config = Config((64, 40), TOKENS, (4, 8), torch.bfloat16, 20, 390.0, json=Path(path))
    machine = environment.describe()
    monitor = Counter()
    bench = KernelBench(config, group, torch.device("cpu"), FAKES, WallClock(), monitor, machine, print)
    return {**bench.run(), "monitored": monitor.samples}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "deep" / "kernel.json"
    first, second = run_ranks(2, _bench, str(path))
    assert [row["us"] for row in first["rows"]] == [row["us"] for row in second["rows"]]  # the slowest rank's
    assert first["monitored"] == 20 * len(TOKENS) * 2
    assert not list(path.parent.glob("*.partial"))
    return json.loads(path.read_text())


def _torch_norm(x, residual, epilogue, *, out=None):
    residual.copy_(reduced_rows([x], residual, epilogue))
    return (x if out is None else out).copy_(normalised(residual, epilogue))


def _library_rivals() -> dict:
    """The rivals that are made of torch.distributed, on gloo."""
    implementations.add_rmsnorm = _torch_norm
    group = dist.group.WORLD
    families = [family for family in implementations.FAMILIES if family.name == "nccl"]
    config = Config((64,), (1, 2, 5, 8), (), torch.float16, 20, 390.0)
    bench = KernelBench(config, group, torch.device("cpu"), families, WallClock(), None, environment.describe(), print)
    return bench.run()


@pytest.mark.parametrize("ranks", [2, 3])
def test_rivals_of_torch_distributed_are_right(ranks):
    result = run_ranks(ranks, _library_rivals)[0]
    assert result["skipped"] == []
    assert len(result["rows"]) == 4 * 4  # tokens, implementations
    assert {row["kind"] for row in result["rows"]} == {"rival", "part"}


def _ours_with_fp8(fp8: bool) -> dict:
    """The package's own family on CPU ranks: the calls that it makes, on another transport than the GPUs'."""

    def workspace(group, **options):
        made = Workspace(group, **{**options, "transport": "torch"})
        made.symmetric = SimpleNamespace(inbox_rows=4, failure=lambda channel: None)
        return made

    replaced = {
        implementations: {"Workspace": workspace},
        cuda_backend: {"default_ctas": lambda tokens, workspace: 64},
    }
    families = [family for family in implementations.FAMILIES if family.name == "tokenweave"]
    config = Config((64,), (1, 8, 9), (4,), torch.bfloat16, 20, 390.0, fp8=fp8)
    with contextlib.ExitStack() as stack:
        for module, names in replaced.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        group = dist.group.WORLD
        bench = KernelBench(
            config, group, torch.device("cpu"), families, WallClock(), None, environment.describe(), print
        )
        result = bench.run()
    report.finish(result)
    return result


def test_fp8_results_are_timed_beside_the_same_kernels_without():
    result = run_ranks(2, _ours_with_fp8, True)[0]
    assert [(skip["impl"], skip["tokens"]) for skip in result["skipped"]] == [("tokenweave one-shot", 9)]
    kernels = {"tokenweave two-shot default": 64, "tokenweave two-shot": 4, "tokenweave one-shot": None}
    for tokens in (1, 8, 9):
        same = {row["impl"]: row for row in result["rows"] if row["tokens"] == tokens}
        shown = {name: ctas for name, ctas in kernels.items() if tokens <= 8 or "one-shot" not in name}
        assert set(same) == {name + end for name in shown for end in ("", " fp8 static", " fp8 rows")}
        for name, ctas in shown.items():
            plain = same[name]
            assert plain["kind"] == "ours"
            assert "unquantised" not in plain
            for ending in report.FP8:
                row = same[f"{name} {ending}"]
                assert (row["kind"], row["ctas"], plain["ctas"]) == ("fp8", ctas, ctas)
                assert row["unquantised"] == (name if ctas is None else f"{name}-{ctas}")
                ratios = [a / b for a, b in zip(row["samples"], plain["samples"], strict=True)]
                assert row["ratio_to_unquantised"] == pytest.approx(statistics.median(ratios), rel=1e-3)
                assert (
                    row["ratio_to_unquantised_low"] <= row["ratio_to_unquantised"] <= row["ratio_to_unquantised_high"]
                )
                assert row["best_rival"] is None
                bytes_of = tokens * 64 * (2 if ctas is None else 1.5)  # of a rank: partial sums, and results of a byte
                assert row["gb_s"] == pytest.approx(bytes_of / row["us"] / 1e3, abs=0.01)
    text = report.text(result)
    assert "hidden 64, 2 ranks: fp8 results over bfloat16 ones of as many blocks" in text
    lines = [line.split() for line in text.split("below 1 fp8 is faster\n")[1].split("\n\n")[0].splitlines()[1:]]
    assert [line[:2] for line in lines[:3]] == [["1", "two-shot"], ["1", "two-shot"], ["1", "one-shot"]]
    assert len(lines) == 3 + 3 + 2
    assert all(kind not in text.split("fp8 results over")[0] for kind in report.FP8), "the first table stays as it is"


def test_without_fp8_there_is_none():
    result = run_ranks(2, _ours_with_fp8, False)[0]
    assert {row["kind"] for row in result["rows"]} == {"ours"}
    assert "fp8" not in report.text(result)


def _expected_of_one_rank(break_it) -> str | None:
    """What Expected says of a right fp8 result that ``break_it`` has changed."""
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    residuals = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    epilogue = Epilogue(torch.ones(64).bfloat16(), 1e-5)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    x, residual = torch.zeros(8, 64).bfloat16(), residuals.clone()
    f = implementations.Fixture(
        group, 0, dist.get_world_size(), cpu, torch.bfloat16, 64, 6, (), rows, residuals, epilogue, x, residual
    )
    expected = Expected(f, 6)
    residual.copy_(expected.residual["fused"])
    stored, scales = fp8.quantise(expected.norm["fused"].float(), None)
    scale = torch.tensor([0.01])
    static, _ = fp8.quantise(expected.norm["fused"].float(), scale)
    of_rows, of_all = fp8.Fp8(stored, scales, None), fp8.Fp8(static, None, scale)
    break_it(of_rows, of_all)
    for output in (of_rows, of_all):
        call = Implementation("fp8", "fp8", lambda: None, x[:6], "fused", range(6), fp8=output)
        try:
            expected.compare(call, f)
        except CollectiveError as error:
            return str(error)
    return None


def _nothing(of_rows, of_all):
    pass


def _two_steps_off(of_rows, of_all):
    row = of_rows.rows[2].float()
    assert row.abs().max() == 448
    of_rows.rows[2, row.abs().argmax()] = 384.0 * row[row.abs().argmax()].sign()


def _scale_off(of_rows, of_all):
    of_rows.scales[3] *= 1.1


def _static_lost(of_rows, of_all):
    of_all.rows.view(torch.uint8)[0, 0] = 0x7F


@pytest.mark.parametrize(
    ("break_it", "said"), [(_nothing, None), (_two_steps_off, "rows"), (_scale_off, "scales"), (_static_lost, "rows")]
)
def test_fp8_results_are_compared_with_float64(break_it, said):
    for error in run_ranks(2, _expected_of_one_rank, break_it):
        assert (error is None) if said is None else error.startswith(f"{said} differ from float64"), error


def test_rows_have_what_a_reader_needs(result):
    sizes = {(row["hidden"], row["tokens"]) for row in result["rows"]}
    assert sizes == {(hidden, tokens) for hidden in (64, 40) for tokens in TOKENS}
    for row in result["rows"]:
        assert {"tokens", "hidden", "ranks", "dtype", "impl", "ctas", "us", "us_low", "us_high", "gb_s"} <= row.keys()
        assert {"percent_of_wire", "ratio_to_best_rival", "rows_per_cta"} <= row.keys()
        assert row["us_low"] <= row["us"] <= row["us_high"]
        assert len(row["samples"]) == 20
        wire_us = row["tokens"] * row["hidden"] * 2 / 390e3
        assert row["percent_of_wire"] == pytest.approx(100 * wire_us / row["us"], abs=0.01)
        assert (row["ratio_to_best_rival"] is None) == (row["kind"] == "part")
        if row["impl"] == "right":
            assert row["ratio_to_best_rival"] == 1.0
    assert {row["impl"] for row in result["rows"]} == {"tokenweave two-shot", "right", "sum"}
    assert {row["calls"] for row in result["rows"] if row["impl"] == "sum"} == {2}


def test_what_fails_on_one_rank_is_left_out_on_all_and_said(result):
    errors = {(skip["impl"], skip.get("tokens")): skip["error"] for skip in result["skipped"]}
    assert errors["absent", None].startswith(
        "rank 0: ModuleNotFoundError: No module named 'rival' (test_bench_kernel.py:"
    )
    for tokens in TOKENS:
        assert "differ from float64" in errors["wrong", tokens]
        assert errors["fails", tokens].startswith("rank 1: RuntimeError: no such kernel (test_bench_kernel.py:")
        assert errors["never", tokens] == "too small"
    assert "differ from float64" in errors["nan", 3]


def test_text_and_table(result, tmp_path):
    import measured_tables

    text = report.text(result)
    assert "hidden 64, bfloat16, 2 ranks" in text
    assert "ours 4" in text
    assert "fails at 1, 3, 8, 1, 3, 8" in text
    assert len(result["table"]["rows"]) == 6
    (tmp_path / "kernel.json").write_text(json.dumps(result))
    assert "ours / baseline" in measured_tables.tables(tmp_path)


def test_plot(result, tmp_path):
    plot_kernel(result, tmp_path / "new" / "kernel.svg")
    drawn = (tmp_path / "new" / "kernel.svg").read_text()
    assert "<svg" in drawn


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "kernel", "--plot", "x.png"]) == 2
    assert "pip install '.[plot]' in TokenWeave's checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "9"], "--tp 9"),
        (["--hidden", "4097"], "multiples of 8"),
        (["--tokens", "1,x"], "--tokens '1,x'"),
        (["--tokens", "0"], "positive"),
        (["--ctas", "257"], "1 to 256"),
        (["--rounds", "5"], "at least 20"),
        (["--only", "nccl,mine"], "expected some of"),
        (["--only", "nccl,torch", "--fp8"], "fp8 results are tokenweave's alone"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, capsys):
    assert main(["bench", "kernel", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs here")
def test_without_gpus_it_says_so(capsys):
    assert main(["bench", "kernel"]) == 2
    assert "needs as many GPUs" in capsys.readouterr().err


def test_ranks_get_the_same_command_line():
    import argparse

    from tokenweave.cli import bench_kernel

    parser = argparse.ArgumentParser()
    bench_kernel.add_parser(parser.add_subparsers())
    words = [
        "kernel",
        "--tp",
        "4",
        "--hidden",
        "64,128",
        "--quick",
        "--json",
        "a/b.json",
        "--ctas",
        "1,2",
        "--dtype",
        "fp16",
        "--fp8",
        "--time-limit",
        "12",
    ]
    args = parser.parse_args(words)
    assert parser.parse_args(command_line(("kernel",), args, bench_kernel.OPTIONS)) == args
