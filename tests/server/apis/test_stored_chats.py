"""OpenAI's stored chats with its stock client: list, retrieve, messages, update, delete."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from mainstem.core.json import AnyJson
from tests.server.running import ALICE, BOB, Running

BODY: AnyJson = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 5,
    "temperature": 0,
}


@pytest.fixture
def client(locked: Running) -> Iterator[OpenAI]:
    """A client whose key has no stored chats."""
    made = OpenAI(base_url=f"{locked.url}/v1", api_key=ALICE, max_retries=0, timeout=300)
    with made:
        yield made
        for chat in made.chat.completions.list():
            made.chat.completions.delete(chat.id)


def stored(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**BODY | {"store": True} | fields)


def listed(client: OpenAI, **wanted: Any) -> list[str]:
    return [chat.id for chat in client.chat.completions.list(**wanted)]


def test_a_stored_chat_is_found_by_its_id(client: OpenAI) -> None:
    chat = stored(client, metadata={"for": "me"}, n=2, logprobs=True)
    found = client.chat.completions.retrieve(chat.id)
    assert found == chat
    assert found.model_dump()["metadata"] == {"for": "me"}
    plain = client.chat.completions.create(**BODY)
    with pytest.raises(openai.NotFoundError, match="store=true"):
        client.chat.completions.retrieve(plain.id)


def test_a_streamed_chat_is_stored_before_it_ends(client: OpenAI) -> None:
    text, chat_id = "", ""
    for chunk in stored(client, stream=True):
        chat_id = chunk.id
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason is not None:
            found = client.chat.completions.retrieve(chat_id)
            assert found.choices[0].message.content == text
            assert found.object == "chat.completion"
    assert listed(client) == [chat_id]


def test_chats_are_listed_by_model_metadata_and_order(client: OpenAI) -> None:
    models = ["fake"] * 3 + ["alias"] * 2
    names = [
        stored(client, metadata={"n": str(n), "even": str(n % 2)}, model=model).id
        for n, model in enumerate(models)
    ]
    assert listed(client) == listed(client, order="asc", limit=2) == names
    assert listed(client, order="desc") == names[::-1]
    assert listed(client, model="alias") == names[3:]
    assert listed(client, metadata={"even": "1"}) == names[1::2]
    assert listed(client, metadata={"even": "1", "n": "3"}) == [names[3]]
    assert listed(client, metadata={"n": "7"}) == listed(client, model="other") == []
    page = client.chat.completions.list(limit=2, after=names[1])
    assert ([chat.id for chat in page.data], page.has_more) == (names[2:4], True)


def test_messages_are_listed_in_pages(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "How"}, {"type": "text", "text": "so?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": parts},
    ]
    chat = stored(client, messages=messages)
    found = [*client.chat.completions.messages.list(chat.id, limit=3)]
    assert [message.id for message in found] == [f"{chat.id}-{place}" for place in range(4)]
    assert [message.content for message in found] == ["Be brief.", "Hi", "Hm.", None]
    assert found[1].model_dump()["name"] == "Ann"
    assert [part.text for part in found[3].content_parts or []] == ["How", "so?"]
    latest = client.chat.completions.messages.list(chat.id, order="desc", limit=1)
    assert latest.data[0].id == f"{chat.id}-3"


def test_metadata_is_replaced_and_a_chat_is_deleted(client: OpenAI) -> None:
    first, second = stored(client, metadata={"a": "1"}), stored(client)
    chats = client.chat.completions
    assert chats.update(first.id, metadata={"b": "2"}).model_dump()["metadata"] == {"b": "2"}
    assert listed(client, metadata={"b": "2"}) == [first.id]
    assert listed(client, metadata={"a": "1"}) == []
    assert listed(client) == [first.id, second.id]  # in the order in which they were answered
    assert chats.update(first.id, metadata=None).model_dump()["metadata"] == {}
    assert chats.delete(first.id).deleted
    for call in (chats.retrieve, chats.delete, chats.messages.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.NotFoundError):
        chats.update(first.id, metadata={})


def test_chats_responses_and_other_keys_are_apart(client: OpenAI, locked: Running) -> None:
    chat = stored(client)
    response = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
    assert listed(client) == [chat.id]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(response.id)
    for path in (chat.id, f"{chat.id}/input_items"):
        assert locked.get(f"/v1/responses/{path}", ALICE).status_code == 404
    assert locked.send("DELETE", f"/v1/responses/{chat.id}", None, ALICE).status_code == 404
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="fake", input="Hi", previous_response_id=chat.id)
    client.responses.delete(response.id)
    other = client.with_options(api_key=BOB)
    assert listed(other) == []
    with pytest.raises(openai.NotFoundError):
        other.chat.completions.retrieve(chat.id)


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "", BODY | {"store": "yes"}, "store"),
        ("POST", "", BODY | {"store": True, "metadata": {"a": 1}}, "metadata"),
        ("POST", "", BODY | {"metadata": {"a": "b" * 513}}, "metadata"),
        ("GET", "?limit=0", None, "limit"),
        ("GET", "?order=up", None, "order"),
        ("GET", "?after=chatcmpl-x", None, "after"),
        ("GET", "?meta[a]=b", None, "meta[a]"),
        ("POST", "/chatcmpl-x", {}, "metadata"),
        ("POST", "/chatcmpl-x", {"metadata": {}, "store": False}, "store"),
    ],
)
def test_the_error_names_a_wrong_value(
    locked: Running, method: str, path: str, body: AnyJson | None, param: str
) -> None:
    response = locked.send(method, f"/v1/chat/completions{path}", body, ALICE)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
