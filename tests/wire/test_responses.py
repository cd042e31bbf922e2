"""Items of the Responses API become a conversation, and answers become items and events."""

import json
from collections.abc import Sequence
from unittest.mock import patch

from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.request import FinishReason, Output, SamplingParams
from mainstem.text.parsers.formats import ToolFormat, ToolUse
from mainstem.text.tools import Part, Reasoning, ToolCall
from mainstem.wire.answers import Heading, PromptAnswers
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.responses.bodies import ReasoningConfig, ResponsesBody, TextConfig, TextFormat
from mainstem.wire.responses.parsing import Item, ItemReader, chat_fields
from mainstem.wire.responses.rendering import ResponseStream

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}


def messages(items: Sequence[Item], instructions: str | None = None) -> list[dict[str, object]]:
    conversation = ItemReader(instructions)
    conversation.add(items)
    return conversation.messages


def said(role: str, text: str) -> Item:
    return {"role": role, "content": text}


def test_system_messages_at_the_beginning_become_one_message() -> None:
    items = [said("developer", "b"), said("system", "c"), said("user", "d"), said("developer", "e")]
    assert messages(items, "a") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
    ]


def test_calls_are_joined_to_the_message_before_them() -> None:
    second = CALL | {"call_id": "c2"}
    found = messages([said("user", "x"), said("assistant", "I call."), CALL, second, OUTPUT])
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    assert found[1] == {"role": "assistant", "content": "I call.", "tool_calls": calls}
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "done"}
    alone = messages([said("user", "x"), CALL, OUTPUT])
    assert alone[1] == {"role": "assistant", "content": None, "tool_calls": calls[:1]}


def test_reasoning_is_joined_to_the_answer_after_it() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    found = messages([said("user", "x"), thought, said("assistant", "y"), said("assistant", "z")])
    assert found[1:] == [
        {"role": "assistant", "content": "y", "reasoning_content": "hm"},
        {"role": "assistant", "content": "z"},
    ]


def test_effort_reaches_the_chat() -> None:
    body = ResponsesBody(input="x", reasoning=ReasoningConfig(effort="low"))
    assert chat_fields(body, [])["reasoning_effort"] == "low"
    assert "reasoning_effort" not in chat_fields(ResponsesBody(input="x"), [])


def test_strict_reaches_the_chat() -> None:
    text = TextConfig(format=TextFormat(type="json_schema", schema={}, strict=True))
    form = chat_fields(ResponsesBody(input="x", text=text), [])["response_format"]
    assert form == {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}


# --- answers -------------------------------------------------------------------------------------


class Script:
    """A fake parser that returns prepared parts, one entry for each push."""

    is_plain = False

    def __init__(self, parts: Sequence[Sequence[Part]]) -> None:
        self._parts = [list(each) for each in parts]

    def push(self, text: str) -> list[Part]:
        return self._parts.pop(0)

    def finish(self) -> list[Part]:
        return []


def answer(
    parts: Sequence[Sequence[Part]],
    reason: FinishReason = FinishReason.STOP,
    *,
    has_one_tool_call: bool = False,
) -> tuple[list[Json], Json]:
    """The events and the response of an answer whose parser returns these parts, one token each."""
    sampling = SamplingParams()
    tools = ToolUse((), ToolFormat.HERMES)
    call = Call(CallKind.CHAT, sampling, tools=tools, has_one_tool_call=has_one_tool_call)
    with patch.object(Call, "parser", lambda _: Script(parts)):
        stream = ResponseStream(call, Heading("resp_1", "m", 0), ResponsesBody(input="x"))
    answers = PromptAnswers(3, sampling)
    data = stream.opening()
    for place in range(len(parts)):
        is_last = place == len(parts) - 1
        finish = reason if is_last else None
        output = Output(RequestId("r"), 0, (place,), finish_reason=finish, text="?")
        answers.add(output)
        data += stream.events(output, answers)
    events = [json.loads(block.split("data: ")[1]) for block in data.decode().split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, stream.response


def a_call(name: str) -> ToolCall:
    return ToolCall(f"call_{name}", name, "{}")


def test_reasoning_text_and_calls_are_separate_items() -> None:
    events, response = answer(
        [[Reasoning("I ")], [Reasoning("think.")], ["\n"], ["Well"], ["."], [a_call("f")]]
    )
    output = response["output"]
    assert isinstance(output, list)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert output[1]["content"][0]["text"] == "Well."
    assert output[2]["call_id"] == "call_f"
    assert len({item["id"] for item in output}) == 3
    usage = response["usage"]
    assert isinstance(usage, dict)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["output_tokens"] == 6
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    kinds = [event["type"] for event in events]
    assert kinds.count("response.reasoning_text.delta") == 2
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds[-1] == "response.completed"


def test_further_calls_are_left_out_if_only_one_is_allowed() -> None:
    both = [[a_call("f"), a_call("g")]]
    _, response = answer(both)
    assert [item["name"] for item in response["output"]] == ["f", "g"]  # type: ignore[attr-defined]
    _, response = answer(both, has_one_tool_call=True)
    assert [item["name"] for item in response["output"]] == ["f"]  # type: ignore[attr-defined]


def test_an_empty_answer_is_an_empty_message() -> None:
    _, response = answer([[]])
    assert isinstance(response["output"], list)
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert response["status"] == "completed"


def test_reasoning_may_be_cut_off() -> None:
    events, response = answer([[Reasoning("I")]], FinishReason.LENGTH)
    assert response["status"] == "incomplete"
    assert response["output"][0]["status"] == "incomplete"  # type: ignore[index]
    assert events[-1]["type"] == "response.incomplete"


def test_a_call_with_invalid_json_can_be_continued() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "not json"}
    conversation = ItemReader(None)
    conversation.add([{"role": "user", "content": "go"}, call])
    *_, said = conversation.messages
    assert said["tool_calls"][0]["function"]["arguments"] == {"arguments": "not json"}  # type: ignore[index]


def test_reasoning_of_an_interrupted_answer_is_a_separate_message() -> None:
    def thought(text: str) -> Item:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    conversation = ItemReader(None)
    conversation.add([
        {"role": "user", "content": "a"}, thought("cut"),
        {"role": "user", "content": "b"}, thought("whole"), {"role": "assistant", "content": "B"},
    ])  # fmt: skip
    thoughts = [message.get("reasoning_content") for message in conversation.messages]
    assert thoughts == [None, "cut", None, "whole"]
