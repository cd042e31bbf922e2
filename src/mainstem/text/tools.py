"""The parts of an answer that are not plain text: reasoning and tool calls."""

import json
from dataclasses import dataclass
from secrets import token_hex
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The text in which the model reasons before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments` is JSON text, as in OpenAI's API."""

    call_id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


Part: TypeAlias = str | Reasoning | ToolCall


def new_call_id() -> str:
    return f"call_{token_hex(12)}"


def past_arguments(text: str) -> object:
    """Return the arguments of an earlier call as the object that chat templates expect. A model may
    write anything: what is no object is kept as text.

    "" -> {}, "null" -> {}, '{"a": 1}' -> {"a": 1}, "a" -> {"arguments": "a"}
    """
    try:
        found = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return {"arguments": text}
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": text}
