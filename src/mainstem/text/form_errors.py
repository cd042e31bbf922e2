"""Says which part of a form is wrong: the tool, the place in its schema, and the keyword."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import JsonView
from mainstem.text.schemas import BY_NAME, NESTED

if TYPE_CHECKING:
    from llguidance import LLParserLimits

FIELD = "response_format"
_MAX_TRIED = 64  # schemas within a wrong one that are tried alone
_TOOL = re.compile(r"tools_(\d+)(?:_.*)?")
_SHARED = ("$defs", "definitions")
_IN_SHARED = tuple(f".{name}." for name in _SHARED)


def blamed(form: str, error: str, limits: "LLParserLimits") -> InvalidRequest:
    """Return the error for a form that llguidance refuses with `error`."""
    for grammar in json.loads(form)["grammars"]:
        schema = grammar.get("json_schema")
        if isinstance(schema, Mapping) and (found := _refusal(schema, limits)):
            path, reason = _deepest(schema, found, limits)
            tool = _TOOL.fullmatch(grammar.get("name", ""))
            if tool is not None and schema.get("required") == ["name", "parameters"]:
                path = path.removeprefix("parameters").lstrip(".")  # a whole call of Llama
            field = FIELD if tool is None else f"tools[{tool[1]}].function.parameters"
            return InvalidRequest(field, f"at {path}: {reason}" if path else reason)
    return InvalidRequest(FIELD, _told(error))


def _refusal(schema: object, limits: "LLParserLimits") -> str:
    """Why llguidance refuses a schema; "" if it accepts it."""
    from llguidance import LLMatcher  # noqa: PLC0415  # an optional package

    form = json.dumps({"grammars": [{"json_schema": schema}]})
    error: str = LLMatcher.validate_grammar(form, limits=limits)
    return error


def _deepest(schema: JsonView, error: str, limits: "LLParserLimits") -> tuple[str, str]:
    """Return the path of the innermost schema that is refused, and why."""
    shared = {name: schema[name] for name in _SHARED if name in schema}
    path, num_tried = "", 0
    children = list(_children(schema))
    while children and num_tried < _MAX_TRIED:
        step, child = children.pop(0)
        num_tried += 1
        if not isinstance(child, Mapping):
            continue
        given = child if not path and step.startswith(_IN_SHARED) else {**shared, **child}
        if found := _refusal(given, limits):
            path, error = path + step, found
            children = list(_children(child))
    return path.lstrip("."), _told(error)


def _children(schema: JsonView) -> Iterator[tuple[str, object]]:
    """The schemas directly within one, and the steps to them. Steps to properties are short."""
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, Mapping):
            prefix = "" if name == "properties" else f".{name}"
            yield from ((f"{prefix}.{key}", each) for key, each in value.items())
        elif name in (*NESTED, "allOf"):
            if isinstance(value, list):
                yield from ((f".{name}[{place}]", each) for place, each in enumerate(value))
            else:
                yield f".{name}", value


def _told(error: str) -> str:
    """An error of llguidance in our words, without the source of the grammar."""
    if (found := re.search(r"Unimplemented keys: \[(.*?)\]", error)) is not None:
        return f"not supported: {found[1].replace(chr(34), '')}"
    if "oneOf constraints are not supported" in error:
        return "oneOf: a value could fit several of its alternatives; use anyOf"
    return " ".join(error.split())
