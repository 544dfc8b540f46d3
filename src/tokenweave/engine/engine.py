"""One rank's engine: schedules a step, walks the stages, samples, and says what came out.

All ranks of a group run the same steps in lockstep. Nothing is agreed upon on the way: they are given the same requests,
schedule and plan by pure functions of what all of them know, and sample from logits that have the same bits everywhere.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tokenweave.collective import Workspace
from tokenweave.engine.batch import Chunk, rows_of, splits_of
from tokenweave.engine.graphs import GraphRecord, StepGraphs
from tokenweave.engine.kv_cache import KVCache
from tokenweave.engine.sampling import sample
from tokenweave.engine.scheduler import NewRequest, Request, Scheduler
from tokenweave.engine.text import Decoder, TextStream
from tokenweave.execution import collective_of, overlap_of
from tokenweave.models.config import ModelConfig
from tokenweave.overlap import Overlap
from tokenweave.planning.plan import Plan
from tokenweave.stages import Stage
from tokenweave.weave import run_stages


class Model(Protocol):
    """What the engine needs of a model: one rank's weights as a stage list, and its head."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kv_heads_local(self) -> int: ...

    @property
    def packs(self) -> bool: ...

    @property
    def capturable(self) -> bool: ...

    def stages(self, kv: KVCache) -> list[Stage]: ...

    def logits(self, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Finished:
    """How a request ended.

    Attributes:
        reason: ``"stop"`` (end of sequence, a stop token or a stop string) or ``"length"``.
        ttft_ms: milliseconds from the request's arrival to its first token, waiting included.
        total_ms: milliseconds from its arrival to its last token.
        mode_counts: mode -> steps that computed some of its tokens.
    """

    reason: str
    ttft_ms: float
    total_ms: float
    mode_counts: dict[str, int]


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token. ``finished`` is set with the request's last one."""

    request: int
    token_id: int
    finished: Finished | None = None


@dataclass(frozen=True)
class StepRecord:
    """What one step did on this rank.

    Attributes:
        mode, split: as the step ran.
        prefill_tokens, decode_tokens: its rows.
        seconds: from scheduling to the sampled tokens.
        collectives, bytes_sent: of the stages, by this rank.
    """

    mode: str
    split: int | None
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    collectives: int
    bytes_sent: int


@dataclass
class _Progress:
    """What the engine keeps about an unfinished request beside the scheduler's state."""

    arrived: float
    text: TextStream | None
    first_token: float | None = None
    modes: Counter[str] = field(default_factory=Counter)


class Engine:
    """One rank's engine.

    Args:
        model: this rank's part.
        cache: its keys and values.
        workspace: of the tensor-parallel group; its ``max_tokens`` is at least the scheduler's ``max_batch_tokens``.
        scheduler: with as many cache rows as ``cache``.
        plan: a step's chunks -> its plan; the same function on all ranks.
        overlap: runs the collectives of woven steps.
        tokenizer: gives the tokenizer; only called for requests with stop strings.
        graphs: run steps as CUDA graphs, if the model and the device allow it.

    Attributes:
        steps: one record per step since the last :meth:`run` began.
        graphs: of the steps; None without.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        workspace: Workspace,
        scheduler: Scheduler,
        plan: Callable[[Sequence[Chunk]], Plan],
        overlap: Overlap,
        tokenizer: Callable[[], Decoder],
        graphs: bool = True,
    ) -> None:
        self.model = model
        self.cache = cache
        self.workspace = workspace
        self.scheduler = scheduler
        self.steps: list[StepRecord] = []
        self._plan = plan
        self._stages = model.stages(cache)
        self._overlap = overlap
        self._tokenizer = tokenizer
        self._progress: dict[int, _Progress] = {}
        self._residual = torch.empty(
            scheduler.max_batch_tokens, workspace.hidden, dtype=workspace.dtype, device=workspace.device
        )
        self.graphs: StepGraphs | None = None
        if graphs and model.capturable:
            longest = min(model.config.context, cache.rows)
            self.graphs = StepGraphs(self._stages, workspace, self._residual, overlap, longest)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Queues requests.

        Raises:
            RequestError: one of them can never be served; none of them was queued.
        """
        self.scheduler.add(requests)
        now = time.perf_counter()
        for request in requests:
            text = TextStream(self._tokenizer(), request.params.stop) if request.params.stop else None
            self._progress[request.number] = _Progress(now, text)

    def run(self, requests: Sequence[NewRequest]) -> Iterator[list[TokenEvent]]:
        """Adds requests and steps until no request is left; yields each step's events."""
        self.steps = []
        self.add(requests)
        while self.scheduler.requests:
            yield self.step()

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Runs one step of at most ``max_batch_tokens`` rows; returns the tokens that it sampled, in batch order."""
        began = time.perf_counter()
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        plan = self._plan(chunks)
        collectives, bytes_sent = self.workspace.collectives, self.workspace.bytes_sent
        rows = self.forward(chunks, plan)
        # Counted before the head, which gathers by its own means.
        collectives, bytes_sent = self.workspace.collectives - collectives, self.workspace.bytes_sent - bytes_sent
        decodes = 0
        for chunk in chunks:
            self._progress[chunk.request].modes[str(plan.mode)] += 1
            decodes += chunk.first >= self.scheduler.requests[chunk.request].prompt_tokens
        events = self._sampled([chunk.request for chunk in chunks if chunk.sampled], rows)
        seconds = time.perf_counter() - began
        prefilled = rows_of(chunks) - decodes
        self.steps.append(StepRecord(str(plan.mode), plan.split, prefilled, decodes, seconds, collectives, bytes_sent))
        return events

    def forward(self, chunks: Sequence[Chunk], plan: Plan) -> torch.Tensor:
        """Walks the stages over one step.

        Returns:
            [number of chunks that are ``sampled``, hidden], their last tokens' rows after the final norm, in chunk order.
        """
        if self.graphs is not None and (final := self.graphs.forward(chunks, plan)) is not None:
            return final
        overlap = overlap_of(plan, self._overlap)
        splits = splits_of(chunks, plan, self._residual, self.model.packs, overlap.reached)
        collective = collective_of(plan, rows_of(chunks), self.workspace)
        rows = run_stages(self._stages, splits, collective, self.workspace, overlap)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @property
    def graph_record(self) -> GraphRecord | None:
        """What the step graphs take; None without."""
        return None if self.graphs is None else self.graphs.record

    def close(self) -> None:
        """Releases threads, graphs and the workspace; idempotent."""
        graphs = [] if self.graphs is None else [self.graphs.close]
        close_all(*graphs, self._overlap.close, self.workspace.close)

    def _sampled(self, numbers: list[int], rows: torch.Tensor) -> list[TokenEvent]:
        if not numbers:
            return []
        requests = [self.scheduler.requests[number] for number in numbers]
        uniforms = [0.0 if r.params.greedy else r.generator.random() for r in requests]
        tokens = sample(self.model.logits(rows), [r.params for r in requests], uniforms)
        self.workspace.check()  # the host has just waited for the step: no token of a failed one leaves
        now = time.perf_counter()
        return [self._accept(request, token, now) for request, token in zip(requests, tokens, strict=True)]

    def _accept(self, request: Request, token: int, now: float) -> TokenEvent:
        """Appends a token to its request, and ends the request where it must end."""
        progress = self._progress[request.number]
        if progress.first_token is None:
            progress.first_token = now
        request.token_ids.append(token)
        if progress.text is not None:
            progress.text.push(token)
        params = request.params
        if (
            (token in self.model.config.eos_token_ids and not params.ignore_eos)
            or token in params.stop_token_ids
            or (progress.text is not None and progress.text.stopped)
        ):
            reason = "stop"
        elif request.generated >= request.max_tokens:
            reason = "length"
        else:
            return TokenEvent(request.number, token)
        self.scheduler.finish(request)
        del self._progress[request.number]
        ttft, total = (1000 * (t - progress.arrived) for t in (progress.first_token, now))
        return TokenEvent(request.number, token, Finished(reason, ttft, total, dict(progress.modes)))


def close_all(*closings: Callable[[], None]) -> None:
    """Calls all of them, in order, whatever they raise; then raises what was raised first."""
    first: BaseException | None = None
    for closing in closings:
        try:
            closing()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
