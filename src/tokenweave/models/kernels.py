"""The models' own CUDA kernels: what lies between the GEMMs of a step, each in one pass over its rows.

Whether they can run is :func:`available`; elsewhere the models compute the same with torch's operations.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenweave.cuda.dtypes import DTYPES
from tokenweave.cuda.launch import available as kernels_available
from tokenweave.cuda.launch import loaded

_SOURCES = Path(__file__).parent / "csrc"
_THREADS = 256
_WAVE = 8  # blocks an SM: enough loads in flight for HBM


@dataclass(frozen=True)
class RowKernel:
    """An instantiation of a kernel in ``csrc/``; ``constants`` are its ``TW_`` definitions beside dtype and threads."""

    name: str
    dtype: str
    constants: tuple[tuple[str, int], ...] = ()
    threads: int = _THREADS
    dynamic_shared_bytes: int = 0

    @property
    def source(self) -> Path:
        """Its file."""
        return _SOURCES / f"{self.name}.cu"

    def defines(self) -> list[tuple[str, str]]:
        """As :class:`tokenweave.cuda.compile.Instantiation` has it."""
        values = {**dict(self.constants), "DTYPE": DTYPES[self.dtype], "THREADS": self.threads}
        return [(f"TW_{name}", str(value)) for name, value in values.items()]


class _RopeArgs(Structure):
    """``struct RopeArgs`` of ``csrc/rope_cache.cu``."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "keys", "values", "cosine", "sine", "norm", "positions", "cache_rows")),
        ("eps", c_float),
    )


class _SiluArgs(Structure):
    """``struct SiluArgs`` of ``csrc/silu_mul.cu``."""

    _fields_ = (("gate_up", c_void_p), ("out", c_void_p), ("vectors", c_int), ("rows", c_int))


class _EmbedArgs(Structure):
    """``struct EmbedArgs`` of ``csrc/embed_rows.cu``."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "ids", "out")),
        ("first", c_int64),
        *((name, c_int) for name in ("count", "vectors", "wide")),
    )


def available(x: torch.Tensor) -> bool:
    """Whether the kernels can run on ``x``'s device; where they can't on a GPU, the log says why."""
    return kernels_available(x.device)


def rope_kernel(dtype: str, query_slots: int, kv_slots: int, head_dim: int, qk_norm: bool) -> RowKernel:
    """The kernel of :func:`rope_cache` for these sizes."""
    sizes = {"QUERY_SLOTS": query_slots, "KV_SLOTS": kv_slots, "HEAD_DIM": head_dim, "QK_NORM": int(qk_norm)}
    return RowKernel("rope_cache", dtype, tuple(sizes.items()))


def silu_kernel(dtype: str) -> RowKernel:
    """The kernel of :func:`silu_mul`."""
    return RowKernel("silu_mul", dtype)


def embed_kernel(dtype: str) -> RowKernel:
    """The kernel of :func:`embed_rows`."""
    return RowKernel("embed_rows", dtype)


def rope_cache(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_slots: int,
    rotary: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cache_rows: torch.Tensor,
) -> None:
    """Norm and rotary embedding of queries and keys in float32; queries stay in ``qkv``, keys and values go to the cache.

    Args:
        qkv: [tokens, query_slots + 2 kv slots, head_dim], contiguous; head_dim a multiple of 4.
        keys, values: one layer's cache, [rows, kv slots, head_dim], qkv's dtype, contiguous.
        rotary: cosines and sines, float32 [positions, head_dim / 2] each.
        norm: float32 [query_slots + kv slots, head_dim], RMSNorm weights, or None for no norm. eps: of it.
        positions, cache_rows: int64 [tokens]. Rows with a negative cache row are not stored.
    """
    tokens, slots, head_dim = qkv.shape
    if not tokens:
        return
    kernel = rope_kernel(_name(qkv), query_slots, (slots - query_slots) // 2, head_dim, norm is not None)
    args = _RopeArgs(
        qkv.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        rotary[0].data_ptr(),
        rotary[1].data_ptr(),
        None if norm is None else norm.data_ptr(),
        positions.data_ptr(),
        cache_rows.data_ptr(),
        eps,
    )
    loaded(kernel, qkv.get_device()).launch(tokens, torch.cuda.current_stream().cuda_stream, args)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float32, rounded once.

    Args:
        gate_up: [tokens, 2 * columns], contiguous, gate before up; columns a multiple of 8.

    Returns:
        [tokens, columns].
    """
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, columns)
    vectors = columns * gate_up.element_size() // 16
    if tokens:
        device = gate_up.get_device()
        most = _WAVE * torch.cuda.get_device_properties(device).multi_processor_count
        blocks = min(most, -(-tokens * vectors // _THREADS))
        args = _SiluArgs(gate_up.data_ptr(), out.data_ptr(), vectors, tokens)
        loaded(silu_kernel(_name(gate_up)), device).launch(blocks, torch.cuda.current_stream().cuda_stream, args)
    return out


def embed_rows(table: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor, *, first: int, count: int) -> None:
    """Rows of the tokens in this rank's part of the vocabulary, zeros for the others.

    Args:
        table: [at least count, hidden], contiguous.
        token_ids: int32 or int64 [tokens], contiguous.
        out: [tokens, hidden], table's dtype, contiguous; hidden's bytes are a multiple of 16.
        first: token of the table's first row. count: tokens from there on that are this rank's.
    """
    tokens, vectors = token_ids.shape[0], table.shape[1] * table.element_size() // 16
    if tokens:
        wide = token_ids.dtype == torch.int64
        args = _EmbedArgs(table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), first, count, vectors, wide)
        kernel = loaded(embed_kernel(_name(table)), table.get_device())
        kernel.launch(tokens, torch.cuda.current_stream().cuda_stream, args)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
