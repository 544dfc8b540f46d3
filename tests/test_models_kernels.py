"""The models' kernels compile, without spills, for every architecture, dtype and kind of head; no GPU is needed."""

import pytest

from tokenweave.collective.instantiations import ARCHITECTURES
from tokenweave.cuda.compile import compile_kernel
from tokenweave.cuda.dtypes import DTYPES
from tokenweave.models.kernels import embed_kernel, rope_kernel, silu_kernel

HEADS = [  # query slots, key/value slots, head_dim, norm
    (16, 4, 128, False),  # Llama-3.1-8B on 2 ranks
    (32, 4, 128, True),  # Qwen3-32B on 2 ranks
    (5, 2, 64, False),  # SmolLM2 on 2 ranks
    (2, 1, 256, True),
    (4, 2, 8, False),
    (2, 1, 24, True),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_all_of_them_compile(arch, dtype):
    for kernel in (*(rope_kernel(dtype, *heads) for heads in HEADS), silu_kernel(dtype), embed_kernel(dtype)):
        compiled = compile_kernel(kernel, arch)
        assert compiled.spill_bytes == 0, kernel
        assert compiled.registers <= 64, f"{kernel}: fewer than 4 blocks of 256 threads an SM"
        assert kernel.name.encode() in compiled.cubin
