"""Tools over HTTP, with a template that supports them."""

import json
from collections.abc import Iterator

import pytest

from tests.fake_engines import TEMPLATE, FakeEngines
from tests.server.running import Running, a_server, events
from tests.text.test_tools import CLOCK, HERMES, LLAMA, WEATHER

CHAT = [{"role": "user", "content": "Will it rain?"}]
TOOLS = [WEATHER, CLOCK]


@pytest.fixture(scope="module", params=[HERMES, LLAMA], ids=["hermes", "llama"])
def shared(request: pytest.FixtureRequest) -> Iterator[Running]:
    engines = FakeEngines(num_pages=512, max_model_len=800, template=request.param)
    with a_server(engines=engines) as running:
        yield running


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def test_a_named_tool_is_called(shared: Running) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": named("weather"), "n": 2}
    reply = shared.post("/v1/chat/completions", body).json()
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert call["function"]["name"] == "weather"
        assert 1 <= json.loads(call["function"]["arguments"])["days"] <= 3
    shared.settle()


def test_a_required_call_is_streamed(shared: Running) -> None:
    tools = [WEATHER, WEATHER | {"function": WEATHER["function"] | {"name": "other"}}]  # type: ignore[operator]
    body = {"messages": CHAT, "tools": tools, "tool_choice": "required", "stream": True}
    chunks = [
        json.loads(data) for data in events(shared.post("/v1/chat/completions", body).text)[:-1]
    ]
    choices = [chunk["choices"][0] for chunk in chunks]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0]
    assert calls[0]["function"]["name"] in ("weather", "other")
    assert "days" in json.loads(calls[0]["function"]["arguments"])
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == ""
    assert choices[-1]["finish_reason"] == "tool_calls"
    shared.settle()


def test_auto_leaves_the_answer_to_the_model(shared: Running) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 12, "temperature": 0}
    message = shared.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"]
    assert "tool_calls" not in message
    none = shared.post("/v1/chat/completions", body | {"tool_choice": "none"}).json()
    bare = shared.post("/v1/chat/completions", body | {"tools": None}).json()
    assert none["choices"] == bare["choices"]


def test_a_wrong_schema_of_a_tool_is_named_as_each_api_calls_it(shared: Running) -> None:
    """Issue 51: the error blamed response_format and printed the grammar."""
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    function = {"name": "f", "parameters": wrong}
    said: dict[str, object] = {"messages": CHAT, "max_tokens": 9}
    for path, body, place in (
        (
            "/v1/chat/completions",
            said | {"tools": [named("f") | {"function": function}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function"} | function], "tool_choice": "required"},
            "tools[0].parameters",
        ),
        (
            "/v1/messages",
            said
            | {"tools": [{"name": "f", "input_schema": wrong}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
    ):
        refused = shared.post(path, body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["message"] == f"{place}: at a: not supported: not"
        assert error.get("param", place) == place
    shared.settle()


def test_the_template_sees_tools_and_earlier_calls() -> None:
    template = (
        "{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>"
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.days }}"
        "{% endfor %}{{ m.role }}:{{ m.content }} {% endfor %}"
    )
    call = {"id": "x", "type": "function",
            "function": {"name": "weather", "arguments": '{"days": 2}'}}  # fmt: skip
    chat = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "sunny"},
    ]
    with a_server(engines=FakeEngines(template=template)) as running:
        found = running.post("/tokenize", {"messages": chat, "tools": TOOLS}).json()
        text = running.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
        assert text == "weather clock <tool_call>user:Will it rain? 2assistant: tool:sunny "
        broken = [*CHAT, {"role": "assistant", "tool_calls": [call | {"function": 5}]}]
        response = running.post("/v1/chat/completions", {"messages": broken, "tools": TOOLS})
        assert response.json()["error"]["param"] == "messages"


def test_tools_for_a_model_without_tool_support_are_refused(server: Running) -> None:
    assert "tools" not in TEMPLATE
    response = server.post("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "chat template" in response.json()["error"]["message"]


def test_tools_are_refused_in_completions(shared: Running) -> None:
    prompt = shared.post("/v1/completions", {"prompt": "x", "tools": TOOLS})
    assert prompt.json()["error"]["param"] == "tools"


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}


def test_beside_tools_an_answer_is_a_call_or_in_the_form_in_each_api(shared: Running) -> None:
    """Issue 51: an agent with tools and an output type never called a tool."""
    found = set()
    for number in range(12):
        chat = [{"role": "user", "content": f"Will it rain on day {number}?"}]
        body = {"messages": chat, "tools": TOOLS, "response_format": FORM}
        message = shared.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        found.add(bool(message.get("tool_calls")))
        assert message.get("tool_calls") or message["content"] == '"yes"'
    assert found == {True, False}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["yes"]}}}
    asked: dict[str, object] = {"input": "x", "tools": flat, "text": text}
    for choice in ("auto", "required"):
        [item] = shared.post("/v1/responses", asked | {"tool_choice": choice}).json()["output"]
        is_form = item["type"] == "message" and item["content"][0]["text"] == '"yes"'
        assert item["type"] == "function_call" or (is_form and choice == "auto")
    offered = [{"name": f"f{days}", "input_schema": {"properties": {"a": {}}}} for days in (1, 2)]
    config = {"format": {"type": "json_schema", "schema": {"enum": ["yes"]}}}
    asked = {"messages": CHAT, "max_tokens": 200, "tools": offered, "output_config": config}
    for kind in ("auto", "any"):
        reply = shared.post("/v1/messages", asked | {"tool_choice": {"type": kind}}).json()
        [block] = reply["content"]
        is_form = block["type"] == "text" and block["text"] == '"yes"'
        assert block["type"] == "tool_use" or (is_form and kind == "auto")
    shared.settle()
