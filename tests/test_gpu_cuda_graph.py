"""Captured graphs: memset nodes become kernel nodes, and the graph computes the same."""

import pytest
import torch

from tokenweave.cuda_graph import capturing, replace_memsets

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def test_memsets_are_replaced_and_the_order_stays():
    device = torch.device("cuda", 0)
    words = torch.ones(8, dtype=torch.int32, device=device)
    seen = torch.zeros(3, dtype=torch.int32, device=device)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        seen[0] = words.sum()
        words.zero_()
        seen[1] = words.sum()
        words.add_(3)
        seen[2] = words.sum()
        graph.capture_end()
    assert replace_memsets(graph.raw_cuda_graph(), device) >= 1
    assert replace_memsets(graph.raw_cuda_graph(), device) == 0
    graph.instantiate()
    for first in (8, 24, 24):
        graph.replay()
        assert seen.tolist() == [first, 0, 24]


def test_gemms_that_clear_a_counter():
    """More tiles than blocks: cuBLAS clears a counter before such a GEMM."""
    device = torch.device("cuda", 0)
    a, b = (torch.randn(n, 4096, device=device, dtype=torch.bfloat16) for n in (2048, 14336))
    expected = a @ b.t()
    torch.cuda.synchronize()
    with capturing(torch.cuda.Stream(device)) as graph:
        results = [a @ b.t() for _ in range(3)]
    for _ in range(20):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_a_capture_that_fails_leaves_the_stream_usable():
    stream = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with pytest.raises(ZeroDivisionError), capturing(stream):
        1 / 0  # noqa: B018
    with torch.cuda.stream(stream):
        y = x + 1
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 4
