"""Values of options that several subcommands take."""

from __future__ import annotations

from tokenweave.errors import RequestError


def numbers(option: str, text: str) -> tuple[int, ...]:
    """``"1,64,64"`` -> (1, 64); RequestError, naming the option, for anything but positive whole numbers."""
    try:
        values = tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise RequestError(f"{option} {text!r}; expected positive whole numbers separated by commas")
    return values
