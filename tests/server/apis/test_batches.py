"""Files and batches over HTTP, with OpenAI's client and without; kills and path tricks included."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL
from threading import Barrier
from time import sleep
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from mainstem.core.errors import ConfigError
from mainstem.core.json import AnyJson
from mainstem.server.http.auth import KeyRing
from mainstem.server.http.limits import ServerLimits
from mainstem.text.encoding import App
from tests.builders import BEYOND
from tests.fake_engines import FakeEngines, expected_text
from tests.server.process import a_process
from tests.server.running import ALICE, BOB, Running, a_server
from tests.text.test_tools import HERMES, WEATHER
from tests.waiting import LIMIT_S, until

ENDED = ("completed", "failed", "cancelled", "expired")


def a_row(name: str, prompt: str, **fields: object) -> AnyJson:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0} | fields
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def lines(rows: list[AnyJson]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = ServerLimits(upload_bytes=1 << 20, body_s=300.0)
    with a_server(data_dir=tmp_path_factory.mktemp("data"), has_keys=True, limits=limits) as made:
        yield made


def a_client(running: Running, key: str = ALICE) -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=300)


def run(client: OpenAI, rows: list[AnyJson], **fields: Any) -> openai.types.Batch:
    """Run a batch; returns it when it has ended."""
    made = client.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    fields = {"endpoint": "/v1/completions", "completion_window": "24h"} | fields
    batch = client.batches.create(input_file_id=made.id, **fields)
    until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def timed_requests(running: Running) -> int:
    """The count of the latency histogram."""
    text = running.get("/metrics", ALICE).text
    (line,) = [each for each in text.splitlines() if "e2e_request_latency_seconds_count" in each]
    return int(float(line.split()[-1]))


def answers(client: OpenAI, file_id: str | None) -> dict[str, AnyJson]:
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


def test_rows_may_name_the_models_that_are_listed(tmp_path: Path) -> None:
    """A row to MODEL:APP runs on the app's pinned pages, as an interactive request does."""
    app = App("polite", "You answer politely and never lose your patience with anybody. ")
    with a_server([app], data_dir=tmp_path) as server, a_client(server) as client:
        listed = [model.id for model in client.models.list()]
        rows = [a_row(name, "why?", model=name) for name in listed]
        rows.append(a_row("nobody", "why?", model="fake:nobody"))
        batch = run(client, rows)
        found = answers(client, batch.output_file_id)
        assert set(found) == set(listed)
        body = found["fake:polite"]["response"]["body"]
        assert body["model"] == "fake:polite"
        assert body["choices"][0]["text"] == expected_text(app.prompt + "why?", 6)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > len(app.prompt) - 8
        assert body["choices"][0]["text"] != found["fake"]["response"]["body"]["choices"][0]["text"]
        failed = answers(client, batch.error_file_id)
        assert failed["nobody"]["error"]["code"] == "model_not_found"
        server.settle()


def test_rows_may_have_tools(tmp_path: Path) -> None:
    engines = FakeEngines(num_pages=512, max_model_len=800, template=HERMES)
    app = App("polite", "You answer politely. ")
    body = {
        "model": "fake:polite",
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
    }
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with a_server([app], data_dir=tmp_path, engines=engines) as server, a_client(server) as client:
        batch = run(client, [row], endpoint="/v1/chat/completions")
        found = answers(client, batch.output_file_id)["a"]["response"]["body"]
        assert found["model"] == "fake:polite"
        (call,) = found["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        server.settle()


def test_responses_of_a_batch_are_answered(shared: Running) -> None:
    """Issue 51: rows for /v1/responses were refused."""
    asked = {"instructions": "Be brief.", "input": "Hi", "max_output_tokens": 7, "temperature": 0}
    wrong: list[AnyJson] = [
        {"input": "Hi", "previous_response_id": "resp_x"},
        {"input": "Hi", "max_output_tokens": 0},
    ]
    rows: list[AnyJson] = [
        {"custom_id": str(place), "method": "POST", "url": "/v1/responses", "body": body}
        for place, body in enumerate([asked, *wrong])
    ]
    with a_client(shared) as client:
        batch = run(client, [*rows, a_row("chat", "x")], endpoint="/v1/responses")
        body = answers(client, batch.output_file_id)["0"]["response"]["body"]
        alone = client.responses.create(model="fake", **asked)  # type: ignore[call-overload]
        found = openai.types.responses.Response.model_validate(body)
        assert found.output_text == alone.output_text
        assert found.usage is not None
        assert found.usage.output_tokens == alone.usage.output_tokens
        assert found.instructions == "Be brief."
        failed = answers(client, batch.error_file_id)
    assert failed["1"]["error"]["param"] == "previous_response_id"
    assert failed["2"]["error"]["param"] == "max_output_tokens"
    assert failed["chat"]["error"]["code"] == "mismatched_url"


def test_files_expire_when_the_client_says(shared: Running) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    with a_client(shared) as client:
        made = client.files.create(
            file=("in.jsonl", lines([a_row("a", "x")])), purpose="batch", expires_after=after
        )
        assert made.expires_at == made.created_at + 3600
        batch = run(client, [a_row("a", "x")], output_expires_after=after)
        assert batch.output_file_id is not None
        output = client.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 3600
        for wrong in ({"anchor": "created_at", "seconds": 5}, {"seconds": 3600}):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                client.files.create(
                    file=("f", b"x"),
                    purpose="batch",
                    expires_after=wrong,  # type: ignore[arg-type]
                )


def test_a_batch_is_answered_as_the_client_expects(shared: Running) -> None:
    rows = [a_row(f"r{n}", f"row number {n}") for n in range(20)]
    rows += [a_row("bad", "x", temperature=-1), a_row("other", "x", model="gpt-9")]
    rows.append(a_row("chat", "x") | {"url": "/v1/chat/completions"})
    rows.append(a_row("form", "x", guided_json=BEYOND, max_tokens=100))
    num_timed = timed_requests(shared)
    with a_client(shared) as client:
        batch = run(client, rows, metadata={"for": "me"})
        assert timed_requests(shared) - num_timed == 20
        assert batch.status == "completed"
        assert batch.metadata == {"for": "me"}
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (24, 20)
        assert batch.request_counts.failed == 4
        found = answers(client, batch.output_file_id)
        for n in range(20):
            body = found[f"r{n}"]["response"]["body"]
            assert body["choices"][0]["text"] == expected_text(f"row number {n}", 6)
        errors = answers(client, batch.error_file_id)
        assert {name: row["error"]["code"] for name, row in errors.items()} == {
            "bad": "invalid_value",
            "other": "model_not_found",
            "chat": "invalid_row",
            "form": "form_limit_reached",
        }
        assert batch.id in [item.id for item in client.batches.list(limit=1)]
    shared.settle()


def test_choices_of_a_batch_are_scored(shared: Running) -> None:
    client, body = a_client(shared), {"prompt": "it is", "choices": [" a", " bc", " bd"]}
    rows = [{"custom_id": "a", "method": "POST", "url": "/v1/score", "body": body}]
    rows.append(a_row("b", "why?"))
    batch = run(client, rows, endpoint="/v1/score")
    assert set(answers(client, batch.error_file_id)) == {"b"}  # the row is for another endpoint
    scores = answers(client, batch.output_file_id)["a"]["response"]["body"]
    asked = shared.post("/v1/score", body, ALICE).json()
    assert scores["choices"] == asked["choices"]
    assert scores["best"] == asked["best"]


def test_rows_that_fail_at_once_do_not_stop_a_batch(shared: Running) -> None:
    rows = [a_row(f"r{n}", "x", model="gpt-9") for n in range(100)]
    with a_client(shared) as client:
        batch = run(client, [*rows, a_row("good", "x")])
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 100)


@pytest.mark.parametrize(
    ("url", "asked"),
    [("/v1/chat/completions", {"max_tokens": 1}), ("/v1/score", {"choices": ["yes", "no"]})],
)
def test_cached_texts_of_a_batch_are_used_for_its_key_only(
    shared: Running, url: str, asked: AnyJson
) -> None:
    """The time that a prompt takes must not reveal whether another tenant has sent it."""
    messages = [{"role": "user", "content": f"A text that only Alice's batch of {url} has had."}]
    body = {"messages": messages} | asked
    rows: list[AnyJson] = [{"custom_id": "a", "method": "POST", "url": url, "body": body}]
    with a_client(shared) as client:
        assert run(client, rows, endpoint=url).status == "completed"
    tokenizer = shared.gateway.engine.tokenizer
    text = tokenizer.chat_text(messages)
    salts = [each.salt for each in KeyRing({"alice": ALICE, "bob": BOB}).tenants]
    new = [tokenizer.look_up_chat_text(text, salt).num_new_chars > 0 for salt in [*salts, b""]]
    assert new == [False, True, True]


def test_files_can_be_made_read_listed_and_deleted(shared: Running) -> None:
    with a_client(shared) as client:
        made = client.files.create(file=("../../evil\\name.jsonl", b"abc\n"), purpose="batch")
        assert (made.bytes, made.filename, made.purpose) == (4, "name.jsonl", "batch")
        assert client.files.retrieve(made.id) == made
        assert made.id in [item.id for item in client.files.list()]
        assert client.files.content(made.id).read() == b"abc\n"
        assert client.files.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(made.id)


def test_lists_are_returned_in_pages(shared: Running) -> None:
    with a_client(shared, BOB) as client:
        made = {client.files.create(file=("f", b"x"), purpose="batch").id for _ in range(5)}
        assert {
            item.id for item in client.files.list(limit=2)
        } == made  # the client asks for all pages of the list
        page = shared.get("/v1/files?limit=2", BOB).json()
        assert (len(page["data"]), page["has_more"]) == (2, True)
        for query in ("limit=0", "limit=x", "limit=-1", "after=file-none"):
            assert shared.get(f"/v1/files?{query}", BOB).status_code == 400
        for file_id in made:
            client.files.delete(file_id)


def test_files_and_batches_belong_to_their_key(shared: Running) -> None:
    with a_client(shared) as client, a_client(shared, BOB) as other:
        batch = run(client, [a_row("a", "a secret")])
        for call in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(str(batch.output_file_id)),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.BadRequestError):
            other.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
        assert batch.id not in [item.id for item in other.batches.list()]
    for path in ("/v1/files", "/v1/batches", f"/v1/files/{batch.input_file_id}/content"):
        assert shared.get(path).status_code == 401


TRICKS = [
    "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "file-%00", "file-" + "0" * 23,
    "file-" + "g" * 24, "file-" + "0" * 24 + "%0a", "a" * 3000, "%ff%fe", "file-*", "~root",
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_path_tricks_find_nothing(shared: Running, name: str) -> None:
    for method, path in (
        ("GET", f"/v1/files/{name}"),
        ("GET", f"/v1/files/{name}/content"),
        ("DELETE", f"/v1/files/{name}"),
        ("GET", f"/v1/batches/{name}"),
        ("POST", f"/v1/batches/{name}/cancel"),
    ):
        response = shared.send(method, path, None, ALICE)
        assert response.status_code in (404, 405), response.text
    body = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert shared.post("/v1/batches", body, ALICE).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"n" * 65: "x"}}, "metadata"),
        ({"metadata": {"n": "x" * 513}}, "metadata"),
        ({"more": 1}, "more"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_the_error_for_a_wrong_batch_names_the_field(
    shared: Running, body: AnyJson, param: str
) -> None:
    right = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}
    response = shared.post("/v1/batches", right | body, ALICE)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def send_form(running: Running, **parts: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {ALICE}"}
    return running.client.post("/v1/files", headers=headers, **parts)


def test_wrong_multipart_forms_are_refused(shared: Running) -> None:
    before = len(shared.get("/v1/files", ALICE).json()["data"])
    file = {"file": ("f", b"x")}
    assert send_form(shared, files=file).json()["error"]["param"] == "purpose"
    wrong = send_form(shared, files=file, data={"purpose": "fine-tune"})
    assert wrong.json()["error"]["param"] == "purpose"
    assert send_form(shared, files=file, data={"purpose": "b" * 9999}).status_code == 400
    other = send_form(shared, files=file, data={"purpose": "batch", "expires_after": "5"})
    assert other.json()["error"]["param"] == "expires_after"
    assert send_form(shared, data={"purpose": "batch"}, files={"x": b""}).status_code == 400
    assert send_form(shared, json={"purpose": "batch"}).status_code == 415
    kind = {"authorization": f"Bearer {ALICE}", "content-type": "multipart/form-data; boundary=b"}
    for data in (
        b"",
        b"garbage",
        b"--b\r\n",
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx',
    ):
        response = shared.client.post("/v1/files", content=data, headers=kind)
        assert response.status_code == 400, data
    assert len(shared.get("/v1/files", ALICE).json()["data"]) == before


def test_a_huge_file_is_refused_with_and_without_a_length_header(shared: Running) -> None:
    big = b"x" * (2 << 20)
    assert send_form(shared, files={"file": big}, data={"purpose": "batch"}).status_code == 413

    def pieces() -> Iterator[bytes]:  # sent without a length
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 65536

    kind = {"authorization": f"Bearer {ALICE}", "content-type": "multipart/form-data; boundary=b"}
    try:
        response = shared.client.post("/v1/files", content=pieces(), headers=kind)
    except httpx.NetworkError:
        return  # the server closed the connection
    assert response.status_code == 413


def test_simultaneous_uploads_do_not_exceed_the_storage_limit(tmp_path: Path) -> None:
    """All of them are in progress before the first is complete."""
    size, num_uploads = 60_000, 8
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    tail = b"\r\n--b--\r\n"
    limits = ServerLimits(upload_bytes=size + 1000, stored_bytes=3 * (size + 1000))
    kind = {"content-type": "multipart/form-data; boundary=b"}
    with a_server(data_dir=tmp_path, limits=limits) as running:
        begun = Barrier(num_uploads)

        def upload(number: int) -> int:
            def pieces() -> Iterator[bytes]:
                yield head
                begun.wait(LIMIT_S)
                sleep(0.2)
                yield b"x" * size + tail

            headers = dict(kind)
            if number % 2:  # with a length, as most clients send
                headers["content-length"] = str(len(head) + size + len(tail))
            url = f"{running.url}/v1/files"
            try:
                return httpx.post(url, content=pieces(), headers=headers, timeout=300).status_code
            except httpx.NetworkError:
                return 413  # the server closed the connection

        with ThreadPoolExecutor(num_uploads) as pool:
            codes = list(pool.map(upload, range(num_uploads)))
        assert sorted(codes) == [200] * 3 + [413] * (num_uploads - 3)
        stored = running.get("/v1/files").json()["data"]
        assert sum(item["bytes"] for item in stored) == 3 * size
        full = running.client.post(
            "/v1/files", files={"file": b"x" * 5000}, data={"purpose": "batch"}
        )
        assert full.json()["error"]["code"] == "storage_full"
        running.send("DELETE", f"/v1/files/{stored[0]['id']}")
        again = running.client.post(
            "/v1/files", files={"file": b"x" * size}, data={"purpose": "batch"}
        )
        assert again.status_code == 200


def test_an_upload_that_pauses_too_long_is_refused(tmp_path: Path) -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: [::1]\r\n"
        "connection: close\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        "content-length: 5000\r\n\r\n--b\r\n"
    )
    with a_server(data_dir=tmp_path, limits=ServerLimits(body_s=0.5)) as running:
        assert b" 408 " in running.raw(head.encode()).split(b"\r\n", 1)[0] + b" "


def test_batches_give_way_to_interactive_requests(shared: Running) -> None:
    finished, num_before = shared.engines.finished, len(shared.engines.finished)
    engine = shared.engines.engine
    assert engine is not None
    waiting = shared.hold_when(lambda: engine.engine.num_waiting > 0)  # rows wait for pages
    rows = [
        a_row(f"r{n}", f"slow row number {n}", max_tokens=60, ignore_eos=True) for n in range(300)
    ]
    with a_client(shared) as client:
        made = client.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
        batch = client.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        )
        waiting.wait()
        answered = shared.hold_when(
            lambda: any(not name.startswith("batch") for name in finished[num_before:])
        )
        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(shared.complete, "hello", BOB, max_tokens=2)
            until(lambda: shared.gateway.gate.open_answers == 1)
            shared.on_loop(asyncio.sleep(0))  # it is on its way to the engine
            waiting.release()
            answer = answering.result()
        assert answer["usage"]["completion_tokens"] == 2
        assert client.batches.retrieve(batch.id).status == "in_progress", (
            "the batch ended before the interactive request"
        )
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        answered.release()
        until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        assert client.batches.cancel(batch.id).status == "cancelled"
    shared.settle()


def test_no_row_is_started_while_there_are_many_clients(shared: Running) -> None:
    runner = shared.gateway.batches.runner  # type: ignore[union-attr]
    assert runner.may_start()
    shared.gateway.gate.open_answers += 9
    try:
        assert not runner.may_start()
    finally:
        shared.gateway.gate.open_answers -= 9


def test_a_batch_does_not_wait_for_the_batch_of_another_key(shared: Running) -> None:
    shared.pause(0.01)
    begun = shared.hold_after(1)
    finished, num_before = shared.engines.finished, len(shared.engines.finished)
    rows = [a_row(f"r{n}", f"row {n}", max_tokens=30, ignore_eos=True) for n in range(800)]
    with a_client(shared) as client, a_client(shared, BOB) as other:
        made = client.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
        long, queued = (
            client.batches.create(
                input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
            )
            for _ in range(2)
        )
        until(lambda: client.batches.retrieve(long.id).status == "in_progress")
        begun.wait()
        answered = shared.hold_when(
            lambda: any(not name.startswith(long.id) for name in finished[num_before:])
        )
        made = other.files.create(
            file=("in", lines([a_row("q", "x", max_tokens=1)])), purpose="batch"
        )
        quick = other.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: other.batches.retrieve(quick.id).status == "in_progress")
        begun.release()
        until(lambda: other.batches.retrieve(quick.id).status == "completed")
        assert client.batches.retrieve(long.id).status == "in_progress"
        assert client.batches.retrieve(queued.id).status == "validating"
        answered.release()
        for batch in (queued, long):
            client.batches.cancel(batch.id)
        for batch in (queued, long):
            until(lambda: client.batches.retrieve(batch.id).status == "cancelled")  # noqa: B023
    shared.settle()


def test_without_a_data_folder_there_are_no_files_and_batches(server: Running) -> None:
    for path in ("/v1/files", "/v1/batches"):
        response = server.get(path)
        assert response.status_code == 404
        assert "--data-dir" in response.json()["error"]["message"]


def test_the_number_of_files_per_key_is_limited(tmp_path: Path) -> None:
    form: dict[str, Any] = {"files": {"file": ("in", b"{}")}, "data": {"purpose": "batch"}}
    with a_server(data_dir=tmp_path, limits=ServerLimits(stored_files=2)) as running:
        made = [running.client.post("/v1/files", **form) for _ in range(3)]
        assert [reply.status_code for reply in made] == [200, 200, 413]
        assert (
            made[2].json()["error"]["message"] == "this key may have at most 2 files: delete some"
        )
        running.client.delete(f"/v1/files/{made[0].json()['id']}")
        assert running.client.post("/v1/files", **form).status_code == 200


@pytest.mark.parametrize("row", [a_row("a", "x"), {"custom_id": "bad"}], ids=["answers", "errors"])
def test_answers_of_batches_count_towards_the_storage_limit(tmp_path: Path, row: AnyJson) -> None:
    """Otherwise many batches over one upload, or many rows in it, could fill the disk."""
    rows = [row | {"custom_id": f"r{n}"} for n in range(300)]
    limits = ServerLimits(stored_bytes=len(lines(rows)) + 20_000)
    with a_server(data_dir=tmp_path, limits=limits) as running, a_client(running) as client:
        batch = run(client, rows)
        assert batch.status == "failed"
        assert "exceed the storage limit of this key" in str(batch.errors)
        kept = answers(client, batch.output_file_id or batch.error_file_id)
        assert 0 < len(kept) < 300
        stored = sum(item.bytes for item in client.files.list())
        assert stored < limits.stored_bytes + 100_000, (
            "only answers in progress may exceed the limit"
        )
        with pytest.raises(openai.APIStatusError, match="delete some") as refused:
            client.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
        assert refused.value.status_code == 413
        client.files.delete(str(batch.output_file_id or batch.error_file_id))
        assert run(client, [a_row("a", "x")]).status == "completed"


def test_uploads_are_refused_if_answers_of_a_running_batch_leave_no_room(tmp_path: Path) -> None:
    limits = ServerLimits(stored_bytes=45_000)
    rows = [a_row(f"r{n}", f"row {n}", max_tokens=3 + n) for n in range(60)]
    form: dict[str, Any] = {"files": {"file": ("in", b"x" * 30_000)}, "data": {"purpose": "batch"}}
    with a_server(data_dir=tmp_path, limits=limits) as running, a_client(running) as client:
        running.hold_when(lambda: len(running.engines.finished) > 40)
        made = client.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
        client.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        )
        desk = running.gateway.batches
        assert desk is not None
        (batch,) = desk.batches.opened()
        until(lambda: desk.batches.work_bytes(batch.owner) > 10_000)
        assert sum(item.bytes for item in client.files.list()) + 31_000 < limits.stored_bytes
        assert running.client.post("/v1/files", **form).status_code == 413


def test_a_killed_server_continues_its_batches_after_a_restart(tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path)]
    rows = [a_row(f"r{n}", f"row {n % 50} of many", max_tokens=40) for n in range(400)]
    rows.append(a_row("bad", "x", n=0))
    with a_process(flags, "mortal") as first:
        form = {"files": {"file": ("in", lines(rows))}, "data": {"purpose": "batch"}}
        made = first.request("POST", "/v1/files", **form).json()
        body = {
            "input_file_id": made["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch_id = first.request("POST", "/v1/batches", json=body).json()["id"]
        assert first.popen.wait(300) == -SIGKILL
    with a_process(flags) as second:

        def batch() -> AnyJson:
            found: AnyJson = second.request("GET", f"/v1/batches/{batch_id}").json()
            return found

        # the first server wrote at least 20 answers before it was killed
        until(lambda: batch()["request_counts"]["completed"] >= 20)
        until(lambda: batch()["status"] in ENDED)
        ended = batch()
        assert ended["status"] == "completed"
        assert ended["request_counts"] == {"total": 401, "completed": 400, "failed": 1}
        text = second.request("GET", f"/v1/files/{ended['output_file_id']}/content").text
        found = [json.loads(line) for line in text.splitlines()]
        assert sorted(row["custom_id"] for row in found) == sorted(f"r{n}" for n in range(400))
        expected = [expected_text(f"row {number} of many", 40) for number in range(50)]
        for row in found:
            said = row["response"]["body"]["choices"][0]["text"]
            assert said == expected[int(row["custom_id"][1:]) % 50]
        assert second.stop() == 0


def test_flags_limit_the_size_number_and_age_of_files(tmp_path: Path) -> None:
    flags = ["--max-stored-gib", "0.0001", "--max-files", "2", "--file-ttl-s", "60"]

    def upload(num_bytes: int) -> httpx.Response:
        form = {"files": {"file": ("in", b"x" * num_bytes)}, "data": {"purpose": "batch"}}
        return process.request("POST", "/v1/files", **form)

    with a_process(["--data-dir", str(tmp_path), *flags]) as process:
        made = upload(1).json()
        assert made["expires_at"] - made["created_at"] == 60
        assert "may have at most 107374 bytes" in upload(108_000).json()["error"]["message"]
        assert upload(1).status_code == 200
        assert "may have at most 2 files" in upload(1).json()["error"]["message"]
        assert process.stop() == 0


def test_fields_that_a_row_leaves_out_come_from_generation_config(tmp_path: Path) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 2, "top_k": 3}
    row = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body}
    with (
        a_server(data_dir=tmp_path, sampling={"temperature": 0.25, "top_k": 7}) as server,
        a_client(server) as client,
    ):
        assert run(client, [row]).status == "completed"
        asked = [(s.temperature, s.top_k) for s in server.engines.samplings.values()]
        assert asked == [(0.25, 3)]


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        a_server(data_dir=tmp_path),
        pytest.raises(ConfigError, match="another server"),
        a_server(data_dir=tmp_path),
    ):
        pass
