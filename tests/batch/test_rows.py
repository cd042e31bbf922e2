"""Lines of a batch file are read as requests, and invalid lines are refused."""

import json
from array import array

import pytest

from mainstem.batch.files import Line
from mainstem.batch.rows import Row, custom_id_of, parse_json, parse_row, served_row
from mainstem.core.errors import InvalidRequest
from mainstem.text.encoding import Chat, Prompt
from mainstem.text.grammar import json_form
from mainstem.text.parsers.formats import AnswerFormats, ToolFormat
from mainstem.wire import neutral
from mainstem.wire.calls import CallKind
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError


def parsed(row: object, **defaults: object) -> tuple[Row, Prompt]:
    read = parse_json(Line(7, json.dumps(row).encode()))
    parser = CallParser(defaults, find_formats=lambda: AnswerFormats(ToolFormat.HERMES))
    return parse_row(parser, read, 7, custom_id_of(read, 7))


def refused(row: object) -> WireError:
    with pytest.raises(WireError) as caught:
        parsed(row)
    return caught.value


def chat_row(**body: object) -> dict[str, object]:
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body},
    }


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "hi", "choices": ["a", "b"]}, "score-"),
        ({"prompt": "hi"}, "cmpl-"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "chatcmpl-"),
    ],
    ids=["choices", "prompt", "chat"],
)
def test_the_id_of_a_workers_answer_depends_on_the_row_not_on_the_worker(
    row: dict[str, object], wanted: str
) -> None:
    line = served_row(parsed(row)[0], {"id": "abc"}, "m", is_copy=False)
    response = line["response"]
    assert isinstance(response, dict)
    assert response["body"]["id"].startswith(wanted)


def test_an_openai_chat_row_is_read() -> None:
    row, prompt = parsed(chat_row(max_completion_tokens=5, temperature=0, stop="x", seed=3))
    assert (row.line, row.custom_id, row.call.kind, row.call.model) == (7, "a", CallKind.CHAT, "m")
    assert prompt == Chat([{"role": "user", "content": "hi"}])
    assert row.call.sampling.max_tokens == 5
    assert row.call.sampling.is_greedy
    assert row.call.sampling.stop == ("x",)
    assert row.call.sampling.seed == 3


def test_an_openai_completion_row_is_read() -> None:
    body = {"prompt": "once", "logprobs": 2, "logit_bias": {"5": -1}}
    row, prompt = parsed({"custom_id": "a", "url": "/v1/completions", "body": body})
    assert (row.call.kind, prompt) == (CallKind.COMPLETION, "once")
    assert row.call.sampling.logprobs == 2
    assert row.call.sampling.logit_bias == {5: -1.0}


def test_plain_rows_have_their_fields_next_to_the_prompt() -> None:
    row, prompt = parsed({"prompt": [1, 2, 3], "max_tokens": 4, "top_k": 3, "cache_salt": "s"})
    assert prompt == array("i", [1, 2, 3])
    assert (row.custom_id, row.call.sampling.max_tokens, row.call.sampling.top_k) == (
        "line-7",
        4,
        3,
    )
    assert row.call.cache_salt == b"s"
    row, prompt = parsed({"messages": [{"role": "user", "content": "hi"}], "custom_id": "b"})
    assert (row.call.kind, row.custom_id) == (CallKind.CHAT, "b")


def test_defaults_are_those_of_openai() -> None:
    chat, _ = parsed(chat_row())
    completion, _ = parsed({"prompt": "x"})
    assert (chat.call.sampling.max_tokens, completion.call.sampling.max_tokens) == (None, 16)
    assert (chat.call.sampling.temperature, completion.call.sampling.temperature) == (1.0, 1.0)


def test_the_jobs_defaults_fill_in_what_a_row_leaves_out() -> None:
    assert parsed({"prompt": "x"}, max_tokens=3, temperature=0.5)[0].call.sampling.max_tokens == 3
    row, _ = parsed({"prompt": "x", "max_tokens": 9}, max_tokens=3, temperature=0.5)
    assert (row.call.sampling.max_tokens, row.call.sampling.temperature) == (9, 0.5)


def test_invalid_defaults_are_refused_before_rows_are_read() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        CallParser({"temperature": -1.0})


def test_null_is_the_same_as_absent() -> None:
    row, _ = parsed(chat_row(stop=None, max_tokens=None, tools=None, logprobs=None))
    assert row.call.sampling.stop == ()
    assert row.call.sampling.max_tokens is None


def test_chat_logprobs_are_a_boolean_and_a_count() -> None:
    assert parsed(chat_row(logprobs=True))[0].call.sampling.logprobs == 0
    assert parsed(chat_row(logprobs=True, top_logprobs=4))[0].call.sampling.logprobs == 4
    assert parsed(chat_row(logprobs=False))[0].call.sampling.logprobs is None
    assert refused(chat_row(top_logprobs=4)).param == "top_logprobs"
    assert refused(chat_row(logprobs=2)).param == "logprobs"


def test_sampling_fields_are_read() -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 4,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "max_tokens": 20,
        "min_tokens": 2,
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    row, _ = parsed({"prompt": "x", "priority": -3, **fields})
    for name, value in fields.items():
        got = getattr(row.call.sampling, name)
        assert got == (tuple(value) if isinstance(value, list) else value), name
    assert row.call.priority == -3


def test_harmless_fields_are_accepted() -> None:
    values = dict.fromkeys(neutral.harmless(neutral.CHAT), "whatever")
    parsed(chat_row(**values | {"store": False}))


def test_fields_that_ask_for_the_default_behaviour_are_accepted() -> None:
    row, _ = parsed(chat_row(stream=False, response_format={"type": "text"}))
    assert row.call.sampling.grammar is None
    assert refused(chat_row(stream=True)).param == "stream"


def test_a_row_may_ask_for_a_grammar() -> None:
    row, _ = parsed(chat_row(response_format={"type": "json_object"}))
    assert row.call.sampling.grammar == json_form({"type": "object"})
    assert refused(chat_row(response_format={"type": "xml"})).param == "response_format"


def test_a_row_may_have_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    row, prompt = parsed(chat_row(tools=[tool], tool_choice="required"))
    assert isinstance(prompt, Chat)
    assert prompt.tools == (tool,)
    assert row.call.sampling.grammar is not None
    assert refused(chat_row(tools=[{"type": "function"}])).param == "tools"


@pytest.mark.parametrize("name", ["session_id", "context_overflow", "echo"])
def test_fields_that_only_servers_support_are_refused(name: str) -> None:
    error = refused({"prompt": "a", name: "x"})
    assert (error.code, error.param) == ("unknown_field", name)


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, prompt = parsed({"messages": [{"role": "user", "content": parts}]})
    assert prompt == Chat([{"role": "user", "content": "a\nb"}])
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert refused({"messages": [{"role": "user", "content": image}]}).param == "messages"


@pytest.mark.parametrize(
    ("row", "code", "param"),
    [
        ([1], "invalid_row", None),
        ({}, "invalid_row", None),
        ({"prompt": "a", "messages": []}, "invalid_row", None),
        ({"prompt": "a", "custom_id": 5}, "invalid_value", "custom_id"),
        ({"prompt": "a", "custom_id": ""}, "invalid_value", "custom_id"),
        ({"prompt": "a", "custom_id": "\ud800"}, "invalid_value", "custom_id"),
        ({"prompt": "a", "custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({"prompt": "a", "tempreature": 1}, "unknown_field", "tempreature"),
        ({"prompt": "a", "echo": True}, "unknown_field", "echo"),
        (
            {"prompt": "a", "messages": None, "tools": [{"type": "function"}]},
            "unknown_field",
            "tools",
        ),
        ({"prompt": ["a", "b"]}, "invalid_value", "prompt"),
        ({"prompt": [1, -2]}, "invalid_value", "prompt"),
        ({"prompt": [2**31]}, "invalid_value", "prompt"),
        ({"prompt": [True]}, "invalid_value", "prompt"),
        ({"prompt": {"a": 1}}, "invalid_value", "prompt"),
        ({"prompt": "a", "temperature": -1}, "invalid_value", "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "invalid_value", "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "invalid_value", "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "invalid_value", "max_tokens"),
        ({"prompt": "a", "n": 10**9}, "invalid_value", "n"),
        ({"prompt": "a", "stop": 5}, "invalid_value", "stop"),
        ({"prompt": "a", "stop": [5]}, "invalid_value", "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, "invalid_value", "stop_token_ids"),
        ({"prompt": "a", "ignore_eos": "yes"}, "invalid_value", "ignore_eos"),
        ({"prompt": "a", "logit_bias": [1]}, "invalid_value", "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"prompt": "a", "cache_salt": 5}, "invalid_value", "cache_salt"),
        ({"prompt": "a", "priority": "high"}, "invalid_value", "priority"),
        ({"messages": "hi"}, "invalid_value", "messages"),
        ({"messages": ["hi"]}, "invalid_value", "messages"),
        ({"messages": [{"content": "hi"}]}, "invalid_value", "messages"),
        ({"url": "/v1/embeddings", "body": {}}, "invalid_value", "url"),
        ({"url": "/v1/completions"}, "invalid_value", "body"),
        ({"url": "/v1/completions", "body": {"messages": []}}, "invalid_row", "prompt"),
        ({"url": "/v1/completions", "method": "GET", "body": {}}, "invalid_value", "method"),
        ({"url": "/v1/completions", "body": {"prompt": ""}, "x": 1}, "unknown_field", "x"),
    ],
)
def test_an_error_names_the_field_that_is_refused(
    row: object, code: str, param: str | None
) -> None:
    error = refused(row)
    assert error.code == code
    if param is not None:
        assert error.param == param
        assert param in error.message


@pytest.mark.parametrize("data", [b"{", b"nonsense", b"\xff\xfe{}", b"[" * 100_000])
def test_a_line_that_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        parse_json(Line(1, data))
    assert caught.value.code == "invalid_json"


def test_a_line_that_is_too_long_is_refused() -> None:
    with pytest.raises(WireError) as caught:
        parse_json(Line(1, None))
    assert caught.value.code == "line_too_long"


def test_a_row_of_messages_is_read_as_the_api_does() -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    row, prompt = parsed({"url": "/v1/messages", "body": body})
    assert row.url == "/v1/messages"
    assert isinstance(prompt, Chat)
    assert prompt.messages == body["messages"]
    assert row.call.sampling.max_tokens == 9
    assert refused({"url": "/v1/messages", "body": body | {"stop": "x"}}).param == "stop"
    assert refused({"url": "/v1/messages", "body": body | {"stream": True}}).param == "stream"


def test_rows_are_not_stored() -> None:
    assert refused(chat_row(store=True)).param == "store"
    parsed(chat_row(store=False, metadata={"a": "b"}))
