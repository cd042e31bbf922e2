"""Reasoning between two marks at the beginning of an answer: <think>...</think> (DeepSeek R1,
Qwen3, SmolLM3 ...), [THINK]...[/THINK] (Magistral)."""

from collections.abc import Iterator
from enum import Enum, auto

from mainstem.text.parsers.parser import AnswerParser, overlap
from mainstem.text.tools import Part, Reasoning


class _ThinkState(Enum):
    START = auto()  # the begin mark may still come
    INSIDE = auto()
    AFTER = auto()  # white space between reasoning and answer
    REST = auto()


class ThinkParser:
    """Reads reasoning first; another parser reads the rest. White space around the marks is
    dropped."""

    def __init__(self, begin: str, end: str, rest: AnswerParser) -> None:
        self._begin, self._end = begin, end
        self._rest = rest
        self._state = _ThinkState.START
        self._has_thought = False
        self._held = ""

    @property
    def is_plain(self) -> bool:
        return self._state is _ThinkState.REST and self._rest.is_plain

    def push(self, text: str) -> list[Part]:
        if self._state is _ThinkState.REST:
            return self._rest.push(text)
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        parts: list[Part] = []
        if self._state is _ThinkState.INSIDE:
            parts = [Reasoning(held.rstrip())] if held.strip() else []
        elif held:
            parts = self._rest.push(held)
        return parts + self._rest.finish()

    def _parts(self) -> Iterator[Part]:
        if self._state is _ThinkState.START:
            bare = self._held.lstrip()
            if self._begin.startswith(bare) and bare != self._begin:
                return
            is_reasoning = bare.startswith(self._begin)
            self._state = _ThinkState.INSIDE if is_reasoning else _ThinkState.REST
            if is_reasoning:
                self._held = bare.removeprefix(self._begin)
        if self._state is _ThinkState.INSIDE:
            yield from self._thoughts()
        if self._state is _ThinkState.AFTER:
            self._held = self._held.lstrip()
            self._state = _ThinkState.REST if self._held else _ThinkState.AFTER
        if self._state is _ThinkState.REST:
            held, self._held = self._held, ""
            yield from self._rest.push(held)

    def _thoughts(self) -> Iterator[Part]:
        if not self._has_thought:
            self._held = self._held.lstrip()
        thought, end, after = self._held.partition(self._end)
        if end:
            self._state, self._held = _ThinkState.AFTER, after
        else:
            thought = self._held[: len(self._held) - overlap(self._held, self._end)]
        thought = thought.rstrip()
        if not end:
            self._held = self._held[len(thought) :]
        if thought:
            self._has_thought = True
            yield Reasoning(thought)
