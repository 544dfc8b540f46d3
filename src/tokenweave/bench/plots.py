"""What all pictures need: matplotlib, ``pip install '.[plot]'`` in TokenWeave's checkout."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from tokenweave.errors import RequestError
from tokenweave.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raises RequestError where there is none, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"pictures need matplotlib ({error}): pip install '.[plot]' in TokenWeave's checkout"
        ) from None


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Writes a picture, as :func:`tokenweave.files.write_whole` does; its format is what the file's name ends in.

    Raises:
        OSError: it cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=path.suffix[1:].lower())
    write_whole(path, picture.getvalue())
