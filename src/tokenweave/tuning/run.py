"""One tuning run on one rank: measures, then rank 0 writes the table."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from tokenweave.bench.timing import slowest_rank
from tokenweave.errors import ProfileError, RequestError
from tokenweave.files import refusal
from tokenweave.peers import differing
from tokenweave.planning.profile_table import Identity, Table, read_table, write_table
from tokenweave.tuning.schedule import Setting
from tokenweave.tuning.tuner import Pieces, Tuner

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]


def partial_path(path: Path) -> Path:
    """Where a run keeps what it has so far, and an interrupted one leaves it: a table that is refused, to look at."""
    return path.with_name(path.name + ".partial")


def tune(
    setting: Setting,
    pieces: Pieces,
    identity: Identity,
    path: Path,
    group: dist.ProcessGroup,
    device: torch.device,
    clock: Callable[[], float],
    seconds: float,
    progress: Progress,
    info: Callable[[Tuner], Mapping[str, Any]],
    *,
    replaces_any: bool = True,
) -> Table:
    """Measures a model's parts and writes the table, all at once, when everything is measured. Every rank of ``group`` calls it.

    Until then what is measured is kept at :func:`partial_path`, from phase to phase: whatever ends a run, that stays.

    Args:
        setting, pieces, clock, seconds, progress: as :class:`Tuner`.
        identity: of the table; it has to be the same on all ranks.
        path: of the table; written by rank 0.
        device: of the numbers that the ranks exchange.
        info: of the table, asked for at the end, on rank 0.
        replaces_any: whatever file is at ``path`` is replaced; False: only one that holds a table of the same machine and model.

    Raises:
        RequestError: the ranks' machines differ.
        ProfileError: the table cannot be written, or must not take a file's place: raised before anything is measured, unless
            the disk is full at the end.
    """
    first = dist.get_rank(group) == 0
    _check_same(identity, group)
    _raise_together(_refusal(path, identity, replaces_any) if first else None, group)

    def slowest(numbers: Any) -> list[float]:
        return slowest_rank({"": numbers}, group, device)[""]

    told = False

    def keep() -> bool:
        nonlocal told
        if not (first and tuner.times):
            return False
        try:
            write_table(Table(identity, tuner.times, {}, complete=False), partial_path(path))
        except ProfileError as error:
            if not told:
                log.warning("tune: what is measured so far is not kept: %s", error)
            told = True
            return False
        return True

    tuner = Tuner(setting, pieces, slowest, clock, seconds, progress, phase_done=keep)
    try:
        tuner.run()
    except BaseException:  # Ctrl-C and a rank's end too
        if keep():
            log.warning("tune: interrupted; %d points are in %s", len(tuner.times), partial_path(path))
        raise
    table = Table(identity, tuner.times, dict(info(tuner)) if first else {})
    if first:
        write_table(table, path)
        with contextlib.suppress(OSError):
            partial_path(path).unlink()
    return table


@contextlib.contextmanager
def progress_bar(show: bool) -> Iterator[Progress]:
    """A bar on stderr; ``show`` on one rank only."""
    with tqdm(unit="point", disable=not show, leave=False, dynamic_ncols=True) as bar:
        shown = [""]

        def progress(done: int, total: int, name: str) -> None:
            bar.total = max(total, done)
            bar.set_description(name, refresh=name != shown[0])
            shown[:] = [name]
            bar.update(done - bar.n)

        yield progress


def _check_same(identity: Identity, group: dist.ProcessGroup) -> None:
    """Raises RequestError where ranks have different machines: their times are not one table's."""
    if (found := differing(vars(identity), group)) is not None:
        rank, values = found
        told = ", ".join(f"{name} {first} and {theirs}" for name, (theirs, first) in values.items())
        raise RequestError(f"tune: ranks 0 and {rank} run on different machines: {told}; use equal GPUs")


def _refusal(path: Path, identity: Identity, replaces_any: bool) -> str | None:
    """Why no table of ``identity`` can be written there, or is to be; None if it may."""
    if (reason := refusal(path, streams=False)) is not None:
        return f"{path}: {reason}"
    return None if replaces_any else _kept(path, identity)


def _kept(path: Path, identity: Identity) -> str | None:
    """Why the file there is not to be replaced by a table of ``identity``; None if it may be, or there is none."""
    if not path.exists():
        return None
    how = "; give --out FILE to replace it or to write elsewhere, or name a folder in TOKENWEAVE_PROFILE"
    try:
        table = read_table(path)
    except ProfileError as error:
        return f"{error}{how}"
    other = table.identity
    if other.key == identity.key:
        return None
    model = table.info.get("model", f"a model of {other.shape.hidden} hidden, {other.shape.heads} heads")
    return f"{path}: it holds a table of {model} on {other.tp} x {other.gpu}, {other.transport}{how}"


def _raise_together(reason: str | None, group: dist.ProcessGroup) -> None:
    """ProfileError on every rank if rank 0 has a reason."""
    sent = [reason]
    dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
    if sent[0] is not None:
        raise ProfileError(sent[0])
