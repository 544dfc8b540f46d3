"""Why a plan was chosen, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from tokenweave.planning.plan import Plan


@dataclass(frozen=True)
class Waves:
    """Waves of the four GEMMs of a layer, all counted in the uncut batch's tile shapes, on the same SMs.

    Attributes:
        whole: of the uncut batch; on the SMs that the collective leaves if the plan is woven, else on all.
        prefix, suffix: of the halves; None without a cut.
        by_gemm: GEMM name -> (whole, prefix, suffix), or (whole,) without a cut.
        tiles: GEMM name -> rows and columns of its tiles.
    """

    whole: int
    prefix: int | None
    suffix: int | None
    by_gemm: dict[str, tuple[int, ...]]
    tiles: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Cut:
    """A cut that was considered.

    Attributes:
        split: rows in the prefix. ctas: thread blocks of the collective.
        waves: of (prefix, suffix), counted as :class:`Waves`.
        cost_us: what the GEMMs of a layer lose by it, on all SMs and without communication.
        ms: of the step, predicted.
    """

    split: int
    ctas: int | None
    waves: tuple[int, int]
    cost_us: float
    ms: float


@dataclass(frozen=True)
class Explanation:
    """Why a plan was chosen.

    Attributes:
        tokens: rows of the step.
        plan: the choice.
        woven: the best woven plan, chosen or not; None where a cut is impossible or vetoed.
        waves: of the choice.
        predicted_ms: mode (and ``"no_comm"``, the reference without communication) -> ms of the whole step.
        reason: one sentence.
        cuts: the best few that were considered, each in its best scheme: the fastest first of those whose
            GEMMs lose little, then the others.
        source: where the figures come from.
    """

    tokens: int
    plan: Plan
    woven: Plan | None
    waves: Waves
    predicted_ms: dict[str, float]
    reason: str
    cuts: tuple[Cut, ...]
    source: str

    def as_json(self, full: bool = False) -> dict[str, object]:
        """Plain values: tokens, mode, split, ctas, gemm_sms ("gate_up/prefix" -> SMs), waves, predicted_ms.

        Args:
            full: also cluster, start_at, waves and tiles of each GEMM, reason, source, and cuts.
        """
        more = {
            "cluster": self.plan.cluster,
            "start_at": sorted(self.plan.start_at),
            "waves_by_gemm": {gemm: list(counts) for gemm, counts in self.waves.by_gemm.items()},
            "tiles": {gemm: list(tile) for gemm, tile in self.waves.tiles.items()},
            "reason": self.reason,
            "source": self.source,
            "cuts": [
                {"split": cut.split, "ctas": cut.ctas, "waves": list(cut.waves), "cost_us": round(cut.cost_us, 2)}
                | {"ms": round(cut.ms, 4)}
                for cut in self.cuts
            ],
        }
        return {
            "tokens": self.tokens,
            "mode": str(self.plan.mode),
            "split": self.plan.split,
            "ctas": self.plan.ctas,
            "gemm_sms": {f"{gemm}/{split}": sms for (gemm, split), sms in self.plan.gemm_sms.items()},
            "waves": {"whole": self.waves.whole, "prefix": self.waves.prefix, "suffix": self.waves.suffix},
            "predicted_ms": {mode: round(ms, 4) for mode, ms in self.predicted_ms.items()},
            **(more if full else {}),
        }
