"""What a step of one model costs in each mode: its stages' times from a machine's, put together by the makespan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tokenweave.models.config import ModelConfig
from tokenweave.models.sharding import shard_of
from tokenweave.planning.batch import Batch, runs_of
from tokenweave.planning.machine import Costs
from tokenweave.planning.makespan import Block, Part, makespan
from tokenweave.planning.plan import Scheme
from tokenweave.planning.waves import BYTES, Gemm, Tiling, attention_gemms, gemm_sms, mlp_gemms, row_step

MOST_TOKENS = 2**22  # of a step: as far as the tables reach; no GPU holds more at once
STEPPED_TOKENS = 16384  # up to here the tables have a column for every row step, beyond so many for every doubling:
COLUMNS_PER_DOUBLING = 64
FINE_ROWS, FINE_STEP = 512, 32
"""Up to so many rows `tune` measures GEMMs in finer steps than tiles are high, since libraries choose among many kernels
there. Between them times are taken for straight lines: whole steps of 330 tokens took what lies between 320 and 352, not
what 352 takes."""

# Kernels of a step's stages and of what ends them; what an eager step launches.
EMBED_LAUNCHES, HEAD_LAUNCHES = 6, 2
ATTENTION_LAUNCHES = 4  # qkv, rotary embedding and cache write, attention, o
MLP_LAUNCHES = 3  # gate_up, activation, down
END_LAUNCHES = {"sequential": 2, "fused": 1, "no_comm": 1}  # all-reduce and norm; one kernel; norm


class CostModel:
    """Predicted us of one model's steps.

    Args:
        config: the model.
        costs: what the parts of a step cost on each rank.

    Attributes:
        gemms: qkv, o, gate_up, down.
        tiling: their tiles and waves.
        schemes: to choose from for woven steps.

    Raises:
        ModelError: more ranks than query heads.
    """

    def __init__(self, config: ModelConfig, costs: Costs) -> None:
        self.config, self.costs = config, costs
        self.gpu, self.tp, self.transport, self.schemes = costs.gpu, costs.tp, costs.transport, costs.schemes
        attention, (gate_up, down) = attention_gemms(config, self.tp), mlp_gemms(config, self.tp)
        self._pieces = {"attention": attention, "gate_up": (gate_up,), "down": (down,)}
        self.gemms = (*attention, gate_up, down)
        self.tiling = Tiling(self.gemms, self.gpu)
        shard = shard_of(config, 0, self.tp)
        self._query, self._kv = shard.query.size, shard.kv.size
        # Bytes a row. Rotary embedding and cache write: q, k, v read and written. Activation: gate and up read, one written.
        self._rope_bytes = 2 * BYTES * (self._query + 2 * self._kv)
        self._activation_bytes = 3 * BYTES * shard.intermediate.size * max(1, config.experts_per_token)
        self._head = Gemm("head", shard.vocab.size, config.hidden)
        # Of each scheme: SMs held, whether collectives start late, and the row of ``_sends``.
        self._scheme_held = np.array([costs.held(scheme.ctas) for scheme in self.schemes])
        self._scheme_late = np.array([scheme.late for scheme in self.schemes])
        self._ctas = list(dict.fromkeys(scheme.ctas for scheme in self.schemes))
        self._scheme_send = np.array([self._ctas.index(scheme.ctas) for scheme in self.schemes])
        self._held = sorted({0, *self._scheme_held.tolist()})
        self._straight = FINE_ROWS if costs.measured else 0  # rows up to which times are straight lines between columns
        self._tables: dict[str, np.ndarray] = {}
        self._tabulate()
        # A plan asks for the same few of these several times.
        self._whole = functools.lru_cache(maxsize=64)(self._whole_us)
        self.head_us = functools.lru_cache(maxsize=4096)(self._head_us)
        self._scales = self._measured_scales()

    def held(self, ctas: int | None) -> int:
        """SMs that GEMMs lose while a fused collective of ``ctas`` CTAs is in flight."""
        return self.costs.held(ctas)

    def _tabulate(self) -> None:
        """us by rows: one column for every row up to a row step, then for (fine and) row steps, then for equal ratios.

        Pieces of stages, all but the attention itself: float64 [2, held SMs, rows], [0] alone, [1] beside the held SMs.
        Collectives: float64 [CTAs, rows].
        """
        costs, step = self.costs, row_step(self.gpu)
        octaves = (MOST_TOKENS // STEPPED_TOKENS).bit_length() - 1
        ratios = np.exp2(np.arange(1, octaves * COLUMNS_PER_DOUBLING + 1) / COLUMNS_PER_DOUBLING)
        beyond = np.round(STEPPED_TOKENS * ratios / step).astype(np.int64) * step
        stepped = np.arange(step, STEPPED_TOKENS + 1, step)
        fine = np.arange(FINE_STEP, self._straight + 1, FINE_STEP)
        rows = np.unique(np.concatenate([np.arange(step), fine, stepped, beyond]))
        self._rows = rows
        streamed = {"attention": self._rope_bytes, "gate_up": 0, "down": self._activation_bytes}
        launches = {"attention": ATTENTION_LAUNCHES, "gate_up": 1, "down": MLP_LAUNCHES - 1}
        self._alone = np.zeros((1, len(rows)))
        for piece, gemms in self._pieces.items():
            table = np.zeros((2, len(self._held), len(rows)))
            for gemm in gemms:
                for index, held in enumerate(self._held):
                    alone, beside = self._gemm_table(gemm, rows, held)
                    table[0, index] += alone
                    table[1, index] += beside
                    self._alone[0] += 0 if held else alone
            if streamed[piece]:
                table += costs.stream_us(rows * streamed[piece])
            self._tables[piece] = table + costs.runtime.gap_us * launches[piece]
        self._sends = np.stack([costs.collective_us(rows, self.config.hidden, ctas) for ctas in self._ctas])
        self._sends += costs.runtime.gap_us * END_LAUNCHES["fused"]

    def _gemm_table(self, gemm: Gemm, rows: np.ndarray, held: int) -> tuple[np.ndarray, np.ndarray]:
        """us for each number of rows, told of what ``held`` SMs leave: alone, and beside them."""
        used = np.minimum(max(1, gemm.experts), np.maximum(1, rows * gemm.experts_per_token))
        each = gemm.rows(rows)

        def us(target: int | None, busy: int) -> np.ndarray:
            many: np.ndarray = np.zeros(len(rows))
            for experts in np.unique(used):
                of = used == experts
                many[of] = self.costs.gemm_us(each[of], gemm.n, gemm.k, sms=target, held=busy, experts=int(experts))
            return many

        if not held:
            return (free := us(None, 0)), free
        left = int(gemm_sms(self.gpu, held))
        alone = us(left, 0)
        return alone, np.maximum(alone, us(left, held))  # never faster beside a collective than alone

    def _column(self, rows: Any) -> tuple[Any, Any]:
        """The first column that has as many rows; what share of the way back to the one before it ``rows`` lie."""
        column = self._rows.searchsorted(rows)
        upper, lower = self._rows[column], self._rows[np.maximum(column - 1, 0)]
        return column, (upper - rows) / np.maximum(upper - lower, 1)

    def _stepped(self, rows: Any) -> tuple[Any, Any]:
        """As :meth:`_column`, for what GEMMs take: as the next row step, since tiles are as high, where lines are not straight."""
        column, back = self._column(rows)
        return column, np.where((rows > self._straight) & (rows <= STEPPED_TOKENS), 0.0, back)

    def _between(self, table: np.ndarray, first: Any, column: Any, back: Any) -> Any:
        """Table look-up, linear between columns."""
        upper = table[first, column]
        return upper - back * (upper - table[first, np.maximum(column - 1, 0)])

    def stage_us(
        self, rows: Any, attention: tuple[Any, Any], held: Any = 0, late: Any = False
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Compute us of (attention, mlp) for a split, each (alone, beside a collective, what runs before that starts).

        Args:
            rows: its rows, int or int64 [...].
            attention: its (pairs, cache reads), as :meth:`Batch.attention`.
            held: SMs that the other split's collective holds: one of :meth:`held`'s, int or int64 [...].
            late: the collective lets gate_up finish, which then has all SMs, before it starts: bool or bool [...].
        """
        column, back = self._stepped(rows)
        of_held = np.searchsorted(self._held, held)
        attend = [
            self.costs.attention_us(*attention, self._query, self._kv, rows=rows, held=busy) for busy in (0, held)
        ]
        table = {
            piece: [self._between(t[i], of_held, column, back) for i in (0, 1)] for piece, t in self._tables.items()
        }
        first = (table["attention"][0] + attend[0], table["attention"][1] + attend[1], 0.0)
        gate_up, down = table["gate_up"], table["down"]
        at_once = (gate_up[0] + down[0], gate_up[1] + down[1], 0.0)
        if not np.any(late):
            return first, at_once
        delayed = (*down, self._between(self._tables["gate_up"][0], 0, column, back))
        return first, tuple(np.where(late, one, other) for one, other in zip(delayed, at_once, strict=True))

    def cut_us(self, tokens: int, cuts: Any) -> Any:
        """What the GEMMs of a layer's halves take longer than the whole's, on all SMs: int or int64 [...] -> float64 [...]."""
        parts = [self._between(self._alone, 0, *self._stepped(rows)) for rows in (cuts, tokens - cuts, tokens)]
        return parts[0] + parts[1] - parts[2]

    def _sends_us(self, rows: np.ndarray, which: np.ndarray) -> np.ndarray:
        """us of fused collectives beside other work, by their row in ``_sends``."""
        return self._between(self._sends, which, *self._column(rows))

    def _whole_us(self, batch: Batch) -> tuple[float, float, float]:
        """Compute us of an uncut batch: embedding, attention, mlp."""
        (attention, *_), (mlp, *_) = self.stage_us(batch.tokens, batch.total_attention)
        return float(self._embed_us(batch.tokens)), float(attention), float(mlp)

    def _head_us(self, sampled: int) -> float:
        """us of the vocabulary projection of the sampled rows and of the step itself, alike in every mode."""
        runtime = self.costs.runtime
        gemm = self.costs.gemm_us(sampled, self._head.n, self._head.k)
        return float(gemm) + runtime.gap_us * HEAD_LAUNCHES + runtime.step_us

    def _launched_us(self, splits: int, kind: str) -> float:
        """Host us to launch a whole step: it can be no shorter."""
        layer = ATTENTION_LAUNCHES + MLP_LAUNCHES + 2 * END_LAUNCHES[kind]
        edges = EMBED_LAUNCHES + END_LAUNCHES[kind]
        return self.costs.runtime.host_us * (splits * (self.config.layers * layer + edges) + HEAD_LAUNCHES)

    def unsplit_us(self, batch: Batch, kind: str) -> float:
        """us of a whole step on one stream.

        Args:
            batch: the step.
            kind: ``"sequential"``, ``"fused"`` or ``"no_comm"``: collectives removed, norms kept.
        """
        us = self._unsplit_us(batch, kind, self.config.layers) * self.scale(kind, batch.tokens)
        return max(us, self._launched_us(1, kind)) + self.head_us(batch.sampled)

    def _unsplit_us(self, batch: Batch, kind: str, layers: int) -> float:
        """Of so many layers, as the parts have it."""
        tokens = batch.tokens
        end: Callable[[int, int], float] = {
            "sequential": lambda sent, normed: self.sequential_us(sent, normed),
            "fused": lambda _, normed: float(self.fused_us(normed)),
            "no_comm": lambda _, normed: float(self.costs.norm_us(normed, self.config.hidden)),
        }[kind]
        gap = self.costs.runtime.gap_us * END_LAUNCHES[kind]
        after, last = end(tokens, tokens) + gap, end(tokens, batch.sampled) + gap
        embed, attention, mlp = self._whole(batch)
        first = [Part(attention, attention, after)]
        layer = [first, [Part(mlp, mlp, after)]]
        blocks: list[Block] = [
            ([[Part(embed, embed, after)]], 1),
            (layer, layers - 1),
            ([first, [Part(mlp, mlp, last)]], 1),
        ]
        return float(makespan(blocks))

    def _embed_us(self, rows: Any) -> Any:
        return self.costs.embed_us(rows, self.config.hidden) + self.costs.runtime.gap_us * EMBED_LAUNCHES

    def sequential_us(self, tokens: int, normed: int | None = None) -> float:
        """us of an all-reduce of all rows and the norm of ``normed`` of them (default: all)."""
        hidden = self.config.hidden
        norm = self.costs.norm_us(tokens if normed is None else normed, hidden)
        return float(self.costs.all_reduce_us(tokens, hidden) + norm)

    def fused_us(self, tokens: Any, ctas: int | None = None) -> Any:
        """us of one fused collective of ``tokens`` rows; with nothing beside it where no ``ctas`` are given."""
        return self.costs.collective_us(tokens, self.config.hidden, ctas, alone=ctas is None)

    def woven_us(self, batch: Batch, cuts: np.ndarray, schemes: np.ndarray) -> np.ndarray:
        """us of a woven step for each (prefix length, scheme): float64 [n].

        Args:
            cuts: int64 [n]. schemes: int64 [n], indices of :attr:`schemes`.
        """
        scales = np.array([self.scale(scheme, batch.tokens) for scheme in self.schemes])
        us = self._woven_us(batch, cuts, schemes, self.config.layers) * scales[schemes]
        return np.maximum(us, self._launched_us(2, "fused")) + self.head_us(batch.sampled)

    def _woven_us(self, batch: Batch, cuts: np.ndarray, schemes: np.ndarray, layers: int) -> Any:
        """Of so many layers, as the parts have it."""
        sampled = batch.sampled
        lengths = np.stack([cuts, batch.tokens - cuts])
        # A chunk that is cut has its context read by both halves; the suffix's reads are at least the rest.
        first, every = batch.attention(cuts), batch.total_attention
        pairs, reads = (np.stack([first[i], every[i] - first[i]]) for i in (0, 1))
        held, late, which = (of[schemes] for of in (self._scheme_held, self._scheme_late, self._scheme_send))
        attention, mlp = self.stage_us(lengths, (pairs, reads), held, late)
        send, embed = self._sends_us(lengths, which), self._embed_us(lengths)
        # The last stage sends the sampled rows alone, the last of each sequence: counted with the suffix.
        nothing, last = self._sends_us(np.array([[0], [sampled]]), which)

        def stage(times: tuple[Any, ...], sends: Any) -> list[Part]:
            alone, beside, lead = times
            leads = lead if np.ndim(lead) else (lead, lead)
            return [Part(*parts) for parts in zip(alone, beside, sends, leads, strict=True)]

        layer = [stage(attention, send), stage(mlp, send)]
        blocks: list[Block] = [
            ([stage((embed, embed, 0.0), send)], 1),
            (layer, layers - 1),
            ([layer[0], stage(mlp, (nothing, last))], 1),
        ]
        return makespan(blocks)

    def scale(self, kind: str | Scheme, tokens: int) -> float:
        """How often measured steps of so many tokens take the time that their parts have together.

        Parts are measured in short chains, one at a time. Whole steps draw more power for longer, and under a power limit
        their clocks are lower; and what runs beside a collective is slower by what its scheme costs.

        Args:
            kind: ``"sequential"``, ``"fused"``, ``"no_comm"``, or a woven step's scheme. One that was not measured scales as 1.
        """
        if (known := self._scales.get(kind)) is None:
            return 1.0
        return float(np.interp(math.log(tokens), *known))

    def _measured_scales(self) -> dict[str | Scheme, tuple[np.ndarray, np.ndarray]]:
        """Kind -> logarithms of tokens, ascending, and the scales there: float64 [n] each."""
        found: dict[str | Scheme, dict[int, float]] = {}
        for point, us in self.costs.steps.items():
            batch = Batch(runs_of([(point.tokens, 0)]))
            if point.split is None:
                kind: str | Scheme = point.mode
                parts = self._unsplit_us(batch, point.mode, point.layers)
            elif (kind := point.scheme) in self.schemes:
                which = np.array([self.schemes.index(kind)])
                parts = float(self._woven_us(batch, np.array([point.split]), which, point.layers)[0])
            else:
                continue
            found.setdefault(kind, {})[point.tokens] = us / parts
        return {
            kind: (np.log(sorted(scales)), np.array([scales[tokens] for tokens in sorted(scales)]))
            for kind, scales in found.items()
        }
