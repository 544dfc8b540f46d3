"""Where a model's measured table is, and one table for all ranks: the first rank reads it, the others are sent what it read."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch.distributed as dist

from tokenweave.cache import cache_dir
from tokenweave.errors import ProfileError
from tokenweave.models.config import ModelConfig
from tokenweave.planning.machine import Machine
from tokenweave.planning.profile import Profile
from tokenweave.planning.profile_table import Identity, parse_table
from tokenweave.tuning.identity import identity_here

log = logging.getLogger(__name__)

VARIABLE = "TOKENWEAVE_PROFILE"


def profile_path(identity: Identity) -> Path | None:
    """Where this machine's table of a model is.

    Returns:
        the file that TOKENWEAVE_PROFILE names, or the model's file in the folder that it names; by default in
        ``$TOKENWEAVE_CACHE/profiles`` (``~/.cache/tokenweave/profiles``). None where the variable says ``off``.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting.casefold() == "off":
        return None
    if setting:
        path = Path(
            os.path.expanduser(setting)
        )  # these two, unlike Path's, take any nonsense: reading it says what is wrong
        return path / f"{identity.key}.json" if os.path.isdir(path) else path
    return cache_dir("profiles") / f"{identity.key}.json"


def agreed_profile(
    config: ModelConfig,
    machine: Machine,
    group: dist.ProcessGroup | None,
    path: Path | None = None,
    here: Identity | None = None,
    *,
    own_attention: bool = True,
) -> Profile | None:
    """The measured costs of a model, the same on every rank of ``group``; all of them call it.

    Rank 0's file is the only one that is read, and where it cannot be used on one rank (another driver, say), none uses it.

    Args:
        config: the model. machine: the analytical machine: this one.
        group: of the ranks; None for a single one.
        path: of the table that was asked for; None: :func:`profile_path`.
        here: this rank's machine; None: as :mod:`tokenweave.tuning.identity` reads it.
        own_attention: as :func:`tokenweave.tuning.identity.identity_here`.

    Returns:
        None where no table holds on all ranks; rank 0's log has one line that says why. Also on CPUs and on one rank, with a
        line where TOKENWEAVE_PROFILE is set all the same.

    Raises:
        ProfileError: the table that was asked for cannot be used; on all ranks alike.
    """
    first = group is None or dist.get_rank(group) == 0
    if here is None:
        if (
            machine.gpu.arch == "cpu" or machine.tp < 2
        ):  # times of a CPU prove nothing, and one rank has nothing to hide
            only = "measured tables are for two or more ranks on GPUs"
            if path is not None:
                raise ProfileError(f"{path}: {only}")
            if first and (setting := os.environ.get(VARIABLE, "")).casefold() not in ("", "off"):
                _say(logging.WARNING, f"planner: {VARIABLE}={setting} is ignored: {only}")
            return None
        here = identity_here(config, machine.tp, machine.transport, own_attention=own_attention)
    others = None if group is None or dist.get_world_size(group) == 1 else group
    found = _read(path, here) if first else ("", None, None)
    if others is not None:
        sent = [found]
        dist.broadcast_object_list(sent, src=dist.get_global_rank(others, 0), group=others)
        found = sent[0]
    where, text, refusal = found
    profile = None
    if text is not None:
        try:
            profile = _checked(text, where, config, machine, here)
        except ProfileError as error:
            refusal = str(error)
    if others is not None:
        refusals: list[str | None] = [None] * dist.get_world_size(others)
        dist.all_gather_object(refusals, refusal, group=others)
        if len(set(refusals)) > 1:
            rank, reason = next((rank, reason) for rank, reason in enumerate(refusals) if reason is not None)
            refusal = f"on rank {rank}: {reason}"
    if refusal is not None and path is not None:
        raise ProfileError(refusal)
    if first:
        if refusal is not None:
            _say(logging.WARNING, f"planner: the analytical model is used: {refusal}")
        elif profile is None:
            _say(
                logging.INFO,
                f"planner: no measured table ({where}): the analytical model is used; see `tokenweave tune`",
            )
        else:
            _say(logging.INFO, f"planner: measured times from {where} ({profile.table.info.get('date', 'no date')})")
    return None if refusal is not None else profile


def find_profile(config: ModelConfig, machine: Machine) -> Profile | None:
    """:func:`agreed_profile` of one process that asks for itself: a planner's, or a simulation's.

    Args:
        config: the model. machine: the analytical machine: this one.

    Returns:
        None: the analytical machine is all there is.
    """
    return agreed_profile(config, machine, None)


def _checked(text: str, where: str, config: ModelConfig, machine: Machine, here: Identity) -> Profile:
    table = parse_table(text, where)
    if (reason := table.identity.refusal(here)) is not None:
        raise ProfileError(f"{where}: {reason}; run `tokenweave tune` here")
    try:
        return Profile(table, config, machine)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _read(path: Path | None, here: Identity) -> tuple[str, str | None, str | None]:
    """(where, content, why it cannot be read); neither content nor a reason where there is nothing to read."""
    asked = path is not None or bool(os.environ.get(VARIABLE))
    path = path or profile_path(here)
    if path is None:
        return f"{VARIABLE}=off", None, None
    try:
        return str(path), path.read_text(encoding="utf-8"), None
    except FileNotFoundError:
        missing = f"{path}: there is no such file; `tokenweave tune` makes one"
        return f"there is no {path}", None, missing if asked else None
    except (OSError, UnicodeDecodeError) as error:
        return str(path), None, f"{path}: it cannot be read: {error}"


def _say(level: int, line: str) -> None:
    """Each line once a process: planners are made often."""
    if line not in _said:
        _said.add(line)
        log.log(level, line)


_said: set[str] = set()
