"""Kernels compile with no GPU, and the cache of cubins survives what happens to it."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from tokenweave.collective.instantiations import MAIN_OPTIONS
from tokenweave.collective.kernels import register_kernel
from tokenweave.cuda import compile as compiler
from tokenweave.cuda.compile import compile_kernel
from tokenweave.cuda.graph import _Fill
from tokenweave.errors import CudaError

SMALL = register_kernel(2, 0, 64, "bfloat16", MAIN_OPTIONS)


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
    with pytest.raises(CudaError, match=r"pip install '\.\[cuda\]' in TokenWeave's checkout"):
        compile_kernel(SMALL, "sm_90a")


HALF_MADE = """
import sys, time
from cuda.core import other
globals().update(vars(other))  # also __spec__, by which others see whether a module is still being made
time.sleep(0.3)
Program = ProgramOptions = object
"""


def test_threads_may_be_the_first_to_compile_at_once(tmp_path):
    package = tmp_path / "cuda" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HALF_MADE)
    (package / "other.py").write_text("")
    program = (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor as Pool\n"
        "from tokenweave.cuda import compile\n"
        "with Pool(4) as pool: print(list(pool.map(lambda n: time.sleep(n / 20) or compile._nvrtc(), range(4))))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_compilers_words_are_in_the_error(cache):
    with pytest.raises(CudaError, match="a group is whole warps"):
        compile_kernel(replace(SMALL, group_threads=33), "sm_90a")


def test_the_kernel_that_takes_the_place_of_memsets_compiles():
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        compiled = compile_kernel(_Fill(), arch)
        assert compiled.cubin.startswith(b"\x7fELF")
