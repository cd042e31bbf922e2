"""Checks JSON objects against records, and the types of fields that several records have.

`/openapi.json` is made from the same records. `null` is the same as leaving a field out, as in
OpenAI's API.
"""

import re
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from mainstem.core.json import JsonView
from mainstem.core.spelling import did_you_mean
from mainstem.wire.errors import WireError

# `(?!\n)`: in Python `$` also matches before a newline at the end of the text
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}(?!\n)$"
MAX_TOOLS = 128

Anything = Annotated[object, Meta(extra_json_schema={"description": "any JSON value"})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# texts by name; the limits are those of OpenAI's API
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
T = TypeVar("T", bound=Struct)


class RoutedBody(Struct, frozen=True, kw_only=True):
    """Fields of all requests to the model in OpenAI's APIs."""

    model: Annotated[str, Meta(description="the model's name, or NAME:APP")] | None = None
    app: Annotated[str, Meta(description="name of a system prompt on the server")] | None = None
    cache_salt: str | None = None  # only requests with the same salt share pages
    priority: Annotated[int, Meta(description="lower goes first")] | None = None


class DrawnBody(RoutedBody, frozen=True, kw_only=True):
    """Fields of all requests for answers: how tokens are chosen, and when an answer ends."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None


_PLACE = re.compile(r"^(?P<reason>.*?) - at (?:`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`$")
_PART = re.compile(r"^(messages\[\d+\]\.content(?:\[\d+\])?)\.type$")
_ENUM = re.compile(r"^Invalid enum value '(.*)'$", re.DOTALL)
_UNKNOWN = re.compile(r"contains unknown field `(.*)`$", re.DOTALL)
_TYPES = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def read_fields(fields: JsonView, kind: type[T]) -> T:
    """Convert a JSON object to a record; raises WireError that names the unknown or invalid
    field."""
    given = {name: value for name, value in fields.items() if value is not None}
    known = kind.__struct_fields__
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known)
            reason = f"the field {name!r} is not supported{'.' + meant if meant else ''}"
            raise WireError("unknown_field", reason, name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None


def _explained(text: str, kind: type[Struct]) -> WireError:
    """Convert msgspec's message to an error that names the field, for example n in "Expected ... -
    at `$.n`"."""
    found = _PLACE.match(text)
    reason, place = (found["reason"], found["path"].lstrip(".")) if found else (text, "")
    if not place and (missing := _MISSING.search(reason)):
        return WireError("invalid_value", f"{missing[1]}: is required", missing[1])
    if unknown := _UNKNOWN.search(reason):
        name = f"{place}.{unknown[1]}"
        return WireError("unknown_field", f"the field {name!r} is not supported", name)
    param = re.split(r"[.\[]", place, maxsplit=1)[0]
    if param in ("stream_options", "structured_outputs"):
        param = place
    if (part := _PART.match(place)) and (named := _ENUM.match(reason)):
        message = f"{part[1]}: {named[1]} parts are not supported: the model reads text"
        if meant := did_you_mean(named[1], ["text"]):
            message += f".{meant}"
        return WireError("invalid_value", message, param)
    if reason.startswith("Invalid enum value") and param == place:
        allowed = ", ".join(map(str, _choices(kind, param)))
        return WireError("invalid_value", f"{place}: must be one of {allowed}", param)
    plain = _TYPES.sub(_in_words, reason)
    return WireError("invalid_value", f"{place}: {plain[0].lower()}{plain[1:]}", param or None)


def _in_words(types: re.Match[str]) -> str:
    """Convert a type to words: `int | null` becomes "a whole number"."""
    names = [name for name in types[1].split(" | ") if name != "null"]
    return " or ".join(_WORDS.get(name, name) for name in names) or "null"


def _choices(kind: type[Struct], name: str) -> list[object]:
    """Return the values that a field of literals can have."""
    hint = get_type_hints(kind)[name]
    return [
        value
        for part in (hint, *get_args(hint))
        if get_origin(part) is Literal
        for value in get_args(part)
    ]
