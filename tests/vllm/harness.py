"""Runs scenarios in a real vLLM engine on this machine's CPU, tensor parallel over 2 processes.

The first start of an engine takes 15 to 30 seconds, further ones some, so a test module starts few engines and runs many scenarios in each. A scenario
is a top-level function of a test module, ``function(llm, **arguments)``, that runs on every rank in the same order and
returns what JSON can hold::

    def lengths(llm, prompts):
        return [len(tokens) for tokens in harness.generate(llm, prompts)]

    @pytest.fixture(scope="module")
    def stock(tmp_path_factory):
        model = saved_models.tiny_model(tmp_path_factory.mktemp("llama"), "llama")
        return harness.run(model, {
            "greedy": harness.Scenario(harness.generate, {"prompts": [[5, 6, 7]], "max_tokens": 8}),
            "lengths": harness.Scenario(lengths, {"prompts": [[5, 6, 7]]}),
        }, env={"TOKENWEAVE": "1"})

    def test_greedy(stock):
        assert stock["greedy"] == [[...]]                # rank 0's result; raises what the scenario raised
        assert stock.ranks("greedy")[1] == stock["greedy"]
        assert "tokenweave" in stock.log                 # what all ranks printed

The ranks are started as torchrun would start them, with vLLM's ``external_launcher``: the model is in the scenario's own
process (:func:`model_of`), so that a scenario can look at it, patch it or count its calls. ``executor="mp"`` runs the same
scenarios under vLLM's own multiprocessing executor instead: one process calls them, and the model is out of reach.

vLLM is imported once, in a process beside pytest's, which forks the ranks (:mod:`preloaded`); each rank runs :func:`main`.
So a variable that vLLM reads as it is imported (its log's level, say) can only be set in :data:`ENVIRONMENT`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import preloaded

RANKS = 2  # of engines on CPUs: their models' heads are made for it, and scenarios name rank 1
GPU_RANKS = int(os.environ.get("TOKENWEAVE_TEST_RANKS", "2"))  # of servers and checks on GPUs
_HERE = Path(__file__).resolve()

ENGINE: dict[str, Any] = {
    "dtype": "float32",  # so that equal mathematics gives equal greedy tokens
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**26,
    "disable_log_stats": True,
    "seed": 0,
}
"""Engine arguments that :func:`run` sets where its caller sets none."""

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
"""Nothing here may depend on multicast, wherever it runs."""

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "TOKENWEAVE": "0",
    **NO_MULTICAST,
}
"""Environment variables of the engine's processes; :func:`run`'s ``env`` has the last word."""


@dataclass(frozen=True)
class Scenario:
    """One call in a running engine: ``function(llm, **arguments)``, a top-level function of a file."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


class EngineFailed(AssertionError):
    """The engine did not start, died, or ran out of time; the message ends with the end of its output."""


@dataclass(frozen=True)
class Run:
    """What a finished engine left.

    Attributes:
        log: all that the ranks printed, one rank's after the other's. seconds: from start to end.
    """

    log: str
    seconds: float
    _results: dict[str, list[dict[str, Any]]]

    def __getitem__(self, name: str) -> Any:
        """Rank 0's result of a scenario; AssertionError with the scenario's traceback if it raised on any rank."""
        return self.ranks(name)[0]

    def ranks(self, name: str) -> list[Any]:
        """Every rank's result of a scenario, in rank order."""
        for rank, result in enumerate(self._results[name]):
            assert "error" not in result, f"scenario {name!r} raised on rank {rank}:\n{result['error']}"
        return [result["value"] for result in self._results[name]]

    def error(self, name: str) -> str:
        """The traceback that a scenario raised on rank 0, "" if it raised none: for scenarios that must fail."""
        return self._results[name][0].get("error", "")


def run(
    model: Path,
    scenarios: Mapping[str, Scenario],
    *,
    engine: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    executor: str = "external_launcher",
    ranks: int = RANKS,
    time_limit: float = 240,
) -> Run:
    """Starts one engine, runs the scenarios in it in order, and ends it.

    Args:
        model: a Hugging Face folder, see :func:`tiny_model`.
        scenarios: name -> what to call.
        engine: arguments of ``vllm.LLM``, beside or instead of :data:`ENGINE`.
        env: variables beside or instead of :data:`ENVIRONMENT`.
        executor: ``"external_launcher"`` (the scenarios run on every rank) or ``"mp"`` (in one process).
        ranks: tensor parallel size.
        time_limit: seconds for everything; then all processes are killed.

    Raises:
        EngineFailed: a process ended with an error, or the time limit passed.
    """
    processes = ranks if executor == "external_launcher" else 1
    with TemporaryDirectory(prefix="tokenweave-vllm-") as name:
        folder = Path(name)
        job = {
            "engine": {
                **ENGINE,
                **(engine or {}),
                "model": str(model),
                "tensor_parallel_size": ranks,
                "distributed_executor_backend": executor,
            },
            "scenarios": [_described(name, scenario) for name, scenario in scenarios.items()],
        }
        (folder / "job.json").write_text(json.dumps(job))
        started = time.monotonic()
        _run_processes(folder, processes, executor, env or {}, time_limit)
        seconds = time.monotonic() - started
        written = [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(processes)]
        log = _log(folder)
    return Run(log, seconds, {name: [results[name] for results in written] for name in scenarios})


def call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    time_limit: float = 240,
) -> Run:
    """Runs ``function(**arguments)`` in a process that has imported vLLM, without an engine; the run's only result, ``""``."""
    with TemporaryDirectory(prefix="tokenweave-vllm-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(
            json.dumps({"engine": None, "scenarios": [_described("", Scenario(function, arguments))]})
        )
        started = time.monotonic()
        _run_processes(folder, 1, "none", env or {}, time_limit)
        results = json.loads((folder / "results0.json").read_text())
        return Run(_log(folder), time.monotonic() - started, {"": [results[""]]})


def _described(name: str, scenario: Scenario) -> dict[str, Any]:
    return {
        "name": name,
        "file": scenario.function.__code__.co_filename,
        "function": scenario.function.__qualname__,
        "arguments": dict(scenario.arguments),
    }


# ---- for scenarios


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 16, one_by_one: bool = False, **sampling: Any
) -> list[list[int]]:
    """Greedy token ids of each prompt, no end-of-text token honoured; all in one batch unless ``one_by_one``."""
    from vllm import SamplingParams

    settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": max_tokens, **sampling}
    batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
    answers = []
    for batch in batches:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in batch]
        answers += llm.generate(requests, SamplingParams(**settings), use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def generate_with_aborts(
    llm: Any, prompts: Sequence[Sequence[int]], abort_after: Mapping[str, int], max_tokens: int = 16
) -> list[list[int]]:
    """As :func:`generate`, step by step; request i is aborted after ``abort_after[str(i)]`` steps of the engine."""
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    engine = llm.llm_engine
    settings = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    internal = [
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, settings) for i, prompt in enumerate(prompts)
    ]
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        if leave := [i for i, after in abort_after.items() if after == step]:
            # Newer engines give requests a name of their own, and abort by the caller's only where asked to.
            names = [internal[int(i)] or i for i in leave]
            engine.abort_request(names, internal=True) if internal[0] else engine.abort_request(names)
    return list(tokens.values())


def model_of(llm: Any) -> Any:
    """The model in this process; under ``external_launcher`` only."""
    return runner_of(llm).model


def runner_of(llm: Any) -> Any:
    """The model runner in this process; under ``external_launcher`` only."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def loaded_plugins(llm: Any) -> list[str]:
    """Names of the general plugins that vLLM finds."""
    from importlib.metadata import entry_points

    return sorted(point.name for point in entry_points(group="vllm.general_plugins"))


# ---- the processes


def _run_processes(folder: Path, processes: int, executor: str, env: Mapping[str, str], time_limit: float) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(_HERE.parent), str(_HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    base = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    # The engine's core in the scenario's process, where the model is to be within reach.
    common = {**base, "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if executor == "external_launcher" else "1", **env}
    if executor == "external_launcher":
        common |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    else:
        environments = [common]
    try:
        codes = preloaded.run(folder, environments, time_limit, base)
        if any(codes) or None in codes:
            why = f"time limit of {time_limit:.0f} s" if not any(codes) else f"exit codes of the ranks: {codes}"
            raise EngineFailed("\n".join([why, *_log(folder).splitlines()[-80:]]))
    finally:
        # Workers that vLLM kills leave theirs; it names them in its log.
        names = {folder.name, *re.findall(r"vllm_dist_[0-9a-f]{32}", _log(folder))}
        for left in [path for place in ("/dev/shm", "/tmp") for name in names for path in Path(place).glob(f"{name}*")]:
            if left.is_file():
                left.unlink(missing_ok=True)


def _log(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log*.txt")))


def main(folder: Path, rank: int) -> None:
    """One rank: the engine (if there is to be one), the scenarios, and their results as a file."""
    job = json.loads((folder / "job.json").read_text())
    engine = job["engine"]
    given: list[Any] = []
    if engine is not None:
        from vllm import LLM

        if engine["distributed_executor_backend"] == "external_launcher":
            _name_shared_memory(folder.name)
        given.append(LLM(**engine))
    results = {}
    for scenario in job["scenarios"]:
        try:
            function = _load(Path(scenario["file"]), scenario["function"])
            results[scenario["name"]] = {"value": function(*given, **scenario["arguments"])}
            json.dumps(results[scenario["name"]])
        except Exception:
            results[scenario["name"]] = {"error": traceback.format_exc()}
    (folder / f"results{rank}.json").write_text(json.dumps(results))
    if engine is not None and engine["distributed_executor_backend"] != "external_launcher":
        given[0].llm_engine.engine_core.shutdown()  # its workers, and what they hold in /dev/shm


def _name_shared_memory(name: str) -> None:
    """Under external_launcher all engines of a machine would meet in one segment, or find the one that a killed one left."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda c: name + original(c).lstrip("/"))


def _load(file: Path, name: str) -> Callable[..., Any]:
    if file.resolve() == _HERE:
        return globals()[name]
    module = sys.modules.get(file.stem)
    if module is None:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    return getattr(module, name)
