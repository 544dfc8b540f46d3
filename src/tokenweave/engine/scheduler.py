"""Which tokens the next step computes: continuous batching with chunked prefill.

Decodes come first, then prompts in the order in which the requests came, in chunks, until the step is full. A request
takes its cache rows when it starts and keeps them until it ends, so that a started request always finishes; the others
wait in line. Deterministic: ranks that add the same requests schedule the same steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenweave.engine.batch import Chunk
from tokenweave.engine.kv_cache import RowAllocator
from tokenweave.engine.sampling import SamplingParams
from tokenweave.errors import RequestError


@dataclass(frozen=True)
class NewRequest:
    """What all ranks are given: a request before it is scheduled.

    Attributes:
        number: unique within the engine's life.
        prompt_token_ids: at least one.
        params: how to sample and where to stop.
        seed: of the draws, already resolved, so that all ranks draw the same.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(eq=False)
class Request:
    """A request on its way.

    Attributes:
        token_ids: the prompt and what was generated.
        prompt_tokens: how many of them are the prompt.
        max_tokens: most tokens to generate, after clipping to the context and the cache.
        computed: positions that are in the cache once the scheduled step has run.
        cache_start: its first cache row; None while it waits.
        generator: of its draws.
    """

    number: int
    params: SamplingParams
    token_ids: list[int]
    prompt_tokens: int
    max_tokens: int
    generator: random.Random = field(repr=False)
    computed: int = 0
    cache_start: int | None = None

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


class Scheduler:
    """The waiting line, the running requests, and the cache rows that they hold.

    Args:
        cache_rows: token positions of the KV cache.
        context: longest sequence, prompt and generated tokens together.
        max_batch_tokens: most rows of a step, >= 1.
        max_num_seqs: most requests that run at once; more than ``max_batch_tokens`` could not all decode in one step,
            so that is the limit.
        vocab: token ids must be below it.

    Attributes:
        requests: all unfinished ones, by number.
    """

    def __init__(self, *, cache_rows: int, context: int, max_batch_tokens: int, max_num_seqs: int, vocab: int) -> None:
        self.context = context
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = min(max_num_seqs, max_batch_tokens)
        self.vocab = vocab
        self.requests: dict[int, Request] = {}
        self._rows = RowAllocator(cache_rows)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def cache_rows(self) -> int:
        return self._rows.rows

    def add(self, new: Sequence[NewRequest]) -> None:
        """Puts requests at the end of the line.

        Raises:
            RequestError: one of them can never be served; none of them was added.
        """
        requests = [self._checked(place, request) for place, request in enumerate(new)]
        self.requests.update((request.number, request) for request in requests)
        self._waiting.extend(requests)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, at most ``max_batch_tokens`` rows; empty only if there is no request.

        The step must then be run: its tokens count as computed from here on.
        """
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        decoding = [r for r in self._running if r.computed >= r.prompt_tokens]
        prefilling = [r for r in self._running if r.computed < r.prompt_tokens]
        for request in decoding:  # one row each: never more than max_num_seqs, so they fit
            chunks.append(self._chunk(request, 1))
            budget -= 1
        while budget:
            following = prefilling.pop(0) if prefilling else self._start_next()
            if following is None:
                break
            chunks.append(self._chunk(following, min(budget, following.prompt_tokens - following.computed)))
            budget -= len(chunks[-1].token_ids)
        return chunks

    def finish(self, request: Request) -> None:
        """Takes out a request and gives back its cache rows."""
        del self.requests[request.number]
        if request.cache_start is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._rows.free(request.cache_start)

    def _start_next(self) -> Request | None:
        """The first in line, if it may start now. Nobody overtakes it: it will fit once enough others have ended."""
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return None
        request = self._waiting[0]
        request.cache_start = self._rows.allocate(request.prompt_tokens + request.max_tokens)
        if request.cache_start is None:
            return None
        self._running.append(self._waiting.popleft())
        return request

    @staticmethod
    def _chunk(request: Request, size: int) -> Chunk:
        assert request.cache_start is not None
        first, end = request.computed, request.computed + size
        request.computed = end
        token_ids = tuple(request.token_ids[first:end])
        return Chunk(request.number, first, token_ids, request.cache_start, end == len(request.token_ids))

    def _checked(self, place: int, new: NewRequest) -> Request:
        prompt, params = new.prompt_token_ids, new.params

        def refuse(why: str) -> RequestError:
            return RequestError(f"prompt {place}: {why}")

        if not prompt:
            raise refuse("it is empty; expected at least one token")
        bad = next((t for t in prompt if not (isinstance(t, int) and 0 <= t < self.vocab)), None)
        if bad is not None:
            raise refuse(f"token id {bad!r}; this model has ids 0..{self.vocab - 1}")
        room = self.context - len(prompt)
        if room < 1:
            raise refuse(
                f"it has {len(prompt)} tokens; the context is {self.context} tokens, of which at least one is "
                f"needed for the answer: shorten the prompt to {self.context - 1} tokens"
            )
        fits = self.cache_rows - len(prompt)
        # Without a wish of its own a request takes what the cache has; the context clips in silence, as everywhere.
        max_tokens = min(room, max(fits, 1)) if params.max_tokens is None else min(room, params.max_tokens)
        if max_tokens > fits:
            raise refuse(
                f"{len(prompt)} prompt tokens + max_tokens {max_tokens} need {len(prompt) + max_tokens} cache rows; the "
                f"cache has {self.cache_rows}: raise cache_tokens, lower max_tokens, or shorten the prompt"
            )
        return Request(new.number, params, list(prompt), len(prompt), max_tokens, random.Random(new.seed))
