"""``LLM(...).generate(prompts, params)``: offline generation in the manner that vLLM's users know."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenweave.engine.build import EngineArgs
from tokenweave.engine.engine import Finished, StepRecord
from tokenweave.engine.graphs import GraphRecord
from tokenweave.engine.local import LocalRank, Ranks, under_torchrun
from tokenweave.engine.processes import RankProcesses
from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest
from tokenweave.engine.text import TextStream
from tokenweave.errors import RequestError

Prompt = str | Mapping[str, Any]
"""A text, or ``{"prompt": text}``, or ``{"prompt_token_ids": ids}``."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
        text: without special tokens, ends before a stop string.
        token_ids: all that were generated, with an end-of-sequence token if there was one.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class RequestMetrics:
    """How long a request took.

    Attributes:
        ttft_ms: milliseconds until its first token, waiting included.
        total_ms: milliseconds until its last token.
        tokens_per_s: of the tokens after the first; 0.0 if there was but one.
    """

    ttft_ms: float
    total_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answer.

    Attributes:
        prompt: its text; None if it came as token ids.
        outputs: exactly one.
        mode_counts: mode -> steps that computed some of this request's tokens.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    mode_counts: dict[str, int]


@dataclass(frozen=True)
class Token:
    """What ``on_token`` is called with.

    Attributes:
        index: of the prompt in this call.
        text: that became final with this token; may be empty. All texts of a request together are its answer's text.
        finish_reason: set with the request's last token.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None


class LLM:
    """A model on ``tensor_parallel_size`` ranks.

    One rank lives in this process; more run as processes of their own, which end with this one. Under torchrun, with
    WORLD_SIZE equal to ``tensor_parallel_size``, this process is one of the ranks: all of them make the same calls.

    Args:
        model: Hugging Face folder (config.json, *.safetensors) or GGUF file.
        seed: from which the seeds of requests without one are made, together with their number.
        show_progress: a bar on stderr while the weights load.
        tensor_parallel_size, dtype, device, mode, max_batch_tokens, max_num_seqs, cache_tokens, max_context, graphs: as
            :class:`tokenweave.engine.build.EngineArgs`.

    Attributes:
        args: the :class:`EngineArgs`.
        steps: records of the steps of the last :meth:`generate`.
        graph_record: what rank 0's step graphs take of its GPU; None where steps do not run as graphs.

    Raises:
        ModelError: the model cannot be loaded.
        RequestError: an argument out of its range; under torchrun also where the ranks were given different ones.
        RankDied: a rank's process ended while loading.
        CollectiveError: another rank never came, or not in time; under torchrun also: it is gone, or could not load its part.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        mode: str | None = None,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 256,
        cache_tokens: int | None = None,
        max_context: int | None = None,
        seed: int = 0,
        device: str = "auto",
        show_progress: bool | None = None,
        graphs: bool = True,
    ) -> None:
        from tokenweave.models import load_tokenizer
        from tokenweave.models.config import read_model_config
        from tokenweave.models.sharding import shard_of

        if not isinstance(model, (str, os.PathLike)) or model == "":
            raise RequestError(f"model={model!r}; expected the path of a folder or of a GGUF file")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise RequestError(f"seed={seed!r}; expected an integer")
        self.args = EngineArgs(
            os.fspath(model),
            tensor_parallel_size,
            dtype=dtype,
            device=device,
            mode=mode,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            cache_tokens=cache_tokens,
            max_context=max_context,
            graphs=graphs,
        )
        if show_progress is None:
            show_progress = sys.stderr.isatty()
        self._seed = seed
        self._requests = 0  # that were answered: the number of the next one
        self._ranks: Ranks | None = None
        self._owner = os.getpid()
        self._generating = threading.Lock()
        # What can be told from the files alone is told before any rank starts.
        shard_of(read_model_config(Path(self.args.model)), 0, tensor_parallel_size)
        self.tokenizer = load_tokenizer(self.args.model)
        if tensor_parallel_size == 1 or under_torchrun(tensor_parallel_size):
            self._ranks = LocalRank(self.args, show_progress)
        else:
            self._ranks = RankProcesses(self.args, show_progress)

    @property
    def steps(self) -> list[StepRecord]:
        return self._open().steps

    @property
    def graph_record(self) -> GraphRecord | None:
        return self._open().graph_record

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[Token], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, all at once as far as they fit.

        Args:
            prompts: one or several.
            sampling_params: one for all prompts, or one each; None for the defaults.
            on_token: called with every token as it comes. If it raises, the LLM is closed.

        Returns:
            one output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt can never be served as given, or torchrun's ranks were given different ones; none was
                begun, and the LLM can still be used. Also where another thread, or ``on_token`` itself, calls this before
                the first call has returned.
            RankDied: a rank's process ended; the LLM is closed.
            CollectiveError: a collective could not complete, such as one with a rank of torchrun's that is gone; the LLM is
                closed.
        """
        if not self._generating.acquire(blocking=False):  # two calls' tokens would be mixed up
            raise RequestError("this LLM is generating already; give one call all prompts, or each thread its own LLM")
        try:
            return self._generate(prompts, sampling_params, on_token)
        finally:
            self._generating.release()

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_token: Callable[[Token], None] | None,
    ) -> list[RequestOutput]:
        ranks = self._open()
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts={prompts!r}; expected a prompt or a list of prompts")
        listed: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        requests = self._requests_of(listed, sampling_params)
        answers = [_Answer(TextStream(self.tokenizer, request.params.stop)) for request in requests]
        begun = False
        try:
            for events in ranks.generate(requests):  # of no requests too: ranks make sure that they were given the same
                begun = True
                for event in events:
                    index = event.request - self._requests
                    token = answers[index].add(index, event.token_id, event.finished)
                    if on_token is not None:
                        on_token(token)
        except BaseException as error:
            if begun or not isinstance(error, RequestError):
                # Also Ctrl-C: requests are half done, and other ranks may be waiting. What failed first is what is told.
                with contextlib.suppress(Exception):
                    self.close()
            raise
        self._requests += len(requests)  # not of a refused call: ranks that were given different ones would count apart
        return [
            answer.output(_text_of(prompt), list(request.prompt_token_ids))
            for answer, prompt, request in zip(answers, listed, requests, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[Token], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template; otherwise as :meth:`generate`.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a list of such lists.
        """
        several: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in several:
            if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
                raise RequestError(
                    f'a conversation is {conversation!r:.80}; expected messages {{"role": ..., "content": ...}} in a list'
                )
            text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
            # The template writes the special tokens itself.
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, on_token=on_token)

    def close(self) -> None:
        """Ends the ranks and gives back the memory; idempotent."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.close()

    def _open(self) -> Ranks:
        if self._ranks is None:
            raise RequestError("this LLM is closed; create a new one")
        if os.getpid() != self._owner:  # both would read the same ranks' answers
            raise RequestError(
                f"this LLM belongs to process {self._owner}, of which this one is a fork; create a new one"
            )
        return self._ranks

    def _requests_of(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[NewRequest]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
            raise RequestError(f"sampling_params={sampling_params!r:.80}; expected SamplingParams, or a list of them")
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts with {len(sampling_params)} sampling parameters; expected one for all, or one each"
            )
        requests = []
        for number, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True), self._requests):
            seed = random.Random(f"{self._seed}/{number}").getrandbits(63) if params.seed is None else params.seed
            requests.append(NewRequest(number, tuple(self._token_ids(prompt)), params, seed))
        return requests

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            ids = ids.tolist() if hasattr(ids, "tolist") else ids  # arrays and tensors are welcome
            if not isinstance(ids, Iterable):
                raise RequestError(f"prompt_token_ids={ids!r}; expected a list of token ids")
            return tuple(ids)
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return self.tokenizer.encode(prompt["prompt"])
        raise RequestError(
            f'a prompt is {prompt!r}; expected a text, {{"prompt": text}} or {{"prompt_token_ids": token ids}}'
        )


@dataclass
class _Answer:
    """One request's answer while it comes."""

    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, index: int, token_id: int, finished: Finished | None) -> Token:
        self.token_ids.append(token_id)
        text = self.stream.push(token_id)
        if finished is not None:
            self.finished = finished
            text += self.stream.finish()
        return Token(index, token_id, text, None if finished is None else finished.reason)

    def output(self, prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
        done = self.finished
        assert done is not None, "the engine ran out of steps before a request ended"
        later, seconds = len(self.token_ids) - 1, (done.total_ms - done.ttft_ms) / 1000
        metrics = RequestMetrics(done.ttft_ms, done.total_ms, later / seconds if later and seconds else 0.0)
        completion = CompletionOutput(self.stream.text, self.token_ids, done.reason)
        return RequestOutput(prompt, prompt_token_ids, [completion], metrics, done.mode_counts)


def _text_of(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else prompt.get("prompt")
