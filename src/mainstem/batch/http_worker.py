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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx

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
MAX_BODY_BYTES = 1 << 30
IDLE_PART = 4  # with less than 1/4 of its possible rows in progress, a worker takes from others
OK, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, BUSY = 200, 401, 403, 404, 429
FAILED, UNAVAILABLE = 500, 503
# detect within two minutes that a machine is down, however long an answer takes
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)  # not on every system
    ),
]
BROKEN = (httpx.HTTPError, OSError, ValueError)  # the connection, or what came through it

Fill = Callable[[Task, Json], Json]  # adds the job's defaults to a row's body


def check_url(url: str) -> None:
    """Raise ConfigError if it cannot be a server's URL."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--workers: {url!r} is not a URL ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.userinfo:
        raise ConfigError(f"--workers: {url!r} is not of the form http://HOST:PORT")


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
class _Answer:
    status: int
    body: Json
    retry_s: float


class HttpWorker:
    """Keeps up to `num_rows` rows in progress at one server."""

    def __init__(
        self,
        url: str,
        key: str | None,
        num_rows: int,
        fill: Fill,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name = url
        self._client = _client(url, key)
        self._patience_s = patience_s
        self._num_rows = num_rows
        self._fill = fill
        self._room = float(num_rows)  # most rows in progress; less after the server refused some
        self._waiting: deque[Task] = deque()
        self._running: dict[asyncio.Task[_Answer], Task] = {}
        self._not_before_s = 0.0  # when to send again

    async def work(self, desk: Desk) -> None:
        """See Worker."""
        try:
            while True:
                await self._wait_until_ready(desk)
                try:
                    while True:
                        await self._step(desk)
                except BROKEN as error:
                    reason = str(error) or type(error).__name__
                    desk.lose(await self._hang_up(), reason)
                    desk.give_back(self._leave())
        finally:
            desk.give_back([*await self._hang_up(), *self._leave()])
            await self._client.aclose()

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
                if (url := task.row.url) != task.row.call.kind.value:
                    reason = f"url: {url} is not supported with --workers; send chats"
                    desk.fail(task, WireError("not_supported", reason, "url"))
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

    def _hear(self, desk: Desk, task: Task, reply: _Answer) -> None:
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
            desk.retry(task, error.message)
        else:
            desk.fail(task, error)

    # --- HTTP -----------------------------------------------------------------------------------

    async def _wait_until_ready(self, desk: Desk) -> None:
        deadline_s, has_waited = monotonic() + self._patience_s, False
        while True:
            try:
                reply = await self._request("GET", "/ready", None)
                if reply.status == OK:
                    await self._ask_model(desk)
                    if has_waited:
                        desk.say("is ready; it gets rows")
                    return
                reason = f"HTTP {reply.status}: {_error(reply).message}"
                if reply.status not in (BUSY, UNAVAILABLE):
                    raise WorkerLost(f"{reason}; is it a Mainstem server?")
            except BROKEN as error:
                reason = str(error) or type(error).__name__
            if monotonic() > deadline_s:
                raise WorkerLost(f"unreachable for {self._patience_s:.0f} s ({reason})")
            if not has_waited:
                has_waited = True
                rest = f"it gets no rows, and is tried again for {self._patience_s:.0f} s"
                desk.say(f"is not ready ({reason}); {rest}")
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

    async def _ask(self, task: Task) -> _Answer:
        body = self._fill(task, row_body(task.line))
        return await self._request("POST", task.row.call.kind.value, body)

    async def _request(self, method: str, path: str, body: Json | None) -> _Answer:
        """One request on a new connection. Raises one of BROKEN."""
        payload = None if body is None else json.dumps(body).encode()
        data = bytearray()
        async with self._client.stream(method, path, content=payload) as response:
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise ValueError(f"the reply has more than {MAX_BODY_BYTES:,} bytes")
        try:
            said = json.loads(data or b"{}")
        except ValueError:
            said = {"error": {"message": data[:300].decode(errors="replace")}}
        retry = response.headers.get("retry-after", "")
        retry_s = float(retry) if retry.isdigit() else RETRY_S
        return _Answer(response.status_code, said if isinstance(said, dict) else {}, retry_s)


def _client(url: str, key: str | None) -> httpx.AsyncClient:
    """A client without proxies and cookies. An answer may take any time, so only connecting has a
    limit."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    headers["Accept-Encoding"] = "identity"
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    transport = httpx.AsyncHTTPTransport(
        # reading the certificates takes time, also where they are not used
        verify=ssl.create_default_context() if httpx.URL(url).scheme == "https" else False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        socket_options=KEEP_ALIVE,
        trust_env=False,
    )
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        transport=transport,
        trust_env=False,
    )


def _error(reply: _Answer) -> WireError:
    """A server's error, for an error row."""
    said = reply.body.get("error")
    said = said if isinstance(said, dict) else {}
    code = said.get("code") or (ENGINE_FAILED if reply.status >= FAILED else "invalid_value")
    if code == "context_length_exceeded":
        code = "prompt_too_long"  # the code in error rows
    param = said.get("param")
    message = str(said.get("message") or f"HTTP {reply.status}")
    return WireError(str(code), message, None if param is None else str(param))
