"""Request traces as the simulator sees them: when, how long, and which pages.

    format     a line                                                      page, tokens
    mooncake   {"timestamp": ms, "input_length", "output_length",                   512
                "hash_ids": [one per page of the prompt]}
    qwen       {"chat_id", "parent_chat_id", "timestamp": s, "turn", ...,            16
                "hash_ids": [...]}                       (Qwen-Bailian usage traces)
    azure      timestamp, prompt tokens, answer tokens   (CSV with a header)        128
    sessions   {"turns": [[user tokens, answer tokens], ...]}                       128

Equal hash ids mean equal prefixes up to and including that page. Only whole pages are reused, as in
the engine. Azure traces have lengths alone, so nothing in them can be shared. Hash traces name the
pages of prompts only: answers come back under names of their own when the next prompt holds them.
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TextIO

from mainstem.core.errors import InvalidRequest
from mainstem.simulate.arrivals import ArrivalProcess

GZIP_MAGIC = b"\x1f\x8b"
MAX_TOKENS = 1 << 30  # in one prompt or answer: more is damage


class TraceFormat(Enum):
    MOONCAKE = "mooncake"
    QWEN = "qwen"
    AZURE = "azure"
    SESSIONS = "sessions"


PAGE_TOKENS = {
    TraceFormat.MOONCAKE: 512,
    TraceFormat.QWEN: 16,
    TraceFormat.AZURE: 128,
    TraceFormat.SESSIONS: 128,
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt and its answer. Pages are numbers; equal numbers mean equal prefixes."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[int]  # whole pages of the prompt
    kept: Sequence[int]  # whole pages worth keeping afterwards: `keys`, and the answer's if named
    session: int
    previous: int | None = None  # index of the turn before; this one cannot come until it is done
    think_s: float = 0.0  # from the answer before to this prompt


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    format: TraceFormat
    page_tokens: int
    requests: list[TraceRequest]

    @property
    def mean_chain_pages(self) -> float:
        """S_kv of the paper: pages that a request leaves behind, on average."""
        return sum(len(request.kept) for request in self.requests) / len(self.requests)

    @property
    def can_share(self) -> bool:
        return self.format is not TraceFormat.AZURE


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace; None leaves a choice to the trace."""

    format: TraceFormat | None = None
    page_tokens: int | None = None
    rate: float | None = None  # requests a second, or session starts a second
    context_tokens: int | None = None  # what is longer is left out, with the rest of its session
    limit: int | None = None  # requests to read, in order of arrival
    seed: int = 0
    think_times: Path | None = None


class _Lines:
    """The lines of a file with their numbers, so that every complaint names its line."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path = path
        self._stream = stream
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        try:
            for line in self._stream:
                self.number += 1
                if line.strip():
                    yield line
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{self._path}:{self.number + 1}", str(error)) from None

    def error(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self._path}:{self.number}", reason)

    def rows(self) -> Iterator[Mapping[str, object]]:
        """Each line as a JSON object."""
        for line in self:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self.error(f"not JSON: {error}") from None
            if not isinstance(row, dict):
                raise self.error("not a JSON object")
            yield row

    def whole(self, row: Mapping[str, object], name: str) -> int:
        """A count of tokens."""
        value = row.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
            raise self.error(f"{name} must be a whole number of tokens, got {value!r}")
        return value

    def time(self, row: Mapping[str, object], name: str) -> float:
        value = row.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{name} must be a number, got {value!r}")
        if not math.isfinite(value) or value < 0:
            raise self.error(f"{name} must be finite and not negative, got {value!r}")
        return float(value)


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Read a trace, plain or gzip; its format is told by its first line unless forced."""
    options = options or ReadOptions()
    with _opened(path) as stream:
        first = next(iter(_Lines(path, stream)), "")
    trace_format = options.format or detect(first, path)
    page_tokens = options.page_tokens or PAGE_TOKENS[trace_format]
    with _opened(path) as stream:
        lines = _Lines(path, stream)
        requests = READERS[trace_format](lines, page_tokens, options)
    if not requests:
        raise InvalidRequest(str(path), "the trace holds no request")
    if options.limit is not None:
        requests = requests[: options.limit]
    return Trace(trace_format, page_tokens, requests)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        raw = path.open("rb")
    except OSError as error:
        raise InvalidRequest(str(path), error.strerror or str(error)) from None
    with raw:
        is_gzip = raw.peek(2)[:2] == GZIP_MAGIC
        stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        yield io.TextIOWrapper(stream, encoding="utf-8", newline="")


def detect(first_line: str, path: Path) -> TraceFormat:
    """The format of a trace, by the names in its first line."""
    try:
        row = json.loads(first_line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        if "turns" in row:
            return TraceFormat.SESSIONS
        if "hash_ids" in row:
            return TraceFormat.QWEN if "chat_id" in row else TraceFormat.MOONCAKE
    elif _azure_columns(next(csv.reader([first_line]), [])) is not None:
        return TraceFormat.AZURE
    known = ", ".join(member.value for member in TraceFormat)
    raise InvalidRequest(f"{path}:1", f"not a trace in a known format ({known})")


# -- formats with page names ----------------------------------------------------------------------


def _hash_ids(lines: _Lines, row: Mapping[str, object], full_pages: int) -> list[int]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise lines.error("hash_ids must be a list of whole numbers")
    if len(ids) < full_pages:
        raise lines.error(f"hash_ids has {len(ids)} ids, its tokens fill {full_pages} pages")
    return ids[:full_pages]  # the last page may be partial, and is not reused


def _read_mooncake(lines: _Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    for row in lines.rows():
        input_tokens = lines.whole(row, "input_length")
        keys = _hash_ids(lines, row, input_tokens // page_tokens)
        found.append(
            TraceRequest(
                arrival_s=lines.time(row, "timestamp") / 1000,
                input_tokens=input_tokens,
                output_tokens=lines.whole(row, "output_length"),
                keys=keys,
                kept=keys,
                session=0,
            )
        )
    return _with_sessions(_in_order(_fitting(found, options), options))


def _read_qwen(lines: _Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    session_of: dict[object, int] = {}
    for row in lines.rows():
        input_tokens = lines.whole(row, "input_length")
        keys = _hash_ids(lines, row, input_tokens // page_tokens)
        if not isinstance(row.get("chat_id"), int | str):
            raise lines.error(f"chat_id must name the chat, got {row.get('chat_id')!r}")
        parent = row.get("parent_chat_id")
        session = session_of.get(parent, len(session_of))
        session_of[row.get("chat_id")] = session
        found.append(
            TraceRequest(
                arrival_s=lines.time(row, "timestamp"),
                input_tokens=input_tokens,
                output_tokens=lines.whole(row, "output_length"),
                keys=keys,
                kept=keys,
                session=session,
            )
        )
    return _in_order(_fitting(found, options), options)


def _with_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Guess sessions where the trace names none.

    A request continues the session of the request that brought in its deepest known page, if that
    page was one of the last two there: then the prompt goes on where the other ended.
    """
    brought: dict[int, tuple[int, int]] = {}  # page -> session, pages after it in that prompt
    found, num_sessions = [], 0
    for request in requests:
        session = None
        for key in reversed(request.keys):
            if key in brought:
                known, pages_after = brought[key]
                session = known if pages_after < 2 else None
                break
        if session is None:
            session, num_sessions = num_sessions, num_sessions + 1
        for index, key in enumerate(request.keys):
            brought.setdefault(key, (session, len(request.keys) - 1 - index))
        found.append(replace(request, session=session))
    return found


# -- lengths only ---------------------------------------------------------------------------------

AZURE_COLUMNS = (
    ("timestamp_ms", "timestamp"),
    ("input_length", "contexttokens"),
    ("output_length", "generatedtokens"),
)


def _azure_columns(header: list[str]) -> list[int] | None:
    """Where timestamp, prompt and answer lengths are; None if this is no such header."""
    names = [name.strip().lower().lstrip("\ufeff") for name in header]
    places = [next((names.index(n) for n in known if n in names), None) for known in AZURE_COLUMNS]
    return None if None in places else [place for place in places if place is not None]


def _read_azure(lines: _Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    rows = _csv_rows(lines)
    columns = _azure_columns(next(rows, []))
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
            raise lines.error(f"lengths of {prompt} and {answer} tokens")
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
    return _in_order(_fitting(found, options), options)


def _csv_rows(lines: _Lines) -> Iterator[list[str]]:
    try:
        yield from csv.reader(iter(lines))
    except csv.Error as error:
        raise lines.error(f"not CSV: {error}") from None


def _azure_time(lines: _Lines, text: str) -> float:
    """Seconds, from milliseconds or from a date with time."""
    try:
        return float(text) / 1000
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text[:26]).timestamp()  # their seventh decimal is cut
    except ValueError:
        raise lines.error(f"{text!r} is not a time") from None


# -- session shapes -------------------------------------------------------------------------------


def _read_sessions(lines: _Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    """Lengths of turns; arrivals are drawn: Poisson session starts and real think times."""
    process = ArrivalProcess(options.rate or 1.0, options.seed, options.think_times)
    found: list[TraceRequest] = []
    next_key = 0
    for session, row in enumerate(lines.rows()):
        turns = row.get("turns")
        if not isinstance(turns, list) or not all(map(_is_turn, turns)):
            raise lines.error("turns must be a list of [user tokens, answer tokens]")
        arrival_s, history = process.next_start(), 0
        first_key, previous = next_key, None
        for index, (user, answer) in enumerate(turns):
            prompt = history + user
            history = prompt + answer
            if options.context_tokens is not None and history > options.context_tokens:
                break
            think_s = process.think_s() if index else 0.0
            if previous is not None:
                arrival_s += process.answer_s(found[-1].output_tokens) + think_s
            next_key = first_key + history // page_tokens
            found.append(
                TraceRequest(
                    arrival_s=arrival_s,
                    input_tokens=prompt,
                    output_tokens=answer,
                    keys=range(first_key, first_key + prompt // page_tokens),
                    kept=range(first_key, next_key),
                    session=session,
                    previous=previous,
                    think_s=think_s,
                )
            )
            previous = len(found) - 1
    return _sorted_sessions(found)


def _is_turn(turn: object) -> bool:
    return (
        isinstance(turn, list)
        and len(turn) == 2
        and all(type(item) is int and 0 <= item <= MAX_TOKENS for item in turn)
    )


def _sorted_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """By arrival, with `previous` pointing to the places after sorting."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    place_of = {index: place for place, index in enumerate(order)}
    moved = (requests[index] for index in order)
    return [
        request
        if request.previous is None
        else replace(request, previous=place_of[request.previous])
        for request in moved
    ]


def _fitting(requests: Iterable[TraceRequest], options: ReadOptions) -> list[TraceRequest]:
    limit = options.context_tokens
    return [
        request
        for request in requests
        if limit is None or request.input_tokens + request.output_tokens <= limit
    ]


def _in_order(requests: list[TraceRequest], options: ReadOptions) -> list[TraceRequest]:
    """By arrival, and faster or slower if a rate is asked for."""
    requests = sorted(requests, key=lambda request: request.arrival_s)
    if options.rate is None or len(requests) < 2:
        return requests
    first_s = requests[0].arrival_s
    length_s = requests[-1].arrival_s - first_s
    pace = (len(requests) - 1) / options.rate / length_s if length_s else 0.0
    return [replace(r, arrival_s=(r.arrival_s - first_s) * pace) for r in requests]


Reader = Callable[[_Lines, int, ReadOptions], list[TraceRequest]]
READERS: dict[TraceFormat, Reader] = {
    TraceFormat.MOONCAKE: _read_mooncake,
    TraceFormat.QWEN: _read_qwen,
    TraceFormat.AZURE: _read_azure,
    TraceFormat.SESSIONS: _read_sessions,
}
