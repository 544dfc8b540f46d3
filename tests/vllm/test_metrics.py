"""The plugin's counters on their way to the Prometheus endpoint, and its variables on their way to Ray's workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, multiprocess
from vllm.ray.ray_env import get_env_vars_to_copy

from tokenweave.integrations.vllm import board, environment, prometheus
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.planning import Mode


def config(engine: int, model: str = "tiny") -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=engine),
        model_config=SimpleNamespace(served_model_name=model),
    )


def an_engines_steps(engine: int, model: str = "tiny") -> None:
    """What a worker counts."""
    sink = prometheus.sink(config(engine, model))
    assert sink is not None
    steps = Steps(sink=sink)
    steps.engine(None)
    steps.ran(Mode.WOVEN, 1000, graph=True)
    steps.ran(Mode.WOVEN, 24 + engine)
    steps.count(Reason.WHOLE_GRAPH)
    if engine:
        steps.engine(Reason.ERROR)


def in_another_process(engine: int) -> None:
    code = f"import test_metrics; test_metrics.an_engines_steps({engine})"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=120)


def value(registry: CollectorRegistry, name: str, engine: int, model: str = "tiny", **label: str) -> float | None:
    return registry.get_sample_value(name, {"engine": str(engine), "model_name": model, **label})


def check(registry: CollectorRegistry, engine: int) -> None:
    assert value(registry, "tokenweave:steps_total", engine, mode="woven") == 2
    assert value(registry, "tokenweave:steps_total", engine, mode="fused") == 0  # known from the start
    assert value(registry, "tokenweave:tokens_total", engine, mode="woven") == 1024 + engine
    assert value(registry, "tokenweave:graph_replays_total", engine, mode="woven") == 1
    assert value(registry, "tokenweave:fallbacks_total", engine, reason="whole_graph") == 1
    assert value(registry, "tokenweave:fallbacks_total", engine, reason="planner") is None
    state = ("on", "error")[engine > 0]
    assert value(registry, "tokenweave:state", engine, state=state) == 1
    if engine:
        assert not value(registry, "tokenweave:state", engine, state="on")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(prometheus.SHARED_FILES, raising=False)
    monkeypatch.setenv(board.VARIABLE, "")
    page = board.create()
    yield page
    os.close(page)


def test_workers_counters_are_in_the_servers_registry(page: int) -> None:
    registry = CollectorRegistry()
    registry.register(prometheus.Collector(page))
    assert not prometheus_client.generate_latest(registry)  # no engine yet
    in_another_process(2)
    an_engines_steps(0)
    check(registry, 0)
    check(registry, 2)
    assert value(registry, "tokenweave:steps_total", 1, mode="woven") is None
    an_engines_steps(0)  # an engine that starts again starts at zero, which Prometheus knows how to read
    check(registry, 0)


@pytest.mark.parametrize("model", ["m", "a/b, ü", "x" * 3000, "ü" * 600])
def test_names_of_models(page: int, model: str) -> None:
    registry = CollectorRegistry()
    registry.register(prometheus.Collector(page))
    an_engines_steps(3, model)
    shown = model if len(model) < 600 else model[: 1024 // len(model[0].encode())]
    assert value(registry, "tokenweave:steps_total", 3, shown, mode="woven") == 2


def test_several_servers_read_the_workers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prometheus.SHARED_FILES, str(tmp_path))
    monkeypatch.setenv(board.VARIABLE, "")
    in_another_process(2)
    an_engines_steps(0)  # here the library was imported before the variable was set
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    check(registry, 0)
    check(registry, 2)


@pytest.mark.parametrize("files", ["", "/nowhere/at/all"])
def test_a_worker_that_does_not_reach_the_server_says_so_and_runs(
    files: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(prometheus.SHARED_FILES, raising=False)
    monkeypatch.setenv(board.VARIABLE, "/proc/1/fd/100000")
    if files:
        monkeypatch.setenv(prometheus.SHARED_FILES, files)
    with caplog.at_level("INFO", logger="vllm.tokenweave"):
        assert prometheus.sink(config(0)) is None
    assert "only in this log" in caplog.text


def test_every_number_has_its_place(page: int) -> None:
    numbers = board.Writer(0, "tiny").numbers
    places = [prometheus.place(m, value) for m in prometheus.METRICS for value in m.values]
    assert places == list(range(len(places)))
    assert len(places) <= len(numbers)


@pytest.mark.parametrize("before", [None, "", "FOO_, TOKENWEAVE", "FOO_"])
def test_rays_workers_get_the_plugins_variables(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.RAY_PREFIXES, raising=False)
    if before is not None:
        monkeypatch.setenv(environment.RAY_PREFIXES, before)
    ours = {"TOKENWEAVE": "1", "TOKENWEAVE_MODE": "woven", board.VARIABLE: "x", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    for name, setting in {**ours, "FOO_BAR": "1"}.items():
        monkeypatch.setenv(name, setting)
    environment.reach_ray_workers()
    once = os.environ[environment.RAY_PREFIXES]
    environment.reach_ray_workers()
    assert os.environ[environment.RAY_PREFIXES] == once
    copied = get_env_vars_to_copy()
    assert set(ours) <= copied
    assert ("FOO_BAR" in copied) == ("FOO_" in (before or ""))
