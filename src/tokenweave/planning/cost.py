"""What a step costs: stage times, and the makespan of the two streams that run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenweave.models.config import ModelConfig
from tokenweave.models.sharding import shard_of
from tokenweave.planning import comm
from tokenweave.planning.batch import Batch
from tokenweave.planning.hardware import Gpu
from tokenweave.planning.waves import (
    BYTES,
    HBM_SHARE,
    Tiling,
    attention_gemms,
    ceil_div,
    gemm_sms,
    gemm_us,
    mlp_gemms,
    row_step,
)

StageTimes = Sequence[tuple[Any, Any]]
"""Per split (compute, collective): floats, or float64 [n] for n alternatives at once. Any unit."""

TABULATED_TOKENS = 131072  # GEMM times are tabulated up to here at construction; longer steps extend the tables

Block = tuple[Sequence[StageTimes], int]
"""Stages, and how many times they are walked."""


def makespan(blocks: Sequence[Block]) -> Any:
    """When a stage list is done: the end of its last collective, from 0.

    Two streams, each in order. A stage's compute of a split waits for the compute stream and for that split's previous
    collective; its collective waits for the communication stream and for its compute. With one split that is the sum of
    all times; with two, attention(prefix) runs beside collective(suffix, previous stage), and so on.

    Args:
        blocks: e.g. ``[([embedding], 1), ([attention, mlp], layers)]``; every stage has the same number of splits.

    Returns:
        float, or float64 [n]: exact. Once a walk of a block has moved every clock by the same time, so will all others
        of that block, and they are not walked one by one.
    """
    splits = max((len(stages[0]) for stages, _ in blocks if stages), default=0)
    vector = any(isinstance(t, np.ndarray) for stages, _ in blocks for stage in stages for pair in stage for t in pair)
    later: Any = np.maximum if vector else max
    compute: Any = 0.0
    comm_end: Any = 0.0
    ready: list[Any] = [0.0] * splits
    for stages, count in blocks:
        for walk in range(count):
            before = (compute, *ready)
            for stage in stages:
                for index, (work, send) in enumerate(stage):
                    compute = later(compute, ready[index]) + work
                    comm_end = later(comm_end, compute) + send
                    ready[index] = comm_end
            moved = [now - then for now, then in zip((compute, *ready), before, strict=True)]
            if walk + 1 < count and _equal(moved, comm_end, vector):
                jump = moved[0] * (count - walk - 1)
                compute, comm_end, ready = compute + jump, comm_end + jump, [r + jump for r in ready]
                break
    return comm_end


def _equal(moved: list[Any], scale: Any, vector: bool) -> bool:
    if vector:
        return all(bool((abs(m - moved[0]) <= 1e-12 * scale).all()) for m in moved[1:])
    return max(moved) - min(moved) <= 1e-12 * scale


class CostModel:
    """Predicted us of steps of one model on ``tp`` equal GPUs.

    Args:
        config: the model.
        gpu: what each rank runs on.
        tp: ranks.
        transport: ``"multimem"``, ``"p2p"`` or ``"torch"``.

    Attributes:
        gemms: qkv, o, gate_up, down.
        tiling: their tiles and waves.
        ctas: thread blocks to choose from for the fused collective; (None,) where there is no choice.

    Raises:
        ModelError: more ranks than query heads.
    """

    def __init__(self, config: ModelConfig, gpu: Gpu, tp: int, transport: str) -> None:
        self.config, self.gpu, self.tp, self.transport = config, gpu, tp, transport
        self._stages = {"attention": attention_gemms(config, tp), "mlp": mlp_gemms(config, tp)}
        self.gemms = (*self._stages["attention"], *self._stages["mlp"])
        self.tiling = Tiling(self.gemms, gpu)
        self.ctas = comm.cta_choices(transport, gpu, tp)
        shard = shard_of(config, 0, tp)
        self._pair_us = 4 * shard.query.size / (gpu.attention_tflops * 1e6)  # q.k and p.v: 2 FLOP each
        self._hbm = gpu.hbm_gbs * HBM_SHARE * 1e3  # bytes per us
        self._read_us = 2 * BYTES * shard.kv.size / self._hbm  # K and V of one position
        # Rotary embedding and cache write: q, k, v read and written. Activation: gate and up read, one written.
        self._rope_us = 2 * BYTES * (shard.query.size + 2 * shard.kv.size) / self._hbm
        self._activation_us = 3 * BYTES * shard.intermediate.size * max(1, config.experts_per_token) / self._hbm
        self._head_bytes = BYTES * shard.vocab.size * config.hidden
        self._step = row_step(gpu)
        self._sms = np.array(sorted({gemm_sms(gpu, self.held(ctas)) for ctas in self.ctas} | {gemm_sms(gpu, 0)}))
        self._tables: dict[str, np.ndarray] = {}
        self._tabulate(TABULATED_TOKENS)

    def held(self, ctas: int | None) -> int:
        """SMs that GEMMs lose while a fused collective of ``ctas`` CTAs is in flight."""
        return comm.held_sms(ctas, self.gpu, self.tp)

    def _tabulate(self, tokens: int) -> None:
        """us of each stage's two GEMMs together, float64 [choices of SMs, rows]: every row up to a row step, then row steps."""
        step = self._step
        rows = np.concatenate([np.arange(step), np.arange(1, ceil_div(tokens, step) + 1) * step])
        for stage, gemms in self._stages.items():
            per_sms = [np.sum([gemm_us(gemm, rows, int(sms), self.gpu) for gemm in gemms], axis=0) for sms in self._sms]
            self._tables[stage] = np.stack(per_sms)
        self._tabulated = tokens

    def _gemms_us(self, stage: str, tokens: Any, sms: Any) -> Any:
        """Table look-up; rows beyond a row step count as the next multiple of it. int or int64 [...], both alike."""
        if (most := int(np.max(tokens))) > self._tabulated:
            self._tabulate(2 * most)
        step = self._step
        return self._tables[stage][
            np.searchsorted(self._sms, sms), np.where(tokens <= step, tokens, step - 1 + ceil_div(tokens, step))
        ]

    def stage_us(self, rows: Any, attention: tuple[Any, Any], held: Any = 0) -> tuple[Any, Any]:
        """Compute us of (attention, mlp) for a split.

        Args:
            rows: its rows, int or int64 [...].
            attention: its (pairs, cache reads), as :meth:`Batch.attention`.
            held: SMs that the other split's collective holds: one of :meth:`held`'s, int or int64 [...].
        """
        gpu = self.gpu
        usable = gemm_sms(gpu, held)
        pairs, reads = attention
        attend = np.maximum(pairs * (self._pair_us * gpu.sms / np.maximum(1, gpu.sms - held)), reads * self._read_us)
        first = self._gemms_us("attention", rows, usable) + attend + rows * self._rope_us + 2 * gpu.kernel_us
        second = self._gemms_us("mlp", rows, usable) + rows * self._activation_us + gpu.kernel_us
        return first, second

    def _embed_us(self, rows: Any) -> Any:
        return self.gpu.kernel_us + rows * (2 * BYTES * self.config.hidden / self._hbm)

    def head_us(self, sampled: int) -> float:
        """us of the vocabulary projection of the sampled rows: memory or FLOPs, alike in every mode."""
        flops_us = self._head_bytes * sampled / (self.gpu.sustained_tflops * 1e6)  # 2 FLOP per 2-byte weight and row
        return self.gpu.kernel_us + max(self._head_bytes / self._hbm, flops_us)

    def unsplit_us(self, batch: Batch, kind: str, ctas: int | None = None) -> float:
        """us of a whole step on one stream.

        Args:
            batch: the step.
            kind: ``"sequential"``, ``"fused"`` (with ``ctas``) or ``"no_comm"``, the bound: collectives removed, norms
                kept.
        """
        hidden, tokens, layers = self.config.hidden, batch.tokens, self.config.layers
        after, last = {
            "sequential": lambda: (self._sequential_us(tokens), self._sequential_us(tokens, batch.sampled)),
            "fused": lambda: (self.fused_us(tokens, ctas), self.fused_us(batch.sampled, ctas)),
            "no_comm": lambda: (
                comm.norm_us(tokens, hidden, self.gpu),
                comm.norm_us(batch.sampled, hidden, self.gpu),
            ),
        }[kind]()
        attention, mlp = (float(us) for us in self.stage_us(tokens, batch.total_attention))
        layer = [[(attention, after)], [(mlp, after)]]
        blocks: list[Block] = [
            ([[(self._embed_us(tokens), after)]], 1),
            (layer, layers - 1),
            ([layer[0], [(mlp, last)]], 1),
        ]
        return float(makespan(blocks)) + self.head_us(batch.sampled)

    def _sequential_us(self, tokens: int, normed: int | None = None) -> float:
        """All-reduce of all rows and norm of ``normed`` of them (default: all)."""
        whole = comm.sequential_us(tokens, self.config.hidden, self.tp, self.gpu, self.transport)
        if normed is not None:
            whole -= comm.norm_us(tokens - normed, self.config.hidden, self.gpu) - self.gpu.kernel_us
        return float(whole)

    def fused_us(self, tokens: Any, ctas: Any) -> Any:
        """us of one fused collective of ``tokens`` rows."""
        return comm.fused_us(tokens, self.config.hidden, self.tp, self.gpu, self.transport, ctas)

    def woven_us(self, batch: Batch, cuts: np.ndarray, ctas: np.ndarray | None) -> np.ndarray:
        """us of a woven step for each (prefix length, CTAs of the collective), int64 [n] both -> float64 [n].

        ``ctas`` is None where the transport has no such choice.
        """
        layers, sampled = self.config.layers, batch.sampled
        lengths = np.stack([cuts, batch.tokens - cuts])
        # A chunk that is cut has its context read by both halves; the suffix's reads are at least the rest.
        first, every = batch.attention(cuts), batch.total_attention
        pairs, reads = (np.stack([first[i], every[i] - first[i]]) for i in (0, 1))
        held = self.held(None) if ctas is None else ctas
        attention, mlp = self.stage_us(lengths, (pairs, reads), held)
        send, embed = self.fused_us(lengths, ctas), self._embed_us(lengths)
        # The last stage sends the sampled rows alone, the last of each sequence: counted with the suffix.
        nothing, last = self.fused_us(0, ctas), self.fused_us(sampled, ctas)
        layer = [list(zip(attention, send, strict=True)), list(zip(mlp, send, strict=True))]
        blocks: list[Block] = [
            ([list(zip(embed, send, strict=True))], 1),
            (layer, layers - 1),
            ([layer[0], [(mlp[0], nothing), (mlp[1], last)]], 1),
        ]
        return makespan(blocks) + self.head_us(sampled)
