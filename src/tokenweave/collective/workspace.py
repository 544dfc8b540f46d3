"""Memory that a tensor-parallel group shares for its collectives."""

from __future__ import annotations

import itertools
import logging
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tokenweave.errors import CollectiveError

if TYPE_CHECKING:
    from tokenweave.collective.symmetric import Symmetric

log = logging.getLogger(__name__)
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
        staging: two more regions, for partial sums and results that are not in the workspace; without them such calls
            are errors on the GPU transports.
        transport: ``"auto"``, ``"torch"`` or ``"p2p"``.
        time_limit: seconds after which a kernel stops waiting for a peer.

    Attributes:
        handle: str, names this workspace to ``torch.library`` ops.
        transport: ``"torch"`` or ``"p2p"``: which implementation runs.
        reason: why that one.
        rank, world_size: within ``group``.
        collectives, bytes_sent, copies: counters since creation; copies of whole batches into or out of the staging.

    Raises:
        CollectiveError: arguments out of range, or ``transport="p2p"`` where the GPUs cannot share memory.
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
        staging: bool = True,
        transport: str = "auto",
        time_limit: float = 20.0,
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
        self.time_limit = time_limit
        self.collectives = 0
        self.bytes_sent = 0
        self.copies = 0
        self.symmetric: Symmetric | None = None
        self.transport, self.reason = choose_transport(transport, self.device, self.world_size)
        self._staging = staging
        if self.transport == "p2p":
            self._allocate_symmetric(fall_back=transport == "auto")
        if self.transport == "torch":
            self._data: torch.Tensor | None = torch.zeros(regions, max_tokens, hidden, dtype=dtype, device=self.device)
        if self.rank == 0:
            log.info("collectives run on the %s transport: %s", self.transport, self.reason)
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

    def staging(self, tokens: int, index: int) -> torch.Tensor:
        """[tokens, hidden] of a staging region: 0 for partial sums, 1 for results that peers could not reach otherwise."""
        if self._data is None or not self._staging:
            raise CollectiveError(
                "this call's partial sums or result are outside the workspace, which was created with staging=False: write "
                "them to workspace.buffer(tokens), or create it with staging=True"
            )
        return self._data[self.regions + index, :tokens]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of the symmetric memory if the whole tensor lies in it, with contiguous rows; else None."""
        if self._data is None or self.symmetric is None or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - self._data.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= self._data.nbytes else None

    def _allocate_symmetric(self, *, fall_back: bool) -> None:
        from tokenweave.collective.symmetric import allocate

        assert self.group is not None
        try:
            self.symmetric = allocate(
                self.group,
                max_tokens=self.max_tokens,
                hidden=self.hidden,
                dtype=self.dtype,
                device=self.device,
                channels=self.channels,
                regions=self.regions + 2 * self._staging,
            )
            self._data = self.symmetric.data
        except CollectiveError as error:
            if not fall_back:
                raise
            self.transport, self.reason = "torch", str(error)

    def close(self) -> None:
        """Releases the memory; idempotent."""
        self._data = None
        self.symmetric = None
        _open.pop(self.handle, None)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def choose_transport(asked: str, device: torch.device, world_size: int) -> tuple[str, str]:
    """(transport, why), from what all ranks know.

    Raises:
        CollectiveError: the transport that was asked for does not exist or cannot run on this device.
    """
    if asked not in ("auto", "torch", "p2p"):
        raise CollectiveError(f"Workspace: transport={asked!r}; expected 'auto', 'torch' or 'p2p'")
    if asked == "torch":
        return "torch", "it was asked for"
    missing = None
    if device.type != "cuda":
        missing = f"p2p needs NVIDIA GPUs, and the device is {device.type}"
    elif not 2 <= world_size <= 8:
        missing = f"p2p takes 2 to 8 ranks, and the group has {world_size}"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        missing = f"p2p needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if missing is None:
        return "p2p", "the GPUs reach each other's memory"
    if asked == "p2p":
        raise CollectiveError(f"Workspace: transport='p2p': {missing}; use transport='torch' or 'auto'")
    return "torch", missing


def find(handle: str) -> Workspace:
    """The open workspace with this handle."""
    try:
        return _open[handle]
    except KeyError:
        raise CollectiveError(
            f"no open workspace is called {handle!r}; it was closed, or belongs to another process"
        ) from None
