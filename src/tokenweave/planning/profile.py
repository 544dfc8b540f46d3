"""Costs of a step's parts from a measured table.

Between measured rows a GEMM's time runs as the analytical model's does, so its steps are kept (the cost model draws straight
lines between few rows, cost.FINE_ROWS). Nothing falls with more work, but for GEMMs for which the library chooses a slower
kernel at some numbers of rows: on H200 448 rows can take 1.7 times as long as 512, and a cut that knows avoids them. What was
not measured falls back to the analytical model, scaled by the nearest measurement.

GEMMs and attention are those of a GPU without anything else on it. What a collective beside them costs is in the measured
woven steps, scheme by scheme: chains of a GEMM beside a collective say too little of it (docs/tuning.md).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from tokenweave.errors import ProfileError
from tokenweave.models.config import ModelConfig
from tokenweave.models.sharding import shard_of
from tokenweave.planning.cost import MOST_TOKENS
from tokenweave.planning.machine import Machine
from tokenweave.planning.plan import TOLD, Scheme
from tokenweave.planning.profile_curves import Curve, Surface
from tokenweave.planning.profile_points import (
    AllReducePoint,
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    OverheadPoint,
    StagePoint,
    StepPoint,
    StreamPoint,
)
from tokenweave.planning.profile_table import Table
from tokenweave.planning.waves import BYTES, Gemm, attention_gemms, mlp_gemms

GEMM_NOISE = 0.04
"""Falls of a GEMM's time by a smaller share are taken for noise."""

_Key = tuple[int, int, int]  # n, k, experts


class Profile:
    """A table as :class:`tokenweave.planning.machine.Costs`. A pure function of the table and the analytical machine.

    Args:
        table: complete.
        config: the model that it was measured for.
        base: the analytical machine, with the table's ranks and transport.

    Attributes:
        gpu, tp, transport, runtime: the base's.
        table, base: as given.

    Raises:
        ProfileError: the table lacks what a plan needs, or has a step that no plan makes.
    """

    def __init__(self, table: Table, config: ModelConfig, base: Machine) -> None:
        self.table, self.base = table, base
        self.gpu, self.tp, self.transport, self.runtime = base.gpu, base.tp, base.transport, base.runtime
        self.measured = True
        self._hidden = config.hidden
        shard = shard_of(config, 0, base.tp)
        self._query, self._kv = shard.query.size, shard.kv.size
        gemms = (*attention_gemms(config, base.tp), *mlp_gemms(config, base.tp))
        self._overhead = {point.name: us for point, us in table.of(OverheadPoint).items()}
        try:
            self._gemms = {_key(gemm): self._gemm(gemm) for gemm in gemms}
            self._collectives = _collectives(table)
            self._norm = Curve({p.rows: us for p, us in table.of(StreamPoint).items() if p.name == "norm"})
            self._all_reduce = Curve({point.tokens: us for point, us in table.of(AllReducePoint).items()})
            self._stream = Curve(_streams(table, config, self._query + 2 * self._kv, shard.intermediate.size))
            self._chunks, self._decodes = self._attention(table.of(AttentionPoint))
        except (ValueError, KeyError) as error:
            raise ProfileError(
                f"the table lacks points that a plan needs: {error}; run `tokenweave tune` again"
            ) from None
        self._steps = table.of(StepPoint)
        blocks = {ctas for _, ctas in self._collectives} | {0}
        if strange := [step for step in self._steps if not _possible(step, blocks)]:
            raise ProfileError(f"the table has a step that no plan makes: {strange[0]}; run `tokenweave tune` again")

    @property
    def signature(self) -> str:
        """Equal on ranks that will make equal plans."""
        return hashlib.sha256(f"{self.table.digest} {self.base.signature}".encode()).hexdigest()

    @property
    def source(self) -> str:
        """Where the figures come from, in a few words."""
        return f"measured on this machine, {self.table.info.get('date', 'at an unknown time')}"

    @property
    def steps(self) -> Mapping[StepPoint, float]:
        """As :attr:`Costs.steps`."""
        return self._steps

    @functools.cached_property
    def schemes(self) -> tuple[Scheme, ...]:
        """Those of steps that were measured from the shortest to the longest; without any, the analytical machine's."""
        tokens: dict[Scheme, set[int]] = {}
        for step in self._steps:
            if step.split is not None:
                tokens.setdefault(step.scheme, set()).add(step.tokens)
        every = set().union(*tokens.values())
        return tuple(scheme for scheme, at in tokens.items() if {min(every), max(every)} <= at) or self.base.schemes

    def held(self, ctas: int | None) -> int:
        """As :meth:`Costs.held`."""
        return self.base.held(ctas)

    def gemm_us(self, m: Any, n: int, k: int, *, sms: int | None = None, held: int = 0, experts: int = 1) -> Any:
        """As :meth:`Costs.gemm_us`, with nothing beside it and on all SMs."""
        curve = self._gemms.get((n, k, experts))
        if curve is None:  # of no layer: say, the vocabulary's projection
            return self.base.gemm_us(m, n, k, experts=experts) * self._usual_ratio
        return curve(m)

    def attention_us(self, pairs: Any, reads: Any, query: int, kv: int, *, rows: Any = None, held: Any = 0) -> Any:
        """As :meth:`Costs.attention_us` with nothing beside it, of the query rows behind the pairs; where they are not given,
        those that one causal chunk with these pairs and reads has."""
        if (query, kv) != (self._query, self._kv):
            return self.base.attention_us(pairs, reads, query, kv, rows=rows)
        pairs, reads = np.asarray(pairs, dtype=np.float64), np.asarray(reads, dtype=np.float64)
        if rows is None:
            twice = 2 * reads + 1
            rows = (twice - np.sqrt(np.maximum(0.0, twice * twice - 8 * pairs))) / 2
        rows = np.maximum(rows, 1)
        keys = pairs / rows
        us = np.maximum(self._chunks(rows, keys), reads * self._read_us)
        alone = pairs <= reads  # every row reads keys of its own: decodes
        if self._decodes is not None and np.any(alone):
            us = np.where(alone, self._decodes(rows, keys), us)
        return np.where(pairs > 0, us, 0.0)[()]

    def collective_us(self, tokens: Any, hidden: int, ctas: Any, *, alone: bool = False) -> Any:
        """As :meth:`Costs.collective_us`; ``alone``: in a fused step, with nothing beside it and, for few rows, in one shot."""
        if hidden != self._hidden or not self._collectives:
            return self.base.collective_us(tokens, hidden, ctas)
        if ctas is None or np.ndim(ctas) == 0:
            return self._one_collective(tokens, hidden, None if ctas is None else int(ctas), alone)
        tokens, ctas = np.broadcast_arrays(tokens, ctas)
        out = np.empty(tokens.shape)
        for each in np.unique(ctas):
            out[ctas == each] = self._one_collective(tokens[ctas == each], hidden, int(each), alone)
        return out

    def _one_collective(self, tokens: Any, hidden: int, ctas: int | None, alone: bool) -> Any:
        known = self._collectives
        kind = ("default", 0) if ctas is None else ("alone" if alone else "beside", ctas)
        if kind in known:
            us = known[kind](tokens)
        else:  # as the nearest number of blocks that was measured
            near = min((c for k, c in known if k == kind[0]), key=lambda c: abs(c - kind[1]), default=None)
            if near is None:
                return self.base.collective_us(tokens, hidden, ctas)
            us = known[kind[0], near](tokens) * (
                self.base.collective_us(tokens, hidden, ctas) / self.base.collective_us(tokens, hidden, near)
            )
        if alone and ("oneshot", 0) in known:
            oneshot = known["oneshot", 0]
            us = np.where(np.asarray(tokens) <= oneshot.x[-1], oneshot(tokens), us)[()]
        return us

    def all_reduce_us(self, tokens: Any, hidden: int) -> Any:
        """As :meth:`Costs.all_reduce_us`: what was measured of both together, less the norm."""
        if hidden != self._hidden:
            return self.base.all_reduce_us(tokens, hidden)
        return np.maximum(self._all_reduce(tokens) - self._norm(tokens), 0.0)[()]

    def norm_us(self, tokens: Any, hidden: int) -> Any:
        """As :meth:`Costs.norm_us`."""
        return self._norm(np.asarray(tokens) * (hidden / self._hidden))

    def stream_us(self, nbytes: Any) -> Any:
        """As :meth:`Costs.stream_us`."""
        return self._stream(nbytes)

    def embed_us(self, rows: Any, hidden: int) -> Any:
        """As :meth:`Costs.embed_us`."""
        measured = self.stage_us("embedding") if hidden == self._hidden else None
        return self.base.embed_us(rows, hidden) if measured is None else measured(rows)

    def overhead_us(self, name: str) -> float | None:
        """A measured :class:`OverheadPoint`, None if it was not measured."""
        return self._overhead.get(name)

    def stage_us(self, name: str) -> Curve | None:
        """Whole stages as they were measured, over rows of one prompt: to judge the sum of the parts by."""
        points = {p.rows: us for p, us in self.table.of(StagePoint).items() if p.name == name}
        return Curve(points) if points else None

    @functools.cached_property
    def _usual_ratio(self) -> float:
        """Measured to analytical, of the free GEMMs."""
        ratios = []
        for (n, k, experts), curve in self._gemms.items():
            rows = curve.x.astype(np.int64)
            ratios += list(curve(rows) / self.base.gemm_us(rows, n, k, experts=experts))
        return float(np.median(ratios))

    def _gemm(self, gemm: Gemm) -> Curve:
        points = {point.rows: us for point, us in self.table.of(GemmPoint).items() if point.name == gemm.name}
        if len(points) < 2:
            raise ValueError(f"fewer than two rows of the {gemm.name} GEMM")

        def analytical(m: Any) -> Any:
            return self.base.gemm_us(m, gemm.n, gemm.k, experts=gemm.experts)

        return Curve(points, analytical, GEMM_NOISE)

    def _attention(self, times: Mapping[AttentionPoint, float]) -> tuple[Surface, Surface | None]:
        chunks: dict[tuple[float, float], float] = {}
        decodes: dict[tuple[float, float], float] = {}
        self._read_us = 0.0
        for point, us in times.items():
            each = point.rows // point.sequences
            if each == 1:
                decodes[point.rows, point.context + 1] = us
            else:
                chunks[point.rows, point.context + (each + 1) / 2] = us
        # The memory's bound: what a read position takes where most of them are read.
        reads, us = max(((rows * length, us) for (rows, length), us in decodes.items()), default=(1.0, 0.0))
        self._read_us = us / reads
        launch = min(times.values())
        start = min(launch, self._overhead.get("kernel", launch))
        return Surface(chunks, start), Surface(decodes, start) if decodes else None


def _key(gemm: Gemm) -> _Key:
    return gemm.n, gemm.k, gemm.experts


def _possible(step: StepPoint, blocks: Set[int]) -> bool:
    """Whether a plan can be for such a step; collectives of so many ``blocks`` were measured."""
    if step.tokens > MOST_TOKENS:
        return False
    scheme = step.scheme
    if step.split is None:
        return step.mode in ("sequential", "fused", "no_comm") and scheme == Scheme()
    launches = step.ctas in blocks and step.ctas % step.cluster == 0 and step.cluster <= max(1, step.ctas)
    return step.mode == "woven" and step.split < step.tokens and launches and set(scheme.told) <= set(TOLD)


def _collectives(table: Table) -> dict[tuple[str, int], Curve]:
    """(kind, CTAs) -> curve over tokens. "beside" was measured at few sizes: the times alone, scaled."""
    points: dict[tuple[str, int], dict[float, float]] = {}
    for point, us in table.of(CollectivePoint).items():
        points.setdefault((point.kind, point.ctas), {})[point.tokens] = us
    curves = {key: Curve(times) for key, times in points.items() if key[0] != "beside"}
    for ctas in [ctas for kind, ctas in points if kind == "alone"]:
        alone, beside = points["alone", ctas], points.get(("beside", ctas), {})
        at = sorted(beside)
        slower = [max(1.0, beside[tokens] / float(curves["alone", ctas](tokens))) for tokens in at] or [1.0]
        scaled = {
            tokens: us * float(np.interp(np.log(tokens), np.log(at), slower) if at else slower[0])
            for tokens, us in alone.items()
        }
        curves["beside", ctas] = Curve(scaled)
    return curves


def _streams(table: Table, config: ModelConfig, qkv: int, inner: int) -> dict[float, float]:
    """Bytes -> us of the kernels that memory bounds. Rope reads and writes q, k and v; the activation reads two, writes one."""
    row_bytes = {"rope": 2 * BYTES * qkv, "activation": 3 * BYTES * inner * max(1, config.experts_per_token)}
    times: dict[float, float] = {}
    for point, us in table.of(StreamPoint).items():
        if point.name in row_bytes:
            times[point.rows * row_bytes[point.name]] = us
    return times
