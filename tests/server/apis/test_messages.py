"""Anthropic's Messages API: the stock client, Claude Code's requests, errors, and kept prefixes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mainstem.core.json import AnyJson
from mainstem.server.http import stream as server_stream
from mainstem.wire.messages import bodies, parsing
from tests.fake_engines import TEMPLATE, FakeEngines, expected_text
from tests.server.conftest import POLITE
from tests.server.running import ADMIN, ALICE, BOB, Running, a_server
from tests.text.test_tools import HERMES
from tests.waiting import until

anthropic = pytest.importorskip("anthropic")

ASK = {"role": "user", "content": "How are you?"}
BODY: AnyJson = {"model": "fake", "max_tokens": 8, "messages": [ASK], "temperature": 0}
WEATHER: AnyJson = {
    "name": "weather",
    "description": "What it will be like",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
KEEP = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def shared_with_tools() -> Iterator[Running]:
    engines = FakeEngines(num_pages=1024, max_model_len=1600, template=HERMES)
    with a_server(engines=engines) as running:
        yield running


@pytest.fixture
def with_tools(shared_with_tools: Running) -> Iterator[Running]:
    yield shared_with_tools
    shared_with_tools.settle()


def a_client(running: Running, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=300)


def send(running: Running, key: str | None = None, **fields: object) -> AnyJson:
    response = running.post("/v1/messages", BODY | fields, key)
    assert response.status_code == 200, response.text
    message: AnyJson = response.json()
    return message


def stream(running: Running, body: AnyJson, path: str = "/v1/messages") -> list[AnyJson]:
    """The events of a stream, each named by its type."""
    blocks = running.post(path, body | {"stream": True}).text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(running: Running, **fields: object) -> str:
    """The prompt of a body, as the model reads it."""
    asked = parsing.read_messages(BODY | fields, bodies.MessagesBody, "")
    chat = {name: value for name, value in asked.fields.items() if name != "model"}
    ids = running.post("/tokenize", chat).json()["tokens"]
    return str(running.post("/detokenize", {"tokens": ids}).json()["prompt"])


# --- the stock client ----------------------------------------------------------------------------


def test_the_client_gets_a_message(server: Running) -> None:
    with a_client(server) as client:
        message = client.messages.create(
            model="fake",
            max_tokens=8,
            system="Be brief.",
            messages=[ASK],
            extra_body={"temperature": 0},
        )
    prompt = "<system>Be brief.\n<user>How are you?\n<assistant>"
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.text for block in message.content] == [expected_text(prompt, 8)]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(prompt)
    assert message.usage.output_tokens == 8
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message._request_id


def test_the_client_streams_the_same_message(server: Running) -> None:
    asked: AnyJson = {"model": "fake", "max_tokens": 12, "messages": [ASK]}
    asked |= {"extra_body": {"temperature": 0}}
    with a_client(server) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as streamed:
            text = "".join(streamed.text_stream)
            last = streamed.get_final_message()
    assert text == whole.content[0].text
    assert last.content[0].text == text
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_input_tokens > 0
    total = last.usage.input_tokens + last.usage.cache_read_input_tokens
    assert total == len("<user>How are you?\n<assistant>")


def test_the_client_counts_tokens(server: Running) -> None:
    with a_client(server) as client:
        counted = client.messages.count_tokens(model="fake", system="Hm.", messages=[ASK])
    assert counted.input_tokens == len("<system>Hm.\n<user>How are you?\n<assistant>")


@pytest.mark.parametrize("is_streaming", [False, True])
def test_the_client_gets_a_tool_call_and_sends_its_result(
    with_tools: Running, is_streaming: bool
) -> None:
    asked: AnyJson = {"model": "fake", "max_tokens": 200, "messages": [ASK], "tools": [WEATHER]}
    with a_client(with_tools) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            if is_streaming:
                with client.messages.stream(**asked, tool_choice=choice) as streamed:
                    message = streamed.get_final_message()
            else:
                message = client.messages.create(**asked, tool_choice=choice)
            [call] = message.content
            assert (call.type, call.name, message.stop_reason) == (
                "tool_use",
                "weather",
                "tool_use",
            )
            assert call.id.startswith("toolu_")
            assert 1 <= call.input["days"] <= 3
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns = [*asked["messages"], {"role": "assistant", "content": message.content}]
        turns.append({"role": "user", "content": [result, {"type": "text", "text": "And then?"}]})
        answer = client.messages.create(**asked | {"messages": turns, "max_tokens": 4})
    assert answer.usage.output_tokens == 4


def test_the_client_lists_models(server: Running) -> None:
    """Issue 51: it got OpenAI's format, in which its fields are None."""
    with a_client(server) as client:
        names = [model["id"] for model in server.get("/v1/models").json()["data"]]
        assert len(names) == 4
        assert [model.id for model in client.models.list(limit=1)] == names
        last = client.models.list(before_id=names[2], limit=1)
        assert ([model.id for model in last.data], last.has_more) == ([names[1]], True)
        model = client.models.retrieve("fake")
        assert (model.type, model.display_name) == ("model", "fake")
        assert model.created_at.tzinfo is not None
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.models.retrieve("claude")
        assert unknown.value.body["error"]["type"] == "not_found_error"
        for wrong in ({"limit": 0}, {"after_id": "claude"}):
            with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
                client.models.list(**wrong)
    assert server.get("/v1/models").json()["object"] == "list"
    assert "param" in server.get("/v1/models/claude").json()["error"]


def test_the_client_raises_its_own_error_classes(locked: Running) -> None:
    asked: AnyJson = {"model": "fake", "max_tokens": 2, "messages": [ASK]}
    with a_client(locked, ALICE) as client:
        assert client.messages.create(**asked).content
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**asked | {"model": "claude"})
        assert unknown.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**asked | {"max_tokens": 0})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        assert "max_tokens" in refused.value.body["error"]["message"]
        assert refused.value.body["request_id"] == refused.value.request_id
    with (
        a_client(locked, "wrong") as stranger,
        pytest.raises(anthropic.AuthenticationError) as closed,
    ):
        stranger.messages.create(**asked)
    assert closed.value.body["type"] == "error"
    assert closed.value.body["error"]["type"] == "authentication_error"


# --- requests ------------------------------------------------------------------------------------

# a request of Claude Code 2.1, with shorter texts
CLAUDE_CODE: AnyJson = {
    "model": "fake",
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "text",
                    "text": "<system-reminder>\nThe date is known.\n</system-reminder>",
                },
                {"type": "text", "text": "What is in this folder?", "cache_control": KEEP},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "EqQBCg"},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "toolu_01",
                    "name": "Bash",
                    "input": {"command": "ls", "description": "List files"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01",
                    "content": [{"type": "text", "text": "README.md"}],
                    "is_error": False,
                },
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.69.1; cch=fa690;"},
        {
            "type": "text",
            "text": "You are a coding tool.",
            "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
        },
        {
            "type": "text",
            "text": "Be concise.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "description": {"type": "string"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        },
    ],
    "metadata": {"user_id": "user_0784_account_261d5434_session_b4e5aaaa"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
    "stream": True,
}
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": f"Bearer {ALICE}",
    "user-agent": "claude-cli/2.1.69 (external, cli)",
    "x-app": "cli",
    "sec-fetch-mode": "cors",
}


def test_claude_code_is_answered(with_tools: Running) -> None:
    response = with_tools.client.post(
        "/v1/messages?beta=true", json=CLAUDE_CODE, headers=CLAUDE_CODE_HEADERS
    )
    assert response.status_code == 200, response.text
    assert response.text.startswith("event: message_start\n")
    assert response.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    counted = {
        name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools", "thinking")
    }
    count = with_tools.client.post("/v1/messages/count_tokens?beta=true", json=counted)
    assert count.json()["input_tokens"] > 100


def test_the_texts_of_claude_code_reach_the_model(with_tools: Running) -> None:
    text = text_of(with_tools, **CLAUDE_CODE)
    assert "billing" not in text
    said = text[text.index("<system>") :]
    assert said == (
        "<system>You are a coding tool.\nBe concise.\n"
        "<user><system-reminder>\nThe date is known.\n</system-reminder>\nWhat is in this folder?\n"
        "<assistant>Let me look.\n<tool>README.md\n<user>Go on.\n<assistant>"
    )


def test_an_assistants_last_message_is_continued(server: Running) -> None:
    turns = [ASK, {"role": "assistant", "content": "I am"}]
    message = send(server, messages=turns)
    expected = expected_text("<user>How are you?\n<assistant>I am", 8)
    assert message["content"][0]["text"] == expected


def test_the_reply_names_the_stop_sequence(server: Running) -> None:
    text = send(server, max_tokens=12)["content"][0]["text"]
    stop = text[3:5]
    message = send(server, max_tokens=12, stop_sequences=["no such text", stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    last = stream(server, BODY | {"max_tokens": 12, "stop_sequences": [stop]})[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_an_answer_fits_a_schema(with_tools: Running) -> None:
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    message = send(with_tools, output_config={"format": form}, max_tokens=40)
    assert 1 <= json.loads(message["content"][0]["text"])["days"] <= 3
    assert message["stop_reason"] == "end_turn"
    wrong = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "bogus"}}}}
    refused = with_tools.post("/v1/messages", BODY | wrong)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("output_config.format: ")


def test_reasoning_comes_before_the_answer() -> None:
    """The template begins the reasoning, and the fake model never ends it."""
    engines = FakeEngines(template=TEMPLATE + "{% if enable_thinking != false %}<think>{% endif %}")
    with a_server(engines=engines) as running:
        on = send(running, thinking={"type": "enabled", "budget_tokens": 1024})
        [block] = on["content"]
        assert (block["type"], block["signature"]) == ("thinking", "")
        assert len(block["thinking"]) == 8
        told = stream(running, BODY)
        thought = [each["delta"] for each in told if each["type"] == "content_block_delta"]
        assert {delta["type"] for delta in thought} == {"thinking_delta"}
        assert "".join(delta["thinking"] for delta in thought) == block["thinking"]
        off = send(running, thinking={"type": "disabled"})
        assert [block["type"] for block in off["content"]] == ["text"]


def test_events_come_in_order(server: Running) -> None:
    told = stream(server, BODY)
    kinds = [each["type"] for each in told]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = told[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len("<user>How are you?\n<assistant>")
    assert {each["index"] for each in told if "index" in each} == {0}


def test_a_stream_without_output_sends_pings(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_stream, "PING_S", 0.01)
    hold = server.hold_after(1)
    with server.client.stream(
        "POST", "/v1/messages", json=BODY | {"max_tokens": 3, "stream": True}
    ) as reply:
        lines, num_pings = list[str](), 0
        for line in reply.iter_lines():
            lines.append(line)
            num_pings += line == "event: ping"
            if num_pings == 5:
                hold.release()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    text = "".join(each["delta"]["text"] for each in told if each["type"] == "content_block_delta")
    assert text == send(server, max_tokens=3)["content"][0]["text"]


def test_a_stream_that_cannot_continue_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_server() as running:
        hold = running.hold_after(1)
        with running.client.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as reply:
            lines = reply.iter_lines()
            assert next(lines) == "event: message_start"

            async def fail() -> None:
                running.gateway.engine.fail_open("gone")

            running.on_loop(fail())
            rest = list(lines)
            hold.release()
        assert rest[-3] == "event: error"
        error = json.loads(rest[-2].removeprefix("data: "))
        assert error["error"] == {"type": "overloaded_error", "message": "gone"}
        assert error["request_id"] == reply.headers["request-id"]
        running.settle()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "'n' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image blocks are not"),
        ({"messages": [{"role": "user", "content": [{"type": "Text"}]}]}, "Did you mean text?"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]: document blocks are not",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
        ({"tools": [WEATHER]}, "tools: this model's chat template has no tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: 'enabled'"),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences: at most 4096"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]}, "system"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"temperature": 1000}, "temperature"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "prompt is too long"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": KEEP}] * 5},
            "at most 4 blocks",
        ),
    ],
)
def test_the_error_names_a_refused_argument(server: Running, fields: AnyJson, said: str) -> None:
    response = server.post("/v1/messages", BODY | fields)
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert said in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"]


def test_other_errors_have_the_same_format(server: Running) -> None:
    wrong = server.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert wrong.headers["allow"] == "POST"
    batches = server.post("/v1/messages/batches", {})
    assert batches.json()["error"]["type"] == "not_found_error"
    assert "--data-dir" in batches.json()["error"]["message"]


# --- keys ----------------------------------------------------------------------------------------


def test_a_key_may_come_as_x_api_key(locked: Running) -> None:
    for headers, status in (
        ({"x-api-key": ALICE}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "wrong", "authorization": f"Bearer {ALICE}"}, 200),
        ({"x-api-key": BOB, "authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ):
        response = locked.client.get("/v1/models", headers=headers)
        assert response.status_code == status
    twice = [("x-api-key", ALICE), ("x-api-key", BOB)]
    assert locked.client.get("/v1/models", headers=twice).status_code == 401


# --- kept prefixes -------------------------------------------------------------------------------

LONG = "a system prompt of some length which is worth keeping for later, " * 2


def kept(text: str = LONG, **control: object) -> list[AnyJson]:
    return [{"type": "text", "text": text, "cache_control": KEEP | control}]


def crowd_out(running: Running, key: str | None = None) -> None:
    """Fill the cache with other requests, so that only pinned pages stay cached."""
    for letter in "abcdefghijklmn":
        running.complete(letter * 200, key, max_tokens=1)


def cached(running: Running, key: str | None = None, **fields: object) -> int:
    usage = send(running, key, max_tokens=1, **fields)["usage"]
    return int(usage["cache_read_input_tokens"])


def test_a_marked_prefix_stays_cached_while_many_requests_run() -> None:
    engines = FakeEngines(num_pages=256, max_model_len=800)
    with a_server(engines=engines, has_keys=True) as running:
        usage = send(running, ALICE, system=kept(), max_tokens=1)["usage"]
        prefix = len(f"<system>{LONG}\n<user>")
        prompt = f"<system>{LONG}\n<user>How are you?\n<assistant>"
        assert usage["cache_creation_input_tokens"] == prefix
        assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == prefix
        assert usage["input_tokens"] == len(prompt) - prefix
        send(running, ALICE, system=LONG.upper(), max_tokens=1)
        crowd_out(running, ALICE)
        assert cached(running, ALICE, system=kept()) >= prefix - 4
        assert cached(running, ALICE, system=LONG.upper()) < 16, "an unmarked prefix stayed cached"
        assert cached(running, BOB, system=kept()) == 0, "another key found the prefix"
        again = send(running, ALICE, system=kept(ttl="1h"), max_tokens=1)["usage"]
        total = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(again[name] for name in total) == len(prompt)
        running.settle()


def test_a_prefix_is_unpinned_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.TTL_S, "5m", 2.0)
    with a_server() as running:
        pins = running.gateway.pins
        send(running, system=kept(), max_tokens=1)
        send(running, system=kept(ttl="1h"), messages=[{"role": "user", "content": "Why?"}])
        assert pins.num_pages() > len(LONG) // 4
        before = pins.num_pages()
        send(running, system=kept(LONG.upper()), max_tokens=1)
        assert pins.num_pages() > before
        until(lambda: pins.num_pages() == before)
        crowd_out(running)
        assert cached(running, system=LONG.upper()) < 16
        assert cached(running, system=LONG) > len(LONG)


def test_a_conversation_is_one_pin_that_grows() -> None:
    engines = FakeEngines(num_pages=256, max_model_len=800)
    with a_server(engines=engines) as running:
        turns: list[AnyJson] = []
        for number in range(3):
            block = {"type": "text", "text": f"This is question {number}.", "cache_control": KEEP}
            turns.append({"role": "user", "content": [block]})
            answer = send(running, messages=turns, system="Hm.")
            turns[-1]["content"] = [{"type": "text", "text": block["text"]}]
            turns.append({"role": "assistant", "content": answer["content"]})
            prompt_tokens = sum(
                answer["usage"][name]
                for name in ("input_tokens", "cache_creation_input_tokens",
                             "cache_read_input_tokens")
            )  # fmt: skip
            assert running.gateway.pins.num_pages() == -(-prompt_tokens // 4)


def test_a_pinned_prefix_ends_with_the_marked_block(with_tools: Running) -> None:
    """Marks may be in tools, system and messages."""
    second = WEATHER | {"name": "clock"}
    tools = [WEATHER | {"cache_control": KEEP}, second]
    usage = send(with_tools, tools=tools, system="Now.", max_tokens=1)["usage"]
    text = text_of(with_tools, tools=tools, system="Now.")
    end = text.index('"clock"') - len(
        '{"function": {"description": "What it will be like", "name": '
    )
    got = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert end <= got <= text.index('"clock"') + 1
    turns = [
        {"role": "user", "content": [
            {"type": "text", "text": "one", "cache_control": KEEP}, {"type": "text", "text": "two"}
        ]},
    ]  # fmt: skip
    usage = send(with_tools, messages=turns, system="Other.", max_tokens=1)["usage"]
    text = text_of(with_tools, messages=turns, system="Other.")
    got = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert text[:got].endswith("<user>one\n")


@pytest.mark.parametrize("is_last", [False, True])
def test_a_mark_in_a_tool_result_pins_up_to_its_text(with_tools: Running, is_last: bool) -> None:
    """`is_last`: the mark is on the last text of the prompt, so the whole prompt is pinned."""
    texts: list[dict[str, object]] = [{"type": "text", "text": word} for word in ("sun", "rain")]
    texts[is_last]["cache_control"] = KEEP
    turns = [
        {"role": "user", "content": "What will it be like?"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": texts}
        ]},
    ]  # fmt: skip
    usage = send(with_tools, messages=turns, tools=[WEATHER], max_tokens=1)["usage"]
    text = text_of(with_tools, messages=turns, tools=[WEATHER])
    got = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert got == len(text) if is_last else text[:got].endswith("sun\n")


def test_a_key_pins_no_more_than_its_share() -> None:
    engines = FakeEngines(num_pages=256, max_model_len=800)
    with a_server(engines=engines, has_keys=True) as running:
        pins = running.gateway.pins
        texts = [f"{number} {LONG}" for number in range(6)]  # each about a seventh of the pages
        for key in (ALICE, BOB):
            for text in texts:
                send(running, key, system=kept(text), max_tokens=1)
        assert 0 < pins.num_pages() <= 256 // 2
        crowd_out(running, ALICE)
        assert cached(running, ALICE, system=texts[-1]) > len(LONG), "the last used prefix stays"
        assert cached(running, ALICE, system=texts[0]) < 16
        usage = send(running, ALICE, system=kept(LONG * 3), max_tokens=1)["usage"]
        read = usage["cache_read_input_tokens"]
        assert read + usage["cache_creation_input_tokens"] == 256 // 4 * 4, (
            "a prefix beyond the share is cut"
        )
        running.settle()


def test_pins_end_when_the_cache_is_reset_or_lost() -> None:
    with a_server(has_keys=True) as running:
        send(running, ALICE, system=kept(), max_tokens=1)
        assert running.gateway.pins.num_pages()
        headers = {"x-api-key": ADMIN}
        reset = running.client.post("/admin/reset_prefix_cache", headers=headers)
        assert reset.status_code == 200
        assert running.gateway.pins.num_pages() == 0
        assert cached(running, ALICE, system=kept()) == 0
        assert running.gateway.pins.num_pages()

        async def lose() -> None:
            assert running.gateway.engine.on_recovered is not None
            running.gateway.engine.on_recovered()

        running.on_loop(lose())
        assert running.gateway.pins.num_pages() == 0


def test_a_marked_prefix_after_an_app_is_kept() -> None:
    """Names of the app's pages do not depend on the key's salt."""
    with a_server([POLITE], has_keys=True) as running:
        asked: AnyJson = {"model": "fake:polite", "messages": [{"role": "user", "content": kept()}]}
        send(running, ALICE, max_tokens=1, **asked)
        crowd_out(running, ALICE)
        assert cached(running, ALICE, **asked) > len(POLITE.prompt) + len(LONG)
        running.settle()
