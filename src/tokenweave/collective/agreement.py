"""What a workspace is made with: checked on every rank, then compared over the group, so that all ranks raise or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from numbers import Integral, Real

import torch
import torch.distributed as dist

from tokenweave import peers
from tokenweave.errors import CollectiveError


def check_arguments(
    *,
    max_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    channels: int,
    regions: int,
    fp8_regions: int,
    time_limit: float,
) -> None:
    """Raises CollectiveError for the first argument of a :class:`tokenweave.Workspace` that is out of range."""
    counts = {"hidden": hidden, "max_tokens": max_tokens, "channels": channels, "regions": regions}
    for name, count in {**counts, "fp8_regions": fp8_regions}.items():
        if not isinstance(count, Integral):
            raise CollectiveError(f"Workspace: {name}={count!r}; expected a whole number")
    if hidden < 8 or hidden % 8 or hidden > 16384:
        raise CollectiveError(f"Workspace: hidden={hidden}; expected a multiple of 8 from 8 to 16384")
    if max_tokens < 1:
        raise CollectiveError(f"Workspace: max_tokens={max_tokens}; expected at least 1")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CollectiveError(f"Workspace: dtype={dtype}; expected torch.bfloat16, torch.float16 or torch.float32")
    if channels < 1 or regions < 1:
        raise CollectiveError(f"Workspace: channels={channels}, regions={regions}; expected at least 1 of each")
    if fp8_regions < 0:
        raise CollectiveError(f"Workspace: fp8_regions={fp8_regions}; expected 0 or more")
    if not isinstance(time_limit, Real) or not 0 < time_limit <= 1e9:  # kernels count nanoseconds in 64 bits
        raise CollectiveError(f"Workspace: time_limit={time_limit!r}; expected seconds, more than 0 and at most 1e9")


def placed(device: torch.device | str) -> torch.device:
    """The device that tensors made with ``device`` are on: ``"cuda"`` is the current GPU, with its index.

    Raises:
        CollectiveError: there is no such device here.
    """
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # the second where torch was built without it
        raise CollectiveError(f"Workspace: device={str(device)!r}: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise CollectiveError("Workspace: device='meta': there is no memory on it; expected 'cpu' or 'cuda'")
    return found


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(this process's rank in ``group``, below 0 outside of it, its ranks); (0, 1) where nothing is initialised.

    Raises:
        CollectiveError: it is no process group, or one that is not there any more.
    """
    if not dist.is_initialized():
        if group is not None:
            raise CollectiveError(
                f"Workspace: group={group!r}, and torch.distributed is not initialised (not yet, or not any more): call "
                "torch.distributed.init_process_group() first, or give None for a single rank"
            )
        return 0, 1
    try:
        return dist.get_rank(group), dist.get_world_size(group)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CollectiveError(
            f"Workspace: group={group!r}: {str(error).splitlines()[0]}; expected a torch.distributed.ProcessGroup that is not "
            "destroyed"
        ) from error


@contextlib.contextmanager
def agreed(group: dist.ProcessGroup | None) -> Iterator[dict[str, object]]:
    """In the block every rank does its part and notes its values; behind it all have done so with the same, or all raise.

    Every rank of ``group`` enters it. It costs one exchange of objects, and nothing for a single rank.

    Args:
        group: None is WORLD.

    Yields:
        the values by name, to be filled. Of a device the type is compared; a GPU is the one that NCCL exchanges on.

    Raises:
        CollectiveError: what the block raises, on the others that this rank failed, or that the values differ; or a rank did
            not come to the end of its block.
    """
    mine: dict[str, object] = {}
    try:
        yield mine
    except Exception as error:
        with contextlib.suppress(CollectiveError):  # a lost peer need not be told
            _exchanged({"problem": str(error)}, None, group)
        raise
    device = mine.get("device")
    values = {name: value.type if isinstance(value, torch.device) else value for name, value in mine.items()}
    found = _exchanged(values, device if isinstance(device, torch.device) else None, group)
    if found is not None:
        raise _difference(*found)


def first_problem(problem: str | None, group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What the first rank that has a problem says of it, with the rank, the same on all ranks; None where none has one.

    Every rank of ``group`` calls it. It costs a reduction of one number, and an exchange of texts where there is a problem.

    Args:
        device: where the group's backend reduces.
    """
    some = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    dist.all_reduce(some, dist.ReduceOp.MAX, group=group)
    if not int(some):
        return None
    every: list[str | None] = [None] * dist.get_world_size(group)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(every, problem, group=group)
    return next(f"rank {rank}: {text}" for rank, text in enumerate(every) if text is not None)


def _exchanged(
    values: dict[str, object], device: torch.device | None, group: dist.ProcessGroup | None
) -> tuple[int, dict[str, tuple[object, object]]] | None:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    whole = group or dist.group.WORLD
    assert whole is not None
    on_gpu = device is not None and device.type == "cuda"
    here = torch.cuda.device(device) if on_gpu else contextlib.nullcontext()
    with peers.lost_peer_is_told(dist.get_rank(group)), here:
        return peers.differing(values, whole)


def _difference(rank: int, values: dict[str, tuple[object, object]]) -> CollectiveError:
    if "problem" in values:
        theirs, of_first = values["problem"]
        who, what = (rank, theirs) if theirs else (0, of_first)
        return CollectiveError(f"rank {who} cannot make its part of the workspace: {what}")
    one, first = (", ".join(f"{name}={pair[i]}" for name, pair in values.items()) for i in (0, 1))
    return CollectiveError(
        f"Workspace: rank {rank} was given {one}, and rank 0 {first}; every rank of the group creates its workspaces with "
        "the same arguments, in the same order"
    )
