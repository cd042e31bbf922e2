"""The interface of all parsers of answers, and what they have in common."""

import json
import re
from collections.abc import Sequence
from typing import Protocol

from mainstem.text.tools import Part, ToolCall, new_call_id

# lone surrogates, which JSON escapes can give; a reply cannot contain them
_HALF = re.compile("[\ud800-\udfff]")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


class AnswerParser(Protocol):
    """Reads one answer as it arrives, and turns pieces of text into parts.

    Text that may turn out not to be plain text is held back. Joined, the parts do not depend on how
    the text was cut into pieces.
    """

    @property
    def is_plain(self) -> bool:
        """Whether nothing is held back, and everything that follows is text."""

    def push(self, text: str) -> list[Part]:
        """Add text; returns the parts that are now certain."""

    def finish(self) -> list[Part]:
        """The answer has ended: return everything that is left."""


class PlainParser:
    """An answer that is only text."""

    is_plain = True

    def push(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []


class CallOrFormParser:
    """An answer that is a call or has a form. If it does not begin like a call, all of it is text,
    even if it quotes a call."""

    def __init__(self, openings: Sequence[str], calls: AnswerParser) -> None:
        """`openings`: how an answer begins that `calls` reads."""
        self._openings = tuple(openings)
        self._calls = calls
        self._held = ""
        self._rest: AnswerParser | None = None  # reads the answer; None: its kind is not known yet

    @property
    def is_plain(self) -> bool:
        return self._rest is not None and self._rest.is_plain

    def push(self, text: str) -> list[Part]:
        if self._rest is not None:
            return self._rest.push(text)
        self._held += text
        is_call = self._held.startswith(self._openings)
        if not is_call and any(opening.startswith(self._held) for opening in self._openings):
            return []
        self._rest = self._calls if is_call else PlainParser()
        return self._rest.push(self._held)

    def finish(self) -> list[Part]:
        if self._rest is not None:
            return self._rest.finish()
        return [self._held] if self._held else []


def overlap(text: str, *marks: str) -> int:
    """Return how many characters at the end of `text` are the beginning of a mark.

    All marks must begin with the same character, and must not contain it again.
    """
    place = text.rfind(marks[0][0], max(0, len(text) - max(map(len, marks)) + 1))
    is_beginning = place >= 0 and any(mark.startswith(text[place:]) for mark in marks)
    return len(text) - place if is_beginning else 0


def without_halves(text: str) -> str:
    return _HALF.sub("\ufffd", text)


def call_of(value: object, call_id: str | None = None) -> ToolCall | None:
    """Return the call that a JSON value describes, {"name": ..., "arguments": ...}; None if it is
    not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name, arguments = without_halves(value["name"]), without_halves(arguments)
    return ToolCall(call_id or new_call_id(), name, arguments)


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text that is one JSON object or several; none if it is anything
    else."""
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    place = len(text) - len(text.lstrip())
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        call = call_of(value)
        if call is None:
            return []
        calls.append(call)
        found = _BETWEEN_CALLS.match(text, place)
        assert found is not None
        place = found.end()
    return calls
