"""Which attention kernel runs on a GPU: chosen once per device, dtype and head size, checked, and said in the log."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tokenweave.errors import RequestError
from tokenweave.models.attention import attend
from tokenweave.models.attention_flash import FLASH3_BUILDS, Kernel, flash2, load_flash3
from tokenweave.models.inputs import PackedSequences, SequenceRows

log = logging.getLogger(__name__)

ATTENTION_VARIABLE = "TOKENWEAVE_ATTENTION"
TORCH = "torch"
NAMES = (*(build.name for build in FLASH3_BUILDS), TORCH)

_HOPPER = (9, 0)  # what FlashAttention-3's kernels are written for; elsewhere it is FlashAttention-2
_TOLERANCE = 0.02  # of a checked result, in the Euclidean norm; bfloat16's own rounding makes some 0.003


@dataclass(frozen=True)
class Choice:
    """A kernel for the device, dtype and head size that were asked about.

    Attributes:
        name: one of :data:`NAMES`. label: the name, with the version of what isn't torch's.
        why: what it is, and why no faster one runs.
        kernel: as :func:`tokenweave.models.attention_cuda.attend_packed`.
    """

    name: str
    label: str
    why: str
    kernel: Kernel


def asked_attention() -> str | None:
    """The kernel that TOKENWEAVE_ATTENTION names; None for auto: the fastest that is here.

    Raises:
        RequestError: no kernel is called so.
    """
    name = (os.environ.get(ATTENTION_VARIABLE) or "auto").casefold()
    if name == "auto":
        return None
    if name not in NAMES:
        raise RequestError(f"{ATTENTION_VARIABLE}={name!r}; expected one of auto, {', '.join(NAMES)}")
    return name


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice | None:
    """The kernel for such a cache; None where there is none, with a warning in the log on a GPU.

    A first call runs kernels and waits for them, so it must precede the capture of a graph.

    Raises:
        RequestError: TOKENWEAVE_ATTENTION names a kernel that doesn't run here.
    """
    if device.type != "cuda":
        return None
    return _once(torch.cuda.current_device() if device.index is None else device.index, dtype, head_dim)


@functools.cache
def _once(index: int, dtype: torch.dtype, head_dim: int) -> Choice | None:
    device = torch.device("cuda", index)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention was not chosen before a graph's capture: call attention_cuda.available() first")
    return pick(device, dtype, head_dim, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def pick(
    device: torch.device, dtype: torch.dtype, head_dim: int, gpu: str, capability: tuple[int, int]
) -> Choice | None:
    """:func:`choose` for a GPU of this name and compute capability, whose tensors are on ``device``."""
    asked = asked_attention()
    refused: list[str] = []
    if (limit := _limit(dtype, head_dim)) is not None:
        refused.append(limit)
    else:
        for choice in _loadable(gpu, capability, asked, refused):
            wrong = None if choice.name == TORCH else differs(choice.kernel, device, dtype, head_dim)
            if wrong is None:
                log.info("attention on %s, %s, heads of %d: %s: %s", device, dtype, head_dim, choice.label, choice.why)
                return choice
            refused.append(f"{choice.label} {wrong}")
            log.warning("attention on %s, %s, heads of %d: %s", device, dtype, head_dim, refused[-1])
    if asked is not None:
        raise RequestError(
            f"{ATTENTION_VARIABLE}={asked}, and that does not run here: {'; '.join(refused)}. "
            f"Install what is missing, or unset {ATTENTION_VARIABLE} to run what is here"
        )
    log.warning("attention runs sequence by sequence, without CUDA graphs: %s", "; ".join(refused))
    return None


def expected(gpu: str, capability: tuple[int, int]) -> tuple[str, str]:
    """What :func:`choose` comes to for bfloat16 on such a GPU, unless its check of the kernel says otherwise.

    Loads libraries and runs nothing on a GPU.

    Args:
        gpu: its name. capability: its compute capability.

    Returns:
        (:attr:`Choice.label`, :attr:`Choice.why`); "none" and why where no kernel is here.

    Raises:
        RequestError: no kernel is called what TOKENWEAVE_ATTENTION says.
    """
    refused: list[str] = []
    for choice in _loadable(gpu, capability, asked_attention(), refused):
        return choice.label, choice.why
    return "none", "; ".join(refused)


def _loadable(gpu: str, capability: tuple[int, int], asked: str | None, refused: list[str]) -> Iterator[Choice]:
    """Fastest first, of ``asked`` alone if that is given; why others are left out is added to ``refused``."""
    has = f"{gpu} has {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        refused.append(f"FlashAttention needs compute capability 8.0, and {has}")
        return
    builds = [build for build in FLASH3_BUILDS if asked in (None, build.name)]
    if builds and capability != _HOPPER:
        refused.append(f"FlashAttention-3 is for compute capability 9.0, and {has}")
        builds = []
    kernels: list[tuple[str, str, str, Callable[[], Kernel]]] = [
        (build.name, build.label, "FlashAttention-3", functools.partial(load_flash3, build)) for build in builds
    ]
    if asked in (None, TORCH):
        kernels.append((TORCH, TORCH, "torch's FlashAttention-2", _load_flash2))
    for name, label, what, load in kernels:
        try:
            kernel = load()
        except ImportError as error:
            refused.append(str(error))
            continue
        why = f"{what}, because {ATTENTION_VARIABLE} says so" if asked else "; ".join([what, *refused])
        yield Choice(name, label, why, kernel)


def _load_flash2() -> Kernel:
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this build of torch has no FlashAttention")
    return flash2


def _limit(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no kernel takes such a cache."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention takes bfloat16 and float16, and the model runs in {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"FlashAttention takes heads of a multiple of 8 up to 256, and the model's have {head_dim}"
    return None


@torch.inference_mode()
def differs(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Compares a kernel with :func:`tokenweave.models.attention.attend` on two small random batches.

    Returns:
        What is wrong with it; None if nothing is.
    """
    for what, runs, most in (
        ("prompts", ((70, 5), (0, 0), (0, 130), (3, 1)), 256),  # (context, tokens)
        ("decodes", ((200, 1), (0, 1), (0, 0), (33, 1)), 1),
    ):
        queries, keys, values, packed, sequences = _batch(runs, most, device, dtype, head_dim)
        try:
            got = kernel(queries, keys, values, packed, 0)[: sum(tokens for _, tokens in runs)].float()
        except Exception as error:  # builds leave out dtypes, head sizes and more, each in its own words
            return f"fails on {what}: {' '.join(str(error).split())[:200]}"
        want = attend(queries[: len(got)].float(), keys.float(), values.float(), sequences)
        distance = float((got - want).norm() / want.norm())
        if not distance <= _TOLERANCE:  # NaN too
            return f"is wrong on {what}: a relative error of {distance:.2g}, {_TOLERANCE} is allowed"
    return None


def _batch(
    runs: tuple[tuple[int, int], ...], most: int, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences, list[SequenceRows]]:
    """Queries, keys, values, and the runs as kernels and as :func:`attend` take them; the same for each call.

    The runs lie apart in the cache and in descending order, which no reading of their starts as cumulated lengths
    survives, and a row of padding follows the queries.
    """
    first, start, starts = 0, 5, [0]
    cache_starts: list[int] = []
    sequences: list[SequenceRows] = []
    for context, tokens in reversed(runs):
        cache_starts.insert(0, start if context + tokens else 0)
        start += context + tokens + 7
    for (context, tokens), cache_start in zip(runs, cache_starts, strict=True):
        if tokens:
            sequences.append(SequenceRows(first, tokens, cache_start, context))
        first += tokens
        starts.append(first)

    def ints(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    random = torch.Generator(device).manual_seed(0)

    def noise(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, head_dim, generator=random, device=device).to(dtype)

    lengths = [context + tokens for context, tokens in runs]
    packed = PackedSequences(ints(starts), ints([*cache_starts, 0]), ints(lengths), most, 512)
    queries = noise(first + 1, 4 + 2)[:, :4]  # beside other columns, as those of a fused projection are
    return queries, noise(start, 2), noise(start, 2), packed, sequences
