"""Reads one streamed chat answer from an OpenAI-compatible server, with the time of each piece.

This is a small HTTP/1.1 client on asyncio streams: no other layer costs time, and no package must
be installed. Each request has its own connection, and the time to open it counts.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

from mainstem.core.errors import ConfigError
from mainstem.core.json import JsonView

MAX_LINE_BYTES = 1 << 20
MAX_HEADERS = 128


class ServerRefused(Exception):
    """The server replied, but refused the request or sent something that is no answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server, and its API key."""

    host: str
    port: int
    base_path: str
    is_tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Endpoint":
        """Make an Endpoint from `http://host:port`, perhaps with a path; a trailing `/v1` may be
        left out."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://host:port, got {url!r}")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), path, is_tls, api_key)


@dataclass(slots=True)
class StreamedAnswer:
    """The answer to one request; times are from `perf_counter`, in seconds."""

    sent_s: float
    piece_s: list[float] = field(default_factory=list)  # when each piece of text came
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # None: the server does not say
    error: str | None = None

    @property
    def num_output(self) -> int:
        """Tokens of the answer as counted by the server, or else the number of pieces."""
        return len(self.piece_s) if self.output_tokens is None else self.output_tokens

    @property
    def first_s(self) -> float:
        """Seconds to the first piece of text."""
        return self.piece_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [b - a for a, b in zip(self.piece_s, self.piece_s[1:], strict=False)]

    @property
    def total_s(self) -> float:
        return self.ended_s - self.sent_s


async def find_model(endpoint: Endpoint, timeout_s: float) -> str:
    """Return the first model that the server lists."""
    async with asyncio.timeout(timeout_s), _exchange(endpoint, "GET", "/v1/models", b"") as body:
        whole = b"".join([piece async for piece in body])
    match json.loads(whole):
        case {"data": [{"id": str(model)}, *_]}:
            return model
    raise ServerRefused("the server lists no model")


async def stream_chat(
    endpoint: Endpoint, body: JsonView, timeout_s: float, answer: StreamedAnswer | None = None
) -> StreamedAnswer:
    """Send a request and read the answer to its end. Errors of the server or the network are in
    `error`. An `answer` that is given is filled as pieces come."""
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(wanted).encode()
    answer = answer or StreamedAnswer(perf_counter())
    try:
        async with (
            asyncio.timeout(timeout_s),
            _exchange(endpoint, "POST", "/v1/chat/completions", payload) as pieces,
        ):
            await _listen(answer, pieces)
        if not answer.piece_s:
            answer.error = "no text came"
    except TimeoutError:
        answer.error = f"no end after {timeout_s:g} s"
    except (OSError, EOFError, ValueError, ServerRefused) as error:
        answer.error = str(error) or type(error).__name__
    answer.ended_s = perf_counter()
    return answer


async def _listen(answer: StreamedAnswer, pieces: AsyncIterator[bytes]) -> None:
    rest = b""
    async for piece in pieces:
        now_s = perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ServerRefused("an event is too long")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line.removeprefix(b"data:").strip()
            if event == b"[DONE]":
                return
            _take_event(answer, json.loads(event), now_s)
    raise ServerRefused("the stream ended before [DONE]")


def _take_event(answer: StreamedAnswer, event: object, now_s: float) -> None:
    if not isinstance(event, dict):
        raise ServerRefused("an event is not an object")
    if event.get("error"):
        raise ServerRefused(str(event["error"]))
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            answer.cached_tokens = details.get("cached_tokens")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if isinstance(delta, dict) and (delta.get("content") or delta.get("reasoning_content")):
            answer.text += delta.get("content") or ""
            answer.piece_s.append(now_s)


@asynccontextmanager
async def _exchange(
    endpoint: Endpoint, method: str, path: str, payload: bytes
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Send a request; yields the body of the reply piece by piece, and closes the connection
    afterwards.

    Raises ServerRefused, with what the server says, unless the status is 200.
    """
    tls = ssl.create_default_context() if endpoint.is_tls else None
    reader, writer = await asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=tls, limit=MAX_LINE_BYTES
    )
    try:
        writer.write(_head(endpoint, method, path, len(payload)) + payload)
        await writer.drain()
        status, headers = await _read_head(reader)
        async with aclosing(_body(reader, headers)) as pieces:
            if status != 200:
                said = await anext(pieces, b"")
                raise ServerRefused(f"HTTP {status}: {said[:300].decode(errors='replace')}")
            yield pieces
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _head(endpoint: Endpoint, method: str, path: str, num_bytes: int) -> bytes:
    lines = [
        f"{method} {endpoint.base_path}{path} HTTP/1.1",
        f"Host: {endpoint.host}:{endpoint.port}",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
        "Connection: close",
    ]
    if endpoint.api_key is not None:
        lines.append(f"Authorization: Bearer {endpoint.api_key}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = (await reader.readline()).split()
    if len(status_line) < 2 or not status_line[0].startswith(b"HTTP/"):
        raise ServerRefused("this is not an HTTP server")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = (await reader.readline()).decode("latin-1").strip()
        if not line:
            return int(status_line[1]), headers
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip().lower()
    raise ServerRefused("too many headers")


async def _body(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives, in any of HTTP's three framings."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(headers["content-length"]) if "content-length" in headers else None
    while left != 0 and (piece := await reader.read(1 << 16)):
        left = None if left is None else max(0, left - len(piece))
        yield piece
