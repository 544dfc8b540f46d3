"""One tuning run on one rank: measures, then rank 0 writes the table."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from tokenweave.bench.timing import slowest_rank
from tokenweave.errors import ProfileError, RequestError
from tokenweave.files import target_of
from tokenweave.planning.profile_table import Identity, Table, read_table, write_table
from tokenweave.tuning.schedule import Setting
from tokenweave.tuning.tuner import Pieces, Tuner

Progress = Callable[[int, int, str], None]


def partial_path(path: Path) -> Path:
    """Where an interrupted run leaves what it has: a table that is refused, to look at."""
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
    _same(identity, group)
    reason = _writable(path) if first else None
    if first and reason is None and not replaces_any:
        reason = _kept(path, identity)
    _raise_together(reason, group)

    def slowest(numbers: Any) -> list[float]:
        return slowest_rank({"": numbers}, group, device)[""]

    tuner = Tuner(setting, pieces, slowest, clock, seconds, progress)
    try:
        tuner.run()
    except BaseException:  # Ctrl-C and a rank's end too
        if first and tuner.times:
            for _ in (
                1,
                2,
                3,
            ):  # an interruption may come in the midst of this, when another rank's end was heard first
                try:
                    with contextlib.suppress(ProfileError):
                        write_table(Table(identity, tuner.times, {}, complete=False), partial_path(path))
                    break
                except KeyboardInterrupt:
                    pass
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


def _same(identity: Identity, group: dist.ProcessGroup) -> None:
    """Raises RequestError where ranks have different machines: their times are not one table's."""
    every: list[Identity | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, identity, group=group)
    for rank, other in enumerate(every):
        if other != every[0]:
            names = [
                f.name for f in dataclasses.fields(Identity) if getattr(other, f.name) != getattr(every[0], f.name)
            ]
            differing = ", ".join(f"{n} {getattr(every[0], n)} and {getattr(other, n)}" for n in names)
            raise RequestError(f"tune: ranks 0 and {rank} run on different machines: {differing}; use equal GPUs")


def _writable(path: Path) -> str | None:
    """Why a table cannot be written there; None if it can."""
    target = target_of(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            return f"{path}: it is {'a folder' if path.is_dir() else 'no regular file'}; --out takes a file"
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        return f"{path}: the table cannot be written: {error.strerror or error}"
    return None


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
