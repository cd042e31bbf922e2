"""Answers of each family's models are parsed, however the text is cut into pieces."""
# ruff: noqa: E501  # answers are quoted unchanged

from dataclasses import dataclass
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.core.request import SamplingParams
from mainstem.text.answer_stream import TextStream
from mainstem.text.parsers.formats import ReasoningFormat, ToolFormat, ToolUse, make_parser
from mainstem.text.parsers.parser import AnswerParser
from mainstem.text.tools import Part, Reasoning, ToolCall
from tests.fake_engines import a_tokenizer

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "text": {"type": "string"},
                    "on": {"type": "boolean"},
                    "list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
                },
            },
        },
    },
)
H, Q, L, M, O = ToolFormat  # noqa: E741
THINK, BRACKETS, CHANNELS = ReasoningFormat
Read = str | tuple[str] | tuple[str, str]  # text, (reasoning,) or (name, arguments) of a call


@dataclass(frozen=True)
class Case:
    """An answer and its parts."""

    name: str
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    text: str
    parts: list[Read]

    def parser(self) -> AnswerParser:
        use = None if self.tools is None else ToolUse(TOOLS, self.tools)
        return make_parser(use, self.reasoning)


F = ("f", '{"a": 1}')
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
QWEN3 = "<think>\nOkay, the user asks for rain.\n\nI call f. </ think>?\n</think>\n\n"
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ANALYSIS = "<|channel|>analysis<|message|>We need f. Is 1 <|x| fine?<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.\n<|return|>"

CASES = [
    # --- <think> ---
    Case("no reasoning", None, THINK, "\n It rains. <think>no</think>", ["\n It rains. <think>no</think>"]),
    Case("qwen3", None, THINK, QWEN3 + "It rains.\n", [("Okay, the user asks for rain.\n\nI call f. </ think>?",), "It rains.\n"]),
    Case("empty block", None, THINK, "<think>\n\n</think>\n\nIt rains.", ["It rains."]),
    Case("without white space", None, THINK, "<think>Hm</think>Yes", [("Hm",), "Yes"]),
    Case("cut within", None, THINK, "<think>\nOkay, so\n the user </think", [("Okay, so\n the user </think",)]),
    Case("cut at once", None, THINK, "<think>", []),
    Case("cut after", None, THINK, "<think>\nHm\n</think>\n", [("Hm",)]),
    Case("no mark after all", None, THINK, " <thin", [" <thin"]),
    Case("more marks", None, THINK, "<think>a<think>b</think>c</think>", [("a<think>b",), "c</think>"]),
    Case("é and 漢", None, THINK, "<think>\n漢字 é🙂\n</think>\n\n🙂", [("漢字 é🙂",), "🙂"]),
    Case("nothing", None, THINK, "", []),
    Case("magistral", M, BRACKETS, '[THINK]Hm, [TH[/THINK]Yes.[TOOL_CALLS]f[ARGS]{"a": 1}', [("Hm, [TH",), "Yes.", F]),
    # --- Hermes, Qwen ---
    Case("plain", H, None, "plain text", ["plain text"]),
    Case("hermes", H, None, CALL, [F]),
    Case("two", H, None, f"\n{CALL}\n{CALL}\n", [F, F]),
    Case("after text", H, None, f"Let me see. {CALL}", ["Let me see.", F]),
    Case("before text", H, None, f"{CALL}\nDone", [F, "\nDone"]),
    Case("almost", H, None, "a < b <tool", ["a < b <tool"]),
    Case("no JSON", H, None, "So: <tool_call>not JSON</tool_call> ", ["So: <tool_call>not JSON</tool_call> "]),
    Case("no end", H, None, '<tool_call>{"name": "f"}', [("f", "{}")]),
    Case("cut call", H, None, ' <tool_call>{"name": ', [' <tool_call>{"name": ']),
    Case("qwen3 with a call", H, THINK, QWEN3 + CALL, [("Okay, the user asks for rain.\n\nI call f. </ think>?",), F]),
    Case("a call in thoughts", H, THINK, f"<think>Maybe {CALL}?</think>No.", [(f"Maybe {CALL}?",), "No."]),
    # --- Qwen3-Coder ---
    Case("coder", Q, None, f"I look.\n\n{CODER}", ["I look.", F]),
    Case("coder, thinking", Q, THINK, f"<think>\nI look.\n</think>\n\n{CODER}\n{CODER}", [("I look.",), F, F]),
    Case("coder without tool_call", Q, None, f"I look.\n{CODER.removeprefix('<tool_call>')}", ["I look.", F]),
    Case(
        "coder's values", Q, None,
        "<tool_call>\n<function=f>\n<parameter=text>\n\n12\n  x = {'<a>': \"é\"}\n</parameter>\n<parameter=on>\nTrue\n"
        "</parameter>\n<parameter=list>\n[1, \"x\"]\n</parameter>\n<parameter=other>\n3\n</parameter>\n</function>\n</tool_call>",
        [("f", '{"text": "\\n12\\n  x = {\'<a>\': \\"é\\"}", "on": true, "list": [1, "x"], "other": "3"}')],
    ),
    Case("coder's wrong value", Q, None, CODER.replace("1", "one"), [("f", '{"a": "one"}')]),
    Case("coder without parameters", Q, None, "<tool_call>\n<function=g>\n</function>\n</tool_call>", [("g", "{}")]),
    Case("coder, cut", Q, None, CODER[:-26], [CODER[:-26]]),
    Case("coder, end missing", Q, None, CODER.removesuffix("\n</tool_call>"), [F]),
    # --- Llama 3 ---
    Case("llama", L, None, '{"name": "f", "parameters": {"é": 1}}', [("f", '{"é": 1}')]),
    Case("half a character", L, None, r'{"name": "\ud83d", "parameters": {"a": "\udc00!"}}', [("\ufffd", '{"a": "\ufffd!"}')]),
    Case("a text as arguments", L, None, r'{"name": "f", "parameters": "\ud83d\ude00 \ud83d"}', [("f", "\U0001f600 \ufffd")]),
    Case("llama's two", L, None, '{"name": "f"}; {"name": "g"}', [("f", "{}"), ("g", "{}")]),
    Case("a semicolon", L, None, '{"name": "f", "parameters": {"a": "x; y"}}', [("f", '{"a": "x; y"}')]),
    Case("text after", L, None, '{"name": "f"}; and', ['{"name": "f"}; and']),
    Case("no call", L, None, '{"not a call"', ['{"not a call"']),
    Case("text before", L, None, 'I say {"name": "f"}', ['I say {"name": "f"}']),
    Case("empty", L, None, "", []),
    Case("tag", L, None, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F]),
    Case("text and tag", L, None, 'I look.<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ["I look.", F]),
    Case("code", L, None, "<|python_tag|>print(1)", ["print(1)"]),
    Case("no tag", L, None, "<|python", ["<|python"]),
    # --- Mistral ---
    Case("mistral", M, None, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [F]),
    Case("mistral's two", M, None, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]\n', [F, ("g", "{}")]),
    Case("args", M, None, 'I look. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ["I look.", F, ("g", "{}")]),
    Case("id and args", M, None, '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}', [F]),
    Case("neither", M, None, '[TOOL_CALLS]f{"a": 1}', [F]),
    Case("cut args", M, None, '[TOOL_CALLS]f[ARGS]{"a": ', ['[TOOL_CALLS]f[ARGS]{"a": ']),
    Case("mistral's text", M, None, "See [1] and [TOOL\n", ["See [1] and [TOOL\n"]),
    # --- gpt-oss ---
    Case("gpt-oss", None, CHANNELS, ANALYSIS + FINAL, [("We need f. Is 1 <|x| fine?",), "It rains.\n"]),
    Case(
        "gpt-oss calls", O, CHANNELS,
        ANALYSIS + '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("We need f. Is 1 <|x| fine?",), F],
    ),
    Case("recipient first", O, CHANNELS, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', [F]),
    Case(
        "preamble", O, CHANNELS,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        [("One.\nTwo.",), "I look.", F],
    ),
    Case("preamble and final", None, CHANNELS, "<|channel|>commentary<|message|>I look.<|end|>" + FINAL, ["I look.\nIt rains.\n"]),
    Case("a form's answer", O, CHANNELS, '{"to": "<b>"}', ['{"to": "<b>"}']),
    Case("to nobody", O, CHANNELS, "to be or not", ["to be or not"]),
    Case("to", O, CHANNELS, " to", [" to"]),
    Case("cut header", O, CHANNELS, "<|channel|>anal", []),
    Case("cut arguments", O, CHANNELS, '<|channel|>commentary to=functions.f<|message|>{"a": ', ['{"a": ']),
    Case("no arguments", O, CHANNELS, "<|channel|>commentary to=functions.f<|message|><|call|>", [("f", "{}")]),
    Case("reasoning is text", O, None, ANALYSIS + FINAL, ["We need f. Is 1 <|x| fine?\nIt rains.\n"]),
]  # fmt: skip


def read(case: Case, pieces: list[str]) -> list[Read]:
    """The parts of an answer; neighbours of the same kind are joined."""
    parser = case.parser()
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    return joined(parts)


def joined(parts: list[Part]) -> list[Read]:
    found: list[Read] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif isinstance(part, Reasoning):
            is_more = isinstance(last, tuple) and len(last) == 1
            found[len(found) - is_more :] = [(last[0] + part.text,) if is_more else (part.text,)]  # type: ignore[index]
        elif isinstance(last, str):
            found[-1] = last + part
        else:
            found.append(part)
    assert all(part not in ("", ("",)) for part in found)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_answer_is_parsed(case: Case) -> None:
    assert read(case, [case.text]) == case.parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_does_not_matter_where_the_text_is_cut(case: Case) -> None:
    for place in range(len(case.text)):
        assert read(case, [case.text[:place], case.text[place:]]) == case.parts
    assert read(case, [*case.text]) == case.parts


@given(case=st.sampled_from(CASES), data=st.data())
def test_it_does_not_matter_how_often_the_text_is_cut(case: Case, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(case.text)), max_size=6)))
    ends = zip([0, *places], [*places, len(case.text)], strict=True)
    assert read(case, [case.text[begin:end] for begin, end in ends]) == case.parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_token_may_be_a_single_byte(case: Case) -> None:
    tokenizer = a_tokenizer()
    stream = TextStream(tokenizer, SamplingParams())
    ids = [token_id for character in case.text for token_id in tokenizer.encode_plain(character)]
    assert len(ids) == len(case.text.encode())
    pieces = [stream.push(token_id) for token_id in ids]
    assert read(case, [*pieces, stream.finish()]) == case.parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_text_after_the_last_mark_needs_no_parser(case: Case) -> None:
    """While `is_plain` is true, a stream sends text on without the parser."""
    parser = case.parser()
    parts: list[Part] = []
    for character in case.text:
        parts += [character] if parser.is_plain else parser.push(character)
    assert joined(parts + parser.finish()) == case.parts


def test_mistrals_calls_have_ids_that_its_template_takes() -> None:
    parser = make_parser(ToolUse(TOOLS, ToolFormat.MISTRAL), None)
    parser.push('[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}')
    [own] = parser.push("[TOOL_CALLS]")
    parser.push('[{"name": "f", "id": "too long to be one"}]')
    [made] = parser.finish()
    assert isinstance(own, ToolCall)
    assert isinstance(made, ToolCall)
    assert own.call_id == "abc123DEF"
    assert len(made.call_id) == 9
    assert made.call_id.isalnum()


def test_reasoning_is_streamed_as_it_arrives() -> None:
    parser = make_parser(None, ReasoningFormat.THINK)
    assert parser.push("<think>\nI") == [Reasoning("I")]
    assert parser.push(" think ") == [Reasoning(" think")]
    assert parser.push("so.</th") == [Reasoning(" so.")]
    assert parser.push("ink>\n") == []
    assert not parser.is_plain
    assert parser.push("\nYes") == ["Yes"]
    assert parser.is_plain


HOSTILE = [
    "<function=",
    "<function=f>",
    "<parameter=",
    "<tool_call>",
    " ",
    "[TOOL_CALLS]f ",
    "{",
    "to=",
    "<think>",
    "<|channel|>",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("tools", ToolFormat)
def test_parsing_time_is_not_quadratic(tools: ToolFormat, text: str) -> None:
    """Patterns that try again at each position would take 10 seconds or more for 100,000 characters."""
    said = (text * (100_000 // len(text)))[:100_000]
    for reasoning in (None, CHANNELS if tools is O else THINK):
        case = Case("", tools, reasoning, "", [])
        began_s = process_time()
        read(case, [f"<tool_call>{said}</tool_call>{said}"])
        read(case, [f"[TOOL_CALLS]{said}"])
        assert process_time() - began_s < 2.0
