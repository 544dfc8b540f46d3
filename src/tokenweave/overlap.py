"""Where a collective runs while the other split computes: on the same thread, on a second CUDA stream, or on a CPU thread.

All three are in-order queues with the same two calls, so the schedule in :mod:`tokenweave.weave` never branches.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch


class Overlap(Protocol):
    """An in-order queue for collectives."""

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> Any:
        """Queues ``collective(*args)`` behind all work issued so far; returns what :meth:`wait` takes."""

    def wait(self, pending: Any) -> torch.Tensor:
        """Makes the compute stream wait for a queued collective; returns its rows. Raises what the collective raised."""

    def close(self) -> None:
        """Ends threads; idempotent."""


class Inline:
    """No overlap: the collective runs on the compute stream. For sequential and fused steps."""

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return collective(*args)

    def wait(self, pending: torch.Tensor) -> torch.Tensor:
        return pending

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

    def close(self) -> None:
        pass
