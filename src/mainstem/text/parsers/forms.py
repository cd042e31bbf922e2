"""Parts of forms that make an answer a tool call, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mainstem.core.json import JsonView
from mainstem.text.schemas import arguments_schema

Spell = Callable[[str], str]  # mark -> its name in a form: the id of a special token, or a text
Functions = Mapping[int, JsonView]  # the functions of tools, by their place in the request


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What a call looks like. `lark` refers to each of the JSON schemas as `@name`."""

    lark: str
    schemas: Mapping[str, JsonView]


def spelled(special: Mapping[str, int]) -> Spell:
    """Return a Spell; `special` has the marks that are special tokens, and their ids."""
    return lambda mark: f"<[{special[mark]}]>" if mark in special else json.dumps(mark)


def tool_name(place: int) -> str:
    """Name of the schema of a tool's arguments. Each schema is a grammar of its own, since
    "#/$defs/..." refers to the schema's own definitions, and so that an error can name the tool."""
    return f"tools_{place}"


def arguments_schemas(functions: Functions) -> dict[str, JsonView]:
    """The schemas of all functions' arguments, by name."""
    return {
        tool_name(place): arguments_schema(function.get("parameters"))
        for place, function in functions.items()
    }


def json_calls(start: str, functions: Functions, arguments: str) -> CallGrammar:
    """Calls that are {"name": ..., `arguments`: ...}; `start` uses them as the rule `call`."""
    calls = [
        f'{json.dumps(json_opening(function, arguments))} @{tool_name(place)} "}}"'
        for place, function in functions.items()
    ]
    return CallGrammar("\n".join([start, *either(calls)]), arguments_schemas(functions))


def json_opening(function: JsonView, arguments: str) -> str:
    """How a call in JSON begins, up to its arguments."""
    return f'{{"name": {json.dumps(function["name"])}, "{arguments}": '


def either(calls: Sequence[str]) -> list[str]:
    """Return the rule `call`, which is one of some calls, and a rule for each of them."""
    names = [f"call_{number}" for number in range(len(calls))]
    rules = [f"{name}: {call}" for name, call in zip(names, calls, strict=True)]
    return [f"call: {' | '.join(names)}", *rules]
