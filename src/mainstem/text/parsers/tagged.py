"""Tool calls between tags. Hermes, Qwen 2.5 and 3, Granite 4:

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Qwen3-Coder, Qwen 3.5 (values are not quoted, so only the tool's schema says which are texts):

    <tool_call>
    <function=f>
    <parameter=x>
    value
    </parameter>
    </function>
    </tool_call>
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from mainstem.core.json import JsonView
from mainstem.text.parsers.forms import (
    CallGrammar,
    Functions,
    Spell,
    either,
    json_calls,
    tool_name,
)
from mainstem.text.parsers.parser import overlap, read_calls
from mainstem.text.schemas import closed
from mainstem.text.tools import Part, ToolCall, new_call_id

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="  # also begins a call: Qwen3-Coder sometimes leaves out <tool_call>
_NAME = re.compile(r"<function=([^>\n]{1,256})>")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]{1,256})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.S
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}  # in Python's spelling, too


class TaggedParser:
    """Calls between tags, with text before, between and after them.

    White space before a call is not part of the answer, so it is held back, too.
    """

    is_plain = False

    def __init__(self, begins: Sequence[str], read: Callable[[str], list[ToolCall]]) -> None:
        """`read` gets the text between the tags. If a call begins with another tag than BEGIN,
        `read` gets this tag, too."""
        self._begins = begins
        self._any_begin = re.compile("|".join(map(re.escape, begins)))
        self._read = read
        self._held = ""
        self._has_called = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        calls = self._calls(held.lstrip())  # the end tag is missing
        return [*calls] if calls else ([held] if held.strip() or not self._has_called else [])

    def _parts(self) -> Iterator[Part]:
        while self._held:
            found = self._any_begin.search(self._held)
            if found is None:
                certain = self._held[: len(self._held) - overlap(self._held, *self._begins)]
                certain = certain.rstrip()
                self._held = self._held[len(certain) :]
                if certain:
                    yield certain
                return
            before = self._held[: found.start()].rstrip()
            self._held = self._held[len(before) :]
            if before:
                yield before
            body, end, after = self._held.partition(END)
            if not end:
                return
            calls = self._calls(body.lstrip())
            yield from calls
            if not calls:
                yield body + end
            self._held = after

    def _calls(self, body: str) -> list[ToolCall]:
        calls = self._read(body.removeprefix(BEGIN)) if body.startswith(tuple(self._begins)) else []
        self._has_called |= bool(calls)
        return calls


def hermes_parser() -> TaggedParser:
    return TaggedParser([BEGIN], read_calls)


def hermes_call(functions: Functions, spell: Spell) -> CallGrammar:
    """Return the grammar of one call."""
    start = f'start: {spell(BEGIN)} "\\n" call "\\n" {spell(END)}'
    return json_calls(start, functions, "arguments")


# --- Qwen3-Coder ---------------------------------------------------------------------------------


def coder_parser(functions: Sequence[JsonView]) -> TaggedParser:
    """Return a parser. `functions` are those that were offered; their schemas say which values are
    texts."""
    known = {function["name"]: _properties(function) for function in functions}

    def read(body: str) -> list[ToolCall]:
        pieces = body.split("</function>")[:-1]  # a function that is not closed was cut off
        found = [(piece, _NAME.search(piece)) for piece in pieces]
        return [
            _call(name[1].strip(), piece[name.end() :], known.get(name[1].strip(), {}))
            for piece, name in found
            if name is not None
        ]

    return TaggedParser([BEGIN, FUNCTION], read)


def _call(name: str, body: str, properties: JsonView) -> ToolCall:
    arguments = {
        parameter.strip(): _value(text, properties.get(parameter.strip()))
        for parameter, text in _PARAMETER.findall(body)
    }
    return ToolCall(new_call_id(), name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: object) -> object:
    text = text.removeprefix("\n").removesuffix("\n")
    if _is_text(schema):
        return text
    if text.strip().lower() in _WORDS:
        return _WORDS[text.strip().lower()]
    try:
        value: object = json.loads(text)
        json.dumps(value).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _is_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if kind is None:
        return not {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys()
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _properties(function: JsonView) -> JsonView:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def coder_call(functions: Functions, spell: Spell) -> CallGrammar:
    """Return the grammar of one call, with required and optional parameters in the schema's
    order."""
    calls: list[str] = []
    rules: list[str] = []
    schemas: dict[str, JsonView] = {}
    for place, function in functions.items():
        parameters = function.get("parameters")
        parameters = parameters if isinstance(parameters, Mapping) else {}
        required = parameters.get("required")
        words = []
        for number, (name, schema) in enumerate(_properties(function).items()):
            rule, value = f"value_{place}_{number}", f"{tool_name(place)}_{number}"
            if _is_text(schema):
                rules.append(_text_rule(rule, schema))
            else:
                assert isinstance(schema, Mapping)
                rules.append(f"{rule}: @{value} {json.dumps(_CLOSING)}")
                shared = {key: parameters[key] for key in _SHARED if key in parameters}
                schemas[value] = closed({**shared, **schema})
            optional = "" if isinstance(required, list) and name in required else "?"
            words.append(f"({json.dumps(f'<parameter={name}>' + chr(10))} {rule}){optional}")
        opening = json.dumps(f"<function={function['name']}>\n")
        calls.append(" ".join([opening, *words, '"</function>"']))
    start = f'start: {spell(BEGIN)} "\\n" call "\\n" {spell(END)}'
    return CallGrammar("\n".join([start, *either(calls), *rules]), schemas)


_CLOSING = "\n</parameter>\n"
_SHARED = ("$defs", "definitions")  # what a parameter's schema may refer to


def _text_rule(rule: str, schema: object) -> str:
    """Return the rule for a value that is a text, and the end of its parameter."""
    closing = json.dumps(_CLOSING)
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(options, list) and options and all(isinstance(each, str) for each in options):
        return f"{rule}: ({' | '.join(map(json.dumps, options))}) {closing}"
    return f"{rule}[suffix={closing}]: /(?s:.*)/"
