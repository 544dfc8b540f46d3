"""Memory that a tensor-parallel group shares for its collectives."""

from __future__ import annotations

import itertools
from types import TracebackType

import torch
import torch.distributed as dist

from tokenweave.errors import CollectiveError

_names = itertools.count()
_open: dict[str, Workspace] = {}


class Workspace:
    """Buffers that partial sums are written to and normalised rows are read from, for one tensor-parallel group.

    Every rank of ``group`` creates it, with the same arguments and in the same order.

    Args:
        group: the tensor-parallel process group (never WORLD by accident: None is accepted only for a single rank
            or where WORLD *is* the group).
        max_tokens: rows of a region; the largest step.
        hidden: elements of a row, a multiple of 8 up to 16384.
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        device: of the buffers.
        channels: how many collectives may be in flight at once (one per stream).
        regions: independent buffers of [max_tokens, hidden]; two allow stages that are not ``in_place``.

    Attributes:
        handle: str, names this workspace to ``torch.library`` ops.
        transport: ``"torch"``, ``"p2p"`` or ``"multimem"``: which implementation runs.
        rank, world_size: within ``group``.

    Raises:
        CollectiveError: arguments out of range.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        channels: int = 2,
        regions: int = 2,
    ) -> None:
        if hidden < 8 or hidden % 8 or hidden > 16384:
            raise CollectiveError(f"Workspace: hidden={hidden}; expected a multiple of 8 from 8 to 16384")
        if max_tokens < 1:
            raise CollectiveError(f"Workspace: max_tokens={max_tokens}; expected at least 1")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise CollectiveError(f"Workspace: dtype={dtype}; expected torch.bfloat16, torch.float16 or torch.float32")
        if channels < 1 or regions < 1:
            raise CollectiveError(f"Workspace: channels={channels}, regions={regions}; expected at least 1 of each")
        self.group = group
        self.max_tokens, self.hidden, self.dtype = max_tokens, hidden, dtype
        self.device = torch.device(device)
        self.channels, self.regions = channels, regions
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.transport = "torch"
        self.collectives = 0
        self.bytes_sent = 0
        self._data: torch.Tensor | None = torch.zeros(regions, max_tokens, hidden, dtype=dtype, device=self.device)
        self.handle = f"tokenweave-{next(_names)}"
        _open[self.handle] = self

    def buffer(self, tokens: int, *, start: int = 0, region: int = 0) -> torch.Tensor:
        """[tokens, hidden] view of rows ``start`` ... of a region: where a GEMM's ``out=`` goes.

        Raises:
            CollectiveError: the rows reach past ``max_tokens``, or the workspace is closed.
        """
        if self._data is None:
            raise CollectiveError("Workspace.buffer: this workspace is closed; create a new one")
        if tokens < 0 or start < 0 or start + tokens > self.max_tokens or not 0 <= region < self.regions:
            raise CollectiveError(
                f"Workspace.buffer: rows {start}..{start + tokens} of region {region}; this workspace has "
                f"{self.regions} regions of {self.max_tokens} rows: raise max_tokens, or send fewer rows per step"
            )
        return self._data[region, start : start + tokens]

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called: its memory is gone, and collectives refuse it."""
        return self._data is None

    def close(self) -> None:
        """Releases the memory; idempotent."""
        self._data = None
        _open.pop(self.handle, None)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find(handle: str) -> Workspace:
    """The open workspace with this handle."""
    try:
        return _open[handle]
    except KeyError:
        raise CollectiveError(
            f"no open workspace is called {handle!r}; it was closed, or belongs to another process"
        ) from None
