"""Anthropic's message batches with its stock client, over the runner of OpenAI's batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mainstem.core.json import AnyJson
from mainstem.server import batch_runner
from mainstem.server.http.limits import ServerLimits
from tests.fake_engines import FakeEngines
from tests.server.running import ALICE, BOB, Running, a_server
from tests.text.test_tools import HERMES
from tests.waiting import until

anthropic = pytest.importorskip("anthropic")

BODY: AnyJson = {
    "model": "fake",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "How are you?"}],
    "temperature": 0,
}
TOOL = {"name": "now", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Few batches and small bodies are allowed."""
    engines = FakeEngines(num_pages=512, max_model_len=800, template=HERMES)
    limits = ServerLimits(
        open_batches=3, message_batch_bytes=1 << 18, upload_bytes=1 << 18, body_bytes=1 << 12
    )
    folder = tmp_path_factory.mktemp("data")
    with a_server(data_dir=folder, has_keys=True, engines=engines, limits=limits) as made:
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No row starts until the test ends, or calls `undo`."""
    monkeypatch.setattr(batch_runner, "BUSY_ANSWERS", -1)
    return monkeypatch


def a_client(running: Running, key: str = ALICE) -> Any:
    return anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=300)


def a_request(name: str, **fields: object) -> AnyJson:
    return {"custom_id": name, "params": BODY | fields}


def ended(client: Any, batch_id: str) -> Any:
    until(lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended")
    return client.messages.batches.retrieve(batch_id)


def results(client: Any, batch_id: str) -> dict[str, Any]:
    found = [*client.messages.batches.results(batch_id)]
    assert len({each.custom_id for each in found}) == len(found)
    return {each.custom_id: each.result for each in found}


def test_the_client_gets_a_result_for_each_request(shared: Running) -> None:
    """Also of requests that are wrong; the body is larger than those of other paths may be."""
    client = a_client(shared)
    asked = [a_request(f"r{n}", messages=[{"role": "user", "content": f"{n}" * 60}])
             for n in range(20)]  # fmt: skip
    wrong = [
        a_request("model", model="gpt-9"),
        a_request("stream", stream=True),
        a_request("stop", stop_sequences=["x" * 5000]),
        a_request("long", messages=[{"role": "user", "content": "x" * 2000}]),
        {"custom_id": "empty", "params": {}},
    ]
    called = a_request("tool", tools=[TOOL], tool_choice={"type": "any"}, max_tokens=100)
    made = client.messages.batches.create(requests=[*asked, *wrong, called])
    assert made.id.startswith("msgbatch_")
    assert (made.processing_status, made.request_counts.processing) == ("in_progress", 26)
    assert made.results_url is None
    batch = ended(client, made.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 21, 5)
    assert batch.results_url == f"{shared.url}/v1/messages/batches/{made.id}/results"
    assert batch.created_at <= batch.ended_at < batch.expires_at
    found = results(client, made.id)
    alone = shared.post("/v1/messages", asked[7]["params"], ALICE).json()
    message = found["r7"].message.model_dump(mode="json", exclude_unset=True)
    same = ("content", "stop_reason", "role", "model")
    assert [message[name] for name in same] == [alone[name] for name in same]
    assert message["usage"]["output_tokens"] == alone["usage"]["output_tokens"]
    assert found["tool"].message.content[0].type == "tool_use"
    said = {each["custom_id"]: found[each["custom_id"]].error.error for each in wrong}
    assert said["model"].type == "not_found_error"
    assert "stream" in said["stream"].message
    assert said["stop"].message.startswith("stop_sequences: ")
    assert said["long"].message.startswith("prompt is too long: ")
    assert said["empty"].type == "invalid_request_error"
    shared.settle()


def test_a_batch_can_be_cancelled_and_deleted(shared: Running, held: pytest.MonkeyPatch) -> None:
    client = a_client(shared)
    batches = client.messages.batches
    made = batches.create(requests=[a_request(f"r{n}") for n in range(30)])
    with pytest.raises(anthropic.BadRequestError, match="still processing"):
        batches.delete(made.id)
    response = shared.get(f"/v1/messages/batches/{made.id}/results", ALICE)
    assert (response.status_code, response.json()["type"]) == (400, "error")
    cancelled = batches.cancel(made.id)
    assert cancelled.processing_status in ("canceling", "ended")
    batch = ended(client, made.id)
    assert batch.cancel_initiated_at is not None
    assert (batch.request_counts.canceled, batch.request_counts.succeeded) == (30, 0)
    assert {each.type for each in results(client, made.id).values()} == {"canceled"}
    assert batches.cancel(made.id) == batch  # nothing is left to cancel
    assert batches.delete(made.id).type == "message_batch_deleted"
    for call in (batches.retrieve, batches.cancel, batches.delete, batches.results):
        with pytest.raises(anthropic.NotFoundError):
            call(made.id)
    shared.settle()


def test_batches_are_listed_in_pages(shared: Running, held: pytest.MonkeyPatch) -> None:
    client = a_client(shared, BOB)
    batches = client.messages.batches
    made = [batches.create(requests=[a_request("a")]).id for _ in range(3)]
    with pytest.raises(anthropic.RateLimitError, match="open batches"):
        batches.create(requests=[a_request("a")])
    assert [each.id for each in batches.list(limit=2)] == made[::-1]  # asks for all pages
    page = batches.list(limit=2)
    assert (page.first_id, page.last_id, page.has_more) == (made[2], made[1], True)
    assert [each.id for each in batches.list(before_id=made[0], limit=1).data] == [made[1]]
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "msgbatch_x"}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            batches.list(**wrong)
    held.undo()
    for batch_id in made:
        ended(client, batch_id)
        batches.delete(batch_id)
    assert [*batches.list()] == []
    shared.settle()


def test_batches_of_the_two_apis_and_of_other_keys_are_apart(shared: Running) -> None:
    client, other = a_client(shared), a_client(shared, BOB)
    made = client.messages.batches.create(requests=[a_request("a")])
    ended(client, made.id)
    for call in ("retrieve", "cancel", "delete", "results"):
        with pytest.raises(anthropic.NotFoundError):
            getattr(other.messages.batches, call)(made.id)
    assert [*other.messages.batches.list()] == []
    with OpenAI(base_url=f"{shared.url}/v1", api_key=ALICE, max_retries=0) as openais:
        assert [*openais.batches.list()] == [*openais.files.list()] == []
    gateway = shared.gateway
    owner = gateway.access.tenants[0].owner
    (stored,) = [
        file for file in gateway.batch_service.files.listed(owner) if made.id in file.filename
    ]
    assert shared.get(f"/v1/files/{stored.file_id}/content", ALICE).status_code == 404
    client.messages.batches.delete(made.id)
    assert stored not in gateway.batch_service.files.listed(owner)


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({}, 400, "invalid_request_error", "requests"),
        ({"requests": [a_request("a"), a_request("a")]}, 400, "invalid_request_error", "unique"),
        ({"requests": [a_request("x" * 300_000)]}, 413, "request_too_large", "limited"),
    ],
)
def test_wrong_bodies_are_refused(
    shared: Running, body: AnyJson, status: int, kind: str, said: str
) -> None:
    response = shared.post("/v1/messages/batches", body, ALICE)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == kind
    assert said in error["message"]


def test_a_batch_continues_after_a_restart(tmp_path: Path, held: pytest.MonkeyPatch) -> None:
    with a_server(data_dir=tmp_path) as running:
        made = a_client(running).messages.batches.create(
            requests=[a_request("a"), a_request("b", max_tokens=0)]
        )
        counts = a_client(running).messages.batches.retrieve(made.id).request_counts
        assert counts.processing == 2
    held.undo()
    with a_server(data_dir=tmp_path) as running:
        client = a_client(running)
        counts = ended(client, made.id).request_counts
        assert (counts.succeeded, counts.errored) == (1, 1)
        found = results(client, made.id)
        assert (found["a"].type, found["b"].type) == ("succeeded", "errored")
        assert "max_tokens" in found["b"].error.error.message


def test_without_a_data_folder_there_are_no_batches(server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match="--data-dir"):
        a_client(server).messages.batches.list()
