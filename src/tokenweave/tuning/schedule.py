"""What is measured, and in which order: few points where times are straight lines, many where GEMMs have steps.

Later phases depend on what earlier ones found. All ranks make the same list, because they are given the same times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tokenweave.planning.plan import GEMMS
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

OVERHEADS = ("kernel", "fork", "replay_host", "layer_host", "woven_layer_host")
# (up to so many rows, in steps of): free GEMMs, and GEMMs beside a collective, which are halves of a step.
FREE_ROWS = ((4096, 64), (8192, 128), (16384, 512))
HELD_ROWS = ((2048, 128), (4096, 256), (8192, 512), (16384, 2048))
FINE_HELD_ROWS = ((2048, 64), (4096, 128), (8192, 256))
FEW_ROWS = (1, 16, 32)
TARGET_ROWS = (512, 768, 1280, 1920, 3072, 4608)  # where SM targets are compared: some are a wave or two of most GEMMs
STEP_BLOCKS = 4  # of the collective in the woven steps that are measured whole
LOWER_TARGETS = (0, 4)  # SMs below those that the collective leaves; its blocks can break up the GEMM's clusters


@dataclass(frozen=True)
class Setting:
    """What the schedule depends on; the same on all ranks.

    Attributes:
        sms: of the GPU. gemm_cluster: SMs that the GEMM library takes at a time; targets are multiples of it.
        max_tokens: rows of the longest step.
        experts: of a layer, 1 for dense. experts_per_token: as the model's, 1 for dense.
        blocks: (CTAs, cluster) of the collective to measure; empty where the transport has no choice.
        oneshot_rows: that the one-shot collective takes at once; 0: there is none.
        max_positions: of the K/V cache that attention is measured over.
        layers: of the steps that are measured whole.
    """

    sms: int
    gemm_cluster: int
    max_tokens: int
    experts: int
    experts_per_token: int
    blocks: tuple[tuple[int, int], ...]
    oneshot_rows: int
    max_positions: int
    layers: int

    def gemm_rows(self, name: str, tokens: int) -> int:
        """Rows of the GEMM (of each expert's) in a step of so many tokens."""
        if self.experts == 1 or name in ("qkv", "o"):
            return tokens
        return -(-tokens * self.experts_per_token // self.experts)

    def targets(self, ctas: int) -> tuple[int | None, ...]:
        """SM targets to try beside so many CTAs: what they leave, somewhat less, and none."""
        left = [(self.sms - ctas - less) // self.gemm_cluster * self.gemm_cluster for less in LOWER_TARGETS]
        return (*(sms for sms in dict.fromkeys(left) if sms > 0), None)


Times = Mapping[Point, float]


@dataclass(frozen=True)
class Phase:
    """A part of the schedule.

    Attributes:
        name: for people. points: of a setting, given the times so far.
        optional: only makes the table finer: left out once time is up.
    """

    name: str
    points: Callable[[Setting, Times], Iterator[Point]]
    optional: bool = False


def steps(ranges: tuple[tuple[int, int], ...], most: int) -> list[int]:
    """``((256, 64), (512, 128))`` -> [64, 128, 192, 256, 384, 512], up to ``most``, which is the last."""
    found: list[int] = []
    start = 0
    for stop, step in ranges:
        found += range(start + step, min(stop, most) + 1, step)
        start = stop
    return sorted({*found, most}) if most not in found else found


def _powers(most: int, first: int = 1) -> list[int]:
    return sorted({min(most, 1 << n) for n in range(first.bit_length() - 1, most.bit_length() + 1)})


def _collectives(setting: Setting, times: Times) -> Iterator[Point]:
    sizes = _powers(setting.max_tokens)
    for tokens in sizes:
        yield StreamPoint("norm", tokens)
        yield AllReducePoint(tokens)
        yield CollectivePoint("default", tokens)
        for ctas, cluster in setting.blocks:
            if tokens >= 16 or tokens == 1:
                yield CollectivePoint("alone", tokens, ctas, cluster)
    for tokens in _powers(setting.oneshot_rows) if setting.oneshot_rows else ():
        yield CollectivePoint("oneshot", tokens)


def _small(setting: Setting, times: Times) -> Iterator[Point]:
    yield from (OverheadPoint(name) for name in OVERHEADS)
    for rows in [1, *_powers(setting.max_tokens, 64)]:
        yield StreamPoint("rope", rows)
        yield StreamPoint("activation", rows)


def _attention(setting: Setting, times: Times) -> Iterator[Point]:
    for rows in _powers(setting.max_tokens, 64):
        sizes = {1, rows // 256} if rows >= 1024 else {1}  # one prompt, and many short ones
        yield from (AttentionPoint(rows, 0, sequences) for sequences in sorted(sizes))
        yield from (
            AttentionPoint(rows, context)
            for context in (2048, 8192, 32768)
            if context + rows <= setting.max_positions and rows * context <= 2**27
        )
    for sequences in (1, 8, 64, 256):
        for length in (128, 1024, 8192, 32768):
            if sequences * length <= setting.max_positions:
                yield AttentionPoint(sequences, length - 1, sequences)


def _gemm_rows(setting: Setting, ranges: tuple[tuple[int, int], ...]) -> list[tuple[str, int]]:
    """(GEMM, its rows), by the rows of the step: neighbours run at about the power that such a step does."""
    pairs = [(name, setting.gemm_rows(name, tokens)) for tokens in steps(ranges, setting.max_tokens) for name in GEMMS]
    return list(dict.fromkeys(pairs))


def _free(setting: Setting, times: Times) -> Iterator[Point]:
    few = [(name, rows) for rows in FEW_ROWS if rows < 64 for name in GEMMS]
    yield from (GemmPoint(*pair) for pair in dict.fromkeys([*few, *_gemm_rows(setting, FREE_ROWS)]))


def _targets(setting: Setting, times: Times) -> Iterator[Point]:
    for tokens in TARGET_ROWS:
        if tokens <= setting.max_tokens:
            for name in GEMMS:
                rows = setting.gemm_rows(name, tokens)
                for ctas, _ in setting.blocks:
                    yield from (GemmPoint(name, rows, ctas, target) for target in setting.targets(ctas))


def best_target(setting: Setting, times: Times, name: str, ctas: int) -> int | None:
    """The SM target with which a GEMM was fastest beside so many CTAs, over the rows that were tried."""

    def score(target: int | None) -> float:
        tried = [GemmPoint(name, setting.gemm_rows(name, tokens), ctas, target) for tokens in TARGET_ROWS]
        return sum(math.log(max(times[point], 1e-9)) for point in tried if point in times)

    return min(setting.targets(ctas), key=score)


def _held(ranges: tuple[tuple[int, int], ...]) -> Callable[[Setting, Times], Iterator[Point]]:
    def points(setting: Setting, times: Times) -> Iterator[Point]:
        best = {(n, ctas): best_target(setting, times, n, ctas) for n in GEMMS for ctas, _ in setting.blocks}
        for name, rows in _gemm_rows(setting, ranges):
            for ctas, _ in setting.blocks:
                yield GemmPoint(name, rows, ctas, best[name, ctas])

    return points


def _left_alone(setting: Setting, times: Times) -> Iterator[Point]:
    """GEMMs that are told of fewer SMs although the collective has ended; and collectives beside GEMMs."""
    for tokens in TARGET_ROWS[::2]:
        if tokens <= setting.max_tokens:
            for ctas, cluster in setting.blocks:
                for name in GEMMS:
                    if (target := best_target(setting, times, name, ctas)) is not None:
                        yield GemmPoint(name, setting.gemm_rows(name, tokens), 0, target)
                yield CollectivePoint("beside", tokens, ctas, cluster)


def _stages(setting: Setting, times: Times) -> Iterator[Point]:
    for tokens in _powers(setting.max_tokens, 64):
        yield from (StagePoint(name, tokens) for name in ("embedding", "attention", "mlp"))


def _steps(setting: Setting, times: Times) -> Iterator[Point]:
    for tokens in [1, 16, *_powers(setting.max_tokens, 64)]:
        for kind in ("sequential", "fused", "no_comm"):
            yield StepPoint(kind, tokens, setting.layers)
        if tokens >= 128:
            ctas = min(
                (blocks for blocks, _ in setting.blocks), key=lambda blocks: abs(blocks - STEP_BLOCKS), default=0
            )
            for kind in ("woven", "woven late") if ctas else ("woven",):
                yield StepPoint(kind, tokens, setting.layers, tokens // 2, ctas)


PHASES = (
    Phase("collectives", _collectives),
    Phase("small kernels and launches", _small),
    Phase("attention", _attention),
    Phase("GEMMs", _free),
    Phase("SM targets", _targets),
    Phase("GEMMs beside collectives", _held(HELD_ROWS)),
    Phase("one beside the other", _left_alone),
    Phase("whole stages", _stages),
    Phase("whole steps", _steps),
    Phase("finer steps beside collectives", _held(FINE_HELD_ROWS), optional=True),
)


def planned(setting: Setting) -> int:
    """About how many points there will be, before any time is known."""
    return len({point for phase in PHASES for point in phase.points(setting, {})})
