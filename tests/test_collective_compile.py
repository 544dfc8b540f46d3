"""The GPU kernels compile with no GPU, do not spill where it matters, and the cache of cubins survives what happens to it."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tokenweave.cli.main import main
from tokenweave.collective import cuda_backend
from tokenweave.collective.instantiations import HIDDEN, MAIN_OPTIONS, instantiations, option_names, option_sets
from tokenweave.collective.kernels import (
    HAS_RESIDUAL,
    SHARED_BYTES,
    oneshot_kernel,
    register_kernel,
    ring_depth,
    ring_kernel,
)
from tokenweave.collective.norm import norm_kernel
from tokenweave.cuda import compile as compiler
from tokenweave.cuda.compile import compile_kernel
from tokenweave.cuda.dtypes import ELEMENT_BYTES
from tokenweave.cuda.graph import _Fill
from tokenweave.errors import CudaError

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100a": 227 << 10}  # a block's, CUDA C++ Programming Guide
SHAPES = [
    (2, 2048),
    (4, 2880),
    (8, 3584),
    (2, 4096),
    (8, 4096),
    (4, 5120),
    (2, 7168),
    (8, 8192),
    (2, 16384),
    (8, 16384),
]
SMALL = register_kernel(2, 0, 64, "bfloat16", MAIN_OPTIONS)


def _sample() -> list:
    """Both dtypes and all ranks and sizes on sm_90a, though not all pairs: ``tokenweave compile`` does these."""
    found = []
    for i, (ranks, hidden) in enumerate(SHAPES):
        dtype = ("bfloat16", "float16")[i % 2]
        for kernel in instantiations("sm_90a", [ranks], [hidden], [dtype]):
            found.append(pytest.param("sm_90a", kernel, id=f"sm_90a-{kernel.name}-{ranks}-{hidden}-{dtype}"))
    for arch in ("sm_80", "sm_100a"):
        for ranks, hidden in ((2, 4096), (8, 5120)):
            for kernel in instantiations(arch, [ranks], [hidden], ["bfloat16"]):
                found.append(pytest.param(arch, kernel, id=f"{arch}-{kernel.name}-{ranks}-{hidden}"))
    return found


@pytest.mark.parametrize(("arch", "kernel"), _sample())
def test_main_variants_compile_without_spills(arch, kernel):
    compiled = compile_kernel(kernel, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.spill_bytes == 0
    assert kernel.threads <= 1024
    assert compiled.registers * kernel.threads <= 65536
    assert compiled.shared_bytes + kernel.dynamic_shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("options", [0, *(HAS_RESIDUAL | 1 << bit for bit in range(1, 7)), 127])
def test_every_option_compiles(options):
    for make in (ring_kernel, register_kernel, oneshot_kernel):
        assert compile_kernel(make(3, 1, 256, "bfloat16", options), "sm_90a").registers > 0
    assert compile_kernel(norm_kernel(256, "bfloat16", options), "sm_90a").registers > 0


@pytest.mark.parametrize("make", [register_kernel, oneshot_kernel])
def test_float32_rows_compile(make):
    assert compile_kernel(make(2, 0, 512, "float32", MAIN_OPTIONS), "sm_90a").registers > 0


# ---- launch shapes


@pytest.mark.parametrize("ranks", range(2, 9))
def test_launch_shapes_are_within_limits(ranks):
    for dtype in ELEMENT_BYTES:
        for hidden in (8, 64, *HIDDEN, 16376):
            kernels = [make(ranks, 0, hidden, dtype, 1) for make in (register_kernel, oneshot_kernel)]
            ring = ring_kernel(ranks, 0, hidden, dtype, 1)
            for kernel in [*kernels, norm_kernel(hidden, dtype, 1), *filter(None, [ring])]:
                assert kernel.group_threads % 32 == 0
                assert 32 <= kernel.threads <= 1024
                assert kernel.groups <= 15  # named barriers
            orders = {kernel.norm_threads or kernel.group_threads for kernel in [*kernels, *filter(None, [ring])]}
            assert len(orders) == 1
            if ring is None:
                assert 2 * (ranks + 1) * hidden * ELEMENT_BYTES[dtype] > SHARED_BYTES - 2048
                continue
            assert ring.stages % ring.groups == 0
            assert ring.dynamic_shared_bytes + 2048 <= SHARED_BYTES
            for ctas in (1, 2, 4, 8, 12, 16, 23, 64, 256):
                depth = ring_depth(ring, ctas)
                assert depth % ring.groups == 0
                assert ring.groups <= depth <= ring.stages


def _workspace(hidden: int = 4096, ranks: int = 2, rank: int = 0, dtype: torch.dtype = torch.bfloat16):
    return SimpleNamespace(
        hidden=hidden,
        world_size=ranks,
        rank=rank,
        dtype=dtype,
        device=torch.device("cuda", rank),
        max_tokens=1,
        transport="p2p",
    )


def test_default_blocks_depend_on_what_all_ranks_know():
    for tokens in (1, 7, 64, 1000, 4096, 131072):
        for hidden in (64, 4096, 16384):
            blocks = {cuda_backend.default_ctas(tokens, _workspace(hidden, 4, rank)) for rank in range(4)}
            assert len(blocks) == 1
            assert 1 <= blocks.pop() <= 64


def test_the_two_shot_kernel_is_the_same_on_all_ranks(monkeypatch):
    def kernels(capability, *, tokens, ctas, **workspace):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        chosen = [
            cuda_backend.twoshot_kernel(_workspace(rank=rank, **workspace), MAIN_OPTIONS, tokens, ctas)
            for rank in range(2)
        ]
        assert [kernel.rank for kernel in chosen] == [0, 1]
        assert chosen[0].name == chosen[1].name
        return chosen[0].name

    assert kernels((9, 0), tokens=16384, ctas=8) == "twoshot_ring"
    assert kernels((9, 0), tokens=16384, ctas=64) == "twoshot_registers"
    assert kernels((9, 0), tokens=16, ctas=8) == "twoshot_registers"
    assert kernels((8, 0), tokens=16384, ctas=8) == "twoshot_registers"
    assert kernels((9, 0), tokens=16384, ctas=8, dtype=torch.float32) == "twoshot_registers"


def test_enumeration():
    every = list(instantiations("sm_90a", [2], [4096], ["bfloat16"], every=True))
    assert len(every) == len(set(every))
    assert {kernel.rank for kernel in every if kernel.ranks == 2} == {0, 1}
    assert set(instantiations("sm_90a", [2], [4096], ["bfloat16"])) <= set(every)
    assert "twoshot_ring" not in {kernel.name for kernel in instantiations("sm_80", [2], [4096], ["bfloat16"])}
    assert len(option_sets("bfloat16")) == len(set(option_sets("bfloat16"))) == 48
    assert option_names(MAIN_OPTIONS) == "residual"
    assert option_names(0) == "none"


# ---- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch):
    """The kernels that were really compiled."""
    seen = []
    real = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda kernel, arch: seen.append(kernel) or real(kernel, arch))
    return seen


def test_a_kernel_is_compiled_once(cache, compilations):
    first = compile_kernel(SMALL, "sm_90a")
    assert compile_kernel(SMALL, "sm_90a") == first
    assert len(compilations) == 1
    compile_kernel(SMALL, "sm_80")  # another architecture is another entry
    assert len(compilations) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not JSON", "of another version"])
def test_a_damaged_entry_is_compiled_again(cache, compilations, damage):
    first = compile_kernel(SMALL, "sm_90a")
    (entry,) = cache.iterdir()
    data = entry.read_bytes()
    entry.write_bytes(
        {
            "truncated": data[:-100],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "not JSON": b"{" + data,
            "of another version": data.replace(b'"registers"', b'"regs"', 1),
        }[damage]
    )
    assert compile_kernel(SMALL, "sm_90a") == first
    assert len(compilations) == 2
    assert entry.read_bytes() == data


def test_other_sources_are_another_entry(cache, compilations, monkeypatch):
    compile_kernel(SMALL, "sm_90a")
    monkeypatch.setattr(compiler, "_digest", lambda folder: "changed")
    compile_kernel(SMALL, "sm_90a")
    assert len(compilations) == 2


def _compile_in_child(folder: str, start, results) -> None:
    os.environ["TOKENWEAVE_CACHE"] = folder
    start.wait(60)
    compiled = compile_kernel(SMALL, "sm_90a")
    results.put((compiled.registers, len(compiled.cubin)))


def test_processes_that_compile_at_once_agree(cache, compilations):
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    children = [
        context.Process(target=_compile_in_child, args=(str(cache.parent), start, results), daemon=True)
        for _ in range(3)
    ]
    for child in children:
        child.start()
    answers = {results.get(timeout=90) for _ in children}
    for child in children:
        child.join(30)
    assert len(answers) == 1
    assert len(list(cache.iterdir())) == 1  # and no temporary files
    compiled = compile_kernel(SMALL, "sm_90a")
    assert (compiled.registers, len(compiled.cubin)) in answers
    assert not compilations


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch, compilations):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")  # also root cannot make a folder below a file
    monkeypatch.setenv("TOKENWEAVE_CACHE", str(blocked))
    assert compile_kernel(SMALL, "sm_90a") == compile_kernel(SMALL, "sm_90a")
    assert len(compilations) == 2
    if os.geteuid():
        folder = tmp_path / "kernels"
        folder.mkdir()
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("TOKENWEAVE_CACHE", str(tmp_path))
        assert compile_kernel(SMALL, "sm_90a").registers > 0
        assert not list(folder.iterdir())


def test_without_nvrtc_the_error_says_how_to_get_it(cache, monkeypatch):
    for name in ("cuda.core", "cuda.core.experimental"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CudaError, match=r"pip install 'tokenweave\[cuda\]'"):
        compile_kernel(SMALL, "sm_90a")


def test_the_compilers_words_are_in_the_error(cache):
    with pytest.raises(CudaError, match="a group is whole warps"):
        compile_kernel(replace(SMALL, group_threads=33), "sm_90a")


# ---- the command


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
    from tokenweave.cli import compile as command

    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (40, 8 * (kernel.name == "silu_mul"), 0))
    assert main(["compile", "--ranks", "2,8", "--hidden", "4096", "--dtype", "bf16"]) == 2
    out, err = capsys.readouterr()
    shown = [line.split() for line in out.splitlines()]
    assert ["rope_cache", "-", "-", "-", "bfloat16", "16+4", "heads", "of", "128", "256", "40", "0", "0", "0"] in shown
    assert sum(line[0] == "rope_cache" for line in shown) == 2, "Llama's and Mixtral's are the same"
    assert sum(line[0] == "silu_mul" for line in shown) == 1
    assert "most of all silu_mul" in err


def test_command_with_several_jobs_prints_a_table(cache, capsys):
    assert (
        main(["compile", "--arch", "sm_80", "--ranks", "2,3", "--hidden", "64", "--dtype", "fp16,fp32", "--jobs", "2"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 10
    assert lines[-1].startswith("10 kernels for sm_80")


def test_command_fails_on_spills_in_main_variants(monkeypatch, capsys):
    from tokenweave.cli import compile as command

    monkeypatch.setattr(command, "_resources", lambda kernel, arch: (255, 8 * (kernel.name == "oneshot"), 0))
    assert main(["compile", "--ranks", "2", "--hidden", "64", "--dtype", "bf16"]) == 2
    assert "1 main variants spill registers, most of all oneshot with 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", ["--arch sm_70", "--ranks 1", "--ranks x", "--hidden 12", "--hidden 32768", "--dtype fp8"]
)
def test_command_refuses_what_there_is_not(arguments, capsys):
    assert main(["compile", *arguments.split()]) == 2
    assert "expected" in capsys.readouterr().err


def test_the_kernel_that_takes_the_place_of_memsets_compiles():
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        compiled = compile_kernel(_Fill(), arch)
        assert compiled.cubin.startswith(b"\x7fELF")
