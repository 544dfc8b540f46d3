"""What the parts of a step cost on one rank of one machine: the interface, and the machine as its data sheet describes it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tokenweave.collective.arguments import MAX_RANKS
from tokenweave.errors import RequestError
from tokenweave.models.config import ModelConfig
from tokenweave.planning import comm, gemms
from tokenweave.planning.hardware import HBM_SHARE, Gpu, gpu_by_name, local_gpu
from tokenweave.planning.plan import Scheme, told_schemes
from tokenweave.planning.profile_points import StepPoint
from tokenweave.planning.runtime import GRAPH, Runtime

# What a collective at work beside a GEMM or attention costs it in addition to the SMs that it holds, since both want L2 and
# memory: a share for each of its blocks, and us. And how much later it starts than the compute that it waits for. Measured
# on 2 H200 (benchmarks/results/h200x2-sm-budget.json).
CROWDED, CROWDED_US = 0.004, 2.3
START_US = 1.3


class Costs(Protocol):
    """us of a step's parts on one rank. Rows and the like are ints or numpy arrays that broadcast; so are the results.

    A part's time is that of its kernels in a chain of kernels inside a CUDA graph: launch gap, ramp and drain included.
    What eager launches add is the :class:`Runtime`'s business.

    Attributes:
        gpu: the entry of the table that describes each rank's GPU.
        tp: ranks.
        transport: of the fused collective: ``"multimem"``, ``"p2p"`` or ``"torch"``.
        runtime: how steps are launched.
        measured: GEMM times are this machine's, and say more of a cut than counts of waves do.
    """

    @property
    def measured(self) -> bool: ...

    @property
    def gpu(self) -> Gpu: ...

    @property
    def tp(self) -> int: ...

    @property
    def transport(self) -> str: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """How woven steps may share the GPU; at least one."""

    @property
    def signature(self) -> str:
        """Equal where all figures are equal: ranks must have the same."""

    @property
    def source(self) -> str:
        """Where the figures come from, in a few words."""

    @property
    def steps(self) -> Mapping[StepPoint, float]:
        """us of whole steps, by which the sums of their parts are put right; empty where there is nothing to put right."""

    def held(self, ctas: int | None) -> int:
        """SMs that other kernels lose while a fused collective of so many thread blocks is in flight."""

    def gemm_us(self, m: Any, n: int, k: int, *, sms: int | None = None, held: int = 0, experts: int = 1) -> Any:
        """``[m, k] x [k, n]``, for each of ``experts``, told of ``sms`` SMs while ``held`` others are busy."""

    def attention_us(self, pairs: Any, reads: Any, query: int, kv: int, *, rows: Any = None, held: Any = 0) -> Any:
        """Attention of a split's rows.

        Args:
            pairs: (query, key) pairs. reads: K/V positions read (:meth:`Batch.attention`).
            query, kv: this rank's columns of q, and of k: heads * head_dim.
            rows: whose pairs these are; None where it does not matter much.
            held: SMs that another kernel holds.
        """

    def collective_us(self, tokens: Any, hidden: int, ctas: Any, *, alone: bool = False) -> Any:
        """The fused collective: barriers, reduce-scatter, residual, RMSNorm of the owned rows, all-gather.

        ``alone``: as the engine launches it when nothing runs beside it, the one-shot kernel for small batches included.
        ``ctas`` None: the transport's own choice.
        """

    def all_reduce_us(self, tokens: Any, hidden: int) -> Any:
        """The sequential mode's all-reduce alone."""

    def norm_us(self, tokens: Any, hidden: int) -> Any:
        """Residual add + RMSNorm of all rows."""

    def stream_us(self, nbytes: Any) -> Any:
        """A kernel that does nothing but move bytes: rotary embedding and cache write, activation."""

    def embed_us(self, rows: Any, hidden: int) -> Any:
        """The embedding's compute; with several ranks it looks up this rank's tokens and leaves the others zero."""


@dataclass(frozen=True)
class Machine:
    """:class:`Costs` from a data sheet, and constants fitted to measurements (docs/planning.md).

    Made by :func:`machine_of`, which checks.
    """

    gpu: Gpu
    tp: int
    transport: str
    runtime: Runtime = GRAPH
    measured = False

    @property
    def ctas(self) -> tuple[int | None, ...]:
        """Thread blocks of the fused collective to choose from; (None,) where there is no choice."""
        return comm.cta_choices(self.transport, self.gpu, self.tp)

    @cached_property
    def schemes(self) -> tuple[Scheme, ...]:
        if not any(map(self.held, self.ctas)):
            return tuple(Scheme(ctas, self.cluster(ctas)) for ctas in self.ctas)
        return tuple(scheme for ctas in self.ctas for scheme in told_schemes(ctas, self.cluster(ctas)))

    @cached_property
    def signature(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def steps(self) -> Mapping[StepPoint, float]:
        return {}

    @property
    def source(self) -> str:
        return f"the {self.gpu.name}'s data sheet"

    def cluster(self, ctas: int | None) -> int | None:
        """Thread blocks per cluster to launch such a collective in; None for no clusters."""
        return comm.cluster(ctas, self.gpu)

    def held(self, ctas: int | None) -> int:
        return comm.held_sms(ctas, self.gpu, self.tp)

    def gemm_us(self, m: Any, n: int, k: int, *, sms: int | None = None, held: int = 0, experts: int = 1) -> Any:
        us = gemms.gemm_us(m, n, k, self.gpu, sms=sms, held=held, experts=experts)
        return us * (1 + CROWDED * held) + CROWDED_US if held else us

    def attention_us(self, pairs: Any, reads: Any, query: int, kv: int, *, rows: Any = None, held: Any = 0) -> Any:
        gpu = self.gpu
        tflops = gpu.flash3_tflops if self.runtime.flash3 else gpu.attention_tflops
        math = (
            pairs * (4 * query / (tflops * 1e6) * gpu.sms) / np.maximum(1, gpu.sms - held)
        )  # q.k and p.v: 2 FLOP each
        us = np.maximum(math, reads * (2 * gemms.BYTES * kv / self._hbm)) + gpu.kernel_us
        return us * (1 + CROWDED * held)

    def collective_us(self, tokens: Any, hidden: int, ctas: Any, *, alone: bool = False) -> Any:
        us = comm.fused_us(tokens, hidden, self.tp, self.gpu, self.transport, ctas, alone=alone)
        return us if alone or self.tp == 1 or self.gpu.arch == "cpu" else us + START_US

    def all_reduce_us(self, tokens: Any, hidden: int) -> Any:
        return comm.all_reduce_us(tokens, hidden, self.tp, self.gpu, self.transport)

    def norm_us(self, tokens: Any, hidden: int) -> Any:
        return comm.norm_us(tokens, hidden, self.gpu)

    def stream_us(self, nbytes: Any) -> Any:
        return self.gpu.kernel_us + comm.stream_us(nbytes, self.gpu)

    def embed_us(self, rows: Any, hidden: int) -> Any:
        once = self.stream_us(rows * (2 * gemms.BYTES * hidden))
        return once if self.tp == 1 else 2 * once + 4 * self.gpu.kernel_us  # four kernels on the token ids, and a mask

    @property
    def _hbm(self) -> float:
        return self.gpu.hbm_gbs * HBM_SHARE * 1e3  # bytes per us


def left(costs: Costs, ctas: int | None) -> int | None:
    """SMs that a fused collective of so many thread blocks leaves to GEMMs; None where it holds none."""
    held = costs.held(ctas)
    return int(gemms.gemm_sms(costs.gpu, held)) if held else None


def machine_of(gpu: Gpu | str | None, tp: int = 1, transport: str | None = None, runtime: Runtime = GRAPH) -> Machine:
    """The machine that these describe.

    Args:
        gpu: a :class:`Gpu`, a name of the table, or None for this machine's (the ``cpu`` entry without one).
        tp: ranks.
        transport: of the fused collective; None for the one with the least wire on this GPU.
        runtime: how steps are launched.

    Raises:
        RequestError: an unknown GPU or transport, one that the GPU has no hardware for, tp < 1, or more GPUs than one
            host's transports join.
    """
    if tp < 1:
        raise RequestError(f"tensor parallel size {tp}; expected 1 or more")
    known = local_gpu() if gpu is None else gpu_by_name(gpu) if isinstance(gpu, str) else gpu
    # Of GPUs that are here and run on torch.distributed any number may be planned for; of others nothing is known past a host.
    if tp > MAX_RANKS and known.arch != "cpu" and (gpu is not None or transport != "torch"):
        raise RequestError(
            f"tensor parallel size {tp} on {known.name}; expected at most {MAX_RANKS}: the GPU transports, and what is known of "
            "links, are of the GPUs of one host"
        )
    transport = comm.check_transport(transport or comm.default_transport(known, tp), known)
    return Machine(known, tp, transport, runtime)


def caveat(costs: Costs, config: ModelConfig) -> str | None:
    """What to know of the figures for a model and a machine, where nobody has timed whole steps on several of its GPUs yet, or where
    these took longer than predicted; None for others."""
    if costs.measured or costs.tp == 1 or costs.gpu.arch == "cpu":
        return None
    if config.experts:
        return (
            "predicted: steps of a mixture of experts took a third longer than that, in the median, where they were measured "
            "(docs/planning.md); `tokenweave tune` measures a machine"
        )
    if (costs.gpu.name, costs.tp, costs.transport) == ("h200", 2, "p2p"):
        return None
    return (
        f"predicted: whole steps were measured on 2 h200 over p2p, not yet on {costs.tp} {costs.gpu.name} over "
        f"{costs.transport} (docs/planning.md); `tokenweave tune` measures a machine"
    )
