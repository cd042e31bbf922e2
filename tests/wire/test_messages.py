"""Answers in the format of Anthropic's Messages API, whole and streamed."""

import json

import msgspec
import pytest

from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.request import FinishReason, Output, SamplingParams
from mainstem.text.parsers.formats import ToolFormat, ToolUse
from mainstem.text.tools import Reasoning, ToolCall
from mainstem.wire.answers import Heading, PromptAnswers
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.messages.bodies import MessagesBody
from mainstem.wire.messages.parsing import read_messages
from mainstem.wire.messages.rendering import MessageReply, MessageStream, PinnedTokens, error_body

HEADING = Heading("msg_1", "fake", 1_700_000_000)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def a_reply(has_tools: bool = True, **fields: object) -> MessageReply:
    tools = ToolUse((), ToolFormat.HERMES) if has_tools else None
    call = Call(CallKind.CHAT, SamplingParams(), tools=tools, has_one_tool_call="one" in fields)
    fields.pop("one", None)
    return MessageReply(call, HEADING, **fields)  # type: ignore[arg-type]


def output(text: str, is_last: bool, stop: str | None = None) -> Output:
    return Output(
        RequestId("r"),
        0,
        (1,),
        finish_reason=FinishReason.STOP if is_last else None,
        num_cached_tokens=3,
        text=text,
        stop_reason=stop,
    )


def both(reply: MessageReply, pieces: list[str]) -> tuple[Json, list[Json]]:
    """The whole reply, and the content blocks assembled from a stream's events."""
    stream, answers = MessageStream(reply), PromptAnswers(10, reply.call.sampling)
    sent = stream.opening(answers)
    for place, piece in enumerate(pieces):
        news = output(piece, is_last=place == len(pieces) - 1)
        answers.add(news)
        sent += stream.events(news, answers)
    told = [json.loads(each.split("\ndata: ")[1]) for each in sent.decode().split("\n\n")[:-1]]
    whole = json.loads(msgspec.json.encode(reply.whole(answers)))
    assert told[-2]["usage"] == whole["usage"]
    assert told[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    blocks: list[Json] = []
    for each in told:
        if each["type"] == "content_block_start":
            assert each["index"] == len(blocks)
            blocks.append(each["content_block"])
        elif each["type"] == "content_block_delta":
            delta, block = each["delta"], blocks[each["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] = f"{block[name]}{delta[name]}"
    return whole, blocks


def without_ids(blocks: object) -> list[Json]:
    assert isinstance(blocks, list)
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize(
    ("pieces", "content", "reason"),
    [
        (["He", "", "llo."], [{"type": "text", "text": "Hello."}], "end_turn"),
        ([""], [], "end_turn"),
        (
            ["So. ", CALL[:20], CALL[20:]],
            [
                {"type": "text", "text": "So."},
                {"type": "tool_use", "name": "f", "input": {"a": 1}},
            ],
            "tool_use",
        ),
        (
            [f"{CALL}\n{CALL}"],
            [{"type": "tool_use", "name": "f", "input": {"a": 1}}] * 2,
            "tool_use",
        ),
    ],
)
def test_whole_and_streamed_replies_are_equal(
    pieces: list[str], content: list[Json], reason: str
) -> None:
    whole, blocks = both(a_reply(), pieces)
    assert without_ids(whole["content"]) == without_ids(blocks) == content
    assert whole["stop_reason"] == reason


def test_only_one_call_is_returned_if_parallel_calls_are_off() -> None:
    whole, blocks = both(a_reply(one=True), [f"{CALL}\n{CALL}"])
    assert len(blocks) == 1
    assert without_ids(whole["content"]) == without_ids(blocks)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": NaN}', {"a": None}),
        (f'{{"a": {10**30}}}', {"a": 10**30}),
        ('"plain"', {"arguments": "plain"}),
        ("[1]", {"arguments": [1]}),
        ('"{\\"a\\": \\"\\\\ud800\\"}"', {"a": "\ufffd"}),
    ],
)
def test_the_input_of_a_call_is_an_object(arguments: str, told: Json) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    whole, blocks = both(a_reply(), [text])
    assert without_ids(whole["content"]) == without_ids(blocks)
    assert blocks[0]["input"] == told


class ThinkingParser:
    """Returns one part for each letter: reasoning for t, text for s, a call for c."""

    def __init__(self) -> None:
        self._parts = {"t": Reasoning("Hm"), "s": "Yes.", "c": ToolCall("call_1", "f", "{}")}

    def push(self, text: str) -> list[object]:
        return [self._parts[letter] for letter in text]

    def finish(self) -> list[object]:
        return []


@pytest.mark.parametrize("shows", [True, False])
def test_reasoning_has_its_own_blocks(monkeypatch: pytest.MonkeyPatch, shows: bool) -> None:
    monkeypatch.setattr(Call, "parser", lambda _: ThinkingParser())
    whole, blocks = both(a_reply(shows_thinking=shows), ["t", "t", "sc", "t"])
    assert whole["content"] == blocks
    thought = ["HmHm", "Hm"] if shows else ["", ""]
    assert blocks == [
        {"type": "thinking", "thinking": thought[0], "signature": ""},
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
        {"type": "thinking", "thinking": thought[1], "signature": ""},
    ]


@pytest.mark.parametrize(
    ("pinned", "created", "of_an_hour"),
    [
        (PinnedTokens(), 0, 0),
        (PinnedTokens(2, 2), 0, 0),
        (PinnedTokens(8, 0), 5, 0),
        (PinnedTokens(8, 5), 5, 2),
    ],
)
def test_tokens_of_the_prompt_are_counted_once(
    pinned: PinnedTokens, created: int, of_an_hour: int
) -> None:
    whole, _ = both(a_reply(has_tools=False, pinned=pinned), ["Yes."])
    assert whole["usage"] == {
        "input_tokens": 10 - 3 - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": 3,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - of_an_hour,
            "ephemeral_1h_input_tokens": of_an_hour,
        },
        "output_tokens": 1,
        "service_tier": "standard",
    }


def test_errors_are_named_by_their_status() -> None:
    kinds = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error",
             413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
             503: "overloaded_error", 507: "api_error"}  # fmt: skip
    for status, kind in kinds.items():
        body = error_body(status, "why", None, "r1")
        assert body == {
            "type": "error",
            "error": {"type": kind, "message": "why"},
            "request_id": "r1",
        }


def test_blocks_become_messages() -> None:
    """Texts and tool results keep their order, reasoning and calls share a message, and results
    that are errors say so."""
    turns: list[Json] = [
        {"role": "user", "content": []},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "first"},
                {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "no"},
                {"type": "tool_result", "tool_use_id": "b"},
            ],
        },
    ]
    body: Json = {
        "model": "fake",
        "max_tokens": 8,
        "messages": turns,
        "thinking": {"type": "disabled"},
        "stop_sequences": ["x"],
    }
    template = "{{ enable_thinking }}"
    fields = read_messages(body, MessagesBody, template).fields
    function = {"name": "f", "arguments": {"x": 1}}
    assert fields["messages"] == [
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "user", "content": "first"},
        {"role": "tool", "tool_call_id": "a", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
    ]
    assert fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert fields["stop"] == ["x"]
