"""What is asked of every row of a table, and which columns its answer becomes.

TextAnswer     any text                      one column
SchemaAnswer   JSON of a schema              a column for each property
ChoiceAnswer   one of some texts             one column, and a probability where texts are scored
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from mainstem.core.errors import InvalidRequest
from mainstem.core.json import AnyJson, Json, JsonView

MOST_SCORED = 128  # choices of a row that is scored
SCORED_TOKENS = 256  # more tokens than this, beside the first ones, are cheaper to generate
INT64 = range(-(1 << 63), 1 << 63)


class Kind(Enum):
    """The type of a column of answers."""

    TEXT = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    JSON = "json"  # text in formats without JSON values


class NoAnswer(Exception):
    """A row was answered, but not with what was asked; the message says why."""


class Asking(Protocol):
    """What is asked of every row."""

    @property
    def columns(self) -> Mapping[str, Kind]:
        """The answers' columns."""

    @property
    def fields(self) -> JsonView:
        """Fields of every request's body."""

    def read(self, body: AnyJson) -> Sequence[object]:
        """The answers' cells, from the body of a reply; raises NoAnswer."""


def error_column(answer: str) -> str:
    """The column that says why a row has no answer."""
    return f"{answer}_error"


def check_columns(asking: Asking, answer: str, columns: Collection[str]) -> None:
    """Raise InvalidRequest if a column of the answers has the name of a column of the table."""
    for name in (*asking.columns, error_column(answer)):
        if name in columns:
            reason = f"the table has a column {name!r} already, which the answers would replace"
            advice = "choose another name with --answer, or rename the column or the property"
            raise InvalidRequest("--answer", f"{reason}; {advice}")
    if error_column(answer) in asking.columns:
        raise InvalidRequest("--schema", f"a property may not be named {error_column(answer)!r}")


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """Any text."""

    answer: str = "answer"
    fields: JsonView = field(default_factory=dict)

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.answer: Kind.TEXT}

    def read(self, body: AnyJson) -> Sequence[object]:
        """See Asking."""
        return [_text(body)]


class SchemaAnswer:
    """JSON of a schema. If the schema is an object, each of its properties is a column (and all are
    required if it does not say which); otherwise the whole is one."""

    def __init__(self, schema: object, answer: str = "answer") -> None:
        """Raises InvalidRequest if the schema is not an object."""
        if not isinstance(schema, dict):
            raise InvalidRequest("--schema", "must be a JSON schema: an object")
        properties = schema.get("properties")
        self._is_object = isinstance(properties, dict) and bool(properties)
        named: Json = dict(properties) if isinstance(properties, dict) else {}
        self.columns: Mapping[str, Kind] = (
            {name: _kind_of(each) for name, each in named.items()}
            if self._is_object
            else {answer: _kind_of(schema)}
        )
        if self._is_object:
            schema = {"required": [*named], **schema}
        described = {"name": "answer", "schema": schema, "strict": True}
        self.fields: JsonView = {
            "response_format": {"type": "json_schema", "json_schema": described}
        }

    def read(self, body: AnyJson) -> Sequence[object]:
        """See Asking."""
        text = _text(body)
        try:
            value = json.loads(text)
        except ValueError:
            if _is_cut(body):
                reason = "the answer was cut off; raise --max-tokens"
                raise NoAnswer(f"{reason}: {text!r:.200}") from None
            raise NoAnswer(f"the answer is not JSON: {text!r:.200}") from None
        if not self._is_object:
            return [_typed(value, kind) for kind in self.columns.values()]
        if not isinstance(value, dict):
            raise NoAnswer(f"the answer is not an object: {text!r:.200}")
        return [_typed(value.get(name), kind) for name, kind in self.columns.items()]


class ChoiceAnswer:
    """One of some texts. `is_scored`: the likeliest one by its logprob; otherwise the model
    generates one of them."""

    def __init__(self, choices: Sequence[str], is_scored: bool, answer: str = "answer") -> None:
        """Raises InvalidRequest for choices that are empty or equal."""
        if len(choices) < 2 or len(set(choices)) < len(choices) or not all(choices):
            raise InvalidRequest("--choices", "must be two different texts or more, with commas")
        self.columns: Mapping[str, Kind] = {answer: Kind.TEXT}
        listed = list(choices)
        self.fields: JsonView = {"structured_outputs": {"choice": listed}}
        if is_scored:
            self.columns = {answer: Kind.TEXT, f"{answer}_probability": Kind.NUMBER}
            self.fields = {"choices": listed}

    def read(self, body: AnyJson) -> Sequence[object]:
        """See Asking."""
        if "best" not in body:
            return [_text(body)]
        best = body["choices"][body["best"]]
        return [best["text"], float(best["probability"])]


def is_cheaper_scored(choices: Sequence[str], encode: Callable[[str], list[int]]) -> bool:
    """Whether scoring all choices takes less work than generating one: scoring takes one pass over
    the prompt, and a token for each token of a choice but its first ones."""
    others = {tuple(encode(choice)[:-1]) for choice in choices}
    return len(choices) <= MOST_SCORED and sum(map(len, others)) <= SCORED_TOKENS


def _text(body: AnyJson) -> str:
    choice = body["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    message = choice["message"]
    if message.get("content") is None and message.get("reasoning_content") and _is_cut(body):
        raise NoAnswer("the model was still reasoning at --max-tokens; raise it")
    return str(message.get("content") or "")


def _is_cut(body: AnyJson) -> bool:
    return bool(body["choices"][0].get("finish_reason") == "length")


def _kind_of(schema: object) -> Kind:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, list):
        named = [each for each in kind if each != "null"]
        kind = named[0] if len(named) == 1 else None
    simple = {each.value: each for each in Kind if each is not Kind.JSON}
    if isinstance(kind, str) and kind in simple:
        return simple[kind]
    listed = schema.get("enum") if isinstance(schema, dict) and kind is None else None
    is_texts = isinstance(listed, list) and all(isinstance(each, str) for each in listed)
    return Kind.TEXT if is_texts else Kind.JSON


def _typed(value: object, kind: Kind) -> object:
    """A value as a cell of its column; raises NoAnswer if it has another type."""
    if value is None or kind is Kind.JSON:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is Kind.TEXT and isinstance(value, str):
        return value
    if kind is Kind.BOOLEAN and isinstance(value, bool):
        return value
    if kind is Kind.NUMBER and is_number:
        return _float(value)
    if kind is Kind.INTEGER and is_number and float(_float(value)).is_integer():
        if int(value) in INT64:  # type: ignore[call-overload]  # a number, as checked
            return int(value)  # type: ignore[call-overload]
        raise NoAnswer(f"{value} does not fit into 64 bits")
    raise NoAnswer(f"{value!r:.80} is not of type {kind.value}")


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # a number
    except OverflowError:
        raise NoAnswer(f"{value!r:.80} is too large") from None
