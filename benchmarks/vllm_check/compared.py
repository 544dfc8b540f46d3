"""What two runs of the same requests differ by, and what shows that nothing was compared. The terms are in check.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class NothingCompared(Exception):
    """Answers that would pass any comparison, or that show no mode at work; the message says whose."""


@dataclass(frozen=True)
class Compared:
    """Of requests in two runs; sums and largest values, see the head of this file.

    Attributes:
        difference: of log-probabilities. equal: tokens before each request's first different one. tokens: all. tie: broken.
        parted: requests that have a different one. requests: all.
    """

    difference: float = 0.0
    equal: int = 0
    tokens: int = 0
    tie: float = 0.0
    parted: int = 0
    requests: int = 0

    def __add__(self, more: Compared) -> Compared:
        return Compared(
            max(self.difference, more.difference),
            self.equal + more.equal,
            self.tokens + more.tokens,
            max(self.tie, more.tie),
            self.parted + more.parted,
            self.requests + more.requests,
        )

    def figures(self) -> dict[str, float | None]:
        """For JSON, which has no infinity."""
        return {
            "largest_logprob_difference": round(self.difference, 4),
            "equal_tokens": round(self.equal / self.tokens, 4),
            "parted": round(self.parted / self.requests, 4),
            "largest_tie_broken": round(self.tie, 4) if math.isfinite(self.tie) else None,
        }


def compare(stock: list[Any], other: list[Any]) -> Compared:
    """Two runs of the same requests."""
    found = Compared()
    for a, b in zip(stock, other, strict=True):
        equal, tie = 0, 0.0
        for x, y, known in zip(a.token_ids, b.token_ids, a.logprobs, strict=True):
            if x != y:
                tie = known[x].logprob - known[y].logprob if y in known else math.inf
                break
            equal += 1
        tokens = len(a.token_ids)
        found += Compared(_difference(a.logprobs[0], b.logprobs[0]), equal, tokens, tie, int(equal < tokens), 1)
    return found


def _difference(first: dict[int, Any], second: dict[int, Any]) -> float:
    """The largest one of a token's log-probability, at least: a token that only one run names has at most the least of the other."""
    if not set(first) & set(second):
        return math.inf
    worst = 0.0
    for one, other in ((first, second), (second, first)):
        least = min(named.logprob for named in other.values())
        for token, named in one.items():
            away = abs(named.logprob - other[token].logprob) if token in other else named.logprob - least
            worst = max(worst, away)
    return worst


def check_answers(prompts: list[list[int]], answers: list[Any], of: str) -> None:
    """NothingCompared if a log-probability is not finite, or if those of two prompts are the same."""
    seen: dict[frozenset[tuple[int, float]], int] = {}
    for number, answer in enumerate(answers):
        for position, named in enumerate(answer.logprobs):
            wrong = {token: value.logprob for token, value in named.items() if not math.isfinite(value.logprob)}
            if wrong:
                raise NothingCompared(f"{of}, request {number}, token {position}: log-probabilities are {wrong}")
        first = frozenset((token, value.logprob) for token, value in answer.logprobs[0].items())
        same = seen.setdefault(first, number)
        if prompts[same] != prompts[number]:
            raise NothingCompared(f"{of}: requests {same} and {number} have the same log-probabilities")


def check_steps(steps: Mapping[str, Counter[str]]) -> None:
    """NothingCompared unless stock ran as stock, and fused and woven steps ran where they were asked for."""
    if steps["stock"]:
        raise NothingCompared(f"mode stock ran steps of another: {dict(steps['stock'])}")
    for mode in ("fused", "woven"):
        if not steps[mode][mode]:
            raise NothingCompared(f"mode {mode} ran no {mode} step, but {dict(steps[mode])} and stock's")
