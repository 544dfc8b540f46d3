"""The models' kernels compile, without spills, for every architecture, dtype and kind of head; no GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

from tokenweave.collective.instantiations import ARCHITECTURES
from tokenweave.cuda.compile import compile_kernel
from tokenweave.cuda.dtypes import DTYPES
from tokenweave.integrations.vllm.linear import partial_embedding
from tokenweave.models import kernels
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("first", "end"), [(0, 64), (64, 100), (100, 100)])  # of 100 tokens, padded to 3 parts of 64
def test_vllms_embedding_is_the_same_with_the_kernel_and_without(monkeypatch, dtype, first, end):
    layer = SimpleNamespace(
        weight=torch.randn(64, 8),
        shard_indices=SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end),
    )
    token_ids, with_kernel, without = torch.tensor([0, 63, 64, 99, 100, 191, -1], dtype=dtype), *torch.randn(2, 7, 8)
    partial_embedding(layer, token_ids, without)

    def embed_rows(table, ids, out, *, first, count):
        for row, token in enumerate(ids.tolist()):
            out[row] = table[token - first] if 0 <= token - first < count else 0

    monkeypatch.setattr(kernels, "available", lambda x: True)
    monkeypatch.setattr(kernels, "embed_rows", embed_rows)
    partial_embedding(layer, token_ids, with_kernel)
    assert torch.equal(with_kernel, without)
    assert without.any(1).tolist() == [first <= token < end for token in token_ids.tolist()]
