"""Where files are kept that can be had again: compiled kernels, measured tables, the demo's weights."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(name: str) -> Path:
    """The folder of one kind of file: ``$TOKENWEAVE_CACHE/<name>``, by default ``~/.cache/tokenweave/<name>``
    (``$XDG_CACHE_HOME`` counts); ``~`` in any of them is the home. It need not exist."""
    root = os.environ.get("TOKENWEAVE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tokenweave"
    )
    # Unlike Path's, this expanduser takes any nonsense: writing there says what is wrong.
    return Path(os.path.expanduser(root)) / name
