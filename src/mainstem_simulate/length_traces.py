"""Reads traces with arrival times and lengths, but without contents: nothing can be shared."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from math import isfinite
from random import Random

from mainstem.core.errors import InvalidRequest
from mainstem_simulate.trace_records import Lines, ReadOptions, TraceRequest, fitting, in_order

AZURE_COLUMNS = (
    ("timestamp_ms", "timestamp"),
    ("input_length", "contexttokens"),
    ("output_length", "generatedtokens"),
)
SERVEGEN_COLUMNS = ["client", "t_s", "rate_rps", "cv", "pattern", "p1", "p2"]
WINDOW_S = 600.0  # each of ServeGen's rates is for this many seconds
MAX_DRAWN = 2_000_000  # the most requests that are drawn without a --limit


def csv_rows(lines: Lines) -> Iterator[list[str]]:
    """Each line as its columns."""
    try:
        yield from csv.reader(iter(lines))
    except csv.Error as error:
        raise lines.error(f"not CSV: {error}") from None


def _names(header: list[str]) -> list[str]:
    return [name.strip().lower().lstrip("\ufeff") for name in header]


# -- Azure ----------------------------------------------------------------------------------------


def azure_columns(header: list[str]) -> list[int] | None:
    """Return the columns of timestamp, prompt and answer lengths; None if this is not such a
    header."""
    names = _names(header)
    places = [next((names.index(n) for n in known if n in names), None) for known in AZURE_COLUMNS]
    return None if None in places else [place for place in places if place is not None]


def read_azure(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    rows = csv_rows(lines)
    columns = azure_columns(next(rows, []))
    if columns is None:
        raise lines.error("the header must name timestamp, prompt and answer lengths")
    found: list[TraceRequest] = []
    next_key, first_s = 0, None
    for row in rows:
        if len(row) <= max(columns):
            raise lines.error(f"{len(row)} columns, the header has more")
        when, prompt, answer = (row[column].strip() for column in columns)
        arrival_s = _azure_time(lines, when)
        first_s = arrival_s if first_s is None else first_s
        if not prompt.isdecimal() or not answer.isdecimal():
            raise lines.error(f"lengths must be whole numbers, got {prompt!r} and {answer!r}")
        if max(len(prompt), len(answer)) > 10:
            raise lines.error(f"lengths of {prompt} and {answer} tokens are too large")
        keys = range(next_key, next_key + int(prompt) // page_tokens)
        next_key += len(keys)
        found.append(
            TraceRequest(
                arrival_s=max(0.0, arrival_s - first_s),
                input_tokens=int(prompt),
                output_tokens=int(answer),
                keys=keys,
                kept=keys,
                session=len(found),
            )
        )
    return in_order(fitting(found, options), options)


def _azure_time(lines: Lines, text: str) -> float:
    """Return seconds, from milliseconds or from a date with time."""
    try:
        return float(text) / 1000
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text[:26]).timestamp()  # the seventh decimal is cut off
    except ValueError:
        raise lines.error(f"{text!r} is not a time") from None


# -- ServeGen -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ClientWindow:
    """The traffic of one client in ten minutes."""

    begin_s: float
    client: int
    rate: float  # requests a second
    is_gamma: bool  # Gamma distribution; otherwise Weibull
    shape: float  # of the distribution of inter-arrival times; its scale follows from the rate


def is_servegen(header: list[str]) -> bool:
    """Whether this is the header of ServeGen's rates."""
    return _names(header) == SERVEGEN_COLUMNS


def read_servegen(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    """Read rates of clients. Arrivals are drawn from each window's distribution, as in ServeGen.
    Inter-arrival times are scaled so that a window's requests fill the window.
    """
    if options.prompt_tokens is None or options.answer_tokens is None:
        reason = "the trace has rates but no lengths: set --prompt-tokens N and --answer-tokens N"
        raise InvalidRequest("--prompt-tokens", reason)
    windows = sorted(_client_windows(lines), key=lambda window: (window.begin_s, window.client))
    if not windows:
        return []
    first_s = windows[0].begin_s
    expected = sum(window.rate for window in windows) * WINDOW_S
    pace = 1.0
    if options.rate is not None and expected:
        pace = options.rate * (windows[-1].begin_s + WINDOW_S - first_s) / expected
    if options.limit is None and expected * pace > MAX_DRAWN:
        reason = (
            f"these rates make {expected * pace:,.0f} requests; set --limit N or a lower --rate"
        )
        raise InvalidRequest("--limit", reason)
    drawn = Random(f"servegen {options.seed}")
    pages = options.prompt_tokens // page_tokens
    found: list[TraceRequest] = []
    for begin_s, group in groupby(windows, key=lambda window: window.begin_s):
        times = [
            (begin_s - first_s + offset_s, window.client)
            for window in group
            for offset_s in _arrivals(drawn, window, pace)
        ]
        for arrival_s, client in sorted(times):
            keys = range(len(found) * pages, (len(found) + 1) * pages)
            found.append(
                TraceRequest(
                    arrival_s, options.prompt_tokens, options.answer_tokens, keys, keys, client
                )
            )
        if options.limit is not None and len(found) >= options.limit:
            break
    return fitting(found, options)


def _arrivals(drawn: Random, window: _ClientWindow, pace: float) -> Iterator[float]:
    """Draw arrival times in a window, in seconds since it began."""
    wanted = window.rate * pace * WINDOW_S
    count = int(wanted) + (drawn.random() < wanted % 1)
    gaps = [
        drawn.gammavariate(window.shape, 1.0)
        if window.is_gamma
        else drawn.weibullvariate(1.0, window.shape)
        for _ in range(count + 1)  # the last gap is from the last request to the window's end
    ]
    total, now = sum(gaps), 0.0
    for gap in gaps[:-1]:
        now += gap
        yield now / total * WINDOW_S if total else 0.0


def _client_windows(lines: Lines) -> Iterator[_ClientWindow]:
    rows = csv_rows(lines)
    if not is_servegen(next(rows, [])):
        raise lines.error(f"the header must be {','.join(SERVEGEN_COLUMNS)}")
    for row in rows:
        if len(row) != len(SERVEGEN_COLUMNS):
            raise lines.error(f"{len(row)} columns, the header has {len(SERVEGEN_COLUMNS)}")
        client, begin, rate, _, pattern, shape, _ = (column.strip() for column in row)
        try:
            window = _ClientWindow(
                float(begin), int(client), float(rate), pattern == "Gamma", float(shape)
            )
        except ValueError as error:
            raise lines.error(str(error)) from None
        if pattern not in ("Gamma", "Weibull"):
            raise lines.error(f"pattern must be Gamma or Weibull, got {pattern!r}")
        if not (0 < window.shape < 1e6 and 0 <= window.rate < 1e9 and isfinite(window.begin_s)):
            raise lines.error(f"out of range: a rate of {rate}, shape {shape}, at {begin} s")
        yield window
