"""How the next token is chosen from a row of logits.

A draw takes one uniform number of the request's own generator, and the inverse of the row's cumulative distribution in
integers: sums of integers are exact in any order, so that every rank and every device draws the same token, whatever
else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tokenweave.errors import RequestError

_ONE = 2.0**40  # probability 1 as an integer; a vocabulary of 2**20 keeps sums exact in int64 and even in float64


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and where it ends.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: in (0, 1], the smallest set of most likely tokens with at least this probability is drawn from.
        top_k: this many most likely tokens are drawn from; -1 or 0 for all.
        max_tokens: most tokens to generate; None for as many as the context and the cache allow.
        seed: of this request's draws; None takes one from the LLM's seed and the request's number.
        stop: strings that end the request; the text ends before them.
        stop_token_ids: tokens that end the request, beside the model's end-of-sequence tokens.
        ignore_eos: True: end-of-sequence tokens do not end the request.

    Raises:
        RequestError: a value out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 16
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # vLLM's users pass one string, or lists.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids))

        def expect(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise RequestError(f"SamplingParams: {name}={getattr(self, name)!r}; expected {expected}")

        expect(_is_number(self.temperature) and self.temperature >= 0, "temperature", "a number >= 0 (0: greedy)")
        expect(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number > 0 and <= 1 (1: no limit)")
        expect(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer >= 1, or -1 for no limit")
        expect(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "an integer >= 1, or None for as many as fit",
        )
        expect(self.seed is None or _is_int(self.seed), "seed", "an integer or None")
        stop, ids = self.stop, self.stop_token_ids
        expect(
            isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop),
            "stop",
            "strings that are not empty",
        )
        expect(isinstance(ids, tuple) and all(_is_int(t) and t >= 0 for t in ids), "stop_token_ids", "token ids >= 0")
        expect(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """The next token of each row.

    Args:
        logits: float32 [n, vocab], the same bits on every rank.
        params: n.
        uniforms: n numbers in [0, 1), each from its request's generator; unused where ``params`` is greedy.

    Returns:
        n token ids. A row's token depends on this row's arguments alone.
    """
    tokens = logits.argmax(dim=-1).tolist()
    # Ranked and unranked draws map the same uniform number to different tokens: a row's own parameters decide which.
    for ranked in (False, True):
        rows = [i for i, p in enumerate(params) if not p.greedy and ranked == _needs_ranking(p)]
        if rows:
            drawn = _draw(logits[rows], [params[i] for i in rows], [uniforms[i] for i in rows], ranked)
            for i, token in zip(rows, drawn, strict=True):
                tokens[i] = token
    return tokens


def _needs_ranking(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.top_k > 0


def _draw(logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float], ranked: bool) -> list[int]:
    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    # The largest logit is taken off first: a tiny temperature then gives -inf for the others and never NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / column([max(p.temperature, 1e-6) for p in params])
    order = None
    if ranked:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        limits = column([p.top_k if p.top_k > 0 else logits.shape[-1] for p in params], torch.int64)
        scaled = scaled.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= limits, -math.inf)
    weights = (scaled.softmax(dim=-1).double() * _ONE).to(torch.int64)
    if ranked:
        # A token is kept while those before it have less than top_p; so the first one always is.
        before = weights.cumsum(dim=-1) - weights
        kept = before < (weights.sum(dim=-1, keepdim=True).double() * column([p.top_p for p in params], torch.float64))
        weights = weights * kept
    cumulative = weights.cumsum(dim=-1)
    target = (cumulative[:, -1:].double() * column(uniforms, torch.float64)).to(torch.int64)
    # The first index whose cumulative weight exceeds the target: it has weight > 0, so it was not masked.
    index = torch.searchsorted(cumulative, target, right=True)
    return (index if order is None else order.gather(-1, index))[:, 0].tolist()


def _tuple(value: object) -> object:
    """() of None; what has no items is left as it is, for the checks to refuse."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
