"""One vLLM engine that replays requests on command: the program that a benchmark starts for each configuration.

``python -m tokenweave.bench.vllm.engine ARGUMENTS.json FD`` starts the engine that vLLM's server runs, without the HTTP
in front, and writes one JSON line to the file descriptor when it is ready. Then each line on its standard input is a
command, and each is answered by a line. The end of its input ends it, so that it never outlives the benchmark.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

LOWEST_TOKEN = 3  # below are, in most vocabularies, tokens that begin, end or pad a text


def steady_step(times: Sequence[Sequence[float]]) -> float | None:
    """Mean seconds a token while all requests were decoding: from the last one's first token to the first one's last.

    Args:
        times: of each request's tokens, ascending.

    Returns:
        None where there was no such time.
    """
    if not times or any(len(each) < 2 for each in times):
        return None
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    inside = [time for time in max(times, key=lambda each: each[0]) if begin <= time <= end]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else None


def prompt(length: int, vocab: int, seed: int) -> list[int]:
    """``length`` random token ids; the same for the same seed."""
    return np.random.default_rng(seed).integers(min(LOWEST_TOKEN, vocab - 1), vocab, length).tolist()


def plugin_counts() -> dict[str, int]:
    """The plugin's counters in this process's Prometheus registry, such as ``steps mode=woven``; none where it is off."""
    from prometheus_client import REGISTRY  # of vLLM's requirements

    found: Counter[str] = Counter()
    for family in REGISTRY.collect():
        kind, _, name = family.name.partition(":")
        if kind != "tokenweave" or family.type != "counter":
            continue
        for sample in family.samples:
            label = next(f"{key}={value}" for key, value in sample.labels.items() if key in ("mode", "reason"))
            found[f"{name} {label}"] += int(sample.value)
    return dict(found)


class Server:
    """Answers commands with a running engine.

    Args:
        engine: an ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._vocab = engine.model_config.get_vocab_size()
        self._sent = 0

    async def replay(self, requests: list[dict[str, Any]], keep_tokens: bool = False) -> dict[str, Any]:
        """Sends requests as they arrive, and waits for all.

        Args:
            requests: of each ``at`` (seconds after the start), ``prompt`` and ``output`` (tokens), ``seed`` of its prompt.
            keep_tokens: give the greedy token ids back.

        Returns:
            ``requests``: of each ``sent``, ``first``, ``last`` (seconds after the start), ``count`` of its tokens, and
            ``tokens`` if asked for. ``step``: :func:`steady_step`. ``plugin``: what the plugin counted meanwhile, by metric.
        """
        prompts = [prompt(each["prompt"], self._vocab, each["seed"]) for each in requests]
        gc.collect()
        before = plugin_counts()
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                self._one(ids, each["output"], start + each.get("at", 0.0))
                for ids, each in zip(prompts, requests, strict=True)
            )
        )
        found = []
        for sent, times, tokens in answers:
            one = {"sent": sent - start, "first": times[0] - start, "last": times[-1] - start, "count": len(times)}
            found.append({**one, "tokens": tokens} if keep_tokens else one)
        counted = {name: count - before.get(name, 0) for name, count in plugin_counts().items()}
        return {
            "requests": found,
            "step": steady_step([times for _, times, _ in answers]),
            "plugin": {name: count for name, count in counted.items() if count},
        }

    async def reset(self) -> dict[str, Any]:
        """Forgets cached prefixes."""
        await self._engine.reset_prefix_cache()
        return {}

    async def _one(self, ids: list[int], output: int, at: float) -> tuple[float, list[float], list[int]]:
        """(time of sending, of each token, the tokens)."""
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        settings = SamplingParams(
            temperature=0.0,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if (wait := at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        self._sent += 1
        sent = time.perf_counter()
        times: list[float] = []
        tokens: list[int] = []
        async for answer in self._engine.generate({"prompt_token_ids": ids}, settings, request_id=f"r{self._sent}"):
            new = answer.outputs[0].token_ids
            times += [time.perf_counter()] * len(new)
            tokens += new
        if not times:
            raise RuntimeError(f"a request of {len(ids)} tokens was answered without a token")
        return sent, times, tokens


async def _serve(arguments: dict[str, Any], replies: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    import vllm

    def answer(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    began = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER)
    try:
        config = engine.vllm_config
        cache, graphs = config.cache_config, config.compilation_config
        answer(
            {
                "vllm": vllm.__version__,
                "engine_start_s": time.monotonic() - began,
                "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "max_model_len": config.model_config.max_model_len,
                "prefix_caching": bool(cache.enable_prefix_caching),
                "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
                "async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False)),
                "cudagraph_mode": str(getattr(graphs.cudagraph_mode, "name", graphs.cudagraph_mode)),
                "largest_graph": getattr(graphs, "max_cudagraph_capture_size", None),
                "model_class": _model_class(config.model_config),
            }
        )
        server = Server(engine)
        gc.collect()
        gc.freeze()  # as vLLM's server does: what lives from now on is small
        commands: dict[str, Any] = {"replay": server.replay, "reset": server.reset}
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            try:
                answer(await commands[command.pop("do")](**command))
            except Exception:
                answer({"error": traceback.format_exc()})
                return
    finally:
        engine.shutdown()


def _model_class(config: Any) -> str | None:
    """Where vLLM's registry takes the model's class from, as ``module:Class``."""
    from vllm.model_executor.models.registry import ModelRegistry

    entry = next((ModelRegistry.models.get(name) for name in config.architectures or ()), None)
    return None if entry is None else f"{getattr(entry, 'module_name', '?')}:{getattr(entry, 'class_name', '?')}"


def main(arguments: str, descriptor: str) -> None:
    """Reads the engine's arguments from a file and serves until its input ends."""
    with open(arguments, encoding="utf-8") as file:
        settings = json.load(file)
    with os.fdopen(int(descriptor), "w") as replies:
        asyncio.run(_serve(settings, replies))


if __name__ == "__main__":
    main(*sys.argv[1:])
