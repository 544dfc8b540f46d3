"""Capturing work as a CUDA graph, without memset nodes.

cuBLAS clears a counter of four bytes before a GEMM whose blocks take their tiles one after the other. As a memset node that
costs 12 us between the kernels on either side of it (H200, driver 580), as a kernel node it costs what a launch does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenweave.cuda.compile import HEADERS
from tokenweave.cuda.launch import available, checked, driver, loaded

_MOST_BYTES = 256  # of a memset that one warp does at once
_MEMSET = 2  # CUgraphNodeType


class _NoCollection:
    """While any thread is inside there is no garbage collection: what it destroys while a stream captures could break the
    capture."""

    def __init__(self) -> None:
        self._lock, self._inside, self._enabled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._enabled:
                gc.enable()


_no_collection = _NoCollection()


@contextlib.contextmanager
def capturing(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures what is launched inside, on ``stream`` and on streams that wait for it. After the block the graph can be replayed.

    Args:
        stream: any but the default one; current inside.
        pool: of memory, as :func:`torch.cuda.graph_pool_handle` gives it; None: the graph's own.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with _no_collection, torch.cuda.stream(stream):
        # thread_local: NCCL's watchdog queries events in a thread of its own, which would end a global capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it is broken already; the first error says why
                graph.capture_end()
            raise
        graph.capture_end()
    if available(stream.device):
        replace_memsets(graph.raw_cuda_graph(), stream.device)
    graph.instantiate()


@dataclass(frozen=True)
class _Fill:
    """``csrc/fill_words.cu``."""

    name: str = "fill_words"
    threads: int = 32
    dynamic_shared_bytes: int = 0

    @property
    def source(self) -> Path:
        return HEADERS / "fill_words.cu"

    def defines(self) -> list[tuple[str, str]]:
        return [("TW_THREADS", str(self.threads))]


class _Memset(Structure):
    """CUDA_MEMSET_NODE_PARAMS, CUDA driver API."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(Structure):
    """CUDA_KERNEL_NODE_PARAMS, CUDA driver API."""

    _fields_ = (
        ("function", c_void_p),
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("params", c_void_p),
        ("extra", c_void_p),
    )


def replace_memsets(graph: int, device: torch.device) -> int:
    """Puts a kernel node in the place of every memset node of whole words that one warp can do at once.

    Args:
        graph: a cudaGraph_t that is not instantiated yet. device: whose memory its memsets write.

    Returns:
        how many were replaced.
    """
    api, handle = driver(), c_void_p(graph)
    fill = loaded(_Fill(), torch.cuda.current_device() if device.index is None else device.index)
    replaced = 0
    for node in _nodes(api.cuGraphGetNodes, handle):
        kind = c_int()
        checked(api.cuGraphNodeGetType(node, byref(kind)), "asking for a graph node's type")
        if kind.value != _MEMSET:
            continue
        memset = _Memset()
        checked(api.cuGraphMemsetNodeGetParams(node, byref(memset)), "asking for a memset's parameters")
        size = memset.width * memset.element_size
        if memset.height != 1 or size > _MOST_BYTES or size % 4 or memset.dst % 4:
            continue
        value = memset.value & (2 ** (8 * memset.element_size) - 1)
        word = int.from_bytes(value.to_bytes(memset.element_size, "little") * (4 // memset.element_size), "little")
        values = (c_void_p(memset.dst), c_uint(word), c_int(size // 4))
        pointers = (c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        before, after = (
            _nodes(ask, node) for ask in (api.cuGraphNodeGetDependencies, api.cuGraphNodeGetDependentNodes)
        )
        params = _Kernel(fill.function, 1, 1, 1, fill.kernel.threads, 1, 1, 0, ctypes.addressof(pointers), None)
        new = c_void_p()
        checked(
            api.cuGraphAddKernelNode(byref(new), handle, _array(before), c_size_t(len(before)), byref(params)),
            "adding a kernel node",
        )
        starts = _array([new] * len(after))
        checked(
            api.cuGraphAddDependencies(handle, starts, _array(after), c_size_t(len(after))), "linking a kernel node"
        )
        checked(api.cuGraphDestroyNode(node), "removing a memset node")
        replaced += 1
    return replaced


def _nodes(ask: Any, of: c_void_p) -> list[c_void_p]:
    count = c_size_t()
    checked(ask(of, None, byref(count)), "counting a graph's nodes")
    found = (c_void_p * count.value)()
    if count.value:
        checked(ask(of, found, byref(count)), "listing a graph's nodes")
    return [c_void_p(each) for each in found]


def _array(nodes: list[c_void_p]) -> Any:
    return (c_void_p * len(nodes))(*nodes)
