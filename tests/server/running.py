"""A server over FakeRunner that listens on a loopback port; tests can access its engine."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any, TypeVar

import httpx
import uvloop

from mainstem.cli.serve import APPS_FILE, Server
from mainstem.core.config import EngineConfig
from mainstem.core.json import AnyJson
from mainstem.core.step import Step
from mainstem.server.apps import AppFile, AppRegistry
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Access, KeyRing
from mainstem.server.http.limits import ServerLimits
from mainstem.server.link.engine_client import EngineClient
from mainstem.server.served_model import ServedModel
from mainstem.text.encoding import App
from mainstem.text.sessions import SessionLimits, Sessions
from tests.fake_engines import FakeEngines
from tests.server.thread_engine import ThreadEngine
from tests.waiting import LIMIT_S, until

T = TypeVar("T")

ALICE, BOB, ADMIN = "alice-key-0123456789", "bob-key-0123456789ab", "admin-key-0123456789"


class Hold:
    """Stops the engine before a step, so that a test can look at what runs, however slow it is.
    What earlier steps gave has been sent to the front."""

    def __init__(self, is_time: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        self._is_time, self._is_over = is_time, is_over
        self._has_stopped, self._may_go_on = Event(), Event()

    def __call__(self, _: Step) -> None:
        if not self._may_go_on.is_set() and self._is_time():
            self._has_stopped.set()
            until(lambda: self._may_go_on.is_set() or self._is_over())

    def wait(self) -> None:
        """Wait until the engine has stopped."""
        assert self._has_stopped.wait(LIMIT_S), "it was never time"

    def release(self) -> None:
        self._may_go_on.set()


@dataclass
class Running:
    """A running server, with the calls that tests need."""

    gateway: Gateway
    engines: FakeEngines
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: Thread
    host: str
    port: int
    _hold: Hold | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @cached_property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, verify=False)

    def send(
        self, method: str, path: str, body: AnyJson | None = None, key: str | None = None
    ) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.client.request(method, path, json=body, headers=headers)

    def post(self, path: str, body: AnyJson, key: str | None = None) -> httpx.Response:
        return self.send("POST", path, body, key)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        return self.send("GET", path, None, key)

    def raw(self, data: bytes) -> bytes:
        """Send `data` on a new connection; returns all bytes until the server closes it."""
        with socket.create_connection((self.host, self.port), timeout=LIMIT_S) as connection:
            connection.sendall(data)
            received = b""
            while piece := connection.recv(65536):
                received += piece
            return received

    def complete(self, prompt: object, key: str | None = None, **fields: object) -> AnyJson:
        """Send a completion, which must succeed; returns the reply."""
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
        response = self.post("/v1/completions", body, key)
        assert response.status_code == 200, response.text
        answer: AnyJson = response.json()
        return answer

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def pause(self, seconds: float) -> None:
        """From now on every step takes this much longer."""
        self.engines.at_step = lambda _: sleep(seconds)

    def hold_when(self, is_time: Callable[[], bool]) -> Hold:
        """From now on the engine stops before a step if it `is_time`, until it is released or
        the server closes the engine."""
        hold = self._hold = Hold(is_time, self.gateway.engine._closing.is_set)
        self.engines.at_launch = hold
        return hold

    def hold_after(self, num_steps: int) -> Hold:
        """From now on the engine takes `num_steps` steps; see `hold_when`."""
        steps = count()
        return self.hold_when(lambda: next(steps) >= num_steps)

    def settle(self) -> None:
        """Wait until no request is open, then check that no page is held."""
        self.engines.at_step = None
        if self._hold is not None:
            self._hold.release()
        until(lambda: self.gateway.engine.num_open == 0 and self.gateway.gate.open_answers == 0)

        async def look() -> None:
            for _ in range(100):
                if not await self.gateway.engine.check():
                    break
                await asyncio.sleep(0.02)

        self.on_loop(look())
        self.gateway.gate.check()
        assert self.gateway.engine.snapshot.num_held_pages == 0

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "the server did not stop"


@contextmanager
def a_server(
    apps: Sequence[App] = (),
    limits: ServerLimits | None = None,
    has_keys: bool = False,
    engines: FakeEngines | None = None,
    shutdown_s: float = 5.0,
    data_dir: Path | None = None,
    sampling: Mapping[str, object] | None = None,
    origins: Sequence[str] = (),
    *,
    hosts: Sequence[str] | None = None,
    config: EngineConfig | None = None,
) -> Iterator[Running]:
    """A server that is ready. It is stopped at the end."""
    engines = engines or FakeEngines(num_pages=512, max_model_len=800)
    engine = engines(config or EngineConfig())
    client = EngineClient(engine.tokenizer, lambda: ThreadEngine(engine))
    keys = KeyRing({"alice": ALICE, "bob": BOB}) if has_keys else None
    gateway = Gateway(
        client,
        ServedModel(("fake", "alias"), 1_700_000_000, sampling or {}),
        Access(keys, KeyRing({"root": ADMIN})),
        AppRegistry(apps, None if data_dir is None else AppFile(data_dir / APPS_FILE)),
        limits or ServerLimits(),
        Sessions(SessionLimits()),
    )
    if data_dir is not None:
        gateway.open_batches(data_dir)
    server = Server(gateway, shutdown_s, origins, hosts)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    host, port = listener.getsockname()
    loop = uvloop.new_event_loop()  # the kind of loop that uvicorn makes

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.serve(sockets=[listener]))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = Thread(target=serve, name="http")
    thread.start()
    running = Running(gateway, engines, server, loop, thread, host, port)
    try:
        until(lambda: gateway.is_ready and server.started)
        yield running
    finally:
        running.stop()


def events(text: str) -> list[str]:
    """The data of server-sent events."""
    blocks = text.split("\n\n")
    assert blocks[-1] == "", "the last event is incomplete"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [block.removeprefix("data: ") for block in blocks[:-1]]
