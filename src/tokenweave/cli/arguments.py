"""Options that several subcommands take: their values, and how they get to ranks."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenweave.errors import RequestError
from tokenweave.files import refusal

PICTURES = (".svg", ".png", ".pdf")
"""Endings of files that pictures are written to."""


def numbers(option: str, text: str) -> tuple[int, ...]:
    """``"1,64,64"`` -> (1, 64); RequestError, naming the option, for anything but positive whole numbers."""
    try:
        values = tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise RequestError(f"{option} {text!r}; expected positive whole numbers separated by commas")
    return values


def some(option: str, text: str, every: Iterable[str]) -> tuple[str, ...]:
    """``"b,a"`` -> ("a", "b"): in the order of ``every``; RequestError, naming the option, for what is not among them."""
    known, asked = tuple(every), text.split(",")
    if unknown := [word for word in asked if word not in known]:
        raise RequestError(f"{option} {unknown[0]!r}; expected some of {', '.join(known)}")
    return tuple(word for word in known if word in asked)


def command_line(command: Sequence[str], args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The arguments once more, as words: for a rank, which is a process of its own.

    Args:
        command: the subcommand. names: of the options, as ``args`` has them: ``time_limit``.
    """
    words = [*command]
    for name in names:
        option, value = "--" + name.replace("_", "-"), getattr(args, name)
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words


def check_output(option: str, path: Path | None, endings: tuple[str, ...] = (), *, streams: bool = True) -> None:
    """RequestError, naming the option, for a file that cannot be written: before the work that it is for, not after.

    Makes the folders that it is to be in.

    Args:
        path: None is fine: the option was not given.
        endings: of the names that are allowed, such as :data:`PICTURES`; () for any.
        streams: whether something that is no regular file will do: ``/dev/stdout``, a pipe.
    """
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise RequestError(f"{option} {path}; expected a name that ends in {', '.join(endings)}")
    if (reason := refusal(path, streams=streams)) is not None:
        raise RequestError(f"{option} {path}: {reason}")


def check_picture(option: str, path: Path | None) -> None:
    """The same for a picture, which matplotlib draws."""
    if path is not None:
        from tokenweave.files import require_matplotlib

        check_output(option, path, PICTURES)
        require_matplotlib()


def check_folder(option: str, path: Path) -> None:
    """The same for a folder of results, which is made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise RequestError(f"{option} {path}: no files can be written to it: {error.strerror or error}") from None


def check_seed(seed: int) -> None:
    """RequestError for a seed that a generator would not take."""
    if not 0 <= seed < 2**63:
        raise RequestError(f"--seed {seed}; expected 0 to {2**63 - 1}")


def check_time_limit(seconds: float) -> None:
    """RequestError for one that would end the ranks at once, or never."""
    if not 0 < seconds < 1e7:
        raise RequestError(f"--time-limit {seconds:g}; expected a positive number of seconds")
