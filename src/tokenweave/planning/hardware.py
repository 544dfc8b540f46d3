"""GPUs as numbers: data sheet figures, and what can really be sustained of them.

``sustained_tflops`` and ``attention_tflops`` are what long runs of GEMMs and of attention reach under the power limit.
They are measured for h200 (docs/planning.md); elsewhere they are the same share of the data sheet's figure, unless the
comment says otherwise, and a measured table should replace them where there is a machine to measure.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tokenweave.errors import RequestError

log = logging.getLogger(__name__)

HBM_SHARE = 0.82  # of the data sheet's bandwidth, in streaming kernels: 3.9 of 4.8 TB/s measured on H200
L2_FOOTPRINT = 1.3  # bytes read and written by a kernel that still run at L2's rate, as a multiple of its size
L2_SM_BYTES = 25.0  # a clock and SM, from and to L2 together: 6.5 TB/s measured on H200


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU (or the host CPU).

    Attributes:
        name: key of the table.
        arch: ``"sm_90"`` and so on, or ``"cpu"``; decides which GEMM tiles there are.
        sms: streaming multiprocessors.
        clock_ghz: boost clock.
        peak_tflops: dense bf16, data sheet.
        sustained_tflops: dense bf16 in large tiles while steps follow each other; without launches and partly filled waves.
        attention_tflops: bf16 of a long prefill's attention with torch's kernel, half of the square counted (causal).
        flash3_tflops: the same with FlashAttention-3; ``attention_tflops`` where there is no such kernel.
        hbm_gbs: memory bandwidth, GB/s.
        l2_mb: L2 cache, MB.
        link_gbs: to the other GPUs, GB/s per direction, data sheet.
        multicast: whether the switch can reduce and multicast (NVLink SHARP).
        gemm_cluster: thread blocks per cluster of the GEMM library's kernels; they take SMs in these multiples.
        library_us: fixed cost of one collective of the communication library (NCCL, gloo) in its bandwidth protocol.
        kernel_us: launch, ramp and drain of one kernel in a chain of them.
    """

    name: str
    arch: str
    sms: int
    clock_ghz: float
    peak_tflops: float
    sustained_tflops: float
    attention_tflops: float
    flash3_tflops: float
    hbm_gbs: float
    l2_mb: float
    link_gbs: float
    multicast: bool
    gemm_cluster: int = 1
    library_us: float = 20.0
    kernel_us: float = 2.0


GPUS = {
    gpu.name: gpu
    for gpu in (
        # H100 SXM5 data sheet: 989.4 TFLOP/s, 3.35 TB/s, NVLink 4 at 900 GB/s both directions together. 132 SMs, 1.98 GHz
        # boost, 50 MB L2: Hopper architecture white paper. Sustained: 7 % under the H200's fits published prefill times.
        Gpu("h100", "sm_90", 132, 1.98, 989.4, 655.0, 280.0, 560.0, 3350.0, 50.0, 450.0, True, gemm_cluster=2),
        # H200 SXM data sheet: the H100's chip with 4.8 TB/s. Sustained figures measured (2026-11, 700 W, torch SDPA).
        Gpu("h200", "sm_90", 132, 1.98, 989.4, 705.0, 280.0, 560.0, 4800.0, 50.0, 450.0, True, gemm_cluster=2),
        # H20 data sheet: 148 TFLOP/s, 4.0 TB/s, NVLink 900 GB/s; 78 SMs, 60 MB L2. So few FLOP/s stay within the power
        # limit: 90 % sustained is an assumption.
        Gpu("h20", "sm_90", 78, 1.98, 148.0, 133.0, 100.0, 110.0, 4000.0, 60.0, 450.0, True, gemm_cluster=2),
        # A100 SXM4 80GB data sheet: 312 TFLOP/s, 2.039 TB/s, NVLink 3 at 600 GB/s; 108 SMs, 1.41 GHz, 40 MB L2: Ampere
        # white paper. No multicast. 78 % sustained is an assumption (less bound by power than Hopper).
        Gpu("a100", "sm_80", 108, 1.41, 312.0, 243.0, 150.0, 150.0, 2039.0, 40.0, 300.0, False),
        # HGX B200 data sheet: 2.25 PFLOP/s dense, 7.7 TB/s, NVLink 5 at 1.8 TB/s; 148 SMs, 1.965 GHz and 126 MB L2 as
        # the device reports them.
        Gpu("b200", "sm_100", 148, 1.965, 2250.0, 1550.0, 640.0, 1270.0, 7700.0, 126.0, 900.0, True, gemm_cluster=2),
        # L40S data sheet: 362.05 TFLOP/s, 864 GB/s, PCIe 4.0 x16 at 64 GB/s both directions together; 142 SMs, 2.52 GHz,
        # 96 MB L2: Ada white paper. No NVLink, no multicast.
        Gpu("l40s", "sm_89", 142, 2.52, 362.05, 249.0, 102.0, 102.0, 864.0, 96.0, 32.0, False),
        # Not a data sheet: the order of magnitude of a few cores and gloo over loopback, as one "SM". It lets a machine
        # without GPUs run every path; CPU times prove nothing about GPUs.
        Gpu("cpu", "cpu", 1, 2.5, 0.3, 0.15, 0.05, 0.05, 20.0, 32.0, 2.0, False, library_us=150.0, kernel_us=5.0),
    )
}
"""Name -> GPU."""


def gpu_by_name(name: str) -> Gpu:
    """The table's entry, in any case. Raises RequestError, with the names there are, for another one."""
    try:
        return GPUS[name.strip().casefold()]
    except KeyError:
        raise RequestError(f"no GPU {name!r} in the table; expected one of {', '.join(GPUS)}") from None


def local_gpu() -> Gpu:
    """This machine's current GPU, or the ``cpu`` entry where torch finds none.

    A GPU that is not in the table (another SKU, a MIG slice) is described by the entry of the same architecture, scaled
    to its number of SMs, with a log line. Raises RequestError for an architecture that no entry has.
    """
    import torch

    if not torch.cuda.is_available():
        return GPUS["cpu"]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = f"sm_{properties.major}{properties.minor}"
    return describe(properties.name, arch, properties.multi_processor_count)


def describe(device: str, arch: str, sms: int) -> Gpu:
    """The entry for a device as the driver names it, e.g. ``("NVIDIA H200", "sm_90", 132)``; see :func:`local_gpu`."""
    words = device.casefold().replace("-", " ").split()
    named = [gpu for gpu in GPUS.values() if gpu.name in words]
    related = named or [gpu for gpu in GPUS.values() if gpu.arch == arch]
    if not related:
        raise RequestError(
            f"{device} ({arch}, {sms} SMs) is not in the planner's table; name the entry that is closest to it: "
            f"{', '.join(GPUS)}"
        )
    entry = related[0]
    if named and entry.sms == sms:
        return entry
    share = sms / entry.sms
    log.warning("planner: %s (%s, %d SMs) is described by %s scaled to its SMs", device, arch, sms, entry.name)
    return replace(
        entry,
        sms=sms,
        peak_tflops=entry.peak_tflops * share,
        sustained_tflops=entry.sustained_tflops * share,
        attention_tflops=entry.attention_tflops * share,
        flash3_tflops=entry.flash3_tflops * share,
    )
