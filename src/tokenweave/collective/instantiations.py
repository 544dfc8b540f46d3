"""The kernels that models ask for, so that all of them can be compiled where there is no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tokenweave.collective.kernels import (
    BIAS,
    FP8,
    HAS_RESIDUAL,
    POST_NORM,
    ROW_COUNT,
    ROW_SCALES,
    ROWS,
    UNQUANTISED,
    WEIGHT_FP32,
    WEIGHT_OFFSET,
    Kernel,
    multimem_kernel,
    oneshot_kernels,
    register_kernel,
    ring_kernel,
)
from tokenweave.collective.norm import norm_kernel

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
HIDDEN = (2048, 2880, 3584, 4096, 5120, 7168, 8192, 12288, 16384)
"""Rows of the models in use: gpt-oss 2880, Qwen and Gemma 3584, DeepSeek 7168, Llama 4096 to 16384, ..."""

MAIN_OPTIONS = HAS_RESIDUAL
"""The layers of Llama, Qwen and Mixtral: no option but the residual. Spills in these are an error."""

_NAMES = {
    HAS_RESIDUAL: "residual",
    BIAS: "bias",
    POST_NORM: "post_norm",
    WEIGHT_FP32: "weight_fp32",
    ROWS: "rows",
    ROW_COUNT: "row_count",
    WEIGHT_OFFSET: "weight_offset",
    FP8: "fp8",
    ROW_SCALES: "row_scales",
    UNQUANTISED: "unquantised",
}
_FAMILIES = (0, BIAS, POST_NORM, WEIGHT_OFFSET, POST_NORM | WEIGHT_OFFSET)  # plain, biased, OLMo-2, Gemma, Gemma-2


def option_names(options: int) -> str:
    """``"residual+bias"`` and so on; ``"none"`` without any."""
    return "+".join(name for bit, name in _NAMES.items() if options & bit) or "none"


def option_sets(dtype: str) -> list[int]:
    """The combinations that models make: a family's options, its weights' dtype, all or some rows. The operator takes others too.

    An embedding has no residual, and then neither a bias, a post-norm nor sampled rows. fp32 rows have fp32 weights
    without the option.
    """
    weights = (0,) if dtype == "float32" else (0, WEIGHT_FP32)
    layers = itertools.product((HAS_RESIDUAL,), _FAMILIES, weights, (0, ROWS), (0, ROW_COUNT))
    embeddings = itertools.product((0, WEIGHT_OFFSET), weights, (0, ROW_COUNT))
    return [sum(options) for options in itertools.chain(layers, embeddings)]


def quantised_option_sets(dtype: str) -> list[int]:
    """The same with fp8 rows: a static scale or one a row, these rows alone or the others too."""
    kinds = (FP8, FP8 | ROW_SCALES, FP8 | UNQUANTISED, FP8 | ROW_SCALES | UNQUANTISED)
    return [options | kind for kind in kinds for options in option_sets(dtype)]


def instantiations(
    arch: str,
    ranks: Iterable[int] = (2, 4, 8),
    hidden: Iterable[int] = HIDDEN,
    dtypes: Iterable[str] = ("bfloat16", "float16"),
    *,
    every: bool = False,
) -> Iterator[Kernel]:
    """The kernels of an architecture.

    Args:
        arch: ``"sm_90a"`` and so on; the ring and the multicast kernel need sm_90 or newer, and so do
            fp8 rows, of these three.
        ranks, hidden, dtypes: ``"bfloat16"``, ``"float16"``, ``"float32"``; the product of them.
        every: all of :func:`option_sets` and :func:`quantised_option_sets` and all rank indices; else :data:`MAIN_OPTIONS` and rank 0.
    """
    hopper = int(arch.removeprefix("sm_").rstrip("af")) >= 90
    ranks = tuple(ranks)
    for size, dtype in itertools.product(hidden, dtypes):
        everything = option_sets(dtype) + (quantised_option_sets(dtype) if hopper else [])
        for options in everything if every else (MAIN_OPTIONS,):
            if not options & (ROWS | ROW_COUNT | FP8):
                yield norm_kernel(size, dtype, options)
            for n in ranks:
                for rank in range(n if every else 1):
                    if hopper and dtype != "float32" and (ring := ring_kernel(n, rank, size, dtype, options)):
                        yield ring
                    yield register_kernel(n, rank, size, dtype, options)
                    if hopper:
                        yield multimem_kernel(n, rank, size, dtype, options)
                    yield from oneshot_kernels(n, rank, size, dtype, options)
