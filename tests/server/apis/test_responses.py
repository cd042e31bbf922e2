"""OpenAI's Responses API over HTTP, through the stock `openai` client where possible."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from mainstem.core.json import AnyJson
from tests.fake_engines import FakeEngines
from tests.server.running import ALICE, BOB, Running, a_server
from tests.text.test_tools import HERMES

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of the next days",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
LONG = "Something to say that is long enough to fill a good number of pages of four tokens."


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def shared_tools() -> Iterator[Running]:
    engines = FakeEngines(num_pages=1024, max_model_len=3200, template=HERMES)
    with a_server(engines=engines) as running:
        yield running


@pytest.fixture
def tools(shared_tools: Running) -> Iterator[Running]:
    yield shared_tools
    shared_tools.settle()


def streamed(running: Running, body: AnyJson) -> list[AnyJson]:
    """The events of a response; their names and numbers are checked."""
    response = running.post("/v1/responses", body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def refused(running: Running, **fields: object) -> AnyJson:
    response = running.post("/v1/responses", {"input": "Hi"} | fields)
    assert response.status_code == 400, response.text
    error: AnyJson = response.json()["error"]
    return error


# --- other paths ---------------------------------------------------------------------------------


def test_the_tokens_of_an_input_are_counted(server: Running, client: OpenAI) -> None:
    """Issue 51: this path was taken for the id of a response."""
    asked: AnyJson = {"model": "fake", "instructions": "Be brief.", "input": "Hi"}
    first = client.responses.create(**asked, max_output_tokens=3)
    assert first.usage is not None
    assert client.responses.input_tokens.count(**asked).input_tokens == first.usage.input_tokens
    more: AnyJson = {"model": "fake", "input": "And?", "previous_response_id": first.id}
    second = client.responses.create(**more, max_output_tokens=3)
    assert second.usage is not None
    assert client.responses.input_tokens.count(**more).input_tokens == second.usage.input_tokens
    wrong = server.post("/v1/responses/input_tokens", {"input": [], "tools": [{"type": "x"}]})
    assert wrong.json()["error"]["param"] == "tools"


def test_the_items_of_an_input_are_listed(client: OpenAI) -> None:
    items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    first = client.responses.create(model="fake", input=items, max_output_tokens=3)  # type: ignore[arg-type]
    second = client.responses.create(
        model="fake", input="And?", previous_response_id=first.id, max_output_tokens=3
    )
    listed: Any = client.responses.input_items.list(second.id, order="asc", limit=3)
    texts = [item.content[0].text for item in listed]  # of all pages
    assert texts == ["Hi", "Yes?", first.output_text, "And?"]
    last: Any = client.responses.input_items.list(second.id, limit=1).data[0]
    assert last.content[0].text == "And?"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_unknown")


def test_only_what_runs_in_the_background_can_be_cancelled(server: Running, client: OpenAI) -> None:
    done = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")
    refused = server.post("/v1/responses/compact", {"input": "Hi"})
    assert refused.status_code == 404
    assert "not compacted" in refused.json()["error"]["message"]


# --- answers -------------------------------------------------------------------------------------


def test_a_response_has_the_same_text_as_a_chat(server: Running, client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        max_tokens=9,
        temperature=0,
    )
    response = client.responses.create(
        model="fake", instructions="Be brief.", input="Hi", max_output_tokens=9, temperature=0
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.object == "response"
    assert response.id.startswith("resp_")
    assert response.instructions == "Be brief."
    assert response.temperature == 0
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_is_cut_off_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(
        model="fake", input="Hi", max_output_tokens=2, extra_body={"ignore_eos": True}
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_events_come_in_order(server: Running) -> None:
    body: AnyJson = {"input": "Hi", "max_output_tokens": 5, "ignore_eos": True, "temperature": 0}
    events = streamed(server, body)
    kinds = [event["type"] for event in events]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    whole = server.post("/v1/responses", body).json()
    last = events[-1]["response"]
    assert events[-4]["text"] == text == last["output"][0]["content"][0]["text"]
    assert text == whole["output"][0]["content"][0]["text"]
    assert last["usage"]["output_tokens"] == 5
    assert events[0]["response"]["status"] == "in_progress"
    assert whole.keys() == last.keys()


def test_the_client_reads_a_stream(client: OpenAI) -> None:
    """`stream` builds the response again from its events and raises if one does not fit."""
    with client.responses.stream(model="fake", input="A question", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    whole = client.responses.create(model="fake", input="A question", temperature=0)
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.status == "completed"


def test_a_response_may_use_an_app(client: OpenAI) -> None:
    response = client.responses.create(model="fake:polite", input="Hi", max_output_tokens=2)
    assert response.model == "fake:polite"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens > 0


def test_a_response_has_the_form_that_was_asked_for(client: OpenAI) -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    response = client.responses.create(
        model="fake",
        input="Hi",
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    )
    assert 1 <= json.loads(response.output_text)["n"] <= 9
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(
            model="fake",
            input="Hi",
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}},
        )
    assert error.value.param == "text"


# --- conversations -------------------------------------------------------------------------------


def test_a_response_continues_an_earlier_one(server: Running, client: OpenAI) -> None:
    """The answer is that of the same chat, and the first turn is found in the cache."""
    first = client.responses.create(model="fake", input=LONG, max_output_tokens=12, temperature=0)
    second = client.responses.create(
        model="fake",
        input="And then?",
        previous_response_id=first.id,
        max_output_tokens=12,
        temperature=0,
    )
    third = client.responses.create(
        model="fake", input="Why?", previous_response_id=second.id, temperature=0
    )
    chat = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "Why?"},
        ],
        temperature=0,
    )
    assert third.output_text == chat.choices[0].message.content
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 8
    assert server.get("/v1/sessions").json()["data"][0]["id"] == first.id


def test_token_ids_of_earlier_turns_are_kept_and_not_encoded_again(server: Running) -> None:
    """The test changes a token id of the session. Encoding its text again would undo that."""
    first = server.post("/v1/responses", {"input": LONG, "max_output_tokens": 4}).json()
    sessions = server.gateway.sessions
    (owner,) = {key[0] for key in sessions._sessions if key[1] == first["id"]}
    session = sessions.find(owner, first["id"])
    assert session is not None
    strange = session.token_ids.copy()
    strange[0] = 50
    sessions.keep(owner, first["id"], strange, session.text)
    body = {"input": "More", "previous_response_id": first["id"], "max_output_tokens": 1}
    assert server.post("/v1/responses", body).status_code == 200
    kept = sessions.find(owner, first["id"])
    assert kept is not None
    assert kept.token_ids[0] == 50


def test_one_response_may_be_continued_twice(client: OpenAI) -> None:
    first = client.responses.create(model="fake", input=LONG, max_output_tokens=8, temperature=0)
    texts = [
        client.responses.create(
            model="fake",
            input=question,
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=8,
        ).output_text
        for question in ("Why?", "How?", "Why?")
    ]
    assert texts[0] == texts[2]


def test_instructions_are_not_carried_over(server: Running) -> None:
    first = server.post(
        "/v1/responses", {"input": "Hi", "instructions": LONG, "max_output_tokens": 1}
    ).json()
    body = {"input": "Hi", "previous_response_id": first["id"], "max_output_tokens": 1}
    second = server.post("/v1/responses", body).json()
    assert second["instructions"] is None
    assert second["usage"]["input_tokens"] < len(LONG)


def test_a_response_is_kept_until_it_is_deleted(server: Running, client: OpenAI) -> None:
    made = client.responses.create(
        model="fake", input="Hi", max_output_tokens=3, metadata={"a": "b"}
    )
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="fake", input="Hi", previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found"
    assert made.id not in [each["id"] for each in server.get("/v1/sessions").json()["data"]]
    server.gateway.responses.check()


def test_a_streamed_response_is_stored_when_its_stream_has_ended(server: Running) -> None:
    last = streamed(server, {"input": "Hi", "max_output_tokens": 3})[-1]["response"]
    assert server.get(f"/v1/responses/{last['id']}").json() == last
    assert server.get(f"/v1/responses/{last['id']}?stream=true").status_code == 400


def test_a_response_with_store_false_is_not_stored(server: Running) -> None:
    first = server.post("/v1/responses", {"input": LONG, "max_output_tokens": 2}).json()
    num_kept, before = len(server.gateway.responses), server.get("/v1/sessions").json()
    body = {"input": "Hi", "store": False, "max_output_tokens": 2}
    made = server.post("/v1/responses", body).json()
    assert made["store"] is False
    assert server.get(f"/v1/responses/{made['id']}").status_code == 404
    on = server.post("/v1/responses", body | {"previous_response_id": first["id"]}).json()
    assert on["usage"]["input_tokens_details"]["cached_tokens"] > len(LONG) - 8
    assert len(server.gateway.responses) == num_kept
    assert server.get("/v1/sessions").json() == before


def test_responses_belong_to_their_key(locked: Running) -> None:
    made = locked.post("/v1/responses", {"input": LONG, "max_output_tokens": 2}, ALICE).json()
    path = f"/v1/responses/{made['id']}"
    assert locked.get(path, BOB).status_code == 404
    assert locked.send("DELETE", path, None, BOB).status_code == 404
    body = {"input": "Hi", "previous_response_id": made["id"]}
    assert locked.post("/v1/responses", body, BOB).status_code == 400
    assert locked.get(path).status_code == 401
    assert locked.get(path, ALICE).json() == made


def test_a_conversation_may_outgrow_the_context_window_if_it_is_truncated(server: Running) -> None:
    error = refused(server, input="x" * 900)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    for store in (True, False):
        body = {"input": "x" * 900, "truncation": "auto", "max_output_tokens": 1, "store": store}
        made = server.post("/v1/responses", body).json()
        assert made["usage"]["input_tokens_details"]["dropped_tokens"] > 0


# --- tools ---------------------------------------------------------------------------------------


def test_a_function_is_called_and_its_result_is_answered(tools: Running) -> None:
    with OpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = [{"role": "user", "content": "Will it rain?"}]
        called = client.responses.create(
            model="fake",
            input=asked,
            tools=[WEATHER],
            tool_choice="required",
        )
        (call,) = called.output
        assert call.type == "function_call"
        assert call.name == "weather"
        assert 1 <= json.loads(call.arguments)["days"] <= 3
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
        by_id = client.responses.create(
            model="fake",
            input=[output],
            previous_response_id=called.id,
            tools=[WEATHER],
            temperature=0,
            max_output_tokens=4,
        )
        items: Any = [*asked, *(item.model_dump() for item in called.output), output]
        by_items = client.responses.create(
            model="fake",
            input=items,
            tools=[WEATHER],
            temperature=0,
            max_output_tokens=4,
        )
        assert by_id.output_text == by_items.output_text


def test_a_function_call_is_streamed(tools: Running) -> None:
    choice = {"type": "function", "name": "weather"}
    body: AnyJson = {"input": "Will it rain?", "tools": [WEATHER], "tool_choice": choice}
    events = streamed(tools, body)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[3]["delta"] == events[4]["arguments"] == events[5]["item"]["arguments"]
    assert events[-1]["response"]["output"] == [events[5]["item"]]
    with (
        OpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="fake", **body) as stream,
    ):
        (call,) = stream.get_final_response().output
        assert call.type == "function_call"


def test_a_request_of_codex_is_answered(tools: Running) -> None:
    """A body that Codex CLI sends in the middle of a task."""
    shell = {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command in a PTY, returning output or a session ID.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "cmd": {"type": "string", "description": "Shell command to execute."},
                "yield_time_ms": {"type": "number"},
            },
            "required": ["cmd"],
            "additionalProperties": False,
        },
    }
    body: AnyJson = {
        "model": "fake",
        "instructions": "You are Codex, a coding agent running in a terminal.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>read</permissions>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "<environment_context>bash"},
                    {"type": "input_text", "text": "</environment_context>"},
                ],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "List the files."}],
            },
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look."}],
                "phase": "commentary",
            },
            {
                "type": "function_call",
                "name": "exec_command",
                "arguments": '{"cmd":"ls"}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "a.txt\n"},
        ],
        "tools": [shell],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199c3f4-7d1b-7a40-9a8c-5d5f2a1b3c4d",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "i"},
    }
    events = streamed(tools, body)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["input_tokens"] > 100


# --- refused requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"background": True}, "background", "background"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"unheard_of": 1}, "unheard_of", "unheard_of"),
        ({"include": ["file_search_call.results"]}, "include", "include"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"tools": [WEATHER | {"name": "no spaces"}]}, "tools", "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "'high'"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "summary"),
        ({"text": {"verbosity": "low"}}, "text", "verbosity"),
        ({"truncation": "middle"}, "truncation", "auto"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"metadata": {"a": 1}}, "metadata", "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: "),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"input": []}, "input", "empty"),
        ({"input": 5}, "input", "input"),
        ({"input": [{"role": "user"}]}, "input", "input[0]: content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0]: role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input", "colour"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "input[0].content[0]: parts of type 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            "input",
            "parts of type 'text' are not supported, only input_text and output_text",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
            "input",
            "no function_call",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input",
            "encrypted_content",
        ),
    ],
    ids=str,
)
def test_the_error_names_the_refused_field(
    server: Running, fields: AnyJson, param: str, said: str
) -> None:
    error = refused(server, **fields)
    assert error["param"] == param
    assert said in error["message"]


def test_a_model_that_does_not_exist_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="Hi")


def test_a_stream_that_cannot_continue_ends_as_failed() -> None:
    with a_server() as running:
        steps = 0

        def fail(_: object) -> None:
            nonlocal steps
            steps += 1
            if steps in (5, 6):
                raise RuntimeError("poison")

        running.engines.at_launch = fail
        events = streamed(running, {"input": "Hi", "ignore_eos": True, "max_output_tokens": 50})
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert "poison" in events[-1]["response"]["error"]["message"]
        assert len(running.gateway.responses) == 0
        running.settle()
