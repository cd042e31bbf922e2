"""The bodies and results of Anthropic's message batches, without a server."""

import re
from typing import Any

import pytest
from pydantic import TypeAdapter

from mainstem.core.json import AnyJson
from mainstem.wire.errors import WireError
from mainstem.wire.messages.batches import errored_line, left_line, read_batch, result_line, rows

PARAMS: AnyJson = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}


def a_request(name: object = "a", params: object = PARAMS) -> AnyJson:
    return {"custom_id": name, "params": params}


def test_requests_become_rows() -> None:
    body = read_batch({"requests": [a_request("a"), a_request("b")]})
    assert [*rows(body)][1] == {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/messages",
        "body": PARAMS,
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "requests: is required"),
        ({"requests": []}, "requests: expected"),
        ({"requests": [a_request(), a_request()]}, r"requests\[1\].custom_id: .* must be unique"),
        ({"requests": [a_request("a b")]}, r"requests\[0\].custom_id"),
        ({"requests": [a_request("a" * 65)]}, r"requests\[0\].custom_id"),
        ({"requests": [a_request("")]}, r"requests\[0\].custom_id"),
        ({"requests": [a_request(params="x")]}, r"requests\[0\].params"),
        ({"requests": [{"custom_id": "a"}]}, r"requests\[0\]: .*params"),
        ({"requests": [a_request() | {"more": 1}]}, "more"),
        ({"requests": [a_request()], "metadata": {}}, "metadata"),
    ],
)
def test_the_error_names_what_is_wrong(body: AnyJson, said: str) -> None:
    with pytest.raises(WireError) as caught:
        read_batch(body)
    assert re.search(said, caught.value.message), caught.value.message


def test_wrong_params_are_accepted() -> None:
    """They become errored results, as in Anthropic's API."""
    assert len(read_batch({"requests": [a_request(params={})]}).requests) == 1


def kind_of(code: str, param: str | None = None, message: str = "m") -> AnyJson:
    line: AnyJson = errored_line("a", WireError(code, message, param))
    error: AnyJson = line["result"]["error"]["error"]
    return error


def test_errors_have_the_kinds_of_the_api() -> None:
    assert kind_of("invalid_value")["type"] == "invalid_request_error"
    assert kind_of("model_not_found")["type"] == "not_found_error"
    assert kind_of("engine_failed")["type"] == "api_error"
    assert kind_of("prompt_too_long")["message"].startswith("prompt is too long: ")


def test_the_client_reads_every_kind_of_result() -> None:
    types = pytest.importorskip("anthropic.types.messages")
    reader: Any = TypeAdapter(types.MessageBatchIndividualResponse)
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    told = {"code": "invalid_value", "message": "stop: too long", "param": "stop", "line": 1}
    done = result_line({"custom_id": "a", "response": {"body": message}, "error": None})
    failed = result_line({"custom_id": "b", "response": None, "error": told})
    lines = [done, failed, left_line("c", "canceled"), left_line("d", "expired")]
    read = [reader.validate_python(line, strict=False) for line in lines]
    assert [each.result.type for each in read] == ["succeeded", "errored", "canceled", "expired"]
    assert read[0].result.message.content[0].text == "hi"
    assert read[1].result.error.error.message == "stop_sequences: too long"
