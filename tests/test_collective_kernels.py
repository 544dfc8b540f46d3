"""The collective's kernels: they compile with no GPU and do not spill where it matters; launch shapes; which one a call takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tokenweave.collective import cuda_backend
from tokenweave.collective.instantiations import HIDDEN, MAIN_OPTIONS, instantiations, option_names, option_sets
from tokenweave.collective.kernels import (
    HAS_RESIDUAL,
    SHARED_BYTES,
    oneshot_kernel,
    oneshot_kernels,
    register_kernel,
    ring_depth,
    ring_kernel,
)
from tokenweave.collective.norm import norm_kernel
from tokenweave.cuda.compile import compile_kernel
from tokenweave.cuda.dtypes import ELEMENT_BYTES

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100a": 227 << 10}  # a block's, CUDA C++ Programming Guide


def _check(kernel, arch: str) -> None:
    compiled = compile_kernel(kernel, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.spill_bytes == 0, kernel
    assert kernel.threads <= 1024
    assert compiled.registers * kernel.threads <= 65536
    assert compiled.shared_bytes + kernel.dynamic_shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_main_variants_compile_without_spills(ranks, hidden):
    """All that ``tokenweave compile`` compiles of the collective."""
    for kernel in instantiations("sm_90a", [ranks], [hidden]):
        _check(kernel, "sm_90a")


@pytest.mark.parametrize(("ranks", "hidden"), [(2, 4096), (8, 16384)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_main_variants_of_other_architectures_compile_without_spills(arch, ranks, hidden):
    for kernel in instantiations(arch, [ranks], [hidden], ["bfloat16"]):
        _check(kernel, arch)


def test_the_one_shot_kernels_shapes_are_all_compiled():
    for ranks, hidden in ((2, 4096), (3, 12288), (8, 16384)):
        shapes = {oneshot_kernel(ranks, 0, hidden, "bfloat16", MAIN_OPTIONS, rows) for rows in range(1, 1025)}
        assert shapes == set(oneshot_kernels(ranks, 0, hidden, "bfloat16", MAIN_OPTIONS))
        listed = set(instantiations("sm_90a", [ranks], [hidden], ["bfloat16"]))
        assert shapes <= listed


@pytest.mark.parametrize("options", [0, *(HAS_RESIDUAL | 1 << bit for bit in range(1, 7)), 127])
def test_every_option_compiles(options):
    for make in (ring_kernel, register_kernel, oneshot_kernel):
        assert compile_kernel(make(3, 1, 256, "bfloat16", options), "sm_90a").registers > 0
    assert compile_kernel(norm_kernel(256, "bfloat16", options), "sm_90a").registers > 0


@pytest.mark.parametrize("make", [register_kernel, oneshot_kernel])
def test_float32_rows_compile(make):
    assert compile_kernel(make(2, 0, 512, "float32", MAIN_OPTIONS), "sm_90a").registers > 0


# ---- launch shapes


@pytest.mark.parametrize("ranks", range(2, 9))
def test_launch_shapes_are_within_limits(ranks):
    for dtype in ELEMENT_BYTES:
        for hidden in (8, 64, *HIDDEN, 16376):
            kernels = [make(ranks, 0, hidden, dtype, 1) for make in (register_kernel, oneshot_kernel)]
            ring = ring_kernel(ranks, 0, hidden, dtype, 1)
            for kernel in [*kernels, norm_kernel(hidden, dtype, 1), *filter(None, [ring])]:
                assert kernel.group_threads % 32 == 0
                assert 32 <= kernel.threads <= 1024
                assert kernel.groups <= 15  # named barriers
            orders = {kernel.norm_threads or kernel.group_threads for kernel in [*kernels, *filter(None, [ring])]}
            assert len(orders) == 1
            if ring is None:
                assert 2 * (ranks + 1) * hidden * ELEMENT_BYTES[dtype] > SHARED_BYTES - 2048
                continue
            assert ring.stages % ring.groups == 0
            assert ring.dynamic_shared_bytes + 2048 <= SHARED_BYTES
            for ctas in (1, 2, 4, 8, 12, 16, 23, 64, 256):
                depth = ring_depth(ring, ctas)
                assert depth % ring.groups == 0
                assert ring.groups <= depth <= ring.stages


def _workspace(hidden: int = 4096, ranks: int = 2, rank: int = 0, dtype: torch.dtype = torch.bfloat16):
    return SimpleNamespace(
        hidden=hidden,
        world_size=ranks,
        rank=rank,
        dtype=dtype,
        device=torch.device("cuda", rank),
        max_tokens=1,
        transport="p2p",
    )


def test_default_blocks_depend_on_what_all_ranks_know():
    for tokens in (1, 7, 64, 1000, 4096, 131072):
        for hidden in (64, 4096, 16384):
            blocks = {cuda_backend.default_ctas(tokens, _workspace(hidden, 4, rank)) for rank in range(4)}
            assert len(blocks) == 1
            assert 1 <= blocks.pop() <= 64


def test_the_two_shot_kernel_is_the_same_on_all_ranks(monkeypatch):
    def kernels(capability, *, tokens, ctas, **workspace):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        chosen = [
            cuda_backend.twoshot_kernel(_workspace(rank=rank, **workspace), MAIN_OPTIONS, tokens, ctas)
            for rank in range(2)
        ]
        assert [kernel.rank for kernel in chosen] == [0, 1]
        assert chosen[0].name == chosen[1].name
        return chosen[0].name

    assert kernels((9, 0), tokens=16384, ctas=8) == "twoshot_ring"
    assert kernels((9, 0), tokens=16384, ctas=64) == "twoshot_registers"
    assert kernels((9, 0), tokens=16, ctas=8) == "twoshot_registers"
    assert kernels((8, 0), tokens=16384, ctas=8) == "twoshot_registers"
    assert kernels((9, 0), tokens=16384, ctas=8, dtype=torch.float32) == "twoshot_registers"


def test_enumeration():
    every = list(instantiations("sm_90a", [2], [4096], ["bfloat16"], every=True))
    assert len(every) == len(set(every))
    assert {kernel.rank for kernel in every if kernel.ranks == 2} == {0, 1}
    assert set(instantiations("sm_90a", [2], [4096], ["bfloat16"])) <= set(every)
    assert "twoshot_ring" not in {kernel.name for kernel in instantiations("sm_80", [2], [4096], ["bfloat16"])}
    assert len(option_sets("bfloat16")) == len(set(option_sets("bfloat16"))) == 48
    assert option_names(MAIN_OPTIONS) == "residual"
    assert option_names(0) == "none"
