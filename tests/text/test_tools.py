"""Tool calls: read out of text however it is cut, and forced by a form."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.core.errors import InvalidRequest
from mainstem.text.grammar import Grammars
from mainstem.text.tools import ToolCall, ToolFormat, ToolReader, offer_tools, tool_format
from tests.batch.fake_batch import TEMPLATE, a_tokenizer

HERMES = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<tool_call>" + TEMPLATE
LLAMA = """{% if tools %}{"name": function name, "parameters": ...}{% endif %}""" + TEMPLATE
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
Part = str | tuple[str, str]


def read(text: str, format: ToolFormat, cuts: list[int] | None = None) -> list[Part]:
    """Text and (name, arguments) of an answer that comes in pieces; text joined."""
    reader = ToolReader(format)
    places = [0, *sorted(cuts or []), len(text)]
    parts: list[str | ToolCall] = []
    for start, end in pairwise(places):
        parts += reader.push(text[start:end])
    parts += reader.finish()
    found: list[Part] = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CASES: list[tuple[str, ToolFormat, list[Part]]] = [
    ("plain text", ToolFormat.HERMES, ["plain text"]),
    (CALL, ToolFormat.HERMES, [("f", '{"a": 1}')]),
    (f"\n{CALL}\n{CALL}\n", ToolFormat.HERMES, [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    (f"Let me see. {CALL}", ToolFormat.HERMES, ["Let me see.", ("f", '{"a": 1}')]),
    ("a < b <tool", ToolFormat.HERMES, ["a < b <tool"]),
    ("<tool_call>not JSON</tool_call>", ToolFormat.HERMES, ["<tool_call>not JSON</tool_call>"]),
    ('<tool_call>{"name": "f"}', ToolFormat.HERMES, [("f", "{}")]),
    ('<tool_call>{"name": ', ToolFormat.HERMES, ['<tool_call>{"name": ']),
    ('{"name": "f", "parameters": {"é": 1}}', ToolFormat.LLAMA, [("f", '{"é": 1}')]),
    (
        r'{"name": "\ud83d", "parameters": {"a": "\udc00!"}}',
        ToolFormat.LLAMA,
        [("\ufffd", '{"a": "\ufffd!"}')],
    ),
    (
        r'{"name": "f", "parameters": "\ud83d\ude00 \ud83d"}',
        ToolFormat.LLAMA,
        [("f", "\U0001f600 \ufffd")],
    ),
    ('{"name": "f"}; {"name": "g"}', ToolFormat.LLAMA, [("f", "{}"), ("g", "{}")]),
    ('{"name": "f", "parameters": {"a": "x; y"}}', ToolFormat.LLAMA, [("f", '{"a": "x; y"}')]),
    ('{"name": "f"}; and', ToolFormat.LLAMA, ['{"name": "f"}; and']),
    ('{"not a call"', ToolFormat.LLAMA, ['{"not a call"']),
    ('I say {"name": "f"}', ToolFormat.LLAMA, ['I say {"name": "f"}']),
    ("", ToolFormat.LLAMA, []),
]


@pytest.mark.parametrize(("text", "format", "expected"), CASES)
def test_calls_are_read_out_of_the_text(
    text: str, format: ToolFormat, expected: list[Part]
) -> None:
    assert read(text, format) == expected


@given(case=st.sampled_from(CASES), data=st.data())
def test_it_does_not_matter_how_the_text_is_cut(
    case: tuple[str, ToolFormat, list[Part]], data: st.DataObject
) -> None:
    text, format, expected = case
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(text, format, cuts) == expected


def test_the_template_tells_the_format() -> None:
    assert tool_format(a_tokenizer(HERMES)) is ToolFormat.HERMES
    assert tool_format(a_tokenizer(LLAMA)) is ToolFormat.LLAMA
    assert tool_format(a_tokenizer()) is None
    assert tool_format(a_tokenizer("<tool_call>" + TEMPLATE)) is None  # reads no tools
    assert tool_format(a_tokenizer("[TOOL_CALLS]" + LLAMA)) is None


@pytest.mark.parametrize("format", list(ToolFormat))
def test_a_required_call_has_a_form_that_compiles(format: ToolFormat) -> None:
    use = offer_tools([WEATHER, CLOCK], ["clock"], format)
    assert use.form is not None
    Grammars(a_tokenizer()).compile(use.form)


def test_a_model_that_was_taught_no_tools_gets_none() -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        offer_tools([CLOCK], None, None)


def test_the_model_decides_whether_to_call() -> None:
    use = offer_tools([CLOCK], None, ToolFormat.HERMES)
    assert use.form is None
    assert json.dumps(use.tools[0]) == json.dumps(CLOCK)
