"""response_format and the other fields that ask for a form, over HTTP."""

import json
import re
from threading import current_thread

import pytest

from mainstem.text.grammar import MAX_FORM_CHARS, CompiledForm, Grammars
from tests.builders import BEYOND
from tests.server.running import Running, events

CHAT = [{"role": "user", "content": "Give me a number."}]
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 12}},
    "required": ["number"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def test_whole_and_streamed_chats_have_the_form(server: Running) -> None:
    body = {"messages": CHAT, "response_format": FORMAT, "n": 4, "temperature": 0.7, "seed": 3}
    whole = server.post("/v1/chat/completions", body).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    for text, choice in zip(texts, whole["choices"], strict=True):
        assert 1 <= json.loads(text)["number"] <= 12
        assert choice["finish_reason"] == "stop"
    streamed = server.post("/v1/chat/completions", body | {"stream": True})
    pieces = [""] * 4
    for event in events(streamed.text)[:-1]:
        for choice in json.loads(event)["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content", "")
    assert pieces == texts


def test_vllms_fields_work_in_completions(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 50, "temperature": 0}
    cases: list[tuple[dict[str, object], str]] = [
        ({"guided_regex": "[ab]{3}/[0-9]"}, "[ab]{3}/[0-9]"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": json.dumps(SCHEMA)}, r'\{"number": \d+\}'),
        ({"response_format": {"type": "json_object"}, "max_tokens": 2}, r'\{[" }].*|\{\}'),
    ]
    for fields, pattern in cases:
        response = server.post("/v1/completions", body | fields)
        assert response.status_code == 200, response.text
        assert re.fullmatch(pattern, response.json()["choices"][0]["text"])


def test_a_form_is_compiled_once_and_on_a_separate_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    compile_ = Grammars.compile

    def noted(self: Grammars, form: str, owner: str = "") -> CompiledForm:
        threads.append(current_thread().name)
        return compile_(self, form, owner)

    monkeypatch.setattr(Grammars, "compile", noted)
    body = {"prompt": "x", "guided_regex": "a form that nobody else asks for [0-9]"}
    for _ in range(2):
        assert server.post("/v1/completions", body).status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["grammar"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format", "x"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_regex": "(a"}, "response_format", "unclosed"),
        ({"guided_regex": 5}, "guided_regex", "text"),
        ({"guided_choice": []}, "response_format", "choices"),
        ({"guided_choice": [5]}, "guided_choice", "a text"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "response_format", "one form"),
        ({"guided_json": {"enum": ["y" * MAX_FORM_CHARS]}}, "response_format", "characters"),
        ({"guided_json": {}, "min_tokens": 3}, "min_tokens", "form"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "form"),
    ],
)  # fmt: skip
def test_the_error_for_a_wrong_form_names_the_field(
    server: Running, fields: dict[str, object], param: str, words: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": CHAT} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


TOO_MUCH = {"prompt": "x", "guided_json": BEYOND, "max_tokens": 100, "temperature": 0}


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_form_beyond_its_parsers_limits_is_an_error(server: Running, is_streaming: bool) -> None:
    """The finish reason is not `stop`, since the answer does not have the form. No step has
    failed."""
    before = server.gateway.engine.num_recoveries
    reply = server.post("/v1/completions", TOO_MUCH | {"stream": is_streaming})
    if is_streaming:
        *_, last = events(reply.text)
        error = json.loads(last)["error"]
        assert '"finish_reason":"' not in reply.text.replace(" ", "")
    else:
        assert reply.status_code == 400
        error = reply.json()["error"]
    assert error["code"] == "form_limit_reached"
    assert error["param"] == "response_format"
    assert "reached its limits" in error["message"]
    assert server.gateway.engine.num_recoveries == before


def test_an_answer_cut_by_max_tokens_within_its_form_is_not_an_error(server: Running) -> None:
    reply = server.post("/v1/completions", TOO_MUCH | {"max_tokens": 3}).json()
    assert reply["choices"][0]["finish_reason"] == "length"
