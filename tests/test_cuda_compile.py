"""Kernels compile with no GPU, and the cache of cubins survives what happens to it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import resource
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

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


def _signed(entry: bytes) -> bytes:
    return hashlib.sha256(entry).hexdigest().encode() + b"\n" + entry


@pytest.mark.parametrize(
    "damage",
    ["truncated", "flipped", "flipped header", "empty", "not JSON", "no object", "too deep", "of another version"],
)
def test_a_damaged_entry_is_compiled_again(cache, compilations, damage):
    first = compile_kernel(SMALL, "sm_90a")
    (entry,) = cache.iterdir()
    data = entry.read_bytes()
    header, _, cubin = data.partition(b"\n")[2].partition(b"\n")
    assert data == _signed(header + b"\n" + cubin)
    entry.write_bytes(
        {
            "truncated": data[:-100],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "flipped header": data.replace(b'"registers": ', b'"registers": 1'),
            "empty": b"",
            "not JSON": b"{" + data,
            "no object": b"5\n" + cubin,
            "too deep": b"[" * 100_000 + b"\n" + cubin,
            "of another version": _signed(header.replace(b'"registers"', b'"regs"') + b"\n" + cubin),
        }[damage]
    )
    assert compile_kernel(SMALL, "sm_90a") == first
    assert len(compilations) == 2
    assert entry.read_bytes() == data
    assert set(json.loads(header)) == {"registers", "spill_bytes", "shared_bytes"}


def test_other_sources_are_another_entry(cache, compilations, monkeypatch):
    compile_kernel(SMALL, "sm_90a")
    monkeypatch.setattr(compiler, "_digest", lambda folder: "changed")
    compile_kernel(SMALL, "sm_90a")
    assert len(compilations) == 2


@dataclass(frozen=True)
class _Sums:
    """A kernel of sources that a test may change; it is not compiled."""

    source: Path
    terms: int = 2
    name: str = "sums"
    threads: int = 32
    dynamic_shared_bytes: int = 0

    def defines(self) -> list[tuple[str, str]]:
        return [("TERMS", str(self.terms))]


@pytest.mark.parametrize(
    "changed",
    [
        "nothing",
        "own/sums.cu",
        "own/beside.cuh",
        "shared/numeric.cuh",
        "terms",
        "arch",
        "cuda-core",
        "cuda-bindings",
        "nvidia-cuda-nvrtc",
    ],
)
def test_whatever_a_cubin_is_made_of_is_in_its_key(cache, tmp_path, monkeypatch, changed):
    for name in ("own/sums.cu", "own/beside.cuh", "shared/numeric.cuh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("int one;")
    versions = dict.fromkeys(("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"), "1.0")
    compiled = []
    monkeypatch.setattr(compiler, "HEADERS", tmp_path / "shared")
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(
        compiler, "_compile", lambda *asked: compiled.append(asked) or compiler.Compiled(b"cubin", 1, 0, 0)
    )
    for name in ("_digest", "_versions"):  # a process keeps their answers, and the next one asks anew
        monkeypatch.setattr(compiler, name, getattr(compiler, name).__wrapped__)
    kernel, arch = _Sums(tmp_path / "own" / "sums.cu"), "sm_90a"
    compile_kernel(kernel, arch)
    if changed in versions:
        versions[changed] = "1.1"
    elif "/" in changed:
        (tmp_path / changed).write_text("int two;")
    else:
        kernel = replace(kernel, terms=3) if changed == "terms" else kernel
        arch = "sm_80" if changed == "arch" else arch
    compile_kernel(kernel, arch)
    assert len(compiled) == len(list(cache.iterdir())) == (1 if changed == "nothing" else 2)


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


def test_others_may_read_an_entry_as_the_umask_says(cache):
    before = os.umask(0o022)
    try:
        compile_kernel(SMALL, "sm_90a")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in cache.iterdir()] == [0o644]


@contextlib.contextmanager
def _short_files(most: int):
    """Files may have so many bytes, as on a disk that is full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_once_and_nothing_is_left_there(cache, monkeypatch):
    compiled = compile_kernel(SMALL, "sm_90a")
    (entry,) = cache.iterdir()
    entry.unlink()
    told = []
    monkeypatch.setattr(compiler.log, "warning", lambda text, *args: told.append(text % args))  # pytest's goes to files
    with _short_files(1000):
        assert compiler._write(entry, compiled) == compiler._write(entry, compiled) == compiled
    assert not list(cache.iterdir())
    (line,) = told
    assert f"cannot be kept in {cache} (File too large)" in line
    assert "TOKENWEAVE_CACHE" in line


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
