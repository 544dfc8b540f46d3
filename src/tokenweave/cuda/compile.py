"""Compiles CUDA kernels at run time for exactly what is asked for, with a cache on disk: ``$TOKENWEAVE_CACHE/kernels``.

NVRTC through ``cuda.core`` needs neither a CUDA toolkit nor a GPU. Cache entries are keyed by the sources, the options,
the architecture and the compiler's version, and replaced atomically, so concurrent ranks are safe.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import re
import threading
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tokenweave.cache import cache_dir
from tokenweave.errors import CudaError
from tokenweave.files import write_whole

log = logging.getLogger(__name__)

HEADERS = Path(__file__).parent / "csrc"
"""Of instructions and dtypes; every kernel can include them."""

_IMPORTING = threading.Lock()


class Instantiation(Protocol):
    """A kernel with its compile-time constants, of any part of the package or from outside.

    Attributes:
        name: of the function, and of the source file without its ending.
        source: the file. It may include :data:`HEADERS` and what lies beside it.
        threads: per block. dynamic_shared_bytes: per block.
    """

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> Path: ...

    @property
    def threads(self) -> int: ...

    @property
    def dynamic_shared_bytes(self) -> int: ...

    def defines(self) -> list[tuple[str, str]]:
        """The preprocessor definitions that select this instantiation."""


@dataclass(frozen=True)
class Compiled:
    """A cubin and what the assembler said about it: registers per thread, spilled bytes, static shared bytes."""

    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_kernel(kernel: Instantiation, arch: str) -> Compiled:
    """Compiles for ``arch`` (``"sm_90a"``), or reads the cache.

    Raises:
        CudaError: ``cuda-core``/NVRTC is not installed, or the compiler refused (its log is in the message).
    """
    sources = [_digest(folder) for folder in (HEADERS, kernel.source.parent)]
    key = hashlib.sha256(json.dumps([sources, kernel.name, kernel.defines(), arch, _versions()]).encode()).hexdigest()
    path = cache_dir("kernels") / f"{kernel.name}-{key[:32]}"
    return _read(path) or _write(path, _compile(kernel, arch))


def _nvrtc() -> tuple[Any, Any]:
    """cuda.core's ``Program`` and ``ProgramOptions``.

    One thread at a time: a second one that imports ``cuda.core`` meanwhile can meet it half made, as it puts another
    module in its own place (seen with its version that CUDA 13.0 came with).
    """
    with _IMPORTING:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:
            try:
                from cuda.core.experimental import Program, ProgramOptions
            except ImportError as error:
                raise CudaError(
                    "TokenWeave compiles its kernels with NVRTC through cuda-core, which cannot be imported "
                    f"({error}): pip install '.[cuda]' in TokenWeave's checkout"
                ) from error
    return Program, ProgramOptions


def _compile(kernel: Instantiation, arch: str) -> Compiled:
    Program, ProgramOptions = _nvrtc()
    options = ProgramOptions(
        name=f"{kernel.name}.cu",
        arch=arch,
        std="c++17",
        include_path=[str(kernel.source.parent), str(HEADERS)],
        define_macro=kernel.defines(),
        ptxas_options=["-v"],
        no_cache=True,  # NVRTC's own cache would answer without the assembler's report; ours keeps it
    )
    log = io.StringIO()
    try:
        cubin = Program(kernel.source.read_text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda.core's own exception types differ between its versions
        raise CudaError(f"NVRTC could not compile {kernel} for {arch}: {error}\n{log.getvalue()}") from error
    text = log.getvalue()
    used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", text)
    if used is None:
        raise CudaError(f"NVRTC's log for {kernel} has no resource report; it says: {text!r}")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))
    return Compiled(bytes(cubin), int(used[1]), spills, int(used[2] or 0))


def _read(path: Path) -> Compiled | None:
    """None where there is no entry, or one that is not what was written: it is compiled again."""
    try:
        digest, _, entry = path.read_bytes().partition(b"\n")
        if digest != hashlib.sha256(entry).hexdigest().encode():
            return None
        header, _, cubin = entry.partition(b"\n")
        return Compiled(cubin, **json.loads(header))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, compiled: Compiled) -> Compiled:
    header = {name: value for name, value in asdict(compiled).items() if name != "cubin"}
    entry = json.dumps(header).encode() + b"\n" + compiled.cubin
    try:
        write_whole(path, hashlib.sha256(entry).hexdigest().encode() + b"\n" + entry)
    except OSError as error:
        _tell_unkept(path.parent, error.strerror or str(error))
    return compiled


@cache
def _tell_unkept(folder: Path, reason: str) -> None:
    """Once a process: it may compile hundreds of kernels, half a second each."""
    log.warning(
        "compiled kernels cannot be kept in %s (%s): each process compiles for itself; TOKENWEAVE_CACHE names another "
        "folder",
        folder,
        reason,
    )


@cache
def _digest(folder: Path) -> str:
    """Of all sources there: a file may include any of them."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _versions() -> list[str]:
    names = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} -")
    return found
