"""A worker that is a server: rows go to /v1/chat/completions and /v1/completions, many at once.

Rows are sent in the plan's order, each on its own connection, so rows with a common prefix reach
the server while the prefix is cached. A broken connection means that the server is down: its rows
are given back, and the worker checks every second whether the server is up again.
"""

import asyncio
import json
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from mainstem.batch.bundles import Task
from mainstem.batch.done import ENGINE_FAILED
from mainstem.batch.driver import POLL_S, Desk, WorkerLost
from mainstem.batch.rows import row_body
from mainstem.core.errors import ConfigError
from mainstem.core.json import Json
from mainstem.wire.errors import WireError

PATIENCE_S = 60.0  # a server that cannot be reached for longer is lost
RETRY_S = 1.0
BUSY_S = 0.5  # longest pause after a server refused rows because it had too many
CONNECT_S = 10.0
MAX_HEADERS = 100
MAX_BODY_BYTES = 1 << 30
IDLE_PART = 4  # with less than 1/4 of its possible rows in progress, a worker takes from others
OK, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, BUSY = 200, 401, 403, 404, 429
FAILED, UNAVAILABLE = 500, 503

Fill = Callable[[Task, Json], Json]  # adds the job's defaults to a row's body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and the key for it."""

    url: str
    key: str | None = None
    host: str = field(init=False)
    port: int = field(init=False)
    is_tls: bool = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise ConfigError(f"--workers: {self.url!r} is not a URL ({error})") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.username:
            raise ConfigError(f"--workers: {self.url!r} is not of the form http://HOST:PORT")
        is_tls = parts.scheme == "https"
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "port", port or (443 if is_tls else 80))
        object.__setattr__(self, "is_tls", is_tls)
        object.__setattr__(self, "path", parts.path.rstrip("/").removesuffix("/v1"))


def read_key(path: Path) -> str:
    """The key in a file of one line. No flag takes the key itself, because other users can see
    command lines."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--worker-key-file: {path} cannot be read ({error})") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"--worker-key-file: {path} must hold one key in ASCII, without spaces")
    return key


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: Json
    retry_s: float


class HttpWorker:
    """Keeps up to `num_rows` rows in progress at one server."""

    def __init__(
        self, endpoint: Endpoint, num_rows: int, fill: Fill, patience_s: float = PATIENCE_S
    ) -> None:
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._num_rows = num_rows
        self._fill = fill
        self._tls = ssl.create_default_context() if endpoint.is_tls else None
        self._room = float(num_rows)  # most rows in progress; less after the server refused some
        self._waiting: deque[Task] = deque()
        self._running: dict[asyncio.Task[_Reply], Task] = {}
        self._not_before_s = 0.0  # when to send again

    @property
    def name(self) -> str:
        return self._endpoint.url

    async def work(self, desk: Desk) -> None:
        """See Worker."""
        try:
            while True:
                await self._wait_until_ready(desk)
                try:
                    while True:
                        await self._step(desk)
                except (OSError, EOFError, ValueError) as error:  # broken connection, bad reply
                    reason = str(error) or type(error).__name__
                    desk.lose(await self._hang_up(), reason)
                    desk.give_back(self._leave())
        finally:
            desk.give_back([*await self._hang_up(), *self._leave()])

    async def _hang_up(self) -> list[Task]:
        """Cancel the rows that were sent; returns them."""
        running, self._running = self._running, {}
        for sent in running:
            sent.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return list(running.values())

    def _leave(self) -> list[Task]:
        """Forget the rows that were not sent, and return them."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    async def _step(self, desk: Desk) -> None:
        """Send rows while there is room, and take in answers."""
        if monotonic() >= self._not_before_s:
            while len(self._running) + 1 <= self._room:
                if not self._waiting:
                    self._waiting.extend(desk.take(len(self._running) < self._room / IDLE_PART))
                if not self._waiting:
                    break
                task = self._waiting.popleft()
                if task.row.choices:
                    reason = "choices: not supported with --workers; leave them out, or use --ray"
                    desk.fail(task, WireError("not_supported", reason, "choices"))
                    continue
                self._running[asyncio.create_task(self._ask(task))] = task
        if not self._running:
            await asyncio.sleep(POLL_S)
            return
        done, _ = await asyncio.wait(
            self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        for sent in sorted(done, key=lambda sent: sent.exception() is not None):
            reply = sent.result()  # raises if the connection broke
            self._hear(desk, self._running.pop(sent), reply)

    def _hear(self, desk: Desk, task: Task, reply: _Reply) -> None:
        if reply.status == OK and isinstance(reply.body.get("choices"), list):
            self._room = min(self._num_rows, self._room + 1 / self._room)
            desk.answer(task, reply.body)
            return
        error = _error(reply)
        if reply.status == BUSY:
            self._room = max(1.0, len(self._running))
            self._not_before_s = monotonic() + min(reply.retry_s, BUSY_S)
            self._waiting.appendleft(task)
        elif reply.status in (UNAUTHORIZED, FORBIDDEN):
            self._waiting.appendleft(task)
            raise WorkerLost(f"HTTP {reply.status}: {error.message}")
        elif reply.status == NOT_FOUND and error.code != "app_not_found":
            self._waiting.appendleft(task)
            raise WorkerLost(f"HTTP {reply.status}: {error.message}; is it a Mainstem server?")
        elif reply.status == UNAVAILABLE:
            self._waiting.appendleft(task)
            raise OSError(error.message)
        elif reply.status >= FAILED or reply.status == OK:
            desk.lose([task], error.message)
        else:
            desk.fail(task, error)

    # --- HTTP -----------------------------------------------------------------------------------

    async def _wait_until_ready(self, desk: Desk) -> None:
        deadline_s = monotonic() + self._patience_s
        while True:
            try:
                reply = await self._request("GET", "/ready", None)
                if reply.status == OK:
                    return await self._ask_model(desk)
                reason = f"HTTP {reply.status}: {_error(reply).message}"
                if reply.status not in (BUSY, UNAVAILABLE):
                    raise WorkerLost(f"{reason}; is it a Mainstem server?")
            except (OSError, EOFError, ValueError) as error:
                reason = str(error) or type(error).__name__
            if monotonic() > deadline_s:
                raise WorkerLost(f"unreachable for {self._patience_s:.0f} s ({reason})")
            await asyncio.sleep(RETRY_S)

    async def _ask_model(self, desk: Desk) -> None:
        """Check that the server has the same model as the other workers."""
        reply = await self._request("GET", "/v1/models", None)
        if reply.status != OK:
            raise WorkerLost(f"HTTP {reply.status}: {_error(reply).message}")
        listed = reply.body.get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict):
            raise WorkerLost("it lists no model")
        desk.check_model(str(first.get("id")))

    async def _ask(self, task: Task) -> _Reply:
        body = self._fill(task, row_body(task.line))
        return await self._request("POST", task.row.call.kind.value, body)

    async def _request(self, method: str, path: str, body: Json | None) -> _Reply:
        """One request on a new connection. Raises OSError, EOFError or ValueError."""
        endpoint = self._endpoint
        payload = b"" if body is None else json.dumps(body).encode()
        opened = asyncio.open_connection(endpoint.host, endpoint.port, ssl=self._tls)
        reader, writer = await asyncio.wait_for(opened, CONNECT_S)
        try:
            _keep_alive(writer)
            writer.write(self._head(method, path, len(payload)) + payload)
            await writer.drain()
            return await _read_reply(reader)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _head(self, method: str, path: str, num_bytes: int) -> bytes:
        endpoint = self._endpoint
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host  # IPv6
        lines = [
            f"{method} {endpoint.path}{path} HTTP/1.1",
            f"Host: {host}:{endpoint.port}",
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
            "Connection: close",
        ]
        if endpoint.key is not None:
            lines.append(f"Authorization: Bearer {endpoint.key}")
        return "\r\n".join([*lines, "", ""]).encode()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Detect within two minutes that a machine is down, however long an answer takes."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _read_reply(reader: asyncio.StreamReader) -> _Reply:
    words = (await reader.readline()).split()
    if not words:
        raise EOFError("the server closed the connection")
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("this is not an HTTP server")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
        if len(headers) > MAX_HEADERS:
            raise ValueError("too many headers")
    data = await _read_body(reader, headers)
    try:
        body = json.loads(data or b"{}")
    except ValueError:
        body = {"error": {"message": data[:300].decode(errors="replace")}}
    retry = headers.get("retry-after", "")
    retry_s = float(retry) if retry.isdigit() else RETRY_S
    return _Reply(int(words[1]), body if isinstance(body, dict) else {}, retry_s)


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        pieces: list[bytes] = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            _check_size(sum(map(len, pieces)) + size)
            pieces.append((await reader.readexactly(size + 2))[:-2])
        return b"".join(pieces)
    if "content-length" in headers:
        return await reader.readexactly(_check_size(int(headers["content-length"])))
    return await reader.read()


def _check_size(num_bytes: int) -> int:
    if not 0 <= num_bytes <= MAX_BODY_BYTES:
        raise ValueError(f"the server announced a reply of {num_bytes} bytes, which is refused")
    return num_bytes


def _error(reply: _Reply) -> WireError:
    """A server's error, for an error row."""
    said = reply.body.get("error")
    said = said if isinstance(said, dict) else {}
    code = said.get("code") or (ENGINE_FAILED if reply.status >= FAILED else "invalid_value")
    if code == "context_length_exceeded":
        code = "prompt_too_long"  # the code in error rows
    param = said.get("param")
    message = str(said.get("message") or f"HTTP {reply.status}")
    return WireError(str(code), message, None if param is None else str(param))
