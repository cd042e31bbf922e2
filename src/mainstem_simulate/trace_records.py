"""Traces as the simulator uses them, and the lines of trace files."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TextIO

from mainstem.core.errors import InvalidRequest
from mainstem.core.files import UNREADABLE

MAX_TOKENS = 1 << 30  # limit for one prompt or answer; a larger number is an error in the file


class TraceFormat(Enum):
    MOONCAKE = "mooncake"
    QWEN = "qwen"
    WEKA = "weka"
    AZURE = "azure"
    SERVEGEN = "servegen"
    SESSIONS = "sessions"
    CHITCHAT = "chitchat"


class Outgrown(Enum):
    """What happens to a session that outgrows the context window."""

    LEFT_OUT = "leave-out"  # it ends there
    KEPT = "keep"  # its beginning is dropped, and the pages of the rest stay valid
    INVALID = "invalidate"  # its beginning is dropped, and the rest has to be computed again


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt and its answer. Pages are numbers; equal numbers mean equal prefixes."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[int]  # whole pages of the prompt
    kept: Sequence[int]  # whole pages to keep: `keys`, and those of the answer if it has ids
    session: int
    previous: int | None = None  # index of the turn before, whose answer comes first
    think_s: float = 0.0  # from the previous answer to this prompt


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    format: TraceFormat
    page_tokens: int
    requests: list[TraceRequest]

    @property
    def mean_chain_pages(self) -> float:
        """S_kv of the paper: the average number of pages that a request stores."""
        return sum(len(request.kept) for request in self.requests) / len(self.requests)

    @property
    def can_share(self) -> bool:
        return self.format not in (TraceFormat.AZURE, TraceFormat.SERVEGEN)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace. None: as in the trace, no limit, or (`think_times`) our own table."""

    format: TraceFormat | None = None
    page_tokens: int | None = None
    rate: float | None = None  # requests a second, or session starts a second
    context_tokens: int | None = None  # longer requests are left out, or cut as `outgrown` says
    outgrown: Outgrown = Outgrown.LEFT_OUT
    limit: int | None = None  # requests to read, in order of arrival
    seed: int = 0
    think_times: Path | None = None
    prompt_tokens: int | None = None  # length of every prompt, if the trace has no lengths
    answer_tokens: int | None = None


class Lines:
    """The lines of a file with their numbers, for error messages."""

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
        except UNREADABLE as error:
            raise InvalidRequest(f"{self._path}:{self.number + 1}", str(error)) from None

    def error(self, reason: str) -> InvalidRequest:
        """An error in the line that was read last."""
        return InvalidRequest(f"{self._path}:{max(1, self.number)}", reason)

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


def fitting(requests: Iterable[TraceRequest], options: ReadOptions) -> list[TraceRequest]:
    """The requests that fit the context window."""
    limit = options.context_tokens
    return [
        request
        for request in requests
        if limit is None or request.input_tokens + request.output_tokens <= limit
    ]


def in_order(requests: list[TraceRequest], options: ReadOptions) -> list[TraceRequest]:
    """Sort requests by arrival; times are scaled if a rate is given."""
    requests = sorted(requests, key=lambda request: request.arrival_s)
    if options.rate is None or len(requests) < 2:
        return requests
    first_s = requests[0].arrival_s
    length_s = requests[-1].arrival_s - first_s
    pace = (len(requests) - 1) / options.rate / length_s if length_s else 0.0
    return [replace(r, arrival_s=(r.arrival_s - first_s) * pace) for r in requests]


def sorted_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Sort requests by arrival, and update `previous` to the sorted order."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    place_of = {index: place for place, index in enumerate(order)}
    moved = (requests[index] for index in order)
    return [
        request
        if request.previous is None
        else replace(request, previous=place_of[request.previous])
        for request in moved
    ]
