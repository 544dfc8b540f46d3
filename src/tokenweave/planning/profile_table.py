"""A measured table: what it holds, what it is valid for, and its file.

The file is JSON: ``identity`` (machine, versions, model shape), ``info`` (when, by which commit, clocks), ``complete``, one
list of rows a kind of point, each row the point's fields and its time in us, and ``digest``, which says whether anything
was lost or changed. :func:`read_table` refuses, with the reason, whatever is not whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from tokenweave.errors import ProfileError
from tokenweave.files import write_whole
from tokenweave.models.config import ModelConfig
from tokenweave.planning.profile_points import KINDS, Point

VERSION = 3
_HEADER = "tokenweave profile"
_MOST_US = 1e9  # of a time that was measured: nothing takes a quarter of an hour
_MOST = 2**31 - 1  # of a point's numbers: products of two fit into 64 bits, where the planner computes
_MAY_BE_ZERO = ("context", "ctas")  # of a point's numbers


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that decide what its layers cost."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    experts_per_token: int
    qkv_bias: bool
    qk_norm: bool
    output_bias: bool
    mlp_bias: bool


def shape_of(config: ModelConfig) -> Shape:
    """A model's; models that differ in layers, norms' epsilon or rotary embedding alone share a table."""
    return Shape(**{f.name: getattr(config, f.name) for f in dataclasses.fields(Shape)})


@dataclass(frozen=True)
class Identity:
    """What a table was measured for, in bf16. It serves there and nowhere else.

    Attributes:
        gpu, sms: the device's name and its SMs. driver: the kernel module's version.
        torch, cuda, cublas, nccl: of the libraries that are loaded.
        attention: the kernel, with the version of what isn't torch's; None of a machine that takes tables with any.
        tp, transport: ranks, and what the fused collective runs on.
        shape: of the model.
    """

    gpu: str
    sms: int
    driver: str
    torch: str
    cuda: str
    cublas: str
    nccl: str
    attention: str | None
    tp: int
    transport: str
    shape: Shape

    def refusal(self, here: Identity) -> str | None:
        """Why a table of this identity cannot be used ``here``; None if it can."""
        for what, names in (
            ("foreign", ("gpu", "sms", "tp", "transport")),
            ("stale", ("driver", "torch", "cuda", "cublas", "nccl", "attention")),
        ):
            if differing := [n for n in names if getattr(here, n) not in (None, getattr(self, n))]:
                return f"it is {what}: " + "; ".join(
                    f"measured with {name} {getattr(self, name)}, here it is {getattr(here, name)}"
                    for name in differing
                )
        differing = [f.name for f in dataclasses.fields(Shape)]
        differing = [n for n in differing if getattr(self.shape, n) != getattr(here.shape, n)]
        if differing:
            return "it is foreign: measured for a model with " + ", ".join(
                f"{name} {getattr(self.shape, name)} (here {getattr(here.shape, name)})" for name in differing
            )
        return None

    @property
    def key(self) -> str:
        """Names the table's file: the machine and the model's shape, not the versions, so that a newer one replaces it."""
        numbers = json.dumps([dataclasses.asdict(self.shape), self.transport], sort_keys=True)
        gpu = "".join(c if c.isalnum() else "-" for c in self.gpu.casefold().removeprefix("nvidia ")).strip("-")
        return f"{gpu}-tp{self.tp}-{hashlib.sha256(numbers.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Table:
    """Measured times.

    Attributes:
        identity: where they hold. info: JSON values for people: date, commit, seconds, clocks.
        times: point -> us, the slowest rank's.
        complete: whether everything that the tuner wanted was measured.
    """

    identity: Identity
    times: Mapping[Point, float]
    info: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True

    def of(self, kind: type[Any]) -> dict[Any, float]:
        """The points of one type, in the order in which they were measured."""
        return {point: us for point, us in self.times.items() if type(point) is kind}

    @property
    def digest(self) -> str:
        """Of all that is in it: equal tables have equal digests."""
        return _digest(_content(self))


def _content(table: Table) -> dict[str, Any]:
    names = {kind: name for name, kind in KINDS.items()}
    times: dict[str, list[list[Any]]] = {name: [] for name in KINDS}
    for point, us in table.times.items():
        times[names[type(point)]].append([*dataclasses.astuple(point), us])
    return {
        "format": _HEADER,
        "version": VERSION,
        "complete": table.complete,
        "identity": dataclasses.asdict(table.identity),
        "info": dict(table.info),
        "columns": {name: [*(f.name for f in dataclasses.fields(kind)), "us"] for name, kind in KINDS.items()},
        "times": times,
    }


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def table_text(table: Table) -> str:
    """The file's content: JSON, a line a measured row."""
    content = _content(table)
    head = {key: value for key, value in content.items() if key != "times"}
    lines = json.dumps({**head, "digest": _digest(content)}, indent=1, allow_nan=False)[:-2] + ',\n "times": {'
    parts = [
        f'\n  "{name}": [' + ",".join(f"\n   {json.dumps(row, allow_nan=False)}" for row in rows) + "]"
        for name, rows in content["times"].items()
    ]
    return lines + ",".join(parts) + "}\n}\n"


def write_table(table: Table, path: Path) -> None:
    """Writes the file all at once, as :func:`tokenweave.files.write_whole` does.

    Raises:
        ProfileError: the folder cannot be made or written to.
    """
    try:
        write_whole(path, table_text(table))
    except OSError as error:
        raise ProfileError(f"{path}: the table cannot be written: {error.strerror or error}") from None


def read_table(path: Path) -> Table:
    """The table of a file.

    Raises:
        ProfileError: there is none, it is damaged, of another version of the format, or of a run that was interrupted.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(f"{path}: there is no such file; `tokenweave tune` makes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: it cannot be read: {error}") from None
    return parse_table(text, str(path))


def parse_table(text: str, where: str) -> Table:
    """The table of a file's content; ``where`` names it in errors. Raises ProfileError as :func:`read_table`."""
    again = "run `tokenweave tune` again"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where}: it is damaged or cut off ({error}); {again}") from None
    if not isinstance(content, dict) or content.get("format") != _HEADER:
        raise ProfileError(f"{where}: it is no table of measured times; `tokenweave tune` writes those")
    if content.get("version") != VERSION:
        raise ProfileError(
            f"{where}: it has version {content.get('version')!r} of the format, this program reads {VERSION}; {again}"
        )
    digest = content.pop("digest", None)
    try:
        whole = digest == _digest(content)
    except (ValueError, RecursionError):  # NaN, infinity, or nested deeper than can be written
        whole = False
    if not whole:
        raise ProfileError(f"{where}: it is damaged: its content and its digest do not agree; {again}")
    try:
        table = _decoded(content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProfileError(f"{where}: it is damaged: {type(error).__name__}: {error}; {again}") from None
    if not table.complete:
        raise ProfileError(
            f"{where}: its measurement was interrupted after {len(table.times)} points; {again} to the end"
        )
    return table


def _decoded(content: dict[str, Any]) -> Table:
    identity = {**_object(content, "identity")}
    identity["shape"] = _checked(Shape, _object(identity, "shape"))
    rows_of = _object(content, "times")
    times: dict[Point, float] = {}
    for name, kind in KINDS.items():
        fields = [f.name for f in dataclasses.fields(kind)]
        for *values, us in rows_of[name]:
            if not isinstance(us, int | float) or isinstance(us, bool) or not 0 < us < _MOST_US:
                raise ValueError(f"a time of {us!r:.40} us in {name}")
            given = dict(zip(fields, values, strict=True))
            point = _checked(kind, given)
            for field_name, value in given.items():
                least = 0 if field_name in _MAY_BE_ZERO else 1
                if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= _MOST:
                    raise ValueError(f"{kind.__name__}.{field_name} is {value!r:.40}; expected {least} to {_MOST}")
            times[point] = float(us)
    return Table(_checked(Identity, identity), times, _object(content, "info"), content["complete"] is True)


def _object(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A member that is an object itself; KeyError or TypeError where it is none."""
    value = content[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {value!r:.40}; expected an object")
    return value


def _checked(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """``kind(**values)``, with a TypeError for values of other types than its fields are declared with."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not isinstance(value, hints[name]) or (isinstance(value, bool) and hints[name] is not bool):
            raise TypeError(f"{kind.__name__}.{name} is {value!r}")
    return kind(**values)
