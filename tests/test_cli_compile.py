"""``tokenweave compile``: what it prints of each kernel, and when it fails."""

from __future__ import annotations

import itertools
import json

import pytest

from tokenweave.cli import compile as command
from tokenweave.cli.main import main
from tokenweave.collective import instantiations
from tokenweave.collective.instantiations import option_names, option_sets, quantised_option_sets
from tokenweave.collective.kernels import FP8, ROW_COUNT, ROWS
from tokenweave.cuda.compile import compile_kernel


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_command_prints_json(cache, capsys):
    assert main(["compile", "--arch", "sm_90a", "--ranks", "2", "--hidden", "64", "--dtype", "bf16", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["arch"] == "sm_90a"
    assert printed["spilling_main_variants"] == 0
    names = [kernel["kernel"] for kernel in printed["kernels"]]
    assert names == ["add_rmsnorm", "twoshot_ring", "twoshot_registers", "twoshot_multimem", "oneshot"]
    assert {"registers", "spills", "static", "dynamic", "threads", "options"} <= printed["kernels"][0].keys()
    assert len(list(cache.iterdir())) == 5


def test_command_compiles_the_models_kernels_too(monkeypatch, capsys):
    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (40, 8 * (kernel.name == "silu_mul"), 0))
    assert main(["compile", "--ranks", "2,8", "--hidden", "4096", "--dtype", "bf16"]) == 2
    out, err = capsys.readouterr()
    shown = [line.split() for line in out.splitlines()]
    assert ["rope_cache", "-", "-", "-", "bfloat16", "16+4", "heads", "of", "128", "256", "40", "0", "0", "0"] in shown
    assert sum(line[0] == "rope_cache" for line in shown) == 2, "Llama's and Mixtral's are the same"
    assert sum(line[0] == "silu_mul" for line in shown) == 1
    assert "most of all silu_mul" in err


def _expected(arch: str, ranks: tuple[int, ...], hidden: int, dtype: str) -> list[tuple]:
    """(kernel, ranks, rank, hidden, dtype, options) of all that ``--all`` stands for, from what the kernels are."""
    hopper = arch != "sm_80"
    names = ["twoshot_registers", "oneshot"] + ["twoshot_multimem"] * hopper
    names += ["twoshot_ring"] * (hopper and dtype != "float32")
    options = option_sets(dtype) + (quantised_option_sets(dtype) if hopper else [])
    of_ranks = [
        (name, n, rank, hidden, dtype, option_names(of))
        for of, n in itertools.product(options, ranks)
        for name, rank in itertools.product(names, range(n))
    ]
    norms = [of for of in options if not of & (ROWS | ROW_COUNT | FP8)]
    return of_ranks + [("add_rmsnorm", 1, 0, hidden, dtype, option_names(of)) for of in norms]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_all_are_every_option_and_rank_index(arch, monkeypatch, capsys):
    """And registers that spill are an error in main variants alone."""
    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (200, 16 * (kernel.options != 1), 128))
    arguments = ["--arch", arch, "--ranks", "2,3", "--hidden", "64,72", "--dtype", "bf16,fp32"]
    assert main(["compile", "--all", "--json", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["arch"] == arch
    assert printed["spilling_main_variants"] == 0
    fields = ("kernel", "ranks", "rank", "hidden", "dtype", "options")
    found = [tuple(kernel[field] for field in fields) for kernel in printed["kernels"]]
    kinds = itertools.product((64, 72), ("bfloat16", "float32"))
    assert sorted(found) == sorted(itertools.chain(*(_expected(arch, (2, 3), *kind) for kind in kinds)))
    assert {kernel["main"] for kernel in printed["kernels"] if kernel["options"] == "residual"} == {True}
    assert {kernel["main"] for kernel in printed["kernels"] if kernel["options"] != "residual"} == {False}
    assert {(kernel["registers"], kernel["spills"], kernel["static"]) for kernel in printed["kernels"]} == {
        (200, 0, 128),
        (200, 16, 128),
    }
    main(["compile", *arguments])
    assert len(capsys.readouterr().out.splitlines()) < len(found) // 10, "without --all the main variants alone"


def test_all_compiles_and_reports_what_each_takes(cache, monkeypatch, capsys):
    """Three of the combinations: all of them would take minutes."""
    some = [0, *option_sets("bfloat16")[9:11]]
    monkeypatch.setattr(instantiations, "option_sets", lambda dtype: some)
    monkeypatch.setattr(instantiations, "quantised_option_sets", lambda dtype: [])
    arguments = ["--arch", "sm_90a", "--ranks", "2", "--hidden", "64", "--dtype", "bf16"]
    assert main(["compile", "--all", "--json", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)["kernels"]
    kernels = list(instantiations.instantiations("sm_90a", [2], [64], ["bfloat16"], every=True))
    assert len(list(cache.iterdir())) == len(kernels) == len(printed) > 3 * 2 * 4
    for kernel, row in zip(kernels, printed, strict=True):
        assert (row["kernel"], row["rank"], row["options"]) == (kernel.name, kernel.rank, option_names(kernel.options))
        compiled = compile_kernel(kernel, "sm_90a")
        assert (row["registers"], row["spills"], row["static"]) == (
            compiled.registers,
            compiled.spill_bytes,
            compiled.shared_bytes,
        )
        assert 16 <= row["registers"] <= 255
        assert row["spills"] == 0
        assert (row["threads"], row["dynamic"]) == (kernel.threads, kernel.dynamic_shared_bytes)
        assert (row["dynamic"] > 0) == (kernel.name == "twoshot_ring")
        if kernel.name == "twoshot_ring":
            assert row["static"] > 0  # its barriers


def test_command_with_several_jobs_prints_a_table(cache, capsys):
    assert (
        main(["compile", "--arch", "sm_80", "--ranks", "2,3", "--hidden", "64", "--dtype", "fp16,fp32", "--jobs", "2"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 10
    assert lines[-1].startswith("10 kernels for sm_80")


def test_command_fails_on_spills_in_main_variants(monkeypatch, capsys):
    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (255, 8 * (kernel.name == "oneshot"), 0))
    assert main(["compile", "--ranks", "2", "--hidden", "64", "--dtype", "bf16"]) == 2
    assert "1 main variants spill registers, most of all oneshot with 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", ["--arch sm_70", "--ranks 1", "--ranks x", "--hidden 12", "--hidden 32768", "--dtype fp8", "--jobs 0"]
)
def test_command_refuses_what_there_is_not(arguments, capsys):
    assert main(["compile", *arguments.split()]) == 2
    assert "expected" in capsys.readouterr().err
