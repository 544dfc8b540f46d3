"""What this machine has, and which transport would run on it. Standard library only; torch is looked at, not needed.

:func:`examine` reads the machine, :func:`judge_multicast` and :func:`judge_transport` are pure functions of what it read;
:func:`judge_attention` loads the attention libraries that are installed.
Nothing is created on a GPU: reading a multicast *attribute* is safe everywhere, creating a multicast object is not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenweave.cache import cache_dir
from tokenweave.cuda.nvidia_smi import nvidia_smi
from tokenweave.switches import multicast_switched_off

PYTHON_MIN = (3, 10)
TORCH_MIN = (2, 11)
TORCH_INSTALL = "pip install 'torch>=2.11'"
CLOCKS = "nvidia-ml-py"  # of the extra "cuda": benchmarks read clocks and power through it, the transports need it not


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees. ``memory`` in bytes; ``multicast`` is the driver's attribute, None if unknown."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory: int
    multicast: bool | None = None


@dataclass(frozen=True)
class Link:
    """Two GPUs: can the first map the second's memory, and over how many NVLinks (None: nvidia-smi doesn't say)."""

    first: int
    second: int
    peer_access: bool
    nvlinks: int | None


@dataclass(frozen=True)
class Verdict:
    """A choice and its reason."""

    value: str
    why: str


@dataclass(frozen=True)
class Advice:
    """Something that is missing or wrong; ``fatal`` if nothing runs without it."""

    what: str
    remedy: str
    fatal: bool = False


@dataclass(frozen=True)
class Report:
    """Everything that ``tokenweave doctor`` shows. Versions are None where the package is missing.

    ``packages`` are what every use needs (but for torch), ``cuda_packages`` what the GPU transports need.
    """

    tokenweave: str
    python: str
    system: str
    torch: str | None
    cuda: str | None
    driver: str | None
    backends: tuple[str, ...]
    packages: Mapping[str, str | None]
    cuda_packages: Mapping[str, str | None]
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    multicast: Verdict = field(default_factory=lambda: Verdict("no", "no GPU"))
    transport: Verdict = field(default_factory=lambda: Verdict("none", "torch is missing"))
    attention: Verdict = field(default_factory=lambda: Verdict("none", "torch is missing"))
    cache: Verdict = field(default_factory=lambda: Verdict("", "not looked at"))
    advice: tuple[Advice, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether nothing can run here."""
        return any(advice.fatal for advice in self.advice)


def examine() -> Report:
    """Reads this machine. Never raises for what it finds; takes a few seconds, most of them torch's import."""
    from tokenweave import __version__

    advice: list[Advice] = []
    if sys.version_info < PYTHON_MIN:
        advice.append(Advice(f"Python {platform.python_version()} is too old", "install Python 3.10 or newer", True))
    required = requirements()
    for_cuda = {name: line for name, line in requirements("cuda").items() if name != CLOCKS}
    if not required:
        advice.append(
            Advice(
                "this package is imported from its sources, so what it needs is unknown",
                "pip install -e .  # in TokenWeave's checkout",
            )
        )
    packages = {name: version_of(name) for name in required if name != "torch"}
    cuda_packages = {name: version_of(name) for name in for_cuda}
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        advice.append(Advice(f"missing: {', '.join(missing)}", _install(missing, required), True))

    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    driver = driver.split()[0] if driver and driver.split() else None
    torch, why_not = _torch()
    backends: list[str] = []
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    if torch is None:
        advice.append(Advice(why_not, TORCH_INSTALL, True))
    else:
        if _numbers(torch.__version__) < TORCH_MIN:
            advice.append(Advice(f"torch {torch.__version__} is too old", TORCH_INSTALL, True))
        backends = _backends(torch)
        if not backends:
            advice.append(Advice("this torch has neither gloo nor NCCL", TORCH_INSTALL, True))
        gpus, links = _gpus(torch), _links(torch)
        if driver and not gpus:
            reason = (
                "torch is a build without CUDA"
                if torch.version.cuda is None
                else f"torch needs a driver for CUDA {torch.version.cuda}, or CUDA_VISIBLE_DEVICES hides the GPUs"
            )
            advice.append(Advice(f"the driver ({driver}) knows GPUs that torch cannot use: {reason}", TORCH_INSTALL))
    if len(gpus) > 1:
        absent = [name for name, version in cuda_packages.items() if version is None]
        if absent:
            advice.append(Advice(f"the GPU transports need {', '.join(absent)}", _install(absent, for_cuda)))

    report = Report(
        tokenweave=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        torch=torch.__version__ if torch else None,
        cuda=torch.version.cuda if torch else None,
        driver=driver,
        backends=tuple(backends),
        packages=packages,
        cuda_packages=cuda_packages,
        gpus=gpus,
        links=links,
        multicast=judge_multicast(gpus, os.environ),
        cache=judge_cache(),
        advice=tuple(advice),
    )
    return replace(report, transport=judge_transport(report), attention=judge_attention(report))


def requirements(extra: str = "") -> dict[str, str]:
    """What this package's metadata requires, as name -> requirement, e.g. ``{"numpy": "numpy>=1.26"}``.

    Empty if it is imported without being installed.
    """
    try:
        lines = importlib.metadata.requires("tokenweave") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    found = {}
    for line in lines:
        requirement, _, condition = line.partition(";")
        of = re.search(r"extra == ['\"](\w+)['\"]", condition)
        name = re.match(r"[\w.-]+", requirement)
        if name and (of[1] if of else "") == extra:
            found[name[0]] = requirement.strip()
    return found


def judge_multicast(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> Verdict:
    """Whether the ``multimem`` transport may use NVSwitch multicast: the value is "yes", "no" or "unknown"."""
    if len(gpus) < 2:
        return Verdict("no", f"it takes two GPUs or more; {len(gpus) or 'none'} here")
    older = [gpu for gpu in gpus if gpu.capability < (9, 0)]
    if older:
        capability = "sm_{}{}".format(*older[0].capability)
        return Verdict("no", f"GPU {older[0].index} is {capability}; multicast needs sm_90 or newer")
    if any(gpu.multicast is False for gpu in gpus):
        return Verdict("no", "the driver says that the GPUs do not support it (no NVSwitch, or its fabric is not up)")
    if (switch := multicast_switched_off(environment)) is not None:
        if switch == "NCCL_NVLS_ENABLE=0":
            return Verdict("no", f"{switch} in the environment, which is taken to mean everybody")
        return Verdict("no", f"{switch.partition('=')[0]} is set in the environment")
    if any(gpu.multicast is None for gpu in gpus):
        return Verdict("unknown", "the driver was not asked: that needs cuda-bindings")
    return Verdict("yes", "the driver supports it and nothing switches it off")


def judge_transport(report: Report) -> Verdict:
    """The transport that a workspace over all GPUs of this machine would use, and why not a faster one."""
    if report.torch is None or not report.backends:
        return Verdict("none", "torch with gloo or NCCL is needed for every transport")
    import torch

    from tokenweave.collective.workspace import choose_transport

    device = torch.device("cuda", 0) if report.gpus else torch.device("cpu")
    value, why = choose_transport("auto", device, max(1, len(report.gpus)))
    if value != "torch":  # the workspace falls back where it then fails: what it would meet
        apart = [link for link in report.links if not link.peer_access]
        absent = [name for name, version in report.cuda_packages.items() if version is None]
        if apart:
            return Verdict("torch", f"GPUs {apart[0].first} and {apart[0].second} cannot reach each other's memory")
        if absent:
            return Verdict("torch", f"{value} needs {', '.join(absent)}")
    return Verdict(value, why)


def judge_cache() -> Verdict:
    """The folder of compiled kernels and tuned tables, and what is in it or why nothing will be."""
    kernels, tables = cache_dir("kernels"), cache_dir("profiles")
    try:
        counts = [sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0 for folder in (kernels, tables)]
        there = next((folder for folder in (kernels, *kernels.parents) if folder.exists()), None)
        writable = there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (OSError, ValueError):
        counts, writable = [0, 0], False
    held = f"compiled kernels {counts[0]}, tuned tables {counts[1]}"
    if not writable:
        held += "; it cannot be written, so that each process compiles for itself: TOKENWEAVE_CACHE names another"
    return Verdict(str(kernels.parent), held)


def judge_attention(report: Report) -> Verdict:
    """The kernel that a bfloat16 model's attention would run on here, and why not a faster one."""
    if report.torch is None:
        return Verdict("none", "torch is missing")
    from tokenweave.errors import RequestError

    try:
        from tokenweave.models.attention_choice import asked_attention, expected

        if not report.gpus:
            asked_attention()
            return Verdict("torch", "CPUs have one kernel, torch's scaled_dot_product_attention")
        return Verdict(*expected(report.gpus[0].name, report.gpus[0].capability))
    except (RequestError, ImportError) as error:  # asked for what is not known; or a package is missing
        return Verdict("none", str(error))


def version_of(package: str) -> str | None:
    """Of an installed package, by its metadata; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(names: Iterable[str], by_name: Mapping[str, str]) -> str:
    return "pip install " + " ".join(f"'{by_name[name]}'" for name in names)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _torch() -> tuple[Any, str]:
    """(torch, "") or (None, why not)."""
    try:
        return importlib.import_module("torch"), ""
    except ModuleNotFoundError:
        return None, "torch is not installed"
    except Exception as error:  # a half-installed torch raises OSError, ImportError and others
        return None, f"torch does not import: {type(error).__name__}: {error}"


def _backends(torch: Any) -> list[str]:
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        return []
    found = []
    if distributed.is_gloo_available():
        found.append("gloo")
    if distributed.is_nccl_available() and torch.cuda.is_available():
        found.append("nccl {}".format(".".join(map(str, torch.cuda.nccl.version()))))
    return found


def _gpus(torch: Any) -> tuple[Gpu, ...]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        capability = (p.major, p.minor)
        gpus.append(Gpu(index, p.name, capability, p.multi_processor_count, p.total_memory, _multicast(index)))
    return tuple(gpus)


def _multicast(index: int) -> bool | None:
    """The driver's MULTICAST_SUPPORTED attribute of a device (an ordinal that counts as torch's do)."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        driver.cuInit(0)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        code, value = driver.cuDeviceGetAttribute(attribute, index)
    except Exception:  # no cuda-bindings, or one without a driver that it can load: both mean unknown
        return None
    return bool(value) if int(code) == 0 else None


def _links(torch: Any) -> tuple[Link, ...]:
    count = torch.cuda.device_count()
    if count < 2:
        return ()
    nvlinks = parse_topology(nvidia_smi("topo", "-m") or "") if "CUDA_VISIBLE_DEVICES" not in os.environ else {}
    return tuple(
        Link(a, b, torch.cuda.can_device_access_peer(a, b), nvlinks.get((a, b)))
        for a, b in itertools.combinations(range(count), 2)
    )


def parse_topology(table: str) -> dict[tuple[int, int], int]:
    """NVLinks between two GPUs, from ``nvidia-smi topo -m``: a cell ``NV18`` is 18 links, anything else none."""
    links = {}
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines():  # the header comes underlined
        cells = line.split()
        if not columns and cells[:1] == ["GPU0"] and "X" not in cells:
            columns = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif columns and cells and re.fullmatch(r"GPU\d+", cells[0]):
            for column, cell in zip(columns, cells[1:], strict=False):
                if cell != "X":
                    match = re.fullmatch(r"NV(\d+)", cell)
                    links[int(cells[0][3:]), column] = int(match[1]) if match else 0
    return links
