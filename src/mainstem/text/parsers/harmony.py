"""gpt-oss writes its answers as messages of OpenAI's harmony format:

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

all on one line. `analysis` is reasoning; a message to a function is a call; `final`, and
`commentary` without a recipient, are text. The first message's `<|start|>assistant` is in the
prompt.
"""

import json
import re
from collections.abc import Iterator
from enum import Enum, auto

from mainstem.text.parsers.forms import (
    CallGrammar,
    Functions,
    Spell,
    arguments_schemas,
    either,
    tool_name,
)
from mainstem.text.parsers.parser import overlap
from mainstem.text.tools import Part, Reasoning, ToolCall, new_call_id

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_ANY_MARK = re.compile("|".join(map(re.escape, MARKS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class _MessageKind(Enum):
    """What a message is."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()


def is_analysis(header: str) -> bool:
    """Whether a message is reasoning, by its header."""
    channel = _CHANNEL.search(header)
    return channel is not None and channel[1] == "analysis" and not _RECIPIENT.search(header)


class HarmonyParser:
    """Reads messages. Without `has_reasoning` or `has_calls`, messages of that kind are text."""

    is_plain = False

    def __init__(self, has_reasoning: bool, has_calls: bool) -> None:
        self._has_reasoning, self._has_calls = has_reasoning, has_calls
        self._held = ""
        self._header: str | None = ""  # the next message's header so far; None: within a message
        self._has_mark = False  # a mark of the header was seen
        self._kind = _MessageKind.TEXT
        self._name = ""  # the function that is called
        self._arguments: list[str] = []
        self._spoken: set[_MessageKind] = set()  # kinds of messages seen
        self._is_first = True  # no text of this message was returned yet

    def push(self, text: str) -> list[Part]:
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        parts = list(self._say(held)) if held else []
        if self._header is None and self._kind is _MessageKind.CALL:
            parts += self._last_call()
        elif self._header and not self._has_mark:
            parts += [self._header] if self._header.strip() else []
        return parts

    def _parts(self) -> Iterator[Part]:
        place = 0
        for found in _ANY_MARK.finditer(self._held):
            if before := self._held[place : found.start()]:
                yield from self._say(before)
            yield from self._obey(found[0])
            place = found.end()
        self._held = self._held[place:]
        certain = self._held[: len(self._held) - overlap(self._held, *MARKS)]
        self._held = self._held[len(certain) :]
        if certain:
            yield from self._say(certain)

    def _obey(self, mark: str) -> Iterator[Part]:
        """Handle a mark, which begins or ends a header or a message."""
        if mark == MESSAGE:
            if self._header is not None:
                self._begin_message(self._header)
            return
        if mark == CONSTRAIN and self._header is None:
            return
        if self._header is None:
            if self._kind is _MessageKind.CALL:
                yield self._call("".join(self._arguments))
            self._header = ""
        self._has_mark = mark in (START, CHANNEL, CONSTRAIN)
        self._header = f"{self._header} {mark}" if self._has_mark and mark != START else ""

    def _begin_message(self, header: str) -> None:
        recipient = _RECIPIENT.search(header)
        self._kind = _MessageKind.TEXT
        if recipient is not None and self._has_calls:
            self._kind, self._name = _MessageKind.CALL, recipient[1].removeprefix("functions.")
            self._arguments = []
        elif self._has_reasoning and is_analysis(header):
            self._kind = _MessageKind.REASONING
        self._header, self._is_first = None, True

    def _say(self, text: str) -> Iterator[Part]:
        """Handle text between two marks, or as much of it as is certain."""
        if self._header is not None:
            self._header += text
            if self._has_mark or "to=".startswith(self._header.lstrip()[:3]):
                return
            # an answer without a header, since it follows a form
            text, self._kind = self._header, _MessageKind.TEXT
            self._header, self._is_first = None, True
        if self._kind is _MessageKind.CALL:
            self._arguments.append(text)
            return
        if self._is_first and self._kind in self._spoken:
            text = "\n" + text  # messages of one kind become one text
        self._is_first = False
        self._spoken.add(self._kind)
        yield Reasoning(text) if self._kind is _MessageKind.REASONING else text

    def _call(self, arguments: str) -> ToolCall:
        return ToolCall(new_call_id(), self._name, arguments.strip() or "{}")

    def _last_call(self) -> list[Part]:
        """A call without its end mark: the answer was cut off, or the mark is not shown."""
        arguments = "".join(self._arguments)
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            return [arguments] if arguments else []
        return [self._call(arguments)]


def harmony_call(functions: Functions, spell: Spell) -> CallGrammar:
    """Return the grammar of one call."""
    calls = []
    for place, function in functions.items():
        opening = json.dumps(f"commentary to=functions.{function['name']} ")
        words = [spell(CHANNEL), opening, spell(CONSTRAIN), '"json"', spell(MESSAGE)]
        calls.append(f"{' '.join(words)} @{tool_name(place)}")
    lark = "\n".join(["start: call", *either(calls)])
    return CallGrammar(lark, arguments_schemas(functions))


def call_or_final(spell: Spell) -> str:
    """Return a Lark grammar for the grammar `@call`, or a final message that is `@answer`. The
    model always begins with a channel, so without `final` it could only ever call. It may reason
    before that."""
    thoughts = f'{spell(CHANNEL)} "analysis" {spell(MESSAGE)} TEXT {spell(END)}'
    return "\n".join(
        [
            f'start: ({thoughts} {spell(START)} "assistant")? (@call | final)',
            f'final: {spell(CHANNEL)} "final" {spell(MESSAGE)} @answer',
            "TEXT: /[^<]([^<]|<[^|])*/",
        ]
    )
