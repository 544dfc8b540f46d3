"""vLLM with and without TokenWeave: prefill latency, decoding, a trace's throughput, and whether they say the same.

Every configuration is an engine of its own, a process that replays requests on command. Side by side, all engines are held
in the GPUs' memory at once, one of them works at a time, and every round measures all of them in an order drawn anew: their
ratios are paired. Else one engine is started after the other, as often as asked for, and their ratios are those of medians
that were read minutes apart, which clocks and temperature tell apart too.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenweave.bench.environment import Monitor
from tokenweave.bench.vllm import configurations
from tokenweave.bench.vllm.process import EngineFailed, EngineProcess
from tokenweave.bench.vllm.report import finish, served
from tokenweave.files import write_result
from tokenweave.simulation import Trace

_WARM_PREFILLS = 4  # TokenWeave runs a new size as stock, then launch by launch, and makes a graph at the third
_DECODE_ROUNDS = 3
_WARM_REQUESTS, _WARM_OUTPUT = 32, 8  # of a trace, and tokens of each
_OUTPUT_TOKENS = 16  # of a request whose tokens are compared
_OUTPUT_PROMPTS = 2  # of each size
_OUTPUT_SIZES = 6  # of those measured, or fewer
_DECODE_SEED, _OUTPUT_SEED, _TRACE_SEED = 1_000_000, 2_000_000, 3_000_000

Samples = dict[tuple[str, int], dict[str, list[float]]]
"""(phase, size) -> configuration -> seconds, the same round at the same place where engines run side by side."""


@dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        model: its name, for the result. folder: where its config.json is.
        tp: ranks. configurations: some of ``configurations.CONFIGURATIONS``, in this order.
        engine: arguments that all engines share.
        tokens: of the prompts whose prefill is measured. batches: requests that decode at once.
        context: tokens before a decoding request's first. steps: tokens that it makes.
        traces: requests to serve, with their arrivals.
        rounds: samples of each prefill. starts: of each engine, one after the other. together: side by side, once.
        multicast: whether vLLM and NCCL may use it.
        seed: of prompts and orders. time_limit: seconds for an engine's start and for each of its answers.
        logs: folder for what the engines print. json: written after every phase; None for nowhere.
    """

    model: str
    folder: Path
    tp: int
    configurations: tuple[str, ...]
    engine: Mapping[str, Any]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    steps: int
    traces: tuple[Trace, ...]
    rounds: int
    starts: int
    together: bool
    multicast: bool
    seed: int
    time_limit: float
    logs: Path
    json: Path | None = None


class VllmBench:
    """Runs a :class:`Config` on this machine.

    Args:
        environment: goes into the result. monitor: of a GPU, or None. say: is called with lines of progress.
    """

    def __init__(
        self, config: Config, environment: dict[str, Any], monitor: Monitor | None, say: Callable[[str], None]
    ) -> None:
        self._config, self._monitor, self._say = config, monitor, say
        self._samples: Samples = {}
        self._random = random.Random(config.seed)
        self._result: dict[str, Any] = {
            "environment": environment,
            "config": {
                "model": config.model,
                "ranks": config.tp,
                "configurations": {name: configurations.CONFIGURATIONS[name] for name in config.configurations},
                "engine": dict(config.engine),
                "decode_context": config.context,
                "decode_steps": config.steps,
                "traces": [trace.name for trace in config.traces],
                "arrivals_last_s": [float(_arrivals(trace)[-1]) for trace in config.traces],
                "rounds": config.rounds,
                "starts": config.starts,
                "together": config.together,
                "multicast": config.multicast,
                "seed": config.seed,
            },
            "engines": [],
            "rows": [],
            "outputs": {},
            "clocks": [],
            "failed": [],
        }

    def run(self) -> dict[str, Any]:
        """Starts the engines, measures, and returns the result."""
        names = self._config.configurations
        if self._config.together:
            with contextlib.ExitStack() as stack:
                self._measure(self._started(list(names), stack))
        else:
            for _ in range(self._config.starts):
                for name in names:
                    with contextlib.ExitStack() as stack:
                        self._measure(self._started([name], stack))
        return self._write()

    def _started(self, names: list[str], stack: contextlib.ExitStack) -> dict[str, EngineProcess]:
        """Engines that run. Stock ones start at the same time; TokenWeave, which times itself as it starts, alone after."""
        engines: dict[str, EngineProcess] = {}
        for together in ([n for n in names if n != "tokenweave"], [n for n in names if n == "tokenweave"]):
            starting = [stack.enter_context(self._engine(name)) for name in together]
            for engine in starting:
                try:
                    ready = engine.wait_ready()
                except EngineFailed as error:
                    self._fail(engine, error)
                    continue
                engines[engine.name] = engine
                self._note(engine)  # also for a run that is cut short
                self._say(
                    f"{engine.name}: started in {ready['start_s']:.0f} s, {ready['kv_tokens']} tokens of KV cache"
                )
                if engine.name == "tokenweave" and (off := _refused(engine)):
                    self._say(f"{engine.name}: NOT AT WORK, its figures are stock vLLM's: {off}")
        return engines

    def _engine(self, name: str) -> EngineProcess:
        config = self._config
        heads, kv_heads = configurations.attention_heads(config.folder)
        arguments = configurations.arguments_of(name, config.engine, config.tokens, heads, kv_heads)
        environment = configurations.environment_of(name, os.environ, config.multicast)
        environment["PYTHONPATH"] = configurations.python_path()
        number = sum(engine["configuration"] == name for engine in self._result["engines"])
        folder = config.logs / str(number) if config.starts > 1 else config.logs
        folder.mkdir(parents=True, exist_ok=True)
        self._result["engines"].append(
            {
                "configuration": name,
                "arguments": arguments,
                "variables": configurations.named_variables(environment),
                "log": str(folder / f"{name}.log"),
            }
        )
        return EngineProcess(name, arguments, environment, folder, config.time_limit)

    def _measure(self, engines: dict[str, EngineProcess]) -> None:
        """All phases. An engine that fails drops out of those that follow."""
        for phase in (self._prefills, self._decodes, self._outputs, self._traces):
            with self._watched(phase.__name__.strip("_"), list(engines)):
                phase(engines)
            self._write()
        for engine in engines.values():
            self._note(engine)
            engine.end()

    # ---- phases

    def _prefills(self, engines: dict[str, EngineProcess]) -> None:
        seeds = iter(range(self._config.seed, _DECODE_SEED))
        for tokens in self._config.tokens:
            for engine in list(engines.values()):
                for _ in range(_WARM_PREFILLS):
                    self._replay(engines, engine, [{"prompt": tokens, "output": 1, "seed": next(seeds)}])
        for _ in range(self._config.rounds):
            sizes = self._random.sample(self._config.tokens, len(self._config.tokens))
            for tokens in sizes:
                request = {"prompt": tokens, "output": 1, "seed": next(seeds)}
                for engine in self._shuffled(engines):
                    if answer := self._replay(engines, engine, [request]):
                        self._add("prefill", tokens, engine, _elapsed(answer))
        self._say_medians("prefill", self._config.tokens)

    def _decodes(self, engines: dict[str, EngineProcess]) -> None:
        for batch in self._config.batches:
            requests = [
                {"prompt": self._config.context, "output": self._config.steps, "seed": _DECODE_SEED + i}
                for i in range(batch)
            ]
            for turn in range(_DECODE_ROUNDS + 1):  # the first warms up
                for engine in self._shuffled(engines):
                    if batch > engine.ready["max_num_seqs"]:
                        continue
                    self._ask(engines, engine, "reset")
                    answer = self._replay(engines, engine, requests)
                    if answer and turn and answer["step"] is not None:
                        self._add("decode", batch, engine, answer["step"])
        self._say_medians("decode", self._config.batches)

    def _outputs(self, engines: dict[str, EngineProcess]) -> None:
        """Greedy tokens of some prompts, one by one and all at once: what a batch alone changes is the yardstick."""
        every = max(1, -(-len(self._config.tokens) // _OUTPUT_SIZES))
        requests = [
            {"prompt": tokens, "output": _OUTPUT_TOKENS, "seed": _OUTPUT_SEED + i * _OUTPUT_PROMPTS + k}
            for i, tokens in enumerate(self._config.tokens[::every])
            for k in range(_OUTPUT_PROMPTS)
        ]
        for engine in list(engines.values()):
            if engine.name in self._result["outputs"]:
                continue
            self._ask(engines, engine, "reset")
            alone = [self._replay(engines, engine, [request], keep_tokens=True) for request in requests]
            self._ask(engines, engine, "reset")
            batch = self._replay(engines, engine, requests, keep_tokens=True)
            if batch and all(alone):
                self._result["outputs"][engine.name] = {
                    "alone": [answer["requests"][0]["tokens"] for answer in alone if answer],
                    "batch": [answer["tokens"] for answer in batch["requests"]],
                }

    def _traces(self, engines: dict[str, EngineProcess]) -> None:
        for number, trace in enumerate(self._config.traces):
            seed = _TRACE_SEED * (1 + number)
            requests = [
                {"at": float(at), "prompt": int(prompt), "output": int(output), "seed": seed + i}
                for i, (at, prompt, output) in enumerate(
                    zip(_arrivals(trace), trace.prompts, trace.outputs, strict=True)
                )
            ]
            warm = [{**r, "at": 0.0, "output": min(r["output"], _WARM_OUTPUT)} for r in requests[:_WARM_REQUESTS]]
            for engine in list(engines.values()):
                self._replay(engines, engine, warm)
                self._ask(engines, engine, "reset")
                if answer := self._replay(engines, engine, requests):
                    row = served(requests, answer["requests"])
                    if counts := answer.get("plugin"):
                        row["plugin"] = counts
                    named = {"phase": "trace", "trace": trace.name, "configuration": engine.name}
                    self._result["rows"].append({**named, **row})
                    self._say(f"{engine.name}: {len(requests)} requests of {trace.name} in {row['seconds']:.1f} s")

    # ---- one engine

    def _replay(
        self, engines: dict[str, EngineProcess], engine: EngineProcess, requests: list[dict[str, Any]], **more: Any
    ) -> dict[str, Any] | None:
        return self._ask(engines, engine, "replay", requests=requests, **more)

    def _ask(
        self, engines: dict[str, EngineProcess], engine: EngineProcess, do: str, **arguments: Any
    ) -> dict[str, Any] | None:
        """The engine's answer; None, and the engine is left out from now on, if it failed or has failed before."""
        if engine.name not in engines:
            return None
        try:
            return engine.ask(do, **arguments)
        except EngineFailed as error:
            del engines[engine.name]
            self._fail(engine, error)
            return None

    def _fail(self, engine: EngineProcess, error: EngineFailed) -> None:
        self._say(str(error))
        self._result["failed"].append({"configuration": engine.name, "error": str(error)})
        self._note(engine)
        engine.close()

    def _note(self, engine: EngineProcess) -> None:
        """What the engine said of itself, and all that its log says of TokenWeave."""
        entry = next(e for e in reversed(self._result["engines"]) if e["configuration"] == engine.name)
        entry |= {**engine.ready, "said": engine.said("tokenweave:")}

    def _shuffled(self, engines: dict[str, EngineProcess]) -> list[EngineProcess]:
        return self._random.sample(list(engines.values()), len(engines))

    def _add(self, phase: str, size: int, engine: EngineProcess, seconds: float) -> None:
        self._samples.setdefault((phase, size), {}).setdefault(engine.name, []).append(seconds)

    def _say_medians(self, phase: str, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            times = self._samples.get((phase, size), {})
            if times:
                named = [(name, sorted(times[name])) for name in self._config.configurations if name in times]
                text = ", ".join(f"{name} {each[len(each) // 2] * 1e3:.2f} ms" for name, each in named)
                self._say(f"{phase} {size}: {text}")

    @contextlib.contextmanager
    def _watched(self, phase: str, names: list[str]) -> Iterator[None]:
        """Samples clocks and power while the phase runs."""
        if self._monitor is None:
            yield
            return
        monitor, ended = self._monitor, threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                monitor.sample()

        monitor.take()
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._result["clocks"].append({"phase": phase, "configurations": names, **monitor.take()})

    def _write(self) -> dict[str, Any]:
        result = finish(self._result, self._samples, paired=self._config.together)
        if self._config.json is not None:
            write_result(result, self._config.json)
        return result


def _arrivals(trace: Trace) -> np.ndarray:
    """Seconds at which its requests arrive: all at once where it doesn't say."""
    return np.zeros(len(trace)) if trace.arrivals is None else trace.arrivals


def _elapsed(answer: dict[str, Any]) -> float:
    (request,) = answer["requests"]
    return request["last"] - request["sent"]


def _refused(engine: EngineProcess) -> str | None:
    """The line in which a TokenWeave engine that has just started said that it is off. What single steps do is said at debug
    level."""
    lines = engine.said("tokenweave: stock vllm runs")
    return next((line for line in lines if not line.startswith("DEBUG") and " DEBUG " not in line), None)
