"""Requests as lengths: read from a CSV file, and made to arrive."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from tokenweave.errors import RequestError

PROMPT_COLUMNS = ("num_prefill_tokens", "prompt_tokens", "ContextTokens", "Request tokens")
OUTPUT_COLUMNS = ("num_decode_tokens", "output_tokens", "GeneratedTokens", "Response tokens")
ARRIVAL_COLUMNS = ("arrived_at", "arrival_time", "TIMESTAMP", "Timestamp")
"""Header names that are known, in any case: Vidur's and Sarathi-Serve's traces, plain words, the Azure LLM inference
traces, BurstGPT."""

MOST_SECONDS = 1e10
"""Of a simulated process of arrivals: 300 years, in which a float64 still tells microseconds apart."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive.

    Attributes:
        name: where they are from.
        prompts, outputs: int64 [requests], tokens, each >= 1.
        arrivals: float64 [requests], seconds, ascending; None where nothing is known of them.
    """

    name: str
    prompts: np.ndarray
    outputs: np.ndarray
    arrivals: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def kept(self, keep: np.ndarray) -> Trace:
        """The requests at these places (int64 or bool [requests])."""
        arrivals = None if self.arrivals is None else self.arrivals[keep]
        return Trace(self.name, self.prompts[keep], self.outputs[keep], arrivals)


def builtin_traces() -> list[str]:
    """Names that :func:`read_trace` knows without a file."""
    folder = resources.files("tokenweave.simulation") / "traces"
    return sorted(entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv"))


def read_trace(path_or_name: str | Path) -> Trace:
    """Reads a CSV file with a header, or one of :func:`builtin_traces`.

    One row a request. Columns: prompt tokens, output tokens and, if there is one, the time of arrival in seconds or as an
    ISO date and time, UTC; other columns are ignored. Known names: :data:`PROMPT_COLUMNS` and so on. With times the requests
    are put in order and the first arrives at 0.

    Raises:
        RequestError: there is no such file; a column is missing; a value is no whole number >= 1 or no time, with its line.
    """
    name = str(path_or_name)
    if name in builtin_traces():
        with (resources.files("tokenweave.simulation") / "traces" / f"{name}.csv").open(encoding="utf-8") as file:
            return _parse(file, name)
    try:
        with open(path_or_name, newline="", encoding="utf-8-sig") as file:
            return _parse(file, name)
    except FileNotFoundError:
        raise RequestError(
            f"no trace {name!r}: there is no such file, and it is none of those that come with TokenWeave: "
            f"{', '.join(builtin_traces())}"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"trace {name!r} cannot be read as a CSV file: {error}") from None


def _parse(file: Iterable[str], name: str) -> Trace:
    lines = csv.reader(file)
    header = next(lines, [])
    prompt = _column(header, PROMPT_COLUMNS, name, "prompt tokens")
    output = _column(header, OUTPUT_COLUMNS, name, "output tokens")
    arrival = next((place for place, word in enumerate(header) if _is_one_of(word, ARRIVAL_COLUMNS)), None)
    prompts: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    for row in lines:
        if not row:
            continue
        try:
            prompts.append(_tokens(row[prompt]))
            outputs.append(_tokens(row[output]))
            if arrival is not None:
                arrivals.append(_seconds(row[arrival]))
        except (ValueError, IndexError):
            raise RequestError(
                f"trace {name!r}, line {lines.line_num}: {','.join(row)!r}; expected whole numbers of tokens >= 1"
                + ("" if arrival is None else f", and in {header[arrival]!r} seconds or an ISO date and time")
            ) from None
    if not prompts:
        raise RequestError(f"trace {name!r} has no requests; expected a row for each below the header")
    trace = Trace(name, np.array(prompts), np.array(outputs), None if arrival is None else np.array(arrivals))
    if trace.arrivals is None:
        return trace
    trace = trace.kept(np.argsort(trace.arrivals, kind="stable"))
    assert trace.arrivals is not None
    return Trace(name, trace.prompts, trace.outputs, trace.arrivals - trace.arrivals[0])


def _column(header: Sequence[str], names: Sequence[str], trace: str, what: str) -> int:
    place = next((place for place, word in enumerate(header) if _is_one_of(word, names)), None)
    if place is None:
        raise RequestError(
            f"trace {trace!r} has the columns {','.join(header)!r}; expected one with the {what}, called one of "
            f"{', '.join(names)}"
        )
    return place


def _is_one_of(word: str, names: Sequence[str]) -> bool:
    return word.strip().casefold() in [name.casefold() for name in names]


def _tokens(text: str) -> int:
    number = float(text)
    if not (1 <= number <= 2**53 and number.is_integer()):  # NaN and infinities too
        raise ValueError(text)
    return int(number)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        if not text.strip()[:1].isdigit():  # numpy reads words too: now, NaT
            raise
        date, ahead = _without_zone(text.strip())
        seconds = float(np.datetime64(date, "us").astype(np.int64)) / 1e6 - ahead
    if not abs(seconds) < 1e15:
        raise ValueError(text)
    return seconds


def _without_zone(date: str) -> tuple[str, float]:
    """A date and time without its offset from UTC, and that in seconds."""
    if zone := re.search(r"(?<=\d)([+-])(\d\d):?(\d\d)$", date) if ":" in date else None:
        sign, hours, minutes = zone.groups()
        return date[: zone.start()], float(f"{sign}1") * (3600 * int(hours) + 60 * int(minutes))
    return date.removesuffix("Z"), 0.0


def sized(trace: Trace, requests: int | None, seed: int, keep_order: bool) -> Trace:
    """A trace of ``requests`` requests (None: as many as it has).

    Args:
        keep_order: the first ones as they arrive, and from the start again where there are not enough, a mean gap after
            the last; else in random order, and all of them in another one where there are not enough.
        seed: of the order.

    Raises:
        RequestError: requests < 1.
    """
    count = len(trace) if requests is None else requests
    if count < 1:
        raise RequestError(f"{count} requests; expected at least 1")
    passes = -(-count // len(trace))
    if not keep_order:
        random = np.random.default_rng([seed, 0])
        return trace.kept(np.concatenate([random.permutation(len(trace)) for _ in range(passes)])[:count])
    repeated = trace.kept(np.tile(np.arange(len(trace)), passes)[:count])
    if repeated.arrivals is None or trace.arrivals is None:
        return repeated
    period = float(trace.arrivals[-1]) * len(trace) / max(1, len(trace) - 1)
    shift = period * np.repeat(np.arange(passes), len(trace))[:count]
    return Trace(trace.name, repeated.prompts, repeated.outputs, repeated.arrivals + shift)


def poisson(requests: int, rate: float, seed: int) -> np.ndarray:
    """float64 [requests] times in seconds of a Poisson process of ``rate`` requests a second.

    The same seed gives the same process at every rate, faster or slower.

    Raises:
        RequestError: a rate that is not positive, or so low that milliseconds are lost in the times of arrival.
    """
    if not 0 < rate < float("inf"):
        raise RequestError(f"a rate of {rate} requests a second; expected a positive number")
    if requests / rate > MOST_SECONDS:
        raise RequestError(
            f"{requests} requests at a rate of {rate:g} a second take {requests / rate:.0e} seconds; "
            f"expected at most {MOST_SECONDS:g}: raise the rate"
        )
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0, requests)) / rate
