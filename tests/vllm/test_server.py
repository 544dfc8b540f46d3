"""``vllm serve`` with the plugin on: loaded by a real client, stopped, restarted; a worker is killed.

On CPUs and, where torch sees enough of them for the ranks or these share one, on GPUs. Two starts; the second has two API servers and two
data-parallel engines where the machine has the cores and GPUs for them. A test is a part of a server's life, so they run in order.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import one_gpu
import openai
import pytest
import saved_models
import server as servers
from server import NAME, WORDS, Server, Setting, word

TOKENS = 16
STOP_SECONDS = 60  # from a signal, or a worker's death, to the end of all processes
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}


def text(tokens: Sequence[int]) -> str:
    return " ".join(map(word, tokens))


class Client:
    """The OpenAI client; prompts and answers are token ids."""

    def __init__(self, server: Server) -> None:
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def complete(self, prompt: Sequence[int], *, stream: bool) -> list[str]:
        answer = self._ask(prompt, TOKENS, stream)
        if not stream:
            return answer.choices[0].text.split()
        with answer:
            return "".join(part.choices[0].text for part in answer if part.choices).split()

    def leave(self, prompt: Sequence[int], tokens: int) -> None:
        """Hangs up after the first part of a stream of many."""
        with self._ask(prompt, tokens, True) as answer:
            next(iter(answer))

    def _ask(self, prompt: Sequence[int], tokens: int, stream: bool) -> Any:
        create = self._client.completions.create
        return create(model=NAME, prompt=text(prompt), max_tokens=tokens, stream=stream, **GREEDY)


def load(server: Server, setting: Setting) -> list[list[str]]:
    """All prompts at once, every second one streamed, and one client that leaves; the others' answers."""
    client = Client(server)
    with ThreadPoolExecutor(len(setting.prompts) + 1) as pool:
        left = pool.submit(client.leave, max(setting.prompts, key=len), setting.longer)
        answers = [pool.submit(client.complete, prompt, stream=bool(i % 2)) for i, prompt in enumerate(setting.prompts)]
        found = [answer.result() for answer in answers]
        left.result()
    for shift in range(1, 4):  # of one length, nothing of them cached: the third one finds its graph
        client.complete([3 + (token + shift) % (WORDS - 3) for token in max(setting.prompts, key=len)], stream=False)
    return found


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 30
    while server.metrics()["vllm:num_requests_running", ""] > 0:
        assert time.monotonic() < deadline, "a request is still running that nobody waits for"
        time.sleep(0.1)


def check_metrics(server: Server, setting: Setting, engines: int = 1) -> None:
    metrics = server.metrics()
    assert metrics["tokenweave:state", "on"] == engines
    assert metrics["tokenweave:steps_total", "woven"] > 0
    assert metrics["tokenweave:tokens_total", "woven"] >= max(map(len, setting.prompts))
    computed = metrics["vllm:prompt_tokens_total", ""] + metrics["vllm:generation_tokens_total", ""]
    ran = metrics["tokenweave:tokens_total", "woven"] + metrics["tokenweave:tokens_total", "fused"]
    assert ran <= computed + setting.longer  # of the client that left, not all that was computed is counted by vLLM
    reasons = {reason for name, reason in metrics if name == "tokenweave:fallbacks_total"}
    known = {
        "whole_graph",
        "planner",
        "dummy",
        "decodes",
        "new_bucket",
        "eager_slower",
        "long_context",
        "prefix_hazard",
    }
    assert reasons <= known


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with one_gpu.sharing(harness.GPU_RANKS) as sharing:
        yield servers.setting(tmp_path_factory.mktemp("model"), sharing)


@pytest.fixture(scope="module")
def expected(setting: Setting) -> list[list[str]] | None:
    """What transformers gives; None where the model's weights are vLLM's random ones."""
    if "dummy" in setting.arguments:
        return None
    tokens = saved_models.transformers_tokens(setting.model, setting.prompts, TOKENS)
    return [text(answer).split() for answer in tokens]


def check_answers(answers: list[list[str]], expected: list[list[str]] | None) -> None:
    if expected is not None:
        assert answers == expected
    assert [len(answer) for answer in answers] == [TOKENS] * len(answers)


@pytest.fixture(scope="module")
def first(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.serving(setting, tmp_path_factory.mktemp("first") / "log.txt") as server:
        yield server


@pytest.fixture(scope="module")
def second(first: Server, setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    assert not first.processes()  # a restart
    log = tmp_path_factory.mktemp("second") / "log.txt"
    arguments = ["--api-server-count", str(setting.front_ends), "--data-parallel-size", str(setting.replicas)]
    with servers.serving(setting, log, *arguments) as server:
        yield server


@pytest.mark.timeout(400)
def test_a_loaded_server_answers(first: Server, setting: Setting, expected: list[list[str]] | None) -> None:
    check_answers(load(first, setting), expected)
    wait_until_idle(first)
    assert "TokenWeave: mode woven" in first.log()
    assert "stock vLLM runs (error)" not in first.log(), first.end_of_log()


def test_its_metrics(first: Server, setting: Setting) -> None:
    check_metrics(first, setting)


def test_it_stops_when_told_and_leaves_nothing(first: Server) -> None:
    shared = first.shared_memory()
    first.send(signal.SIGTERM)
    assert first.wait(STOP_SECONDS) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    # vLLM's CPU communicator leaves its own, with the plugin or without.
    assert not [file for file in shared if file.exists() and not file.name.startswith("vllm_dist_")]


@pytest.mark.timeout(400)
def test_a_restarted_server_answers(second: Server, setting: Setting, expected: list[list[str]] | None) -> None:
    check_answers(load(second, setting), expected)
    wait_until_idle(second)
    check_metrics(second, setting, setting.replicas)


def test_a_killed_worker_ends_it_with_a_message(second: Server, setting: Setting) -> None:
    worker = next(pid for pid, title in second.processes().items() if re.search(r"Worker_TP1\b", title))
    client = Client(second)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.leave, setting.prompts[0], setting.longer)
        os.kill(worker, signal.SIGKILL)
        second.wait(STOP_SECONDS)  # with code 0 if there is one API server: vLLM's has then been told to stop
        waiting.exception(timeout=STOP_SECONDS)  # it may have had its first part before
    assert "died unexpectedly" in second.log()
    with pytest.raises(openai.APIConnectionError):
        client.complete(setting.prompts[0], stream=False)
