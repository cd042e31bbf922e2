"""Answers in OpenAI's format; the fast path of a stream must not change a byte."""

import json
import random
from typing import Any

import msgspec
import pytest

from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.request import FinishReason, Output
from mainstem.text.parsers.counting import count_reasoning
from mainstem.text.parsers.formats import MARKS, AnswerFormats, ReasoningFormat, ToolFormat
from mainstem.wire.answers import Heading, PromptAnswers
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.chat.rendering import CompletionReply
from mainstem.wire.chat.stream import CompletionStream
from tests.fake_engines import a_tokenizer
from tests.text.test_tools import a_marked_tokenizer

HEADING = Heading("id-1", '"mark"', 1_700_000_000)  # a name that looks like a marker
PROMPTS: dict[CallKind, Json] = {
    CallKind.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    CallKind.COMPLETION: {"prompt": ["one", "two"]},
}


def a_reply(kind: CallKind, **fields: object) -> CompletionReply:
    call, _ = CallParser().parse(PROMPTS[kind] | {"stream": True} | fields, kind)
    return CompletionReply(call, HEADING, a_tokenizer())


def news(
    text: str, index: int = 0, reason: FinishReason | None = None, ids: tuple[int, ...] = (5,)
) -> Output:
    return Output(RequestId("r"), index, ids, finish_reason=reason, text=text)


def sent(data: bytes) -> list[Json]:
    """The chunks in some events, each written as msgspec writes it."""
    blocks = data.split(b"\n\n")
    assert blocks.pop() == b""
    chunks = [msgspec.json.decode(block.removeprefix(b"data: ")) for block in blocks]
    assert data == b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks)
    return chunks


def random_text(source: random.Random) -> str:
    some = ["a", ' "mark"', '"', "\\", "\n", "\x00", "\u2028", "é", "漢", "🙂", "\x7f"]
    return "".join(source.choices(some, k=source.randrange(4)))


@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("kind", [*CallKind])
def test_every_chunk_of_a_stream_has_the_text_of_its_output(
    kind: CallKind, has_usage: bool
) -> None:
    reply = a_reply(kind, n=2, stream_options={"include_usage": has_usage})
    stream, source = CompletionStream(reply), random.Random(7)
    places = 1 if kind is CallKind.CHAT else 2
    answers = [PromptAnswers(3, reply.call.sampling) for _ in range(places)]
    if kind is CallKind.CHAT:
        opening = [chunk["choices"][0]["delta"] for chunk in sent(stream.opening(answers))]  # type: ignore[index]
        assert opening == [{"role": "assistant", "content": ""}] * 2
    else:
        assert stream.opening(answers) == b""
    texts = dict.fromkeys(range(places * 2), "")
    for _ in range(300):
        place, output = source.randrange(places), news(random_text(source), source.randrange(2))
        number = place * 2 + output.index
        texts[number] += output.text
        answers[place].add(output)
        told = [chunk["choices"] for chunk in chunks_of(stream, place, output, answers, has_usage)]
        if kind is CallKind.CHAT:
            expected = [{"delta": {"content": output.text}}] if output.text else []
            rest: Json = {"logprobs": None, "finish_reason": None}
        else:
            expected = [{"text": output.text}] if output.text else []  # type: ignore[dict-item]
            rest = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        assert told == [[{"index": number} | part | rest] for part in expected]
    assert texts == {
        place * 2 + index: answers[place].answers[index].text
        for place in range(places)
        for index in range(2)
    }


def chunks_of(
    stream: CompletionStream,
    place: int,
    output: Output,
    answers: list[PromptAnswers],
    has_usage: bool,
) -> list[Json]:
    """The chunks of one output; checks the fields that all of them repeat."""
    chunks = sent(stream.events(place, output, answers[place]))
    for chunk in chunks:
        assert (chunk["id"], chunk["model"]) == (HEADING.reply_id, HEADING.model)
        assert ("usage" in chunk) is has_usage
        assert chunk.get("usage") is None
    return chunks


def test_only_the_last_output_has_a_finish_reason() -> None:
    reply = a_reply(CallKind.CHAT)
    stream, answers = CompletionStream(reply), PromptAnswers(1, reply.call.sampling)
    events = stream.opening([answers])
    for output in (news("a"), news("b"), news(""), news("c", reason=FinishReason.LENGTH)):
        answers.add(output)
        events += stream.events(0, output, answers)
    choices = [chunk["choices"][0] for chunk in sent(events)]  # type: ignore[index]
    assert [choice["delta"].get("content") for choice in choices] == ["", "a", "b", "c", None]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert answers.is_finished
    assert json.loads(json.dumps(reply.usage([answers])))["completion_tokens"] == 4


def test_every_chunk_has_the_usage_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = a_reply(CallKind.COMPLETION, prompt="x", stream_options=options)
    stream, answers = CompletionStream(reply), PromptAnswers(3, reply.call.sampling)
    source = random.Random(3)
    for count in range(1, 100):
        output = news(random_text(source))
        answers.add(output)
        for chunk in sent(stream.events(0, output, answers)):
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
            assert chunk["usage"] == usage
            assert chunk["choices"][0]["text"] == output.text  # type: ignore[index]


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(("is_parallel", "count"), [(True, 2), (None, 2), (False, 1)])
def test_parallel_calls_can_be_turned_off(is_parallel: bool | None, count: int) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {"tools": [tool], "parallel_tool_calls": is_parallel, "return_token_ids": True}
    parser = CallParser(find_formats=lambda: AnswerFormats(ToolFormat.HERMES))
    call, _ = parser.parse(PROMPTS[CallKind.CHAT] | fields, CallKind.CHAT)
    reply = CompletionReply(call, HEADING, a_tokenizer(), prompt_ids=[[7]])
    answers, stream, data = PromptAnswers(1, call.sampling), CompletionStream(reply), b""
    for output in (news(CALL, ids=(1,)), news(CALL, ids=(2,)), news("", 0, FinishReason.STOP)):
        answers.add(output)
        data += stream.events(0, output, answers)
    whole = json.loads(msgspec.json.encode(reply.whole([answers])))
    assert len(whole["choices"][0]["message"]["tool_calls"]) == count
    choices: list[Json] = [chunk["choices"][0] for chunk in sent(data)]  # type: ignore[index]
    assert sum("tool_calls" in choice["delta"] for choice in choices) == count  # type: ignore[operator]
    assert [choice["token_ids"] for choice in choices if "token_ids" in choice] == [[1], [2], [5]]
    assert choices[-1]["finish_reason"] == "tool_calls"


THOUGHTFUL = '<think>\nHm.\n</think>\n\nIt "is" <b>.\n'


def only_choice(whole: Json) -> dict[str, Any]:
    [choice] = json.loads(msgspec.json.encode(whole))["choices"]
    found: dict[str, Any] = choice
    return found


def a_thoughtful_call(**fields: object) -> Call:
    formats = AnswerFormats(ToolFormat.HERMES, ReasoningFormat.THINK)
    parser = CallParser(find_formats=lambda: formats)
    return parser.parse(PROMPTS[CallKind.CHAT] | fields, CallKind.CHAT)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_reasoning_has_a_separate_field_whole_and_streamed(size: int) -> None:
    call = a_thoughtful_call(stream=True, stream_options={"include_usage": True})
    reply = CompletionReply(call, HEADING, a_tokenizer())
    answers, stream, data = PromptAnswers(1, call.sampling), CompletionStream(reply), b""
    pieces = [THOUGHTFUL[place : place + size] for place in range(0, len(THOUGHTFUL), size)]
    for output in [*map(news, pieces), news("", 0, FinishReason.STOP)]:
        answers.add(output)
        data += stream.events(0, output, answers)
    message = only_choice(reply.whole([answers]))["message"]
    assert message == {
        "role": "assistant",
        "content": 'It "is" <b>.\n',
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    choices: list[Json] = [chunk["choices"][0] for chunk in sent(data)]  # type: ignore[index]
    deltas: list[dict[str, str]] = [choice["delta"] for choice in choices]  # type: ignore[misc]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    assert choices[-1]["finish_reason"] == "stop"


def test_an_answer_that_never_gets_beyond_its_reasoning_has_no_content() -> None:
    call = a_thoughtful_call()
    answers = PromptAnswers(1, call.sampling)
    answers.add(news("<think>\nSo", 0, FinishReason.LENGTH))
    choice = only_choice(CompletionReply(call, HEADING, a_tokenizer()).whole([answers]))
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "So"
    assert choice["finish_reason"] == "length"


def test_reasoning_and_a_call_are_returned_together() -> None:
    call = a_thoughtful_call(tools=[{"type": "function", "function": {"name": "f"}}])
    answers = PromptAnswers(1, call.sampling)
    answers.add(news(f"<think>\nHm\n</think>\n\nSee:\n{CALL}", 0, FinishReason.STOP))
    choice = only_choice(CompletionReply(call, HEADING, a_tokenizer()).whole([answers]))
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "See:")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"


def test_tokens_of_reasoning_are_counted() -> None:
    tokenizer = a_marked_tokenizer("</think>", *MARKS[ReasoningFormat.HARMONY])

    def count(reasoning: ReasoningFormat, opening: str, text: str) -> int | None:
        ids = tokenizer.encode_plain(text)
        return count_reasoning(reasoning, opening + text, ids, tokenizer)

    think, harmony = ReasoningFormat.THINK, ReasoningFormat.HARMONY
    assert count(think, "<think>", "Hm</think>Yes") == 3
    assert count(think, "<think>", "Hm, ") == 4
    assert count(think, "", "Yes") == 0
    assert count(ReasoningFormat.MISTRAL, "", "[THINK]") is None
    analysis = "<|channel|>analysis<|message|>Hm<|end|>"
    assert count(harmony, "", analysis + "<|start|>assistant<|channel|>final<|message|>Yes") == 13
    assert count(harmony, "", "<|channel|>analysis<|message|>Hm") == 12
    assert count(harmony, "", "Yes") == 0
    call = a_thoughtful_call()
    answers = PromptAnswers(1, call.sampling)
    ids = tuple(tokenizer.encode_plain("Hm</think>Yes"))
    answers.add(news("<think>Hm</think>Yes", 0, FinishReason.STOP, ids))
    usage = CompletionReply(call, HEADING, tokenizer).usage([answers])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
