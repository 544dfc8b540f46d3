"""Where a collective runs while the other split computes: on the same thread, on a second CUDA stream, or on a CPU thread.

All three are in-order queues with the same two calls, so the schedule in :mod:`tokenweave.weave` never branches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch


class Overlap(Protocol):
    """An in-order queue for collectives."""

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> Any:
        """Queues ``collective(*args)`` behind all work issued so far; returns what :meth:`wait` takes."""

    def wait(self, pending: Any) -> torch.Tensor:
        """Makes the compute stream wait for a queued collective; returns its rows. Raises what the collective raised."""

    def reached(self, point: str) -> None:
        """The compute that is being issued has come to ``point`` (:data:`tokenweave.planning.plan.POINTS`)."""

    def close(self) -> None:
        """Ends threads; idempotent."""


class Inline:
    """No overlap: the collective runs on the compute stream. For sequential and fused steps."""

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return collective(*args)

    def wait(self, pending: torch.Tensor) -> torch.Tensor:
        return pending

    def reached(self, point: str) -> None:
        pass

    def close(self) -> None:
        pass


class CpuThread:
    """One worker thread is the communication stream: gloo releases the GIL while bytes travel."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenweave-comm")

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> Future[torch.Tensor]:
        return self._executor.submit(_without_grad, collective, *args)

    def wait(self, pending: Future[torch.Tensor]) -> torch.Tensor:
        return pending.result()

    def reached(self, point: str) -> None:
        pass

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _without_grad(collective: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    with torch.inference_mode():  # thread-local in torch: the worker needs its own
        return collective(*args)


class _Recorded(NamedTuple):
    rows: torch.Tensor
    event: torch.cuda.Event


class CudaStream:
    """A second CUDA stream for collectives; events order it with the current (compute) stream. Capturable in a graph.

    Args:
        device: the rank's CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> _Recorded:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            rows = collective(*args)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Recorded(rows, event)

    def wait(self, pending: _Recorded) -> torch.Tensor:
        pending.event.wait(torch.cuda.current_stream())
        return pending.rows

    def reached(self, point: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Held:
    """A collective that waits for its start."""

    def __init__(self, collective: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        self.collective, self.args = collective, args
        self.pending: Any = None


class StartAt:
    """Another overlap, whose collectives start once the compute that is issued after them comes to one of ``points``.

    They start in their order, at the latest when one of them is waited for.

    Args:
        inner: runs them; not closed with this.
        points: :data:`tokenweave.planning.plan.POINTS`.
    """

    def __init__(self, inner: Overlap, points: Collection[str]) -> None:
        self._inner, self._points = inner, frozenset(points)
        self._held: list[_Held] = []

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> _Held:
        self._held.append(_Held(collective, args))
        return self._held[-1]

    def reached(self, point: str) -> None:
        if point in self._points:
            self._start()

    def wait(self, pending: _Held) -> torch.Tensor:
        if pending in self._held:
            self._start()
        return self._inner.wait(pending.pending)

    def _start(self) -> None:
        held, self._held = self._held, []
        for one in held:
            one.pending = self._inner.run(one.collective, *one.args)

    def close(self) -> None:
        self._held.clear()
