"""Tool calls of Mistral's models. Calls come after the text of the answer, if there is any:

[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]      models until 2024
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}           later models; [ARGS] may be missing, and
                                                           [CALL_ID] with an id may come before it
"""

import json
import re
from collections.abc import Iterator
from secrets import token_hex

from mainstem.text.parsers.forms import (
    CallGrammar,
    Functions,
    Spell,
    arguments_schemas,
    either,
    json_calls,
    tool_name,
)
from mainstem.text.parsers.parser import call_of, overlap
from mainstem.text.tools import Part, ToolCall

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"([\w.-]{1,256})\s?(?:\[CALL_ID\]\s?(\w{1,64})\s?)?(?:\[ARGS\])?", re.ASCII)
ID_CHARS = 9  # length of a call's id: templates refuse other lengths


class MistralParser:
    """A call is returned when the next one begins or the answer ends."""

    is_plain = False

    def __init__(self) -> None:
        self._held = ""
        self._is_call = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._is_call:
            return list(self._calls(held))
        return [held] if held else []

    def _parts(self) -> Iterator[Part]:
        *ended, self._held = self._held.split(CALLS)
        for before in ended:
            if self._is_call:
                yield from self._calls(before)
            elif said := before.rstrip():
                yield said
            self._is_call = True
        if not self._is_call:
            certain = self._held[: len(self._held) - overlap(self._held, CALLS)].rstrip()
            self._held = self._held[len(certain) :]
            if certain:
                yield certain

    def _calls(self, body: str) -> Iterator[Part]:
        calls = _read(body)
        yield from calls
        if not calls:
            yield CALLS + body


def _read(body: str) -> list[ToolCall]:
    head, brace, rest = body.partition("{")
    named = _NAMED.fullmatch(head.strip())
    try:
        if named is not None:
            name, call_id = named.groups()
            values = [{"name": name, "id": call_id, "arguments": json.loads(brace + rest)}]
        else:
            value = json.loads(body)
            values = value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return []
    calls = [call_of(value, _call_id(value)) for value in values]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else []


def _call_id(value: object) -> str:
    """Return the id that the model wrote; a new one if it is missing or templates refuse it."""
    given = value.get("id") if isinstance(value, dict) else None
    if isinstance(given, str) and re.fullmatch(rf"[A-Za-z0-9]{{{ID_CHARS}}}", given):
        return given
    return token_hex(ID_CHARS)[:ID_CHARS]


def mistral_call(functions: Functions, spell: Spell) -> CallGrammar:
    """The grammar of one call, in the newer format if the vocabulary has [ARGS]."""
    if spell(ARGS) == json.dumps(ARGS):
        return json_calls(f'start: {spell(CALLS)} " [" call "]"', functions, "arguments")
    named = [
        f"{json.dumps(function['name'])} {spell(ARGS)} @{tool_name(place)}"
        for place, function in functions.items()
    ]
    lark = "\n".join([f"start: {spell(CALLS)} call", *either(named)])
    return CallGrammar(lark, arguments_schemas(functions))
