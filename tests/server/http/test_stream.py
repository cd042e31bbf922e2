"""Streams send pings while they are silent, and every client ignores these."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from itertools import islice
from threading import Event

import pytest
from openai import OpenAI
from starlette.types import Message, Send

from mainstem.core.json import AnyJson
from mainstem.server.http import stream
from mainstem.server.http.stream import PING, EventStream
from mainstem_bench.sse_client import Endpoint, stream_chat
from tests.server.running import Running

CHAT = [{"role": "user", "content": "hello"}]
BODIES: dict[str, AnyJson] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}
ENDS = {
    "/v1/completions": "data: [DONE]",
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "event: response.incomplete",
    "/v1/messages": "event: message_stop",
}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams send a ping after a hundredth of a second."""
    monkeypatch.setattr(stream, "PING_S", 0.01)


class Held:
    """Holds back the steps of a server's engine until pings were sent."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_pings = 0
        self._go = Event()
        send = EventStream.__call__

        async def counted(self_: EventStream, scope: object, receive: object, out: Send) -> None:
            async def count(message: Message) -> None:
                await out(message)
                self.num_pings += message.get("body") == PING
                if self.num_pings == 3:
                    self._go.set()

            await send(self_, scope, receive, count)  # type: ignore[arg-type]

        def wait(_: object) -> None:
            assert self._go.wait(60), "no ping was sent"

        monkeypatch.setattr(EventStream, "__call__", counted)
        server.engines.at_step = wait


@pytest.fixture
def held(server: Running, often: None, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(server, monkeypatch)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_for_the_engine_sends_pings(
    server: Running, often: None, path: str
) -> None:
    """The engine goes on after the client has received a ping."""
    go = Event()

    def wait(_: object) -> None:
        assert go.wait(60), "the client received no ping"

    server.engines.at_step = wait
    mark = 'data: {"type":"ping"}' if path == "/v1/messages" else ": ping"
    with server.client.stream("POST", path, json=BODIES[path] | {"stream": True}) as reply:
        lines = reply.iter_lines()
        # the first ping of Messages is part of the opening
        assert len(list(islice((line for line in lines if line == mark), 2))) == 2
        go.set()
        assert ENDS[path] in "\n".join(lines)


def test_the_openai_client_ignores_pings(server: Running, held: Held) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as client:
        chunks = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=5,
            stream=True,
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert held.num_pings >= 3
        whole = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=5
        )
    assert said == whole.choices[0].message.content


def test_the_openai_client_ignores_pings_in_responses(server: Running, held: Held) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as client:
        events = client.responses.create(
            model="fake", input="hello", max_output_tokens=5, stream=True
        )
        said = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert held.num_pings >= 3
        whole = client.responses.create(model="fake", input="hello", max_output_tokens=5)
    assert said == whole.output_text


def test_the_client_of_the_benchmarks_ignores_pings(server: Running, held: Held) -> None:
    body = {"model": "fake", "messages": CHAT, "max_tokens": 5, "ignore_eos": True}
    answer = asyncio.run(stream_chat(Endpoint.parse(server.url), body, 30))
    assert held.num_pings >= 3
    assert answer.error is None
    assert (len(answer.piece_s), answer.output_tokens) == (5, 5)


# --- without a server ----------------------------------------------------------------------------


def streamed(
    events: AsyncGenerator[bytes, None], send: Send, write_s: float = 60.0
) -> Callable[[], None]:
    """Return a function that sends the events to a client which stays connected."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    def run() -> None:
        made = EventStream(events, lambda error: repr(error).encode(), ExitStack(), write_s, PING)
        asyncio.run(made({}, receive, send))

    return run


async def numbered(count: int) -> AsyncGenerator[bytes, None]:
    for index in range(count):
        await asyncio.sleep(0)
        yield b"data: %d\n\n" % index


def test_pings_come_only_between_the_start_and_the_end(often: None) -> None:
    sent: list[bytes] = []
    is_open, num_misplaced = False, 0

    async def send(message: Message) -> None:
        nonlocal is_open, num_misplaced
        body = message.get("body")
        num_misplaced += body == PING and not is_open
        is_open &= body != b""
        await asyncio.sleep(0.1)  # ten times as long as a stream may be silent
        is_open |= body is None
        if body and body != PING:
            sent.append(body)

    streamed(numbered(3), send)()
    assert num_misplaced == 0
    assert sent == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]


def test_a_client_that_reads_no_pings_is_disconnected(often: None) -> None:
    """Pings must not hide from the stream that its client reads nothing."""
    is_closed = False

    async def silent() -> AsyncGenerator[bytes, None]:
        nonlocal is_closed
        try:
            yield b"data: 0\n\n"
            await asyncio.Event().wait()
        finally:
            is_closed = True

    async def send(message: Message) -> None:
        if message.get("body") == PING:
            await asyncio.Event().wait()

    streamed(silent(), send, write_s=0.1)()
    assert is_closed


def test_events_set_no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of pings does not grow with the number of tokens."""
    num_timers = 0
    call_at = asyncio.BaseEventLoop.call_at

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal num_timers
        num_timers += 1
        return call_at(*args, **kwargs)  # type: ignore[arg-type]

    async def send(message: Message) -> None:
        pass

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", counted)
    monkeypatch.setattr(stream, "PING_S", 600.0)
    streamed(numbered(10_000), send, write_s=2400.0)()
    assert num_timers == 1
