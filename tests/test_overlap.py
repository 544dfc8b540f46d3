"""What the second CUDA stream waits for and what waits for it, with streams and events that keep what precedes them."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from tokenweave.overlap import CudaStream


class _Event:
    def __init__(self) -> None:
        self.behind: frozenset[str] = frozenset()

    def record(self, stream: _Stream) -> None:
        self.behind = frozenset(stream.behind)

    def wait(self, stream: _Stream) -> None:
        stream.behind |= self.behind


class _Stream:
    """``behind``: all that has surely run when the next operation of this stream begins."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.behind: set[str] = set()

    def wait_stream(self, other: _Stream) -> None:
        self.behind |= other.behind

    def runs(self, name: str) -> set[str]:
        """An operation; returns what it surely comes behind."""
        before = set(self.behind)
        self.behind.add(name)
        return before


class _Gpu:
    def __init__(self) -> None:
        self.current = _Stream()

    @contextlib.contextmanager
    def stream(self, stream: _Stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu():
    made = _Gpu()
    names = {"Stream": _Stream, "Event": _Event, "stream": made.stream, "current_stream": lambda: made.current}
    with mock.patch.multiple(torch.cuda, **names):
        yield made


def test_collectives_come_behind_the_compute_before_them_and_before_what_waits_for_them(gpu):
    overlap = CudaStream(torch.device("cuda", 0))
    compute, before = gpu.current, {}

    def collective(name: str, rows: torch.Tensor) -> torch.Tensor:
        assert gpu.current is not compute
        before[name] = gpu.current.runs(name)
        return rows + 1

    compute.runs("prefix")
    prefix = overlap.run(collective, "reduce prefix", torch.zeros(1))
    assert gpu.current is compute
    assert compute.runs("suffix") == {"prefix"}, "compute waits for a collective that nobody asked for"
    suffix = overlap.run(collective, "reduce suffix", torch.ones(1))
    assert before == {"reduce prefix": {"prefix"}, "reduce suffix": {"prefix", "suffix", "reduce prefix"}}
    assert overlap.wait(prefix).item() == 1
    assert compute.runs("next prefix") == {"prefix", "suffix", "reduce prefix"}, (
        "it waits for one, not for what came later"
    )
    assert overlap.wait(suffix).item() == 2
    assert "reduce suffix" in compute.runs("next suffix")


def test_what_waits_is_the_stream_that_is_current_then(gpu):
    """A graph is captured on another stream than the one that eager steps run on."""
    overlap = CudaStream(torch.device("cuda", 0))
    eager, other = gpu.current, _Stream()
    with gpu.stream(other):
        other.runs("compute")
        pending = overlap.run(lambda: gpu.current.runs("reduce"))
        assert pending.rows == {"compute"}
        overlap.wait(pending)
        assert "reduce" in other.behind
    assert not eager.behind
