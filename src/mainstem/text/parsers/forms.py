"""Parts of forms that make an answer a tool call, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Mapping, Sequence

from mainstem.core.json import JsonView
from mainstem.text.grammar import JSON_SPACING
from mainstem.text.schemas import arguments_schema

Spell = Callable[[str], str]  # mark -> its name in a form: the id of a special token, or a text


def spelled(special: Mapping[str, int]) -> Spell:
    """Return a Spell; `special` has the marks that are special tokens, and their ids."""
    return lambda mark: f"<[{special[mark]}]>" if mark in special else json.dumps(mark)


def json_rule(schema: JsonView) -> str:
    """JSON that a schema describes."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_SPACING})}"


def arguments_rules(functions: Sequence[JsonView]) -> list[str]:
    """Return the rules `arguments_0`, `arguments_1` ...: JSON that the functions' schemas describe.
    Each schema has its own rule, since "#/$defs/..." refers to the schema's own definitions."""
    schemas = [arguments_schema(function.get("parameters")) for function in functions]
    return [f"arguments_{number}: {json_rule(schema)}" for number, schema in enumerate(schemas)]


def json_call_rules(functions: Sequence[JsonView], arguments: str) -> list[str]:
    """Return the rule `call`, {"name": ..., `arguments`: ...}, and the rules that it needs."""
    calls = []
    for number, function in enumerate(functions):
        opening = f'{{"name": {json.dumps(function["name"])}, "{arguments}": '
        calls.append(f'{json.dumps(opening)} arguments_{number} "}}"')
    return [*either(calls), *arguments_rules(functions)]


def either(calls: Sequence[str]) -> list[str]:
    """Return the rule `call`, which is one of some calls, and a rule for each of them."""
    names = [f"call_{number}" for number in range(len(calls))]
    rules = [f"{name}: {call}" for name, call in zip(names, calls, strict=True)]
    return [f"call: {' | '.join(names)}", *rules]
