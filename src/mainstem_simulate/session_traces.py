"""Reads traces of conversations: lengths of turns, and for ChitChat also their times."""

from collections.abc import Callable, Iterator, Sequence

from mainstem_simulate.arrivals import ArrivalProcess
from mainstem_simulate.trace_records import (
    MAX_TOKENS,
    Lines,
    Outgrown,
    ReadOptions,
    TraceRequest,
    sorted_sessions,
)

Timing = Callable[[int], tuple[float, float]]
"""Called with the index of a turn. Returns the seconds of the answer before it, and of the user's
thinking after that answer."""

Pairs = list[tuple[list[int], list[int]]]


class _Chains:
    """Requests of conversations: a turn's prompt includes all earlier turns and answers."""

    def __init__(self, page_tokens: int, options: ReadOptions) -> None:
        self._page_tokens = page_tokens
        self._window = options.context_tokens
        self._outgrown = options.outgrown
        self._next_key = 0
        self._num_sessions = 0
        self.requests: list[TraceRequest] = []

    def add(self, start_s: float, turns: Sequence[tuple[int, int]], timing: Timing) -> None:
        """Add a conversation, given as (user tokens, answer tokens) of each turn."""
        arrival_s, history = start_s, 0
        first_key, previous = self._next_key, None
        for index, (user, answer) in enumerate(turns):
            num_dropped = self._num_dropped(history, user + answer)
            if num_dropped is None:
                break
            history -= num_dropped * self._page_tokens
            if num_dropped and self._outgrown is Outgrown.INVALID:
                # the remaining tokens are at other positions, so their pages are new
                first_key = self._next_key
            else:
                first_key += num_dropped
            prompt = history + user
            history = prompt + answer
            answer_s, think_s = timing(index) if index else (0.0, 0.0)
            arrival_s += answer_s + think_s
            self._next_key = first_key + history // self._page_tokens
            self.requests.append(
                TraceRequest(
                    arrival_s=arrival_s,
                    input_tokens=prompt,
                    output_tokens=answer,
                    keys=range(first_key, first_key + prompt // self._page_tokens),
                    kept=range(first_key, self._next_key),
                    session=self._num_sessions,
                    previous=previous,
                    think_s=think_s,
                )
            )
            previous = len(self.requests) - 1
        self._num_sessions += 1

    def _num_dropped(self, history: int, new: int) -> int | None:
        """Return how many pages at the beginning of a history are dropped, so that a turn of `new`
        tokens fits the window: a multiple of half a window, or all full pages. None: the session
        ends."""
        window = self._window
        if window is None or history + new <= window:
            return 0
        if self._outgrown is Outgrown.LEFT_OUT or new > window:
            return None
        half, num_dropped = max(1, window // 2 // self._page_tokens), 0
        num_pages = history // self._page_tokens
        while num_dropped < num_pages and history - num_dropped * self._page_tokens + new > window:
            num_dropped = min(num_dropped + half, num_pages)
        left = history - num_dropped * self._page_tokens
        return num_dropped if left + new <= window else None


def read_sessions(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    """Read lengths of turns. Arrivals are drawn: Poisson session starts and real think times."""
    process = ArrivalProcess(options.rate or 1.0, options.seed, options.think_times)
    chains = _Chains(page_tokens, options)
    for turns in _rows_of_turns(lines, ("user tokens", "answer tokens")):

        def timing(index: int, turns: list[list[int]] = turns) -> tuple[float, float]:
            return process.answer_s(turns[index - 1][1]), process.think_s()

        chains.add(process.next_start(), [(user, answer) for user, answer in turns], timing)
    return sorted_sessions(chains.requests)


def read_chitchat(lines: Lines, page_tokens: int, options: ReadOptions) -> list[TraceRequest]:
    """Read chats between two people. The first one counts as the user, the other as the model.

    Session starts are drawn. Within a session, a prompt arrives when its last message was sent. A
    last turn without an answer is left out.
    """
    process = ArrivalProcess(options.rate or 1.0, options.seed, options.think_times)
    chains = _Chains(page_tokens, options)
    for turns in _rows_of_turns(lines, ("first message s", "last message s", "tokens")):
        pairs: Pairs = list(zip(turns[::2], turns[1::2], strict=False))

        def timing(index: int, pairs: Pairs = pairs) -> tuple[float, float]:
            asked, answered = (turn[1] for turn in pairs[index - 1])
            return max(0.0, answered - asked), max(0.0, pairs[index][0][1] - answered)

        counts = [(user[2], answer[2]) for user, answer in pairs]
        chains.add(process.next_start(), counts, timing)
    return sorted_sessions(chains.requests)


def _rows_of_turns(lines: Lines, counts: Sequence[str]) -> Iterator[list[list[int]]]:
    """The turns of each line, with these numbers."""
    for row in lines.rows():
        turns = row.get("turns")
        if not isinstance(turns, list) or not all(_are_counts(each, len(counts)) for each in turns):
            raise lines.error(f"turns must be a list of [{', '.join(counts)}]")
        yield turns


def _are_counts(turn: object, num_counts: int) -> bool:
    return (
        isinstance(turn, list)
        and len(turn) == num_counts
        and all(type(item) is int and 0 <= item <= MAX_TOKENS for item in turn)
    )
