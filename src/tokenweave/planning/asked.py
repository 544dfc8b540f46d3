"""Which mode is asked for: the argument, else the environment's."""

from __future__ import annotations

import os

from tokenweave.errors import RequestError
from tokenweave.planning.plan import Mode

MODE_VARIABLE = "TOKENWEAVE_MODE"


def asked_mode(mode: Mode | str | None = None) -> Mode | None:
    """The mode that counts: the argument, ``"auto"`` too; for None what TOKENWEAVE_MODE says; auto where that is not set.

    Every entry point (:class:`Planner`, :func:`plan`, ``LLM``, ``--mode``) goes by this and has None as its default.

    Returns:
        None for auto: the planner chooses.

    Raises:
        RequestError: no mode is called so.
    """
    source, name = "mode", mode
    if mode is None:
        source, name = MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "auto"
    if str(name).casefold() == "auto":
        return None
    try:
        return Mode(str(name).casefold())
    except ValueError:
        raise RequestError(f"{source}={str(name)!r}; expected one of auto, {', '.join(map(str, Mode))}") from None
