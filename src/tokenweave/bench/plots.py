"""What all pictures need: matplotlib, ``pip install '.[plot]'`` in TokenWeave's checkout."""

from __future__ import annotations

from tokenweave.errors import RequestError


def require_matplotlib() -> None:
    """Raises RequestError where there is none, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"pictures need matplotlib ({error}): pip install '.[plot]' in TokenWeave's checkout"
        ) from None
