"""What the collectives cost, by transport. Formulas with few constants, each fitted to the tables in docs/planning.md.

``wire`` is what one direction of a rank's link must carry. Without multicast every rank reads N-1 partials of its own
rows and writes its rows to N-1 peers; with it the switch reduces and replicates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenweave.errors import RequestError
from tokenweave.planning.hardware import HBM_SHARE, Gpu
from tokenweave.planning.waves import BYTES

TRANSPORTS = ("multimem", "p2p", "torch")

# Measured on 2 and 4 H200 (p2p, NCCL), and published for 8 H100 (multimem); shares are of the data sheet's link rate.
P2P_PLATEAU = 0.73  # 328 of 450 GB/s
P2P_CTA_GBS_PER_GHZ = 46.0  # 91 GB/s touched by a CTA at 1.98 GHz, peers' and local bytes alike: the SM is the limit
MULTIMEM_PLATEAU = 0.68  # 306 of 450 GB/s
MULTIMEM_REDUCE_PLATEAU = 0.80  # a plain multimem all-reduce, with no norm to wait for
MULTIMEM_CTA_GBS = 6.26  # owned bytes per CTA: each load waits for the switch
MULTIMEM_SERIAL_GBS = 76.6  # owned bytes, whatever the CTAs
LIBRARY_PLATEAU = 0.70  # NCCL's ring, 295-328 of 450 GB/s
LIBRARY_LOW_LATENCY_RATE = 0.30  # of the link, in the protocol for small messages
CTA_CHOICES = (2, 4, 8, 12, 16)  # more gain nothing (p2p: flat from 12 on; multimem: slower again from 32)
LIBRARY_CTAS = 16  # SMs that the library's kernel holds


def default_transport(gpu: Gpu, tp: int) -> str:
    """The transport with the least wire: multimem carries 1 + 1/N of the rows, p2p 2 - 2/N."""
    if gpu.arch == "cpu":
        return "torch"
    return "multimem" if gpu.multicast and tp > 2 else "p2p"


def check_transport(transport: str, gpu: Gpu) -> str:
    """Returns it. Raises RequestError for an unknown transport, or one that the GPU has no hardware for."""
    if transport not in TRANSPORTS:
        raise RequestError(f"unknown transport {transport!r}; expected one of {', '.join(TRANSPORTS)}")
    if (transport == "multimem" and not gpu.multicast) or (transport == "p2p" and gpu.arch == "cpu"):
        usable = "torch" if gpu.arch == "cpu" else "p2p or torch"
        raise RequestError(f"transport {transport} cannot work on {gpu.name}; use {usable}")
    return transport


def cta_choices(transport: str, gpu: Gpu, tp: int) -> tuple[int | None, ...]:
    """Thread blocks to consider for the fused collective; (None,) where the transport has no such choice."""
    if transport == "torch" or tp == 1:
        return (None,)
    return tuple(ctas for ctas in CTA_CHOICES if ctas * 4 <= gpu.sms) or (1,)


def held_sms(ctas: int | None, gpu: Gpu, tp: int) -> int:
    """SMs that GEMMs lose while a collective is in flight."""
    if gpu.arch == "cpu" or tp == 1:
        return 0
    return min(LIBRARY_CTAS, gpu.sms // 4) if ctas is None else ctas


def norm_us(tokens: Any, hidden: int, gpu: Gpu) -> Any:
    """us of a residual add + RMSNorm kernel: reads rows and residual, writes both."""
    return gpu.kernel_us + 4 * BYTES * hidden / (gpu.hbm_gbs * HBM_SHARE * 1e3) * tokens


def _library_us(wire: Any, tp: int, gpu: Gpu) -> Any:
    """us of one collective of NCCL or gloo: the better of its bandwidth and its low-latency protocol. ``wire`` in bytes."""
    low_latency = (0.2 + 0.07 * min(tp, 8)) * gpu.library_us
    return np.minimum(
        gpu.library_us + wire / (gpu.link_gbs * LIBRARY_PLATEAU * 1e3),
        low_latency + wire / (gpu.link_gbs * LIBRARY_LOW_LATENCY_RATE * 1e3),
    )


def all_reduce_us(tokens: Any, hidden: int, tp: int, gpu: Gpu, transport: str) -> Any:
    """us of the sequential mode's all-reduce, norm not included: multimem's where that is the transport, else the library's."""
    if tp == 1:
        return 0.0
    rows = tokens * (hidden * BYTES)
    if transport == "multimem":
        wire = rows * (1 + 1 / tp)
        return _barriers_us(transport, tp) + wire / (gpu.link_gbs * MULTIMEM_REDUCE_PLATEAU * 1e3)
    return _library_us(rows * (2 * (tp - 1) / tp), tp, gpu)


def _barriers_us(transport: str, tp: int) -> float:
    """us of launch and both barriers: 7 at 2 ranks, 8 at 4; 14 published for multimem at 8."""
    return 6.0 + tp if transport == "multimem" else 6.0 + tp / 2


def fused_us(tokens: Any, hidden: int, tp: int, gpu: Gpu, transport: str, ctas: Any) -> Any:
    """us of the fused collective: reduce-scatter, residual, RMSNorm of the owned rows, all-gather.

    ``tokens`` and ``ctas`` are ints or int64 arrays that broadcast; ``ctas`` is None for the torch transport or one rank.
    """
    if tp == 1:
        return norm_us(tokens, hidden, gpu)
    rows = tokens * (hidden * BYTES)
    owned = rows / tp
    if transport == "torch":
        # Two library collectives, and kernels that add N parts and the residual, then norm, on the owned rows.
        passes = owned * ((tp + 6) / (gpu.hbm_gbs * HBM_SHARE * 1e3)) + 2 * gpu.kernel_us
        return passes + 2 * _library_us(owned * (tp - 1), tp, gpu)
    if transport == "multimem":
        wire_us = rows * (1 + 1 / tp) / (gpu.link_gbs * MULTIMEM_PLATEAU * 1e3)
        cta_us = owned * (1 / (ctas * MULTIMEM_CTA_GBS) + 1 / MULTIMEM_SERIAL_GBS) / 1e3
    else:
        wire_us = owned * (2 * (tp - 1)) / (gpu.link_gbs * P2P_PLATEAU * 1e3)
        touched = owned * (2 * tp + 2)  # N loads, N stores, the residual read and written
        cta_us = touched / (ctas * P2P_CTA_GBS_PER_GHZ * gpu.clock_ghz * 1e3)
    return _barriers_us(transport, tp) + np.maximum(wire_us, cta_us)


def cluster(ctas: int | None, gpu: Gpu) -> int | None:
    """Thread blocks per cluster of the collective's launch.

    The GEMM library's blocks come in clusters of ``gpu.gemm_cluster``; a lone block of the collective can take one SM of
    such a group and leave the others idle, so that the GEMM's last clusters find no place (measured on H200: 4 blocks
    and a target of 128 SMs fit in clusters of 2 or 4 alone). Clusters of 4 are faster from 16 blocks on.
    """
    if ctas is None or gpu.gemm_cluster == 1:
        return None
    return next((size for size in (4, 2) if size >= gpu.gemm_cluster and ctas % size == 0), None)
