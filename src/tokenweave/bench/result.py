"""Results as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenweave.files import write_whole


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Writes JSON, as :func:`tokenweave.files.write_whole` does.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, json.dumps(result, indent=1) + "\n")
