"""Shutdown: answers finish, or end with an error at the deadline; the engine's thread ends."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread

import httpx
import pytest

from mainstem.core.json import AnyJson
from mainstem.server.http.limits import ServerLimits
from mainstem.text.tokenizer import Tokenizer
from tests.fake_engines import FakeEngines
from tests.server.running import Running, a_server, events
from tests.waiting import LIMIT_S, until


def _engine_threads() -> int:
    return sum(thread.name == "engine" for thread in threading.enumerate())


class Background:
    """A request whose outcome is checked later."""

    def __init__(self, running: Running, body: AnyJson, path: str = "/v1/completions") -> None:
        self._path = path
        self.response: httpx.Response | None = None
        self._running = running
        self._body = body
        self._thread = Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        with httpx.Client(base_url=self._running.url, timeout=LIMIT_S, verify=False) as client:
            self.response = client.post(self._path, json=self._body)

    def result(self) -> httpx.Response:
        self._thread.join(LIMIT_S)
        assert self.response is not None, "no response came"
        return self.response


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = _engine_threads()
    yield
    assert _engine_threads() == before


@pytest.mark.parametrize("is_streaming", [True, False])
def test_open_answers_finish_before_shutdown(is_streaming: bool) -> None:
    with a_server(shutdown_s=600) as running:
        hold = running.hold_after(3)
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": is_streaming}
        request = Background(running, body)
        hold.wait()
        running.server.should_exit = True
        until(lambda: running.gateway.is_draining)
        hold.release()
        response = request.result()
        assert response.status_code == 200
        if is_streaming:
            assert events(response.text)[-1] == "[DONE]"
        else:
            assert response.json()["usage"]["completion_tokens"] == 30


def test_shutdown_does_not_wait_for_idle_connections() -> None:
    """Every limit is longer than `stop` waits."""
    new, used, refused = (
        b"",
        b"GET /health HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 9\r\n",
    )
    limits = ServerLimits(header_s=600, body_s=600, idle_s=600)
    with a_server(limits=limits, shutdown_s=600) as running, ExitStack() as held:
        for start in (new, used, refused):
            address = (running.host, running.port)
            connection = held.enter_context(socket.create_connection(address, timeout=300))
            if start:
                connection.sendall(start + b"host: [::1]\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 ")
        until(lambda: len(running.server.server_state.connections) == 3)
        running.stop()


@pytest.mark.parametrize("is_streaming", [True, False])
def test_answers_that_take_too_long_end_with_an_error(is_streaming: bool) -> None:
    """The engine gives no more tokens."""
    with a_server(shutdown_s=0.3) as running:
        hold = running.hold_after(3)
        body = {"prompt": "x", "max_tokens": 700, "ignore_eos": True, "stream": is_streaming}
        request = Background(running, body)
        hold.wait()
        running.server.should_exit = True
        response = request.result()
        if is_streaming:
            assert "shutting down" in json.loads(events(response.text)[-1])["error"]["message"]
        else:
            assert response.status_code == 503
            assert "shutting down" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_second_signal_ends_open_answers_with_an_error(is_streaming: bool) -> None:
    with a_server(shutdown_s=600) as running:
        hold = running.hold_after(3)
        body = {"prompt": "x", "max_tokens": 700, "ignore_eos": True, "stream": is_streaming}
        request = Background(running, body)
        hold.wait()
        running.server.handle_exit(signal.SIGINT, None)
        until(lambda: running.gateway.is_draining)
        running.server.handle_exit(signal.SIGINT, None)
        response = request.result()
        if is_streaming:
            assert "shutting down" in json.loads(events(response.text)[-1])["error"]["message"]
        else:
            assert response.status_code == 503


LONG = "x" * 1500  # a prompt of this length is encoded on a thread


@pytest.mark.parametrize(("num_signals", "status"), [(1, 200), (2, 503)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
        ("/v1/score", {"query": LONG, "items": ["x"], "label_token_ids": [1, 2]}),
    ],
)
def test_a_second_signal_also_ends_requests_that_are_being_encoded(
    path: str, body: AnyJson, num_signals: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one signal they are answered, like other open requests."""
    is_encoding, may_go_on = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def encode_later(tokenizer: Tokenizer, text: str) -> list[int]:
        is_encoding.set()
        assert may_go_on.wait(60)
        return encode(tokenizer, text)

    engines = FakeEngines(num_pages=512, max_model_len=2000)
    with a_server(shutdown_s=600, engines=engines) as running:
        monkeypatch.setattr(Tokenizer, "encode", encode_later)
        request = Background(running, body, path)
        assert is_encoding.wait(60)
        for _ in range(num_signals):
            running.server.handle_exit(signal.SIGINT, None)
            until(lambda: running.gateway.is_draining)
        running.on_loop(asyncio.sleep(0))  # the signal's work on the loop is done
        may_go_on.set()
        response = request.result()
    assert response.status_code == status, response.text
    assert ("shutting down" in response.text) == (status == 503)
