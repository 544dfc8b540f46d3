"""What the collectives cost, by transport. Formulas with few constants, each fitted to the tables in docs/planning.md.

``wire`` is what one direction of a rank's link must carry. Without multicast every rank reads N-1 partials of its own
rows and writes its rows to N-1 peers; with it the switch reduces and replicates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenweave.collective.symmetric import oneshot_rows
from tokenweave.errors import RequestError
from tokenweave.planning.gemms import BYTES, ceil_div
from tokenweave.planning.hardware import HBM_SHARE, L2_FOOTPRINT, L2_SM_BYTES, Gpu

TRANSPORTS = ("multimem", "p2p", "torch")

# Fitted to kernels measured on 2 and 4 H200 (p2p, NCCL), and published for 8 H100 (multimem): docs/planning.md. Shares are
# of the data sheet's link rate.
P2P_START_US, P2P_RANK_US = 4.75, 0.78  # launch and both barriers, and what each rank adds
P2P_FILL_US, P2P_FILL_ROWS = 0.4, 15.0  # until rows are in flight; half of it from so many rows of the batch on
P2P_PLATEAU = 0.729  # 328 of 450 GB/s
P2P_CTA_GBS_PER_GHZ = 45.3  # 90 GB/s at 1.98 GHz touched by a CTA, peers' and local bytes alike: the SM's port
P2P_SHARPNESS = 9.0  # the slower of link and SMs, rounded off where both are close
ALONE_US = 1.4  # that a launch with the default blocks gains by starting while its predecessor ends
ONESHOT_START_US, ONESHOT_RANK_US = 3.4, 0.6
ONESHOT_PLATEAU, ONESHOT_SHARPNESS = 0.62, 1.6
MULTIMEM_START_US, MULTIMEM_RANK_US = 4.5, 0.92
MULTIMEM_FILL_US, MULTIMEM_FILL_ROWS = 7.0, 360.0
MULTIMEM_PLATEAU = 0.696  # 313 of 450 GB/s
MULTIMEM_REDUCE_PLATEAU = 0.80  # a plain multimem all-reduce, with no norm to wait for
MULTIMEM_CTA_GBS = 6.43  # owned bytes per CTA: each load waits for the switch
MULTIMEM_SWITCH_SHARE = 1.29  # 580 GB/s of the batch's bytes, whatever the CTAs
MULTIMEM_CROWD_US, MULTIMEM_CROWD_ROWS = 0.663, 2960.0  # a CTA beyond 16, in batches that are long beside so many rows
LIBRARY_PLATEAU = 0.72  # NCCL's ring, 316-340 of 450 GB/s
LIBRARY_LOW_LATENCY_RATE = 0.31  # of the link, in the protocol for small messages
CTA_CHOICES = (2, 4, 8, 16)  # beside other work; p2p gains nothing from more
# Of these on Hopper: 12 and 16 leave no room for all clusters of a GEMM, whatever it is told of (measured on H200: 1.4 to 2.2
# times its time alone).
MOST_BESIDE = {"sm_90": 8}
MOST_ALONE = {"p2p": 64, "multimem": 32}  # blocks of a launch that has the GPU to itself
ROW_ELEMENTS = 16384  # that a block works on at a time: so many rows
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
    most = min(gpu.sms // 4, MOST_BESIDE.get(gpu.arch, max(CTA_CHOICES)))
    return tuple(ctas for ctas in CTA_CHOICES if ctas <= most) or (1,)


def held_sms(ctas: int | None, gpu: Gpu, tp: int) -> int:
    """SMs that GEMMs lose while a collective is in flight."""
    if gpu.arch == "cpu" or tp == 1:
        return 0
    return min(LIBRARY_CTAS, gpu.sms // 4) if ctas is None else ctas


def norm_us(tokens: Any, hidden: int, gpu: Gpu) -> Any:
    """us of a residual add + RMSNorm kernel: reads rows and residual, writes both."""
    return gpu.kernel_us + stream_us(4 * BYTES * hidden * tokens, gpu)


def stream_us(nbytes: Any, gpu: Gpu) -> Any:
    """us to read and write so many bytes, half of them each, that the kernel before has just touched.

    They come from L2 as far as they fit, and from memory if they are half as much again: an LRU that is too small for a
    loop hits nothing.
    """
    fits = gpu.l2_mb * L2_FOOTPRINT * 1e6
    missed = np.clip(nbytes / fits - 1, 0, 1)
    memory, l2 = 1 / (gpu.hbm_gbs * HBM_SHARE * 1e3), 1 / (gpu.sms * gpu.clock_ghz * L2_SM_BYTES * 1e3)
    return nbytes * (l2 + missed * max(0.0, memory - l2))


def _library_us(wire: Any, tp: int, gpu: Gpu) -> Any:
    """us of one collective of NCCL or gloo: the better of its bandwidth and its low-latency protocol. ``wire`` in bytes."""
    low_latency = (0.205 + 0.07 * min(tp, 8)) * gpu.library_us
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
        return MULTIMEM_START_US + MULTIMEM_RANK_US * tp + wire / (gpu.link_gbs * MULTIMEM_REDUCE_PLATEAU * 1e3)
    return _library_us(rows * (2 * (tp - 1) / tp), tp, gpu)


def fused_us(tokens: Any, hidden: int, tp: int, gpu: Gpu, transport: str, ctas: Any, *, alone: bool = False) -> Any:
    """us of the fused collective: reduce-scatter, residual, RMSNorm of the owned rows, all-gather.

    Args:
        tokens, ctas: ints or int64 arrays that broadcast; ``ctas`` None for the transport's own choice.
        alone: nothing runs beside it: it may start while its predecessor ends, and small batches take the one-shot kernel.
    """
    if tp == 1:
        return norm_us(tokens, hidden, gpu)
    rows = tokens * (hidden * BYTES)
    owned = rows / tp
    if transport == "torch":
        # Two library collectives, and kernels that add N parts and the residual, then norm, on the owned rows.
        passes = owned * ((tp + 6) / (gpu.hbm_gbs * HBM_SHARE * 1e3)) + 2 * gpu.kernel_us
        return passes + 2 * _library_us(owned * (tp - 1), tp, gpu)
    two_shot = two_shot_us(tokens, hidden, tp, gpu, transport, ctas, alone=alone)
    if not alone:
        return two_shot
    one_shot = one_shot_us(tokens, hidden, tp, gpu)
    return np.where(tokens <= oneshot_rows(tp, hidden * BYTES), np.minimum(one_shot, two_shot), two_shot)


def one_shot_us(tokens: Any, hidden: int, tp: int, gpu: Gpu) -> Any:
    """us of the one-shot kernel: every rank sends all of its rows to every other."""
    start = ONESHOT_START_US + ONESHOT_RANK_US * tp
    wire_us = tokens * (hidden * BYTES * (tp - 1)) / (gpu.link_gbs * ONESHOT_PLATEAU * 1e3)
    return (start**ONESHOT_SHARPNESS + wire_us**ONESHOT_SHARPNESS) ** (1 / ONESHOT_SHARPNESS)


def two_shot_us(tokens: Any, hidden: int, tp: int, gpu: Gpu, transport: str, ctas: Any, *, alone: bool = False) -> Any:
    """us of the two-shot kernels, p2p or multimem; arguments as :func:`fused_us`."""
    rows = tokens * (hidden * BYTES)
    owned = rows / tp
    overlapped = ALONE_US if alone else 0.0
    if ctas is None:
        ctas = np.clip(ceil_div(ceil_div(tokens, tp), max(1, ROW_ELEMENTS // hidden)), 1, MOST_ALONE[transport])
    if transport == "multimem":
        start = MULTIMEM_START_US + MULTIMEM_RANK_US * tp - overlapped
        fill = MULTIMEM_FILL_US * tokens / (tokens + MULTIMEM_FILL_ROWS)
        wire_us = rows * (1 + 1 / tp) / (gpu.link_gbs * MULTIMEM_PLATEAU * 1e3)
        cta_us = (owned / (ctas * MULTIMEM_CTA_GBS) + rows / (gpu.link_gbs * MULTIMEM_SWITCH_SHARE)) / 1e3
        crowd = MULTIMEM_CROWD_US * np.maximum(0, ctas - 16) * tokens / (tokens + MULTIMEM_CROWD_ROWS)
        return start + fill + np.maximum(wire_us, cta_us) + crowd
    start = P2P_START_US + P2P_RANK_US * tp - overlapped
    fill = P2P_FILL_US * tokens / (tokens + P2P_FILL_ROWS)
    wire_us = owned * (2 * (tp - 1)) / (gpu.link_gbs * P2P_PLATEAU * 1e3)
    touched = owned * (2 * tp + 2)  # N loads, N stores, the residual read and written
    cta_us = touched / (ctas * P2P_CTA_GBS_PER_GHZ * gpu.clock_ghz * 1e3)
    return start + fill + (wire_us**P2P_SHARPNESS + cta_us**P2P_SHARPNESS) ** (1 / P2P_SHARPNESS)


def cluster(ctas: int | None, gpu: Gpu) -> int | None:
    """Thread blocks per cluster of a collective's launch beside GEMMs; None for none.

    The GEMM library's blocks come in clusters of ``gpu.gemm_cluster``. A lone block of the collective can take one SM of such
    a group and leave the others idle, so that the GEMM's last clusters find no place: with 4 blocks GEMMs of 2048 rows take
    1.85 times as long as alone, in pairs 1.05 (2 H200, told of the other SMs). Larger clusters leave no room for the larger
    ones that some GEMMs have.
    """
    size = gpu.gemm_cluster
    return size if ctas is not None and size > 1 and ctas % size == 0 else None
