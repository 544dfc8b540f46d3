"""fp8 and multicast kernels compile with no GPU and do not spill; the machine code of the multicast kernel has what it must."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tokenweave.collective.instantiations import instantiations, option_names, quantised_option_sets
from tokenweave.collective.kernels import (
    FP8,
    HAS_RESIDUAL,
    ROW_SCALES,
    UNQUANTISED,
    Kernel,
    multimem_kernel,
    oneshot_kernel,
    register_kernel,
    ring_kernel,
)
from tokenweave.cuda.compile import compile_kernel
from tokenweave.errors import CudaError

MAKERS = (ring_kernel, register_kernel, multimem_kernel, oneshot_kernel)
STATIC, DYNAMIC = HAS_RESIDUAL | FP8, HAS_RESIDUAL | FP8 | ROW_SCALES


@pytest.mark.parametrize("options", [STATIC, DYNAMIC], ids=option_names)
@pytest.mark.parametrize(("ranks", "hidden"), [(2, 2880), (2, 4096), (4, 5120), (8, 4096), (2, 16384)])
@pytest.mark.parametrize("make", MAKERS)
def test_fp8_variants_do_not_spill(make, ranks, hidden, options):
    kernel = make(ranks, ranks - 1, hidden, "bfloat16", options)
    if kernel is not None:
        assert compile_kernel(kernel, "sm_90a").spill_bytes == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("hidden", [8, 72, 1032])
def test_fp8_rows_of_any_size_compile(hidden, dtype):
    for options in (DYNAMIC, DYNAMIC | UNQUANTISED):
        for make in MAKERS[1:]:
            assert compile_kernel(make(2, 0, hidden, dtype, options), "sm_90a").registers > 0


@pytest.mark.parametrize(("ranks", "emulated"), [(2, False), (8, False), (2, True)])
def test_the_multicast_kernel_does_not_spill(ranks, emulated):
    for hidden, dtype in ((2880, "float16"), (4096, "bfloat16"), (7168, "bfloat16")):
        kernel = multimem_kernel(ranks, 0, hidden, dtype, HAS_RESIDUAL, emulated=emulated)
        assert compile_kernel(kernel, "sm_90a").spill_bytes == 0


def test_older_gpus_have_neither():
    for kernel in (register_kernel(2, 0, 64, "bfloat16", STATIC), multimem_kernel(2, 0, 64, "bfloat16", HAS_RESIDUAL)):
        with pytest.raises(CudaError, match="could not compile"):
            compile_kernel(kernel, "sm_80")
    assert compile_kernel(multimem_kernel(2, 0, 64, "bfloat16", HAS_RESIDUAL, emulated=True), "sm_80").registers > 0
    for every in (False, True):
        kernels = list(instantiations("sm_80", [2], [64], ["bfloat16"], every=every))
        assert not any(kernel.options & FP8 or kernel.name == "twoshot_multimem" for kernel in kernels)
    every_one = set(instantiations("sm_90a", [2], [64], ["bfloat16"], every=True))
    for options in quantised_option_sets("bfloat16"):
        assert register_kernel(2, 1, 64, "bfloat16", options) in every_one


# ---- machine code


def _instructions(kernel: Kernel, tmp_path: Path) -> Counter[str]:
    """How often each instruction, with its modifiers, is in the kernel's sm_90a code."""
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    (tool,) = (file.locate() for file in files if file.name in ("nvdisasm", "nvdisasm.exe"))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_kernel(kernel, "sm_90a").cubin)
    text = subprocess.run([str(tool), str(cubin)], capture_output=True, text=True, check=True, timeout=60).stdout
    return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text))


@pytest.mark.parametrize(
    ("dtype", "load"),
    [
        ("bfloat16", "LDGMC.E.F32ADD.BF16x8.RN.STRONG.SYS"),  # sums of bf16 in fp32
        ("float16", "LDGMC.E.F32ADD.F16x8.RN.STRONG.SYS"),
        ("float32", "LDGMC.E.ADD.F32x4.RN.STRONG.SYS"),
    ],
)
def test_multicast_loads_add_in_fp32_and_stores_are_multicast(tmp_path, dtype, load):
    vectors = 4  # 16-byte vectors a thread, of 4096 elements
    kernel = multimem_kernel(4, 1, 4096, dtype, HAS_RESIDUAL)
    found = _instructions(kernel, tmp_path)
    assert found[load] == vectors
    assert sum(n for name, n in found.items() if name.startswith("LDGMC")) == vectors
    # multimem.st is a strong store at system scope; the only other 16-byte stores, the residual's, are weak.
    assert found["STG.E.128.STRONG.SYS"] == vectors
    assert found["STG.E.128"] == vectors
    emulated = _instructions(multimem_kernel(4, 1, 4096, dtype, HAS_RESIDUAL, emulated=True), tmp_path)
    assert not any(name.startswith("LDGMC") for name in emulated)
    assert emulated["STG.E.128.STRONG.SYS"] == 0
    assert emulated["STG.E.128"] == vectors * (1 + 4)


def test_fp8_rows_are_stored_in_half_as_many_vectors(tmp_path):
    plain = _instructions(register_kernel(2, 0, 4096, "bfloat16", HAS_RESIDUAL), tmp_path)
    fp8 = _instructions(register_kernel(2, 0, 4096, "bfloat16", STATIC), tmp_path)
    assert (plain["STG.E.128"], fp8["STG.E.128"]) == (4 + 2 * 4, 4 + 2 * 2)
    assert sum(n for name, n in fp8.items() if name.startswith("F2FP.SATFINITE.E4M3")) == 16
