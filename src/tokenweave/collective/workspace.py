"""Memory that a tensor-parallel group shares for its collectives."""

from __future__ import annotations

import itertools
import logging
import os
from types import TracebackType

import torch
import torch.distributed as dist

from tokenweave.collective import fp8
from tokenweave.collective.agreement import agreed, check_arguments, place_in, placed
from tokenweave.collective.symmetric import Symmetric, allocate
from tokenweave.errors import CollectiveError
from tokenweave.switches import multicast_switched_off

log = logging.getLogger(__name__)
_names = itertools.count()
_open: dict[str, Workspace] = {}


class Workspace:
    """Buffers that partial sums are written to and normalised rows are read from, for one tensor-parallel group.

    Every rank of ``group`` creates it, with the same arguments (but for ``time_limit``) and in the same order; they are
    compared, and what is wrong on one rank is an error on all.

    Args:
        group: the tensor-parallel process group (never WORLD by accident: None is accepted only for a single rank
            or where WORLD *is* the group).
        max_tokens: rows of a region; the largest step.
        hidden: elements of a row, a multiple of 8 up to 16384.
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        device: of the buffers; ``"cuda"`` is the current GPU.
        channels: how many collectives may be in flight at once (one per stream).
        regions: independent buffers of [max_tokens, hidden]; two allow stages that are not ``in_place``.
        staging: two more regions, for partial sums and results that are not in the workspace; without them such calls
            are errors on the GPU transports.
        fp8_regions: regions of [max_tokens, hidden] for quantised results, with a scale a row; 0 where there are none.
        transport: ``"auto"``, ``"torch"``, ``"p2p"`` or ``"multimem"`` (NVSwitch multicast for the large batches;
            equal bits on all ranks, but not those of the others). ``"auto"`` takes multicast, where there is any, for
            more than two ranks: it carries 1 + 1/N of the rows, p2p 2 - 2/N. ``"multimem-emulated"`` is its kernel with
            peer-to-peer loops in place of the multicast instructions, for tests.
        time_limit: seconds after which a kernel stops waiting for a peer.

    Attributes:
        handle: str, names this workspace to ``torch.library`` ops.
        transport: ``"torch"``, ``"p2p"``, ``"multimem"`` or ``"multimem-emulated"``: which implementation runs. A GPU
            transport has passed its self-test (:mod:`tokenweave.collective.selftest`).
        reason: why that one.
        rank, world_size: within ``group``. process: id of the process that made it, of which no fork may use it.
        collectives, bytes_sent, copies: counters since creation; copies of whole batches into or out of the staging.

    A workspace that is not closed is kept until the process ends, since captured graphs know its memory by address alone.

    Raises:
        CollectiveError: arguments out of range or not those of the other ranks, no memory, a group without this rank, a
            stream that captures a graph, or a transport that cannot run here or fails its self-test was asked for.
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
        fp8_regions: int = 0,
        transport: str = "auto",
        time_limit: float = 20.0,
    ) -> None:
        self.group = group
        self.max_tokens, self.hidden, self.dtype = max_tokens, hidden, dtype
        self.channels, self.regions, self.fp8_regions = channels, regions, fp8_regions
        self.process = os.getpid()
        self.rank, self.world_size = place_in(group)
        if self.rank < 0:
            raise CollectiveError(
                f"Workspace: rank {dist.get_rank()} of the job is not in the group that it was given; the group's own ranks "
                "create its workspace"
            )
        # Before the ranks speak with each other, which would break the capture.
        if str(device).startswith("cuda") and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CollectiveError(
                "Workspace: the current stream captures a CUDA graph, which can hold neither the set-up of a workspace nor its "
                "self-test; create the workspace before, on all ranks"
            )
        self.time_limit = time_limit
        self.collectives = 0
        self.bytes_sent = 0
        self.copies = 0
        self.symmetric: Symmetric | None = None
        self.handle = f"tokenweave-{next(_names)}"
        self._staging = staging
        self._data: torch.Tensor | None = None
        self._fp8: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None
        sizes = {"max_tokens": max_tokens, "hidden": hidden, "channels": channels, "regions": regions}
        sizes["fp8_regions"] = fp8_regions
        with agreed(group) as same:
            check_arguments(**sizes, dtype=dtype, time_limit=time_limit)
            self.device = placed(device)
            self.transport, self.reason = choose_transport(transport, self.device, self.world_size)
            if self.transport == "torch":
                self._allocate()
            same.update(sizes, dtype=dtype, staging=staging, device=self.device)
            same["transport"] = f"{transport!r} ({self.transport} here)"
        fell_back = self.device.type == "cuda" and self.transport == "torch" and transport != "torch"
        if self.transport != "torch":
            fell_back = self._set_up_gpus(transport)
        if self.rank == 0:
            log.log(
                logging.WARNING if fell_back else logging.INFO,
                "collectives run on the %s transport: %s",
                self.transport,
                self.reason,
            )
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
                f"{self.regions} regions of {self.max_tokens} rows: raise max_tokens or regions, or send fewer rows per step"
            )
        return self._data[region, start : start + tokens]

    def fp8(self, tokens: int, *, start: int = 0, region: int = 0) -> torch.Tensor:
        """e4m3 [tokens, hidden] view of rows ``start`` ... of a region for quantised results, which peers write.

        It shares no memory with :meth:`buffer`: a quantised row is written while others of the batch are still read.

        Raises:
            CollectiveError: the rows reach past ``max_tokens`` or ``fp8_regions``, or the workspace is closed.
        """
        return self._quantised("fp8", tokens, start, region)[0]

    def scales(self, tokens: int, *, start: int = 0, region: int = 0) -> torch.Tensor:
        """float32 [tokens]: memory for the scales of the rows ``fp8(tokens, start=start, region=region)``."""
        return self._quantised("scales", tokens, start, region)[1]

    def _quantised(self, what: str, tokens: int, start: int, region: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fp8 is None or self._scales is None:
            raise CollectiveError(f"Workspace.{what}: this workspace is closed; create a new one")
        if tokens < 0 or start < 0 or start + tokens > self.max_tokens or not 0 <= region < self.fp8_regions:
            advice = "raise max_tokens, or send fewer rows per step"
            if region >= self.fp8_regions:
                advice = f"create it with fp8_regions={region + 1} or more"
            raise CollectiveError(
                f"Workspace.{what}: rows {start}..{start + tokens} of region {region}; this workspace has "
                f"{self.fp8_regions} fp8 regions of {self.max_tokens} rows: {advice}"
            )
        rows = slice(start, start + tokens)
        return self._fp8[region, rows], self._scales[region, rows]

    def check(self) -> None:
        """Raises if a collective of this workspace has failed, as far as the host knows; waits for nothing.

        Kernels cannot raise: one whose peer is late or gone records that and ends, with rows that are worth nothing. The next
        call finds the record. Where there is none, as after the last call or while graphs are replayed, ask for it here: after
        the host has waited for the GPU, and before it uses what was computed.

        Raises:
            CollectiveError: names rank, peer, channel, phase and epoch.
        """
        if self.symmetric is None:  # torch.distributed raises by itself
            return
        for channel in range(self.channels):
            if (failure := self.symmetric.failure(channel)) is not None:
                raise CollectiveError(
                    f"collective failed: {failure}. A peer died or fell behind, or the ranks called with different shapes; "
                    "the workspace cannot be used any more: end this process, or close the workspace on all ranks and "
                    "create a new one"
                )

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
        """Bytes from the start of the symmetric memory if the whole tensor lies in it, with contiguous rows; else None.

        Rows must lie among the buffers, quantised rows among those and scales among those.
        """
        if self._data is None or self.symmetric is None or not tensor.is_contiguous():
            return None
        for part in (self.symmetric.data, self.symmetric.fp8, self.symmetric.scales):
            first = tensor.data_ptr() - part.data_ptr()
            if part.dtype == tensor.dtype and first >= 0 and first + tensor.nbytes <= part.nbytes:
                return tensor.data_ptr() - self._data.data_ptr()
        return None

    @torch.inference_mode(False)  # or its memory could be written in that mode alone
    def _set_up_gpus(self, asked: str) -> bool:
        """Symmetric memory, and the first transport that works on it; the ``torch`` transport if none does. Whether one is refused."""
        from tokenweave.collective import selftest

        refused: list[str] = []
        group = self.group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        try:
            self.symmetric = allocate(
                group,
                max_tokens=self.max_tokens,
                hidden=self.hidden,
                dtype=self.dtype,
                device=self.device,
                channels=self.channels,
                regions=self.regions + 2 * self._staging,
                fp8_regions=self.fp8_regions,
            )
            self._data, self._fp8, self._scales = self.symmetric.data, self.symmetric.fp8, self.symmetric.scales
            if asked == "multimem" and not self.symmetric.multicast:
                raise CollectiveError(
                    "Workspace: transport='multimem': torch's symmetric memory has no multicast address on every rank (no "
                    "NVSwitch, or its fabric is not up, or a rank's environment switches it off); use transport='p2p'"
                )
            several = asked == "auto" and self.world_size > 2 and self.symmetric.multicast
            for transport in ("multimem", "p2p") if several else (self.transport,):
                self.transport = transport
                if (failure := selftest.failure(self)) is None:
                    if several and transport == "multimem":
                        self.reason = "the GPUs have NVSwitch multicast"
                    if refused:
                        self.reason += f", and {refused[0]}"
                    return bool(refused)
                refused.append(
                    f"the {transport} transport is refused, because it did not pass its self-test: {failure}"
                )
            raise CollectiveError(f"Workspace: {'; '.join(refused)}; transport='torch' works without")
        except CollectiveError as error:
            self._release()
            if asked != "auto":
                raise
            self.transport, self.reason = "torch", str(error)
        with agreed(group) as same:
            self._allocate()
            same["device"] = self.device
        return True

    @torch.inference_mode(False)
    def _allocate(self) -> None:
        """The ``torch`` transport's memory: nobody else's to reach, so it has no staging."""
        shape = (self.max_tokens, self.hidden)
        try:
            self._data = torch.zeros(self.regions, *shape, dtype=self.dtype, device=self.device)
            self._fp8 = torch.zeros(self.fp8_regions, *shape, dtype=fp8.DTYPE, device=self.device)
            self._scales = torch.zeros(self.fp8_regions, self.max_tokens, dtype=torch.float32, device=self.device)
        except (RuntimeError, OverflowError, TypeError) as error:
            self._release()
            size = self.max_tokens * self.hidden * (self.regions * self.dtype.itemsize + self.fp8_regions)
            raise CollectiveError(
                f"Workspace: no {size / 2**30:.3g} GiB on {self.device} for {self.regions} regions and {self.fp8_regions} fp8 "
                f"regions of max_tokens={self.max_tokens} rows of hidden={self.hidden}: {str(error).splitlines()[0]}; lower "
                "max_tokens"
            ) from error

    def close(self) -> None:
        """Releases the memory, and the group: one that outlives ``dist.destroy_process_group`` may abort the program as it
        exits. Idempotent."""
        self._release()
        self.group = None
        _open.pop(self.handle, None)

    def _release(self) -> None:
        self._data = self._fp8 = self._scales = self.symmetric = None

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
    kinds = ("auto", "torch", "p2p", "multimem", "multimem-emulated")
    if asked not in kinds:
        raise CollectiveError(f"Workspace: transport={asked!r}; expected one of {', '.join(map(repr, kinds))}")
    if asked == "torch":
        return "torch", "it was asked for"
    kind = "p2p" if asked == "auto" else asked
    least = (9, 0) if asked == "multimem" else (8, 0)
    missing = None
    if device.type != "cuda":
        missing = f"{kind} needs NVIDIA GPUs, and the device is {device.type}"
    elif not 2 <= world_size <= 8:
        missing = f"{kind} takes 2 to 8 ranks, and the group has {world_size}"
    elif torch.cuda.get_device_capability(device) < least:
        missing = (
            f"{kind} needs compute capability {least[0]}.{least[1]}, and {torch.cuda.get_device_name(device)} has less"
        )
    if asked == "multimem" and (switch := multicast_switched_off(os.environ)):
        missing = f"{switch} in the environment switches multicast off"
    if missing is None:
        return kind, "the GPUs reach each other's memory" if asked == "auto" else "it was asked for"
    if asked == "auto":
        return "torch", missing
    raise CollectiveError(f"Workspace: transport={asked!r}: {missing}; use transport='torch' or 'auto'")


def find(handle: str) -> Workspace:
    """The open workspace with this handle."""
    try:
        return _open[handle]
    except KeyError:
        raise CollectiveError(
            f"no open workspace is called {handle!r}; it was closed, or belongs to another process"
        ) from None
