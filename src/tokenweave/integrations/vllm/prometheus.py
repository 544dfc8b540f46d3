"""The plugin's counters in vLLM's Prometheus endpoint, beside vLLM's own and with their labels.

One API server: its process has a page (:mod:`tokenweave.integrations.vllm.board`) that the engines write, and a collector
in prometheus_client's registry that reads it when the endpoint is asked. Several API servers, or a user's
PROMETHEUS_MULTIPROC_DIR: the endpoint adds up files that any process may write; the engines' workers do.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenweave.integrations.vllm import board
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.planning import Mode

log = logging.getLogger("vllm.tokenweave")

SHARED_FILES = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True)
class Metric:
    """``kind``: counter or gauge. ``label``: its only one beside model_name and engine, with these ``values``."""

    kind: str
    name: str
    help: str
    label: str
    values: tuple[str, ...]

    @property
    def from_start(self) -> bool:
        """Whether its zeros are shown, so that a rate is known from the first step on; of reasons there are too many."""
        return self.label == "mode"


_RUN = (str(Mode.FUSED), str(Mode.WOVEN))
ON = "on"
STEPS = Metric("counter", "tokenweave:steps", "Steps that TokenWeave ran, by mode.", "mode", _RUN)
TOKENS = Metric("counter", "tokenweave:tokens", "Tokens of the steps that TokenWeave ran, by mode.", "mode", _RUN)
REPLAYS = Metric("counter", "tokenweave:graph_replays", "Steps that were replays of a CUDA graph.", "mode", _RUN)
FALLBACKS = Metric(
    "counter",
    "tokenweave:fallbacks",
    "Steps that ran as stock vLLM (prefix_hazard: that were not cut), by reason.",
    "reason",
    tuple(str(reason) for reason in Reason),
)
STATE = Metric(
    "gauge",
    "tokenweave:state",
    "1 for what the engine is: on, or the reason for which all of its steps run as stock vLLM.",
    "state",
    (ON, *(str(reason) for reason in Reason)),
)
METRICS = (STEPS, TOKENS, REPLAYS, FALLBACKS, STATE)
_PLACES = {pair: i for i, pair in enumerate((metric.name, value) for metric in METRICS for value in metric.values)}
_SUFFIX = {"counter": "_total", "gauge": ""}


def place(metric: Metric, value: str) -> int:
    """Of the number with this label among those of an engine on the board."""
    return _PLACES[metric.name, value]


class Sink(Protocol):
    """Where one engine's counters go."""

    def add(self, metric: Metric, value: str, amount: int) -> None:
        """Adds to the metric with this label."""

    def set(self, metric: Metric, value: str, number: int) -> None:
        """Sets it."""


class OnBoard:
    """A slot of the board: one number a metric and label."""

    def __init__(self, engine: int, model: str) -> None:
        self._numbers = board.Writer(engine, model).numbers

    def add(self, metric: Metric, value: str, amount: int) -> None:
        """One store."""
        self._numbers[place(metric, value)] += amount

    def set(self, metric: Metric, value: str, number: int) -> None:
        """One store."""
        self._numbers[place(metric, value)] = number


class InFiles:
    """prometheus_client's files of this process."""

    def __init__(self, engine: int, model: str) -> None:
        from prometheus_client import values

        # Asked here, and not where the library is imported: a forked process imported it before the variable was set.
        self._value: Any = values.get_value_class()
        self._labels = (model, str(engine))
        self._files: dict[tuple[str, str], Any] = {}
        for metric in METRICS:
            for value in metric.values if metric.from_start else ():
                self._file(metric, value)  # raises OSError here, and not in a step

    def add(self, metric: Metric, value: str, amount: int) -> None:
        """A store into a mapped file."""
        self._file(metric, value).inc(amount)

    def set(self, metric: Metric, value: str, number: int) -> None:
        """A store into a mapped file."""
        self._file(metric, value).set(number)

    def _file(self, metric: Metric, value: str) -> Any:
        found = self._files.get((metric.name, value))
        if found is None:
            labels = (("model_name", "engine", metric.label), (*self._labels, value))
            name = metric.name + _SUFFIX[metric.kind]
            found = self._value(metric.kind, metric.name, name, *labels, metric.help, multiprocess_mode="max")
            self._files[metric.name, value] = found
        return found


def sink(vllm_config: Any) -> Sink | None:
    """Where the counters of this engine go; one rank of it asks. None, with a line in the log, where nobody reads them."""
    try:
        engine = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
        model = str(vllm_config.model_config.served_model_name)
        return InFiles(engine, model) if SHARED_FILES in os.environ else OnBoard(engine, model)
    except Exception as error:  # whatever it is: nothing that an engine needs
        log.info("TokenWeave: its counters are only in this log, the Prometheus endpoint is out of reach (%s)", error)
        return None


class Collector:
    """What prometheus_client's registry asks for the page's numbers."""

    def __init__(self, page: int) -> None:
        self.page = page

    def describe(self) -> Sequence[Any]:
        """Nothing: the page is not read before it is asked for."""
        return []

    def collect(self) -> Iterable[Any]:
        """All metrics of all engines."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        slots = list(board.read(self.page))
        for metric in METRICS:
            labels = ["model_name", "engine", metric.label]
            family: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = family(metric.name, metric.help, labels=labels)
            for slot in slots:
                for value in metric.values:
                    number = slot.numbers[place(metric, value)]
                    if number or metric.from_start:
                        family.add_metric([slot.model, str(slot.engine), value], number)
            if family.samples:
                yield family


_collector: Collector | None = None


def serve() -> None:
    """Gives this process a page and a collector if it may be the server's. Before engines are started; safe to repeat."""
    global _collector
    if _collector is not None or SHARED_FILES in os.environ or not _may_serve():
        return
    from prometheus_client import REGISTRY

    try:
        _collector = Collector(board.create())
    except OSError as error:
        log.info("TokenWeave: no memory to share with workers (%s): its counters are only in this log", error)
        return
    REGISTRY.register(_collector)


def _may_serve() -> bool:
    """Not an engine's or a worker's process: those are multiprocessing's, or actors of Ray.

    vLLM's supervisor of data-parallel servers starts servers by multiprocessing, too; it names them.
    """
    if board.VARIABLE in os.environ and _ray_actor():
        return False
    return multiprocessing.parent_process() is None or multiprocessing.current_process().name.casefold().startswith(
        "apiserver"
    )


def _ray_actor() -> bool:
    ray: Any = sys.modules.get("ray")
    return hasattr(ray, "is_initialized") and ray.is_initialized() and bool(ray.get_runtime_context().get_actor_id())
