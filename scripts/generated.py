"""What the scripts that make parts of files share: writing them anew, or saying which are out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def command(description: str | None, contents: Callable[[], Mapping[Path, str]]) -> int:
    """A script's exit code.

    Args:
        description: its docstring.
        contents: what the files should hold.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is out of date")
    args = parser.parse_args()
    try:
        found = contents()
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    stale = {path: text for path, text in found.items() if path.read_text(encoding="utf-8") != text}
    if args.check:
        for path in stale:
            print(f"{path.name} is out of date: run scripts/{parser.prog}", file=sys.stderr)
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0
