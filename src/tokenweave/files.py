"""How files are written: all at once, so that whoever reads, or whatever ends this process, meets the old one or the new one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDING = ".tokenweave-part"
_LEFT_BEHIND = 600.0  # seconds; no write takes as long: the process of an older part was killed in the middle


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, in a folder that is made where there is none.

    A link's target is what is written. Who may read a file stays as it is; a new one follows the umask. What is no regular
    file (``/dev/stdout``, ``/dev/null``, a pipe) is written to as it stands, since there is nothing to keep whole.

    Args:
        content: a text is written in UTF-8.

    Raises:
        OSError: it cannot be written, and names ``path``; a file of before is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if (stream := _standard_stream(path)) is not None:
        with os.fdopen(os.dup(stream), "wb") as file:
            file.write(data)
        return
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            file.write(data)
        return
    target = target_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear(target.parent)
    # Short, whatever the target is called: a name of 255 bytes is one that a file can have.
    part = target.parent / f".{secrets.token_hex(8)}{_ENDING}"
    try:
        with open(part, "xb") as file:
            with contextlib.suppress(OSError):  # there is no file yet, or the file system knows no such modes
                os.chmod(part, target.stat().st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):  # of a full disk it names no file, else the part
            error.filename, error.filename2 = os.fspath(path), None
        raise


def write_picture(path: Path, figure: Figure, dpi: int) -> None:
    """:func:`write_whole` for a picture; its format is what the file's name ends in."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=path.suffix[1:].lower())
    write_whole(path, picture.getvalue())


def require_matplotlib() -> None:
    """Raises RequestError where there is nothing to draw pictures with, before anything is measured for one."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"pictures need matplotlib ({error}): pip install '.[plot]' in TokenWeave's checkout"
        ) from None


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """:func:`write_whole` for figures, as JSON."""
    write_whole(path, json.dumps(result, indent=1) + "\n")


def refusal(path: Path, *, streams: bool = True) -> str | None:
    """Why :func:`write_whole` could not write a file there; None if it could. Makes the folders that it is to be in.

    Args:
        streams: whether something that is no regular file will do: ``/dev/stdout``, a pipe.
    """
    if os.path.isdir(path):
        return "it is a folder; expected a file"
    try:
        if path.exists() and not streams and not path.is_file():
            return "it is no regular file; expected a file, which is replaced"
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "no permission to write to it")
        if path.is_file() or not path.exists():  # it is replaced, by one that is made beside it
            folder = target_of(path).parent
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        return f"it cannot be written: {error.strerror or error}"
    return None


def target_of(path: Path) -> Path:
    """Where a path leads, through links: what is written there takes the place of a file, and not of a link to it."""
    return Path(os.path.realpath(path))


def _standard_stream(path: Path) -> int | None:
    """The descriptor of our output or our errors where ``path`` is the same file: opened anew, it would be overwritten from
    its start."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                stream.flush()
                return descriptor
    return None


def _clear(folder: Path) -> None:
    """Removes what processes that were killed in the middle of a write have left."""
    for part in folder.glob(f".*{_ENDING}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _LEFT_BEHIND:
                part.unlink()
