"""Captured graphs: memset nodes become kernel nodes, and the graph computes the same."""

import ctypes
import gc

import pytest
import torch

from tokenweave.cuda.graph import capturing, replace_memsets

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def test_the_counters_that_gemms_clear():
    """More tiles than blocks: cuBLAS clears a counter before such a GEMM."""
    device = torch.device("cuda", 0)
    a, b = (torch.randn(n, 4096, device=device, dtype=torch.bfloat16) for n in (2048, 14336))
    expected = a @ b.t()
    torch.cuda.synchronize()
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        kept.capture_begin()
        results = [a @ b.t() for _ in range(3)]
        kept.capture_end()
    assert replace_memsets(kept.raw_cuda_graph(), device) == 3
    assert replace_memsets(kept.raw_cuda_graph(), device) == 0
    kept.instantiate()
    with capturing(torch.cuda.Stream(device)) as graph:
        results += [a @ b.t() for _ in range(3)]
    for _ in range(20):
        for result in results:
            result.fill_(float("nan"))
        kept.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_memsets_between_kernels():
    """A value other than zero, in bytes, in the middle of a chain."""
    device = torch.device("cuda", 0)
    words = torch.ones(8, dtype=torch.int32, device=device)
    seen = torch.zeros(3, dtype=torch.int64, device=device)
    runtime = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        seen[0] = words.sum()
        where, handle = ctypes.c_uint64(words.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
        assert runtime.cuMemsetD8Async(where, ctypes.c_ubyte(3), ctypes.c_size_t(16), handle) == 0
        seen[1] = words.sum()
        words.fill_(5)
        seen[2] = words.sum()
        graph.capture_end()
    assert replace_memsets(graph.raw_cuda_graph(), device) == 1
    graph.instantiate()
    for first in (8, 40, 40):
        start = 8 if first == 8 else 40
        graph.replay()
        assert seen.tolist() == [first, 4 * 0x03030303 + 4 * start // 8, 40]


def test_a_capture_that_fails_leaves_the_stream_usable():
    stream = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with pytest.raises(ZeroDivisionError), capturing(stream):  # noqa: PT012
        assert not gc.isenabled(), "a collection could destroy what breaks the capture"
        1 / 0  # noqa: B018
    assert gc.isenabled()
    with torch.cuda.stream(stream):
        y = x + 1
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 4
