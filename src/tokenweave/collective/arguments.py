"""What the kernels are called with."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_uint, c_uint64, c_void_p

MAX_RANKS = 8
MAX_BLOCKS = 256
PointerTable = c_void_p * MAX_RANKS


class Args(Structure):
    """``struct Args`` of ``csrc/barrier.cuh``, field by field."""

    _fields_ = (
        ("x", PointerTable),
        ("out", PointerTable),
        ("fp8", PointerTable),
        ("scales", PointerTable),
        ("flags", PointerTable),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("post_weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("rows", c_void_p),
        ("row_count", c_void_p),
        ("state", c_void_p),
        ("record", c_void_p),
        ("time_limit", c_uint64),
        ("eps", c_float),
        ("weight_offset", c_float),
        ("rank", c_int),
        ("tokens", c_int),
        ("n_rows", c_int),
        ("signature", c_uint),
    )
