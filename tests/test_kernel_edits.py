"""The sources that the tests edit for compute-sanitizer: the edits still apply, and what they make compiles with no GPU."""

from __future__ import annotations

import pytest

from kernel_edits import EACH_READER_FREES, MISTAKES, ROUNDED_VECTORS, compiled_from
from tokenweave.collective.instantiations import MAIN_OPTIONS, option_names
from tokenweave.collective.kernels import (
    BIAS,
    FP8,
    POST_NORM,
    ROW_SCALES,
    UNQUANTISED,
    WEIGHT_FP32,
    multimem_kernel,
    oneshot_kernel,
    register_kernel,
    ring_kernel,
)
from tokenweave.collective.norm import norm_kernel
from tokenweave.cuda.compile import compile_kernel

MAKERS = {"twoshot_ring": ring_kernel, "twoshot_registers": register_kernel}


@pytest.mark.parametrize(
    "kernel",
    [
        ring_kernel(2, 0, 4096, "bfloat16", MAIN_OPTIONS),
        ring_kernel(2, 1, 2880, "float16", MAIN_OPTIONS | POST_NORM),
        ring_kernel(4, 0, 2880, "bfloat16", MAIN_OPTIONS),
        ring_kernel(2, 0, 4096, "bfloat16", MAIN_OPTIONS | FP8 | ROW_SCALES | UNQUANTISED),
    ],
    ids=lambda kernel: f"{kernel.ranks}-{kernel.hidden}-{kernel.dtype}-{option_names(kernel.options)}",
)
def test_the_ring_that_racecheck_can_follow_compiles_without_spills(kernel):
    shipped, edited = _compiled(kernel, EACH_READER_FREES)
    assert edited.spill_bytes == shipped.spill_bytes == 0
    assert edited.shared_bytes == shipped.shared_bytes
    assert edited.registers * kernel.threads <= 65536


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_compile(name):
    mistake = MISTAKES[name]
    kernel = MAKERS[mistake.kernel](2, 0, mistake.case.hidden, "bfloat16", MAIN_OPTIONS)
    _, edited = _compiled(kernel, mistake.edits)
    assert edited.spill_bytes == 0


@pytest.mark.parametrize(
    "kernel",
    [
        *(
            make(2, 0, hidden, dtype, MAIN_OPTIONS | WEIGHT_FP32 | options)
            for make in (ring_kernel, register_kernel, multimem_kernel, oneshot_kernel)
            for hidden, dtype, options in ((4096, "bfloat16", 0), (2880, "float16", BIAS | POST_NORM))
        ),
        norm_kernel(4096, "bfloat16", MAIN_OPTIONS | WEIGHT_FP32),
    ],
    ids=lambda kernel: f"{kernel.name}-{kernel.dtype}-{option_names(kernel.options)}",
)
def test_vectors_can_be_rounded_in_every_kernel(kernel):
    shipped, edited = _compiled(kernel, ROUNDED_VECTORS)
    assert edited.spill_bytes == shipped.spill_bytes


def _compiled(kernel, edits):
    """As it is shipped, and from edited sources, which make another program of it."""
    shipped = compile_kernel(kernel, "sm_90a")
    with compiled_from(*edits):
        edited = compile_kernel(kernel, "sm_90a")
    assert edited.cubin != shipped.cubin
    return shipped, edited


def test_edits_that_do_not_apply_are_told():
    with pytest.raises(AssertionError, match=r"row\.cuh has changed"), compiled_from(("row.cuh", "no such line", "")):
        pass
