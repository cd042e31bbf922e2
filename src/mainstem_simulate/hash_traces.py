"""Reads traces that have ids for the pages of prompts: Mooncake, Qwen-Bailian and WEKA's agent
sessions.

Equal ids mean equal tokens in the page and in the prompt before it. Answers have no ids; their
pages get ids when they are part of the next prompt.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mainstem.core.errors import InvalidRequest
from mainstem_simulate.arrivals import ArrivalProcess
from mainstem_simulate.trace_records import (
    MAX_TOKENS,
    Lines,
    ReadOptions,
    TraceRequest,
    fitting,
    in_order,
    sorted_sessions,
)

Row = Mapping[str, object]


class _PageFit:
    """Checks that every request has one id per page; if not, finds the page size that fits.

    The last page may be partial: some traces have an id for it, others do not. Both are accepted.
    """

    def __init__(self, lines: Lines, page_tokens: int) -> None:
        self._lines = lines
        self._page_tokens = page_tokens
        self._misfit: InvalidRequest | None = None  # error of the first request that does not fit
        self._up = _SizeRange()  # page sizes that fit if a partial page has an id
        self._down = _SizeRange()  # page sizes that fit if a partial page has no id

    def check(self, field: str, num_ids: int, input_tokens: int) -> None:
        """Check a request; `finish` raises."""
        self._up.add_rounded_up(num_ids, input_tokens)
        self._down.add_rounded_down(num_ids, input_tokens)
        full = input_tokens // self._page_tokens
        most = -(-input_tokens // self._page_tokens)
        if self._misfit is None and not full <= num_ids <= most:
            made = f"fill {full}" if num_ids < full else f"make at most {most}"
            reason = (
                f"{field} has {num_ids} ids, but its tokens {made} pages of {self._page_tokens}"
            )
            self._misfit = self._lines.error(reason)

    def finish(self) -> None:
        """Raise InvalidRequest for the first request that did not fit, with the size to use."""
        if self._misfit is None:
            return
        size = self._up.choose() or self._down.choose()
        advice = "no page size fits every request of this trace"
        if size is not None:
            advice = f"every request fits --page-tokens {size}"
        raise InvalidRequest(self._misfit.field, f"{self._misfit.reason}; {advice}")


class _SizeRange:
    """Page sizes that agree with all requests seen."""

    def __init__(self) -> None:
        self._least = 1
        self._most = MAX_TOKENS

    def add_rounded_up(self, num_ids: int, input_tokens: int) -> None:
        """Keep the sizes with ceil(input_tokens / size) == num_ids."""
        if num_ids == 0 or input_tokens == 0:
            if num_ids != input_tokens:
                self._most = 0
            return
        self._least = max(self._least, -(-input_tokens // num_ids))
        if num_ids > 1:
            self._most = min(self._most, (input_tokens - 1) // (num_ids - 1))

    def add_rounded_down(self, num_ids: int, input_tokens: int) -> None:
        """Keep the sizes with floor(input_tokens / size) == num_ids."""
        self._least = max(self._least, input_tokens // (num_ids + 1) + 1)
        if num_ids:
            self._most = min(self._most, input_tokens // num_ids)

    def choose(self) -> int | None:
        """Return the smallest power of two among these sizes, or else the smallest size; None if no
        size fits."""
        if self._least > self._most:
            return None
        power = 1 << (self._least - 1).bit_length()
        return power if power <= self._most else self._least


def _hashed_request(lines: Lines, row: Row, page_tokens: int, fit: _PageFit) -> TraceRequest:
    """The request of a row, without a session and with its time as it stands there."""
    input_tokens, ids = lines.whole(row, "input_length"), row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise lines.error("hash_ids must be a list of whole numbers")
    fit.check("hash_ids", len(ids), input_tokens)
    keys = ids[: input_tokens // page_tokens]  # a partial page is not reused
    return TraceRequest(
        arrival_s=lines.time(row, "timestamp"),
        input_tokens=input_tokens,
        output_tokens=lines.whole(row, "output_length"),
        keys=keys,
        kept=keys,
        session=0,
    )


def read_mooncake(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    fit = _PageFit(lines, page_tokens)
    for row in lines.rows():
        request = _hashed_request(lines, row, page_tokens, fit)
        found.append(replace(request, arrival_s=request.arrival_s / 1000))
    fit.finish()
    return _with_sessions(in_order(fitting(found, options), options))


def read_qwen(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    session_of: dict[object, int] = {}
    fit = _PageFit(lines, page_tokens)
    for row in lines.rows():
        request = _hashed_request(lines, row, page_tokens, fit)
        if not isinstance(row.get("chat_id"), int | str):
            raise lines.error(f"chat_id must name the chat, got {row.get('chat_id')!r}")
        parent = row.get("parent_chat_id")
        session = session_of.get(parent, len(session_of))
        session_of[row.get("chat_id")] = session
        found.append(replace(request, session=session))
    fit.finish()
    return in_order(fitting(found, options), options)


def _with_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Guess the sessions of a trace that does not have them.

    Take the deepest page of a prompt that occurred before, and the prompt in which this page first
    occurred. If the page was one of the last two pages there, the new prompt continues the old one,
    so both belong to one session.
    """
    # page -> its session, and the number of pages after it in the prompt where it first occurred
    brought: dict[int, tuple[int, int]] = {}
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


# -- WEKA -----------------------------------------------------------------------------------------


def read_weka(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    """Read agent sessions. Times within a session are recorded; session starts are drawn.

    Ids are local to a session, so prefixes that sessions share are not counted.
    """
    process = ArrivalProcess(options.rate or 1.0, options.seed, options.think_times)
    fit = _PageFit(lines, page_tokens)
    found: list[TraceRequest] = []
    next_key = 0
    for session, row in enumerate(lines.rows()):
        if row.get("block_size") != page_tokens:
            size = row.get("block_size")
            reason = f"block_size is {size!r}, pages have {page_tokens} tokens"
            raise lines.error(f"{reason}; set --page-tokens {size}")
        given = row.get("requests")
        if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
            raise lines.error("requests must be a list of objects")
        start_s, first_key = process.next_start(), next_key
        last_of: dict[object, int] = {}  # agent -> its last request
        for item in given:
            request = _weka_request(lines, item, fit, first_key)
            next_key = max(next_key, max(request.keys, default=first_key) + 1)
            total = request.input_tokens + request.output_tokens
            if options.context_tokens is not None and total > options.context_tokens:
                break
            agent = str(item.get("agent"))
            placed = replace(
                request,
                arrival_s=start_s + request.arrival_s,
                keys=request.keys[: request.input_tokens // page_tokens],
                kept=request.keys[: request.input_tokens // page_tokens],
                session=session,
                previous=last_of.get(agent),
            )
            last_of[agent] = len(found)
            found.append(placed)
    fit.finish()
    return sorted_sessions(found)


def _weka_request(lines: Lines, item: Row, fit: _PageFit, first_key: int) -> TraceRequest:
    """Return one request of a session whose ids count from `first_key`."""
    input_tokens = lines.whole(item, "input_length")
    keys = _expanded(lines, item.get("hash_runs"), first_key)
    fit.check("hash_runs", len(keys), input_tokens)
    return TraceRequest(
        arrival_s=lines.time(item, "t"),
        input_tokens=input_tokens,
        output_tokens=lines.whole(item, "output_length"),
        keys=keys,
        kept=keys,
        session=0,
        think_s=0.0 if item.get("think_s") is None else lines.time(item, "think_s"),
    )


def _expanded(lines: Lines, runs: object, first_key: int) -> Sequence[int]:
    """Expand runs of [start, count] to ids; an array, to save memory."""
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        raise lines.error("hash_runs must be a list of [start, count]")
    ranges = [range(first_key + start, first_key + start + count) for start, count in runs]
    if len(ranges) == 1:
        return ranges[0]
    keys = array("q")
    for part in ranges:
        keys.extend(part)
    return keys


def _is_run(run: object) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 2
        and all(type(item) is int and 0 <= item <= MAX_TOKENS for item in run)
    )
