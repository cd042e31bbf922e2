"""Schemas that llguidance refuses or does not know in full: rewritten, checked at the end, or
refused with the place and the keyword (issue 51)."""

from typing import Any

import numpy as np
import pytest

from mainstem.core.errors import InvalidRequest
from mainstem.text.grammar import Grammars, json_form
from mainstem.text.late_checks import broken_rule, lowered
from mainstem.text.parsers.formats import AnswerFormats, ToolFormat, offer_tools
from tests.fake_engines import a_tokenizer

INT: dict[str, Any] = {"type": "integer"}
SET = {"type": "array", "items": INT, "uniqueItems": True}
LEVELS = {"$defs": {"Level": {"enum": ["low", "high"], "type": "string"}}}


def in_a(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def verdict(form: str, text: str) -> str | None:
    """What happens to a complete answer in a form: "refused", a fault, or None."""
    tokenizer = a_tokenizer()
    mask = Grammars(tokenizer).compile(form).start()
    ids = np.array(tokenizer.encode(text), np.int32)
    for place, token_id in enumerate(ids.tolist()):
        allowed = mask.allowed(ids[:place])
        if not allowed[token_id // 8] >> token_id % 8 & 1:
            return "refused"
    mask.allowed(ids)
    return mask.fault


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "array", "minItems": 1.0, "maxItems": 2}, {"minItems": 1, "maxItems": 2}),
        ({"type": "array", "minItems": 1.5}, {"minItems": 1.5}),
        ({"type": "array", "uniqueItems": False}, {}),
        ({"const": {"minItems": 1.0}}, {"const": {"minItems": 1.0}}),
        ({"propertyNames": {"type": "string", "title": "Key"}}, {}),
        ({"propertyNames": {"const": "x"}, "additionalProperties": INT},
         {"properties": {"x": INT}, "additionalProperties": False}),
        ({"propertyNames": {"enum": ["a", "b", "cc"], "maxLength": 1.0},
          "properties": {"a": INT, "c": INT}},
         {"properties": {"a": INT, "b": True}, "additionalProperties": False}),
        ({"propertyNames": {"pattern": "^a"}},
         {"patternProperties": {"^a": True}, "additionalProperties": False}),
        ({"propertyNames": {"not": {}}}, {"propertyNames": {"not": {}}}),
    ],
    ids=str,
)  # fmt: skip
def test_keywords_are_rewritten_if_llguidance_knows_others_for_the_same(
    schema: dict[str, Any], made: dict[str, Any]
) -> None:
    low = lowered(schema)
    assert not low.must_check
    assert low.schema == {key: schema[key] for key in ("type",) if key in schema} | made


def test_names_from_a_list_are_enforced() -> None:
    """pydantic's dict[Level, int]."""
    named = {"type": "object", "propertyNames": {"$ref": "#/$defs/Level"}}
    form = json_form(LEVELS | in_a(named | {"additionalProperties": INT}))
    assert verdict(form, '{"a": {"low": 1, "high": 2}}') is None
    assert verdict(form, '{"a": {"mid": 1}}') == "refused"


def test_sets_of_few_options_are_enforced() -> None:
    """pydantic's set[Level]; the model would otherwise repeat an option until it is cut off."""
    levels = {"type": "array", "items": {"$ref": "#/$defs/Level"}, "uniqueItems": True}
    form = json_form(LEVELS | in_a(levels))
    for text in ("[]", '["high"]', '["high", "low"]', '["low", "high"]'):
        assert verdict(form, f'{{"a": {text}}}') is None
    for text in ('["low", "low"]', '["low", "high", "low"]', '["mid"]'):
        assert verdict(form, f'{{"a": {text}}}') == "refused"
    bounded = json_form(LEVELS | levels | {"minItems": 1.0, "maxItems": 1})
    assert [verdict(bounded, text) for text in ("[]", '["low"]', '["low", "high"]')] == [
        "refused", None, "refused"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "items", [{"enum": [1, 2, 3, 4, 5]}, {"enum": ["a"], "minLength": 1}, {"type": "boolean"}]
)
def test_other_sets_are_checked_at_the_end(items: dict[str, Any]) -> None:
    assert lowered({"type": "array", "items": items, "uniqueItems": True}).must_check


@pytest.mark.parametrize(
    ("schema", "text", "words"),
    [
        (SET, "[1, 2, 1]", "the list: uniqueItems: 1 occurs twice"),
        (in_a({"anyOf": [SET, {"type": "null"}]}), '{"a": [1, 2]}', ""),
        (LEVELS | {"$defs": {"S": SET}, "type": "array", "prefixItems": [{"$ref": "#/$defs/S"}]},
         "[[3, 3]]", r"\[0\]: uniqueItems"),
        (in_a({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": SET}),
         '{"a": {"b": [1], "long": [2]}}', "a: propertyNames: 'long' is too long"),
        (in_a({"type": "object", "additionalProperties": SET}), '{"a": {"b": [1, 1]}}',
         "a.b: uniqueItems"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_form_cannot_prevent_is_an_error_at_the_end(
    schema: dict[str, Any], text: str, words: str
) -> None:
    if words:
        with pytest.raises(AssertionError, match=words):
            assert verdict(json_form(schema), text) is None
    else:
        assert verdict(json_form(schema), text) is None


def test_an_alternative_without_the_rule_is_enough() -> None:
    either = {"anyOf": [SET, {"type": "array", "items": INT}]}
    assert broken_rule("[1, 1]", either) is None
    assert broken_rule("[1, 1]", {"anyOf": [SET, SET]}) is not None


def test_a_check_has_limits() -> None:
    """Both the schema and the answer come from clients."""
    twice = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "uniqueItems": True}
    assert "too large or too deep" in str(broken_rule("[1]", twice))
    deep = {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}
    assert "too large or too deep" in str(broken_rule("[" * 9000 + "]" * 9000, deep))


@pytest.mark.parametrize("format", list(ToolFormat))
def test_a_wrong_schema_of_a_tool_is_named(format: ToolFormat) -> None:
    """Before, the error named response_format and printed the grammar."""
    schemas: list[dict[str, Any]] = [INT, {"type": "array", "items": {"not": INT}}]
    tools = [
        {"type": "function", "function": {"name": f"f{place}", "parameters": in_a(schema)}}
        for place, schema in enumerate(schemas)
    ]
    use = offer_tools(tools, ["f0", "f1"], AnswerFormats(format), [3, 5])
    assert use.form is not None
    with pytest.raises(InvalidRequest, match="not supported: not") as refused:
        Grammars(a_tokenizer()).compile(use.form)
    assert refused.value.field == "tools[5].function.parameters"
    assert "%json" not in refused.value.reason
    if format is not ToolFormat.QWEN_CODER:  # it has a schema for each parameter
        assert refused.value.reason.startswith("at a.items: ")


@pytest.mark.parametrize("format", [ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.MISTRAL])
def test_arguments_of_calls_are_checked_at_the_end(format: ToolFormat) -> None:
    function = {"name": "f", "parameters": in_a(SET)}
    use = offer_tools([{"type": "function", "function": function}], ["f"], AnswerFormats(format))
    assert use.form is not None
    around = {
        ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
        ToolFormat.LLAMA: '{"name": "f", "parameters": %s}',
        ToolFormat.MISTRAL: '[TOOL_CALLS] [{"name": "f", "arguments": %s}]',
    }[format]
    assert verdict(use.form, around % '{"a": [1, 2]}') is None
    assert "uniqueItems" in str(verdict(use.form, around % '{"a": [1, 1]}'))


def test_errors_give_advice_that_can_be_followed() -> None:
    overlapping = in_a({"oneOf": [INT, {"type": "number"}]})
    with pytest.raises(InvalidRequest, match=r"at a: oneOf: .*; use anyOf") as refused:
        Grammars(a_tokenizer()).compile(json_form(overlapping))
    assert "coerce_one_of" not in str(refused.value)
