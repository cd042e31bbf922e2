"""Tools that a request offers: how the model writes calls, and the form of a required call."""

import json
from importlib.resources import files

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.request import Output, Rendering, Request, SamplingParams
from mainstem.text.answer_stream import TextStream
from mainstem.text.grammar import Grammars, json_form
from mainstem.text.parsers.formats import (
    MARKS,
    AnswerFormats,
    ReasoningFormat,
    ToolFormat,
    ToolUse,
    find_formats,
    make_parser,
    offer_tools,
    opening_of,
)
from mainstem.text.text_engine import AnswerReader
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tools import Part, Reasoning, ToolCall
from tests.fake_engines import TEMPLATE, a_tokenizer

HERMES = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<tool_call>" + TEMPLATE
LLAMA = """{% if tools %}{"name": function name, "parameters": ...}{% endif %}""" + TEMPLATE
READS_TOOLS = "{% if tools %}{% endif %}" + TEMPLATE
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
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "$defs": {"page": {"type": "integer"}},
            "properties": {
                "text": {"type": "string"},
                "order": {"type": "string", "enum": ["new", "old"]},
                "pages": {"type": "array", "items": {"$ref": "#/$defs/page"}},
            },
            "required": ["text", "pages"],
        },
    },
}

# --- formats -----------------------------------------------------------------------------------

TOOL_SIGNS = [
    (HERMES, ToolFormat.HERMES),
    (LLAMA, ToolFormat.LLAMA),
    ((files("mainstem") / "data" / "smollm2_chat_template.jinja").read_text(), ToolFormat.HERMES),
    (TEMPLATE, None),
    ("<tool_call>" + TEMPLATE, None),  # its template reads no tools
    ("[TOOL_CALLS]" + READS_TOOLS, ToolFormat.MISTRAL),
    ("[TOOL_CALLS]" + LLAMA, ToolFormat.MISTRAL),
    ("<tool_call>\n<function=f>\n<parameter=x>\n" + READS_TOOLS, ToolFormat.QWEN_CODER),
    ('<function=f>{"x": 1}</function>' + READS_TOOLS, None),
    ("<seed:tool_call><function=f><parameter=x>" + READS_TOOLS, None),
    ("within <tool_call></tool_call>: <tool_calls>[...]" + READS_TOOLS, None),
    ("<tool_call>f\n<arg_key>x</arg_key>" + READS_TOOLS, None),  # GLM
    ("<|channel|>analysis <|call|>" + READS_TOOLS, ToolFormat.HARMONY),
    ("{{ 'parameters' }}" + READS_TOOLS, None),
    ("""{"name": ' + name + ', "description": ' + text + ', "parameters": """ + READS_TOOLS, None),
]
REASONING_SIGNS = [
    (TEMPLATE, None),
    ("{% if false %}<think>{% endif %}" + TEMPLATE, ReasoningFormat.THINK),
    ("{{ x.split('</think>')[-1] if x else '' }}" + TEMPLATE, ReasoningFormat.THINK),
    ("[THINK]" + TEMPLATE, ReasoningFormat.MISTRAL),
    ("<|channel|>analysis" + TEMPLATE, ReasoningFormat.HARMONY),
    ("<|channel|>" + TEMPLATE, None),
]


@pytest.mark.parametrize(("template", "format"), TOOL_SIGNS)
def test_the_format_of_calls_is_found_in_the_template(
    template: str, format: ToolFormat | None
) -> None:
    assert find_formats(a_tokenizer(template)).tools is format


@pytest.mark.parametrize(("template", "format"), REASONING_SIGNS)
def test_the_format_of_reasoning_is_found_in_the_template(
    template: str, format: ReasoningFormat | None
) -> None:
    assert find_formats(a_tokenizer(template)).reasoning is format


def test_a_flag_overrides_the_template() -> None:
    thinking = a_tokenizer("<think>" + HERMES)
    plain = AnswerFormats(efforts={"medium": {}}, template="<think>" + HERMES)
    assert find_formats(thinking, "none", "none") == plain
    named = find_formats(thinking, "mistral", "deepseek_r1")
    assert (named.tools, named.reasoning) == (ToolFormat.MISTRAL, ReasoningFormat.THINK)
    unseen = find_formats(a_tokenizer(), "hermes", "qwen3")  # its template shows no tools
    assert (unseen.tools, unseen.reasoning) == (None, ReasoningFormat.THINK)
    with pytest.raises(ConfigError, match="--tool-call-parser hermes"):
        find_formats(thinking, "hermes", "openai_gptoss")
    assert find_formats(thinking, "openai").reasoning is None


@pytest.mark.parametrize(
    ("end", "is_continued", "is_inside"),
    [
        ("<|im_start|>assistant\n<think>\n", False, True),
        ("<|Assistant|><think>", False, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("<|im_start|>assistant\n", False, False),
        ("user: what is <think> for?\nassistant:", False, False),
        ("assistant\n<think>\nSo far", True, True),
        ("assistant\n<think>\nSo far\n</think>\nIt is", True, False),
        ("assistant\nIt is", True, False),
    ],
)
def test_the_prompt_decides_whether_an_answer_begins_inside_reasoning(
    end: str, is_continued: bool, is_inside: bool
) -> None:
    opening = opening_of(ReasoningFormat.THINK, end, is_continued)
    assert opening == ("<think>" if is_inside else "")
    assert opening_of(ReasoningFormat.HARMONY, end, is_continued) == ""


# --- offered tools -----------------------------------------------------------------------------


def a_marked_tokenizer(*marks: str) -> Tokenizer:
    """A tokenizer with one token per byte and special tokens."""
    vocab = {name: place for place, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", *marks])
    template = {"default": READS_TOOLS}
    return Tokenizer(backend, frozenset({backend.get_vocab_size() - 1 - len(marks)}), {}, template)


WRITTEN: list[tuple[ToolFormat, bool, str, dict[str, object]]] = [
    (
        ToolFormat.HERMES,
        False,
        '<tool_call>\n{"name": "search", "arguments": {"text": "x", "pages": [1]}}\n</tool_call>',
        {"text": "x", "pages": [1]},
    ),
    (
        ToolFormat.HERMES,
        True,
        '<tool_call>\n{"name": "search", "arguments": {"text": "x", "pages": []}}\n</tool_call>',
        {"text": "x", "pages": []},
    ),
    (
        ToolFormat.LLAMA,
        True,
        '{"name": "search", "parameters": {"text": "x", "pages": [1]}}',
        {"text": "x", "pages": [1]},
    ),
    (
        ToolFormat.MISTRAL,
        False,
        '[TOOL_CALLS] [{"name": "search", "arguments": {"text": "x", "pages": [1]}}]',
        {"text": "x", "pages": [1]},
    ),
    (
        ToolFormat.MISTRAL,
        True,
        '[TOOL_CALLS]search[ARGS]{"text": "x", "pages": [1]}',
        {"text": "x", "pages": [1]},
    ),
    (
        ToolFormat.HARMONY,
        True,
        "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
        '{"text": "x", "pages": [1]}',
        {"text": "x", "pages": [1]},
    ),
    (
        ToolFormat.QWEN_CODER,
        False,
        "<tool_call>\n<function=search>\n<parameter=text>\nif a < b:\n    é\n</parameter>\n"
        "<parameter=order>\nnew\n</parameter>\n<parameter=pages>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>",
        {"text": "if a < b:\n    é", "order": "new", "pages": [1, 2]},
    ),
]


@pytest.mark.parametrize(("format", "has_special", "text", "arguments"), WRITTEN)
def test_the_form_of_a_required_call_accepts_a_call_and_not_other_text(
    format: ToolFormat, has_special: bool, text: str, arguments: dict[str, object]
) -> None:
    tokenizer = a_marked_tokenizer(*(MARKS[format] if has_special else ()))
    formats = find_formats(tokenizer, format.value)
    assert len(formats.special) == (len(MARKS[format]) if has_special else 0)
    use = offer_tools([WEATHER, SEARCH, CLOCK], ["search", "clock"], formats)
    assert use.form is not None
    mask = Grammars(tokenizer).compile(use.form).start()
    ids = tokenizer.encode_plain(text)
    assert len(ids) < len(text.encode()) or not has_special or format is ToolFormat.LLAMA
    for place, token_id in enumerate(ids):
        allowed = mask.allowed(_array(ids[:place]))
        assert allowed[token_id // 8] >> token_id % 8 & 1, text[:place]
    end = next(iter(tokenizer.eos_ids))
    assert mask.allowed(_array(ids))[end // 8] >> end % 8 & 1
    other = Grammars(tokenizer).compile(use.form).start().allowed(_array([]))
    hello = tokenizer.encode_plain("Hello")[0]
    assert not other[hello // 8] >> hello % 8 & 1
    parser = make_parser(use, None)
    [call] = [*parser.push(text), *parser.finish()]
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("search", arguments)


def accepts(tokenizer: Tokenizer, form: str, text: str) -> bool:
    """Whether a form allows exactly this text."""
    mask = Grammars(tokenizer).compile(form).start()
    ids = [*tokenizer.encode_plain(text), next(iter(tokenizer.eos_ids))]
    bits = [mask.allowed(_array(ids[:place]))[each // 8] >> each % 8 & 1 for place, each in
            enumerate(ids)]  # fmt: skip
    return all(bits)


ANSWER = json_form({"type": "object", "properties": {"told": {"type": "string"}}})
QUOTED = '{"told": "<tool_call>\\n{}\\n</tool_call> {\\"name\\": \\"clock\\"}"}'


def parts_of(use: ToolUse, text: str) -> list[Part]:
    """The parts of an answer that arrives character by character."""
    parser = make_parser(use, None, is_call_or_form=True)
    return [*(part for letter in text for part in parser.push(letter)), *parser.finish()]


@pytest.mark.parametrize(("format", "has_special", "text", "arguments"), WRITTEN)
def test_beside_tools_an_answer_is_a_call_or_has_the_form(
    format: ToolFormat, has_special: bool, text: str, arguments: dict[str, object]
) -> None:
    """Issue 51: with a form beside tools the model could never call."""
    tokenizer = a_marked_tokenizer(*(MARKS[format] if has_special else ()))
    use = offer_tools([WEATHER, SEARCH, CLOCK], None, find_formats(tokenizer, format.value))
    form = use.form_beside(ANSWER, has_one_call=False)
    final = "<|channel|>final<|message|>" if format is ToolFormat.HARMONY else ""
    assert accepts(tokenizer, form, text)
    told = '{"told": "<b>"}' if has_special else QUOTED  # a mark would become a special token
    assert accepts(tokenizer, form, final + told)
    assert not accepts(tokenizer, form, "Hello")
    several = format in (ToolFormat.HERMES, ToolFormat.QWEN_CODER)
    assert accepts(tokenizer, form, f"{text}\n{text}") == several
    assert not accepts(tokenizer, use.form_beside(ANSWER, has_one_call=True), f"{text}\n{text}")
    [call] = parts_of(use, text)
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("search", arguments)
    assert "".join(map(str, parts_of(use, final + QUOTED))) == QUOTED
    for cut in ("{", "<", "[TOOL"):
        assert "".join(map(str, parts_of(use, cut))) == cut


def test_gpt_oss_may_reason_before_a_call_or_an_answer_in_a_form() -> None:
    tokenizer = a_marked_tokenizer(*MARKS[ToolFormat.HARMONY])
    use = offer_tools([CLOCK], None, find_formats(tokenizer, "openai"))
    form = use.form_beside(ANSWER, has_one_call=False)
    thought = "<|channel|>analysis<|message|>Is 1 < 2? Yes.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    assert accepts(tokenizer, form, thought + call)
    assert accepts(tokenizer, form, thought + '<|channel|>final<|message|>{"told": "<b>"}')
    assert not accepts(tokenizer, form, thought + thought)
    parser = make_parser(use, ReasoningFormat.HARMONY, is_call_or_form=True)
    [reasoning, made] = [*parser.push(thought + call), *parser.finish()]
    assert reasoning == Reasoning("Is 1 < 2? Yes.")
    assert isinstance(made, ToolCall)


@pytest.mark.parametrize(
    ("parameters", "arguments", "is_allowed"),
    [
        (None, "{}", True),
        (None, '{"a": 1}', False),
        ({}, "{}", True),
        ({}, '{"a": 1}', False),
        ({"type": "object"}, '{"a": 1}', False),
        ({"type": "object", "properties": {}}, "{}", True),
        ({"type": "object", "properties": {}}, '{"a": 1}', False),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "b": 2}', False),
        ({"properties": {"a": {"type": "integer"}}}, "5", False),
        ({"type": "object", "additionalProperties": True}, '{"a": 1}', True),
    ],
    ids=str,
)
def test_a_required_call_has_only_arguments_that_its_tool_declares(
    parameters: object, arguments: str, is_allowed: bool
) -> None:
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    use = offer_tools(
        [{"type": "function", "function": function}], ["f"], AnswerFormats(ToolFormat.LLAMA)
    )
    assert use.form is not None
    text = f'{{"name": "f", "parameters": {arguments}}}'
    assert accepts(a_marked_tokenizer(), use.form, text) == is_allowed


def test_objects_in_parameters_of_qwen3_coder_have_only_declared_properties() -> None:
    place = {"type": "object", "properties": {"city": {"type": "string"}}}
    parameters = {"type": "object", "properties": {"at": place}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    use = offer_tools(tools, ["f"], AnswerFormats(ToolFormat.QWEN_CODER))
    assert use.form is not None
    call = "<tool_call>\n<function=f>\n<parameter=at>\n{}\n</parameter>\n</function>\n</tool_call>"
    tokenizer = a_marked_tokenizer()
    assert accepts(tokenizer, use.form, call.format('{"city": "x"}'))
    assert not accepts(tokenizer, use.form, call.format('{"city": "x", "b": 2}'))


def _array(ids: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(ids, np.int32)


def test_tools_for_a_model_without_tool_support_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        offer_tools([CLOCK], None, AnswerFormats())


def test_tools_that_need_not_be_called_impose_no_form() -> None:
    use = offer_tools([CLOCK], None, AnswerFormats(ToolFormat.HERMES))
    assert use.form is None
    assert json.dumps(use.tools[0]) == json.dumps(CLOCK)


# --- special tokens ------------------------------------------------------------------------------


def test_marks_that_are_special_tokens_reach_the_parser_and_other_special_tokens_do_not() -> None:
    tokenizer = a_marked_tokenizer("[TOOL_CALLS]", "[ARGS]", "<other>")
    formats = find_formats(tokenizer, "mistral")
    text = 'I <other>look.[TOOL_CALLS]clock[ARGS]{"a": "[ARGS]"}<eos>'
    shown = formats.shown_ids(formats.tools, formats.reasoning)
    for shown_ids, expected in (
        (shown, 'I look.[TOOL_CALLS]clock[ARGS]{"a": "[ARGS]"}'),
        (frozenset[int](), 'I look.clock{"a": ""}'),
    ):
        stream = TextStream(tokenizer, SamplingParams(), (), shown_ids)
        pieces = [stream.push(token_id) for token_id in tokenizer.encode_plain(text)]
        assert "".join(pieces) + stream.finish() == expected


def test_the_text_of_each_answer_has_the_opening_once() -> None:
    rendering = Rendering(opening="<think>")
    prompt = np.array([1], np.int32)
    request = Request(RequestId("r"), prompt, SamplingParams(n=2), rendering=rendering)
    reader = AnswerReader(a_tokenizer(), request)
    texts = ["", ""]
    for index, token_id in [(0, 33), (1, 34), (0, 35), (1, 36)]:
        news = Output(RequestId("r"), index, (token_id,))
        assert reader.read(news)
        texts[index] += news.text
    assert texts == ["<think>AC", "<think>BD"]
