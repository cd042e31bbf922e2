"""Requests of hostile or faulty clients get a clear 4xx, and the engine continues."""

import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np
import pytest

from mainstem.core.step import Step
from mainstem.server.http.auth import ANYBODY
from mainstem.server.http.faults import ApiError
from mainstem.server.http.limits import RequestGate, ServerLimits
from tests.fake_engines import FakeEngines
from tests.server.running import Running, a_server
from tests.waiting import LIMIT_S, until

TIGHT = ServerLimits(body_bytes=20_000, header_bytes=4_000, header_s=60.0, open_answers=6)
HASTY = ServerLimits(header_s=1.0, body_s=1.0)


@pytest.fixture(scope="module")
def tight_server() -> Iterator[Running]:
    with a_server(limits=TIGHT) as running:
        yield running


@pytest.fixture
def tight(tight_server: Running) -> Iterator[Running]:
    """A server with small limits; after the test, no request may be open and no page held."""
    yield tight_server
    tight_server.settle()
    assert tight_server.complete("alive?", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.fixture(scope="module")
def hasty_server() -> Iterator[Running]:
    with a_server(limits=HASTY) as running:
        yield running


@pytest.fixture
def hasty(hasty_server: Running) -> Iterator[Running]:
    """A server with short time limits, for `serial` tests; after each, no request may be open."""
    yield hasty_server
    hasty_server.settle()


def send(server: Running, data: bytes, **headers: str) -> httpx.Response:
    kind = {"content-type": "application/json"}
    return server.client.post("/v1/completions", content=data, headers=kind | headers)


@contextmanager
def refused_early(server: Running, path: bytes, length: int) -> Iterator[socket.socket]:
    """A connection that has received the reply to a request before it sent the request's body."""
    head = b"%b %b HTTP/1.1\r\nhost: [::1]\r\ncontent-length: %d\r\n\r\n"
    method = b"GET" if path == b"/health" else b"POST"
    with socket.create_connection((server.host, server.port), timeout=300) as connection:
        connection.sendall(head % (method, path, length))
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        reply_head, _, reply = received.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", reply_head)
        assert found is not None
        while len(reply) < int(found[1]):
            reply += connection.recv(65536)
        yield connection


# --- sizes and shapes ----------------------------------------------------------------------------


def test_a_body_whose_announced_size_exceeds_the_limit_is_refused(tight: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 99999999999\r\n\r\n"
    with socket.create_connection((tight.host, tight.port), timeout=300) as connection:
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_is_refused_when_it_exceeds_the_limit(tight: Running) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    response = tight.client.post(
        "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413


def test_headers_over_the_limit_are_refused(tight: Running) -> None:
    lines = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 100) for i in range(100))
    assert tight.raw(b"GET /health HTTP/1.1\r\nhost: [::1]\r\n" + lines + b"\r\n").startswith(
        b"HTTP/1.1 431"
    )


def test_headers_that_never_end_are_refused(tight: Running) -> None:
    assert tight.raw(b"GET /health HTTP/1.1\r\nx: " + b"y" * 10_000).startswith(b"HTTP/1.1 431")


def test_deep_json_is_refused(tight: Running) -> None:
    for data in (b'{"a":' * 3000, b"[" * 9000, b'{"prompt":' + b"[" * 40 + b"]" * 40 + b"}"):
        response = send(tight, data)
        assert response.status_code == 400
        assert "nested" in response.json()["error"]["message"]


def test_brackets_in_texts_do_not_count_as_nesting(tight: Running) -> None:
    assert tight.complete("[" * 100 + '\\"[[' * 20, max_tokens=1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"x"',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": ' + b"9" * 6000 + b"}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b"\x00\x01\x02",
        "ÿþ{}".encode("utf-16"),
    ],
)
def test_a_body_that_is_not_a_json_object_in_utf8_is_refused(tight: Running, data: bytes) -> None:
    response = send(tight, data)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", ["cache_salt", "model", "app", "stop", "user", "prompt", "x"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_a_lone_surrogate_is_refused_in_any_field(tight: Running, path: str, field: str) -> None:
    for value in (rb'"\ud800"', rb'["\uDFFF"]', rb'{"\udc00": 1}'):
        data = b'{"%s": %s}' % (field.encode(), value)
        kind = {"content-type": "application/json"}
        response = tight.client.post(path, content=data, headers=kind)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


def test_a_pair_of_surrogate_escapes_is_one_character(server: Running) -> None:
    found = server.client.post(
        "/tokenize",
        content=rb'{"prompt": "\ud83d\ude00"}',
        headers={"content-type": "application/json"},
    )
    assert found.json()["count"] == 4


def test_other_content_types_are_refused(tight: Running) -> None:
    """A form on another site's page could send these without a preflight."""
    body = json.dumps({"prompt": "x"}).encode()
    response = tight.client.post(
        "/v1/completions", content=body, headers={"content-type": "text/plain"}
    )
    assert response.status_code == 415


def test_a_body_that_says_it_is_compressed_is_refused(tight: Running) -> None:
    """Bodies are not decompressed; an error about bad JSON would not say why."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    plain = {"content-type": "application/json"}
    for encoding, content in (("gzip", gzip.compress(body)), ("gzip", body), ("br", body)):
        headers = plain | {"content-encoding": encoding}
        response = tight.client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 415
        assert encoding in response.json()["error"]["message"]
    headers = plain | {"content-encoding": "identity"}
    response = tight.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "prompt"),
        ("/v1/score", "prompt"),
    ],
)
def test_the_error_for_a_missing_prompt_names_the_field(
    tight: Running, path: str, field: str
) -> None:
    response = tight.post(path, {"choices": ["a"]} if path == "/v1/score" else {})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (field, "invalid_value")


def test_a_million_stop_strings_are_refused(server: Running) -> None:
    began = time.perf_counter()
    response = server.post("/v1/completions", {"prompt": "x", "stop": ["ab"] * 1_000_000})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"
    assert len(response.content) < 2000
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "n": 10**9},
        {"prompt": ["x"] * 5000},
        {"prompt": ["x"] * 100, "n": 100},
        {"prompt": "x", "logprobs": 10**9},
        {"prompt": "x", "max_tokens": -5},
        {"prompt": list(range(100_000))},
        {"prompt": "x", "stop": ["y" * 100_000]},
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}},
        {"prompt": "x", "stop_token_ids": [1] * 5000},
        {"prompt": "x", "x" * 100_000: 1},
    ],
)
def test_huge_values_are_refused(server: Running, body: dict[str, object]) -> None:
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert len(response.content) < 3000


def test_messages_cannot_inject_into_the_template(server: Running) -> None:
    for content in ("{{ 7*7 }}", "{% for x in ().__class__.__mro__ %}{{x}}{% endfor %}"):
        chat = [{"role": "user", "content": content}]
        found = server.post("/tokenize", {"messages": chat}).json()
        text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
        assert text == f"<user>{content}\n<assistant>"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "x",
        [5],
        [{}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        None,
    ],
)
def test_odd_messages_are_refused(server: Running, messages: object) -> None:
    response = server.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_request_cannot_have_its_own_template(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}
    assert server.post("/v1/chat/completions", body).json()["error"]["param"] == "chat_template"


# --- slow clients --------------------------------------------------------------------------------


@pytest.mark.serial
def test_headers_must_come_in_time(hasty: Running) -> None:
    for start in (b"", b"GET /health HTTP/1.1\r\nhost: [::1]\r\nx-slow: "):
        began = time.perf_counter()
        assert hasty.raw(start).startswith(b"HTTP/1.1 408")
        assert time.perf_counter() - began < LIMIT_S


@pytest.mark.serial
def test_headers_that_trickle_in_do_not_gain_time(hasty: Running) -> None:
    with socket.create_connection((hasty.host, hasty.port), timeout=300) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        began = time.perf_counter()
        received = b""
        connection.settimeout(0.05)
        while time.perf_counter() - began < LIMIT_S and not received:
            try:
                connection.sendall(b"x: y\r\n")
                received = connection.recv(4096)
            except TimeoutError:
                continue
    assert received.startswith(b"HTTP/1.1 408")
    assert time.perf_counter() - began < LIMIT_S


@pytest.mark.serial
def test_a_body_must_come_in_time(hasty: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 100\r\n\r\n{"
    with socket.create_connection((hasty.host, hasty.port), timeout=300) as connection:
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.serial
def test_bodies_that_stop_after_their_replies_end_the_connections(hasty: Running) -> None:
    """Any byte stops uvicorn's timer for idle connections."""
    kinds = [(path, rest) for path in (b"/v1/completions", b"/v1/nope", b"/health")
             for rest in (b"", b"a")]  # fmt: skip
    with ExitStack() as opened:
        connections = [
            opened.enter_context(refused_early(hasty, path, 99_999_999)) for path, _ in kinds
        ]
        for kind, connection in zip(kinds, connections, strict=True):
            connection.sendall(kind[1])
        for kind, connection in zip(kinds, connections, strict=True):
            assert connection.recv(4096) == b"", kind


@pytest.mark.serial
def test_a_body_that_goes_on_after_its_reply_ends_the_connection(hasty: Running) -> None:
    with refused_early(hasty, b"/v1/completions", 99_999_999_999) as connection:
        connection.settimeout(0.05)
        ended = False
        deadline_s = time.monotonic() + LIMIT_S
        while not ended:
            assert time.monotonic() < deadline_s, "the server reads the body without end"
            try:
                connection.sendall(b"a" * 1000)
                ended = connection.recv(4096) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True


def test_a_body_that_ends_after_its_reply_leaves_an_idle_connection() -> None:
    """The connection can be used again; if it is not, it is closed like any other."""
    health = b"GET /health HTTP/1.1\r\nhost: [::1]\r\n\r\n"
    with a_server(limits=ServerLimits(idle_s=1)) as running:
        for after, replies in ((b"", 0), (health, 1), (health + health, 2)):
            with refused_early(running, b"/v1/nope", 5) as connection:
                connection.sendall(b"12345" + after)
                received = b""
                while piece := connection.recv(4096):
                    received += piece
            assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1 ") == replies


def test_idle_connections_outlast_those_in_the_pool_of_a_proxy(server: Running) -> None:
    """Otherwise a proxy may send a request while the server closes the connection."""
    proxy_s = 60  # for which nginx and others keep a connection
    assert server.server.config.timeout_keep_alive == ServerLimits().idle_s > proxy_s


@pytest.mark.serial
def test_bytes_that_follow_a_request_do_not_end_its_answer(hasty: Running) -> None:
    """Some clients send a line end after the body. It is no head of a next request."""
    hasty.pause(0.05)
    fields = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection((hasty.host, hasty.port), timeout=300) as connection:
        connection.sendall(head + body)
        received = connection.recv(4096)
        connection.sendall(b"\r\n")
        while not received.endswith(b"0\r\n\r\n") and (piece := connection.recv(4096)):
            received += piece
    assert b"HTTP/1.1 408" not in received
    assert b"data: [DONE]" in received


@pytest.mark.serial
def test_a_second_request_on_a_connection_is_served_after_a_pause(hasty: Running) -> None:
    """The time limit does not include the wait between requests."""
    assert hasty.get("/health").status_code == 200
    time.sleep(HASTY.header_s + 0.3)
    assert hasty.get("/health").status_code == 200


# --- too many requests ---------------------------------------------------------------------------


def test_a_full_queue_answers_429_with_retry_after(tight: Running) -> None:
    tight.pause(0.1)
    body = {"prompt": "x", "n": 6, "max_tokens": 700, "stream": True, "ignore_eos": True}
    with tight.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        refused = tight.post("/v1/completions", {"prompt": "y"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert tight.get("/health").status_code == 200


def test_more_answers_than_the_queue_can_hold_get_400() -> None:
    """With 429, clients would retry requests that can never fit."""
    gate = RequestGate(ServerLimits(open_answers=4))
    with gate.enter(ANYBODY, 3), pytest.raises(ApiError) as caught, gate.enter(ANYBODY, 5):
        pass
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert "5 answers" in caught.value.message
    with gate.enter(ANYBODY, 4), pytest.raises(ApiError) as caught, gate.enter(ANYBODY, 1):
        pass
    assert caught.value.status == 429
    gate.check()


def test_the_number_of_open_requests_per_key_is_limited() -> None:
    gate = RequestGate(ServerLimits(open_requests=2))
    refused = pytest.raises(ApiError, match="2 requests open")
    with gate.enter(ANYBODY, 1), gate.enter(ANYBODY, 1), refused, gate.enter(ANYBODY, 1):
        pass
    with gate.enter(ANYBODY, 1):
        pass
    gate.check()


def test_the_number_of_requests_per_key_and_minute_is_limited() -> None:
    now = 0.0
    gate = RequestGate(ServerLimits(requests_per_minute=3), clock=lambda: now)
    for _ in range(3):
        gate.allow(ANYBODY)
    with pytest.raises(ApiError) as caught:
        gate.allow(ANYBODY)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 20
    now = 20.0
    gate.allow(ANYBODY)
    with pytest.raises(ApiError):
        gate.allow(ANYBODY)


def test_every_request_of_a_key_counts_in_its_rate() -> None:
    """Issue 51: lists, files and wrong paths did not count. Paths that watch the server do not."""
    with a_server(limits=ServerLimits(requests_per_minute=3)) as running:
        for path in ("/health", "/ready", "/metrics", "/live", "/version", "/"):
            assert running.get(path).status_code == 200
        found = [running.get(path).status_code for path in ("/v1/models", "/v1/x", "/v1/models")]
        assert found == [200, 404, 200]
        assert running.get("/v1/models").status_code == 429
        refused = running.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: [::1]\r\nhost: x\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: [::1]\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
    ],
)
def test_a_request_names_one_host(tight: Running, head: bytes, status: bytes) -> None:
    """RFC 9112, 3.2: without Host, or with several, the reply is 400."""
    with socket.create_connection((tight.host, tight.port), timeout=300) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_the_rate_limit_is_reported_to_the_client() -> None:
    with a_server(limits=ServerLimits(requests_per_minute=1)) as running:
        assert running.post("/v1/completions", {"prompt": "x"}).status_code == 200
        refused = running.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60


# --- clients that disconnect ---------------------------------------------------------------------


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_disconnects_frees_its_pages(tight: Running, is_streaming: bool) -> None:
    tight.pause(0.1)
    body = json.dumps(
        {"prompt": "leaving", "max_tokens": 700, "ignore_eos": True, "stream": is_streaming}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection((tight.host, tight.port), timeout=300) as connection:
        connection.sendall(head + body)
        until(lambda: tight.gateway.engine.snapshot.num_running == 1)
    until(lambda: tight.gateway.engine.num_open == 0)
    until(lambda: tight.gateway.engine.snapshot.num_running == 0)
    assert tight.get("/live").json()["recent"][-1]["state"] == "aborted"


def test_a_client_that_stops_reading_is_disconnected() -> None:
    """The server keeps sending its answer until the socket's buffers are full."""
    body = json.dumps(
        {"prompt": "stalled", "max_tokens": 700, "n": 20, "ignore_eos": True, "stream": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: %d\r\n\r\n" % len(body)
    with a_server(limits=ServerLimits(write_s=0.5)) as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(60)
        connection.connect((running.host, running.port))
        connection.sendall(head + body)
        until(lambda: running.gateway.gate.open_answers == 20)
        until(lambda: running.gateway.gate.open_answers == 0)
        until(lambda: not running.server.server_state.connections)


# --- a poisoned request --------------------------------------------------------------------------


def test_a_step_that_fails_does_not_end_the_engine() -> None:
    engines = FakeEngines(num_pages=256)
    with a_server(engines=engines) as running:
        prompt = "computed before and after the failure of a step"
        before = running.complete(prompt, max_tokens=4)["choices"][0]["text"]

        def fail(_: object) -> None:
            engines.at_launch = None
            raise RuntimeError("poison")

        engines.at_launch = fail
        body = {"prompt": "tried again", "max_tokens": 20, "ignore_eos": True}
        response = running.post("/v1/completions", body)
        assert response.json()["usage"]["completion_tokens"] == 20
        assert running.get("/health").status_code == 200
        after = running.complete(prompt, max_tokens=4)
        assert after["choices"][0]["text"] == before
        assert running.gateway.engine.num_recoveries == 1
        running.settle()


def test_a_request_that_fails_every_step_ends_and_the_others_are_answered() -> None:
    engines, poison = FakeEngines(num_pages=256), "longer than what the others ever have " * 2
    with a_server(engines=engines) as running:

        def fail(step: Step) -> None:
            if len(poison) in np.diff(step.seq_starts):
                raise RuntimeError("poison")

        engines.at_launch = fail
        bodies: list[dict[str, object]] = [
            {"prompt": prompt, "max_tokens": 30, "ignore_eos": True}
            for prompt in ("one", "the second", poison, "the last of all")
        ]
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda body: running.post("/v1/completions", body), bodies))
        assert [reply.status_code for reply in replies] == [200, 200, 500, 200]
        error = replies[2].json()["error"]
        assert error["code"] == "step_failed"
        assert "RuntimeError: poison" in error["message"]
        assert running.get("/health").status_code == 200
        running.settle()


def test_a_stream_ends_with_the_error_of_a_failed_step() -> None:
    engines = FakeEngines(num_pages=256)
    with a_server(engines=engines) as running:
        steps = 0

        def fail(_: object) -> None:
            nonlocal steps
            steps += 1
            if steps in (5, 6):
                raise RuntimeError("poison")

        engines.at_launch = fail
        body = {"prompt": "stream", "max_tokens": 50, "stream": True, "ignore_eos": True}
        text = running.post("/v1/completions", body).text
        assert "steps failed on this request: RuntimeError: poison" in text.split("\n\n")[-2]
        assert "[DONE]" not in text
        running.settle()


def test_an_engine_that_stays_broken_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.server.link.engine_client.FIRST_RETRY_S", 1e-3)
    engines = FakeEngines(num_pages=256)
    with a_server(engines=engines) as running:

        def fail(_: object) -> None:
            raise RuntimeError("poison")

        engines.at_launch = fail
        assert running.post("/v1/completions", {"prompt": "x"}).status_code == 500
        until(lambda: running.get("/health").status_code == 503)
        assert running.get("/ready").status_code == 503
        assert running.post("/v1/completions", {"prompt": "x"}).status_code == 503
