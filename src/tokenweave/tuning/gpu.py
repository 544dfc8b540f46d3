"""Measures the parts of a step on this rank's GPU.

Every call is the one that the engine makes, on a model of random weights. Weights take turns, so that they come from
memory as in a model of many layers and not from the L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tokenweave.bench.steps import PrefillSteps, norm_alone
from tokenweave.collective import allreduce_rmsnorm, fused_allreduce_rmsnorm
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.cuda.sm_budget import sm_budget
from tokenweave.engine.batch import Chunk, splits_of
from tokenweave.engine.kv_cache import KVCache
from tokenweave.models import ModelConfig, kernels
from tokenweave.models.attention_cuda import attend_packed
from tokenweave.models.inputs import PackedSequences
from tokenweave.models.llama import gated
from tokenweave.models.mixtral import MixtureMLP
from tokenweave.models.rotary import Rotary
from tokenweave.planning import Mode, Plan
from tokenweave.planning.machine import Machine, left
from tokenweave.planning.plan import GEMMS, Scheme, woven_plan
from tokenweave.planning.profile_points import (
    AllReducePoint,
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    OverheadPoint,
    Point,
    StagePoint,
    StepPoint,
    StreamPoint,
)
from tokenweave.tuning.chains import Call, Chains
from tokenweave.tuning.rig import MAX_POSITIONS, rig_of
from tokenweave.tuning.schedule import Setting


class GpuPieces:
    """:class:`tokenweave.tuning.tuner.Pieces` of one rank.

    Args:
        config: the model. max_tokens: rows of the longest step.
        group, device: of the ranks.
        machine: of a transport; gives estimates, by which chains are made long enough.

    Attributes:
        setting: for the schedule. machine: for the transport that was found.

    Raises:
        RequestError: as :func:`tokenweave.tuning.rig.rig_of`.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        group: dist.ProcessGroup,
        device: torch.device,
        machine: Callable[[str], Machine],
    ) -> None:
        self._rig = rig_of(config, max_tokens, group, device)
        self._model, self._group, self._device, self._most = self._rig.model, group, device, max_tokens
        self._steps = PrefillSteps(self._model, max_tokens, group, device)
        self._workspace = self._steps.workspace
        self.machine = machine(self._workspace.transport)
        cache = KVCache(
            self._model.config.layers,
            max_tokens,
            self._model.kv_heads_local,
            config.head_dim,
            torch.bfloat16,
            device,
        )
        self._stages = self._model.stages(cache)
        self._rotary = Rotary(config, min(config.context, max_tokens), device)
        self._epilogue = self._stages[1].epilogue
        self._tiny = torch.zeros(1, device=device)
        self._chains = Chains(group, device)
        memory = self._workspace.symmetric
        self.setting = Setting(
            max_tokens=max_tokens,
            experts=max(1, config.experts),
            experts_per_token=max(1, config.experts_per_token),
            blocks=tuple((c, self.machine.cluster(c) or 1) for c in self.machine.ctas if c is not None),
            oneshot_rows=0 if memory is None else min(memory.inbox_rows, max_tokens),
            max_positions=MAX_POSITIONS,
            layers=len(self._model.layers),
        )

    def warm_up(self, seconds: float = 0.5) -> None:
        """Brings clocks and temperature to where they are under load."""
        end = time.monotonic() + seconds
        calls = self._gemm_calls("gate_up", self._rig.rows("gate_up", min(4096, self._most)))
        while time.monotonic() < end:
            with torch.inference_mode():
                for call in calls:
                    call()
            torch.cuda.synchronize()

    @torch.inference_mode()
    def measure(self, point: Point) -> list[float]:
        """As :meth:`Pieces.measure`."""
        if isinstance(point, GemmPoint):
            return self._measure_gemm(point)
        if isinstance(point, CollectivePoint):
            return self._measure_collective(point)
        if isinstance(point, AllReducePoint):
            return self._measure_all_reduce(point)
        if isinstance(point, AttentionPoint):
            return self._measure_attention(point)
        if isinstance(point, StreamPoint):
            call, moved = self._stream(point)
            return self._chains.alone(self._chains.compute, [call], float(self.machine.stream_us(moved)))
        if isinstance(point, StagePoint):
            return self._measure_stage(point)
        if isinstance(point, StepPoint):
            return self._measure_step(point)
        return self._measure_overhead(point)

    def close(self) -> None:
        """Drops graphs and gives back the workspace: NCCL ends only without graphs of its kernels."""
        self._workspace.check()
        self._chains.close()
        self._steps.close()

    @property
    def uncovered(self) -> int:
        """Samples in which the work beside a chain ended first."""
        return self._chains.uncovered

    # ---- GEMMs

    def _gemm_us(self, name: str, rows: int) -> float:
        gemm = self._rig.gemms[name]
        return float(self.machine.gemm_us(rows, gemm.n, gemm.k, experts=gemm.experts))

    def _gemm_calls(self, name: str, rows: int) -> list[Call]:
        """One for each layer's weights."""
        return [self._gemm_call(name, layer, rows, None) for layer in self._model.layers]

    def _gemm_call(self, name: str, layer: Any, rows: int, target: int | None) -> Call:
        attention, mlp = layer.attention, layer.mlp
        if isinstance(mlp, MixtureMLP) and name in ("gate_up", "down"):
            experts = mlp.router.shape[0]
            total = min(rows * experts, self._rig.x.shape[0])
            ends = (torch.arange(1, experts + 1, device=self._device) * rows).clamp(max=total).to(torch.int32)
            x, weights = (self._rig.x, mlp.gate_up) if name == "gate_up" else (self._rig.activations, mlp.down)
            call: Call = lambda: torch._grouped_mm(x[:total], weights.transpose(1, 2), offs=ends)  # noqa: E731
        elif name == "qkv":
            call = lambda: linear(self._rig.x[:rows], attention.qkv, attention.qkv_bias)  # noqa: E731
        elif name == "gate_up":
            call = lambda: linear(self._rig.x[:rows], mlp.gate_up, mlp.gate_up_bias)  # noqa: E731
        else:
            x, weights = (self._rig.heads, attention.output) if name == "o" else (self._rig.activations, mlp.down)
            out = self._workspace.buffer(rows)
            call = lambda: torch.mm(x[:rows], weights.t(), out=out)  # noqa: E731

        def told() -> None:
            with sm_budget(target):
                call()

        return told

    def _measure_gemm(self, point: GemmPoint) -> list[float]:
        calls = self._gemm_calls(point.name, point.rows)
        return self._chains.alone(self._chains.compute, calls, self._gemm_us(point.name, point.rows))

    # ---- collectives

    def _collective_us(self, tokens: int, ctas: int | None) -> float:
        blocks = ctas or max((c for c in self.machine.ctas if c is not None), default=None)
        return float(self.machine.collective_us(tokens, self._model.config.hidden, blocks))

    def _collective(self, point: CollectivePoint, region: int = 0) -> Call:
        rows, residual = self._workspace.buffer(point.tokens, region=region), self._rig.residual[: point.tokens]
        epilogue = self._epilogue
        given: dict[str, Any] = {"layout": "replicated"} if point.kind == "oneshot" else {}
        if point.ctas:
            given = {"ctas": point.ctas, "cluster": point.cluster if point.cluster > 1 else None}
        return lambda: fused_allreduce_rmsnorm(
            rows, residual, epilogue.weight, epilogue.eps, self._workspace, bias=epilogue.bias, **given
        )

    def _measure_collective(self, point: CollectivePoint) -> list[float]:
        self._rig.residual.normal_(0, 1)
        call = self._collective(point, region=1)
        us = self._collective_us(point.tokens, point.ctas or None)
        if point.kind != "beside":
            return self._chains.alone(self._chains.comm, [call], us)
        target = left(self.machine, point.ctas)
        rows = {name: self._rig.rows(name, point.tokens) for name in self._rig.gemms}
        beside = [self._gemm_call(name, self._model.layers[0], rows[name], target) for name in self._rig.gemms]
        each = sum(self._gemm_us(name, rows[name]) for name in self._rig.gemms)
        return self._chains.beside(self._chains.comm, [call], us, self._chains.compute, beside, each)

    def _measure_all_reduce(self, point: AllReducePoint) -> list[float]:
        e, rows, residual = self._epilogue, self._workspace.buffer(point.tokens), self._rig.residual[: point.tokens]
        us = float(self.machine.all_reduce_us(point.tokens, self._model.config.hidden))

        def call() -> None:
            allreduce_rmsnorm(rows, residual, e.weight, e.eps, self._workspace, bias=e.bias)

        return self._chains.alone(self._chains.comm, [call], us)

    # ---- between the GEMMs

    def _measure_attention(self, point: AttentionPoint) -> list[float]:
        each = point.rows // point.sequences
        length = point.context + each
        starts = torch.arange(point.sequences + 1, device=self._device, dtype=torch.int32)
        lengths = torch.full((point.sequences,), length, device=self._device, dtype=torch.int32)
        packed = PackedSequences(starts * each, starts * length, lengths, each, length)
        queries = self._rig.qkv[: point.rows, : self._rig.query_slots]
        keys, values = self._rig.keys, self._rig.values
        pairs = point.sequences * (each * point.context + each * (each + 1) / 2)
        columns = (
            self._rig.query_slots * self._model.config.head_dim,
            self._model.kv_heads_local * self._model.config.head_dim,
        )
        us = float(self.machine.attention_us(pairs, point.sequences * length, *columns))
        return self._chains.alone(self._chains.compute, [lambda: attend_packed(queries, keys, values, packed)], us)

    def _stream(self, point: StreamPoint) -> tuple[Call, float]:
        """The kernel, and about how many bytes it moves."""
        rows, c = point.rows, self._model.config
        if point.name == "norm":
            x, residual = self._workspace.buffer(rows), self._rig.residual[:rows]
            return lambda: add_rmsnorm(x, residual, self._epilogue), 8.0 * rows * c.hidden
        if point.name == "activation":
            gate_up = self._rig.gate_up[: rows * max(1, c.experts_per_token)]
            return lambda: gated(gate_up), 1.5 * gate_up.nbytes
        qkv, attention = self._rig.qkv[:rows], self._model.layers[0].attention
        tables = (self._rotary.cosines, self._rotary.sines)
        positions = torch.arange(rows, device=self._device) % tables[0].shape[0]
        cache_rows = torch.arange(rows, device=self._device)
        keys, values = self._rig.keys, self._rig.values
        return lambda: kernels.rope_cache(
            qkv,
            keys,
            values,
            self._rig.query_slots,
            tables,
            attention.qk_norm,
            attention.norm_eps,
            positions,
            cache_rows,
        ), 2.0 * qkv.nbytes

    def _measure_stage(self, point: StagePoint) -> list[float]:
        ids = torch.randint(self._model.config.vocab, (point.rows,), generator=torch.Generator().manual_seed(0))
        chunk = Chunk(0, 0, tuple(ids.tolist()), 0, True)
        (split,) = splits_of([chunk], Plan(Mode.SEQUENTIAL), self._rig.residual, self._model.packs)
        out, x = self._workspace.buffer(point.rows), self._rig.x[: point.rows]
        if point.name == "embedding":
            stages = self._stages[:1]
        else:
            stages = [s for s in self._stages if s.name.startswith(point.name)]
        given = None if point.name == "embedding" else x
        calls: list[Call] = [lambda stage=s: stage.compute(given, split.inputs, out) for s in stages]  # type: ignore[misc]
        names = {"attention": ("qkv", "o"), "mlp": ("gate_up", "down")}.get(point.name, ())
        us = 20.0 + sum(self._gemm_us(name, self._rig.rows(name, point.rows)) for name in names)
        return self._chains.alone(self._chains.compute, calls, us)

    def _measure_step(self, point: StepPoint) -> list[float]:
        if point.mode == "no_comm":
            walk = self._steps.of_collective("no_comm", "norm", None, point.tokens, norm_alone).walk
        elif point.split is None:
            walk = self._steps.of_plan(point.mode, "whole", Plan(Mode(point.mode)), point.tokens).walk
        else:
            plan = self._woven_plan(point.split, point.scheme)
            walk = self._steps.of_plan(point.mode, str(point.scheme), plan, point.tokens).walk
        layer = sum(self._gemm_us(name, self._rig.rows(name, point.tokens)) for name in GEMMS)
        us = point.layers * (layer + 2 * self._collective_us(point.tokens, None))
        return self._chains.sustained(self._chains.compute, [walk], us)

    # ---- overheads

    def _measure_overhead(self, point: OverheadPoint) -> list[float]:
        if point.name == "kernel":
            return self._chains.alone(self._chains.compute, [lambda: self._tiny.add_(0)], 20.0)
        if point.name == "fork":
            return self._chains.alone(self._chains.compute, [self._fork], 20.0)
        plan = Plan(Mode.FUSED) if point.name != "woven_layer_host" else self._woven_plan(32, self.setting.schemes[0])
        walk = self._steps.of_plan(str(plan.mode), point.name, plan, 64).walk
        layers = len(self._model.layers)
        if point.name != "replay_host":
            return self._chains.host_us(walk, layers)
        graph = self._chains.captured(self._chains.compute, [walk], 1)
        return self._chains.host_us(graph.replay, 1)

    def _woven_plan(self, split: int, scheme: Scheme) -> Plan:
        return woven_plan(split, scheme, left(self.machine, scheme.ctas))

    def _fork(self) -> None:
        """A side stream takes part, as a woven step's collective does: two empty kernels, one after the other."""
        current, side = torch.cuda.current_stream(), self._chains.comm.stream
        self._tiny.add_(0)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._tiny.add_(0)
        current.wait_stream(side)
