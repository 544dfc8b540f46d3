"""What is measured, and in which order: few points where times are straight lines, many where GEMMs have steps; and whole
steps, woven ones in the schemes that turn out to be the fastest.

Later phases depend on what earlier ones found. All ranks make the same list, because they are given the same times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenweave.planning.cost import FINE_ROWS, FINE_STEP
from tokenweave.planning.plan import FIRST_GEMMS, GEMMS, Scheme, told_schemes
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
GEMM_ROWS = ((FINE_ROWS, FINE_STEP), (4096, 64), (8192, 128), (16384, 512))  # up to so many rows, in steps of
FEW_ROWS = (1, 16)
BESIDE_ROWS = (512, 1280, 3072)  # of collectives beside GEMMs
LEAST_WOVEN = 128  # tokens of the shortest woven step
TRIED_TOKENS = (1024, 4096)  # of the woven steps that every scheme is tried in
KEPT_SCHEMES = 4
LEAST_BLOCKS = 4  # of a scheme: with fewer, collectives outlast the compute that hides them


@dataclass(frozen=True)
class Setting:
    """What the schedule depends on; the same on all ranks.

    Attributes:
        max_tokens: rows of the longest step.
        experts: of a layer, 1 for dense. experts_per_token: as the model's, 1 for dense.
        blocks: (CTAs, cluster) of the collective to measure; empty where the transport has no choice.
        oneshot_rows: that the one-shot collective takes at once; 0: there is none.
        max_positions: of the K/V cache that attention is measured over.
        layers: of the steps that are measured whole.
    """

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

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """To try for woven steps: with every number of blocks, GEMMs told or not, collectives at once or late."""
        most = max((ctas for ctas, _ in self.blocks), default=0)
        found: list[Scheme] = []
        for ctas, cluster in self.blocks:
            if ctas >= min(LEAST_BLOCKS, most):
                found += [*told_schemes(ctas, cluster if cluster > 1 else None), Scheme(ctas)]
        return tuple(found) or (Scheme(told=FIRST_GEMMS), Scheme())


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


def _gemms(setting: Setting, times: Times) -> Iterator[Point]:
    """By the rows of the step: neighbours run at about the power that such a step does."""
    few = [(name, rows) for rows in FEW_ROWS for name in GEMMS]
    tokens = steps(GEMM_ROWS, setting.max_tokens)
    pairs = [(name, setting.gemm_rows(name, each)) for each in tokens for name in GEMMS]
    yield from (GemmPoint(*pair) for pair in dict.fromkeys([*few, *pairs]))


def _beside(setting: Setting, times: Times) -> Iterator[Point]:
    for tokens in BESIDE_ROWS:
        if tokens <= setting.max_tokens:
            yield from (CollectivePoint("beside", tokens, *blocks) for blocks in setting.blocks)


def _stages(setting: Setting, times: Times) -> Iterator[Point]:
    for tokens in _powers(setting.max_tokens, 64):
        yield from (StagePoint(name, tokens) for name in ("embedding", "attention", "mlp"))


def _woven(setting: Setting, tokens: int, scheme: Scheme) -> StepPoint:
    return StepPoint.woven(tokens, setting.layers, tokens // 2, scheme)


def _schemes(setting: Setting, times: Times) -> Iterator[Point]:
    for tokens in TRIED_TOKENS:
        if tokens <= setting.max_tokens:
            yield from (_woven(setting, tokens, scheme) for scheme in setting.schemes)


def kept_schemes(setting: Setting, times: Times) -> Sequence[Scheme]:
    """Those which together have the fastest steps of the sizes that were tried, the best one first."""
    tried = [tokens for tokens in TRIED_TOKENS if tokens <= setting.max_tokens]
    kept: list[Scheme] = []

    def score(scheme: Scheme) -> float:
        steps = [[_woven(setting, tokens, each) for each in (*kept, scheme)] for tokens in tried]
        return sum(math.log(max(1e-9, min(times.get(step, 1e9) for step in each))) for each in steps)

    while len(kept) < min(KEPT_SCHEMES, len(setting.schemes)):
        kept.append(min((scheme for scheme in setting.schemes if scheme not in kept), key=score))
    return kept


def _whole(setting: Setting, times: Times, sizes: Sequence[int]) -> Iterator[Point]:
    kept = kept_schemes(setting, times)
    for tokens in sizes:
        for mode in ("sequential", "fused", "no_comm"):
            yield StepPoint(mode, tokens, setting.layers)
        if tokens >= LEAST_WOVEN:
            yield from (_woven(setting, tokens, scheme) for scheme in kept)


def _steps(setting: Setting, times: Times) -> Iterator[Point]:
    yield from _whole(setting, times, [1, 16, *_powers(setting.max_tokens, 64)])


def _steps_between(setting: Setting, times: Times) -> Iterator[Point]:
    yield from _whole(
        setting, times, [n * 3 // 2 for n in _powers(setting.max_tokens, 64) if n * 3 // 2 < setting.max_tokens]
    )


PHASES = (
    Phase("collectives", _collectives),
    Phase("small kernels and launches", _small),
    Phase("attention", _attention),
    Phase("GEMMs", _gemms),
    Phase("collectives beside GEMMs", _beside),
    Phase("whole stages", _stages),
    Phase("schemes of woven steps", _schemes),
    Phase("whole steps", _steps),
    Phase("whole steps of sizes between", _steps_between, optional=True),
)


def planned(setting: Setting) -> int:
    """About how many points there will be, before any time is known."""
    return len({point for phase in PHASES for point in phase.points(setting, {})})
