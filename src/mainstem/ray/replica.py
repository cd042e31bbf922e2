"""A replica under Ray Serve: a whole server in an actor, called through Ray instead of a socket.

    front --serve(call)--> Replica: ASGI application --> engine's process
          <-- ACCEPTED, Head, bytes, bytes, ... --

The application is the same as in `mainstem serve`; it checks keys, limits and origins.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message

from mainstem.checkpoints.fetch import fetch_model
from mainstem.core.config import EngineConfig, with_arguments
from mainstem.core.errors import ConfigError, MainstemError
from mainstem.core.request import SamplingParams
from mainstem.server.apps import AppRegistry
from mainstem.server.build import GatewaySettings, make_gateway, server_config
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Access, KeyRing
from mainstem.server.http.limits import ServerLimits
from mainstem.server.http.logs import set_up_logs
from mainstem.server.link.engine_client import EngineState
from mainstem.server.link.engine_process import EngineProcess
from mainstem.server.link.protocol import BeginEngine
from mainstem.server.routes import make_app
from mainstem.text.encoding import App
from mainstem.text.tokenizer import Tokenizer

UNSENT = 64  # pieces of an answer buffered for a slow reader; then the application blocks
LEAVE_S = 30.0  # timeout for the application to end after the client disconnected


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of a replica; only the apps may differ between replicas."""

    engine: Mapping[str, object]  # settings as LLM has them
    names: tuple[str, ...] = ()  # the model's names for clients
    apps: Mapping[str, str] = field(default_factory=dict)  # name -> prompt
    api_key_file: str | None = None
    admin_key_file: str | None = None
    max_queue: int = ServerLimits().open_answers
    max_body_bytes: int = ServerLimits().body_bytes
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class HttpCall:
    """An HTTP request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None = None
    scheme: str = "http"


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of a reply."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of a replica."""

    boot: str  # changes if the replica or its engine restarted, or its cache was lost
    is_ready: bool
    kv_tokens: int  # capacity of all tiers


ACCEPTED = "accepted"
Piece = str | Head | bytes


class Replica:
    """One engine and the server around it; a Ray Serve deployment is made of it."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]
        """Return when the model is loaded and the apps are computed; Ray Serve awaits it."""
        self._boot = uuid4().hex
        set_up_logs(settings.log_level)
        self._config = server_config(with_arguments(EngineConfig(), settings.engine, "engine"))
        self._gateway = await asyncio.to_thread(open_gateway, settings, self._config)
        hosts = settings.allowed_hosts or None
        self._application: ASGIApp = make_app(self._gateway, settings.allowed_origins, hosts)
        await self._gateway.engine.start()
        await self._gateway.start()

    async def serve(self, call: HttpCall) -> AsyncGenerator[Piece, None]:
        """Yield ACCEPTED immediately, then the reply's head, then its body in pieces."""
        yield ACCEPTED
        pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue(UNSENT)
        has_left = asyncio.Event()
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                await pieces.put(Head(message["status"], list(message.get("headers", ()))))
            elif message["type"] == "http.response.body" and message.get("body"):
                await pieces.put(bytes(message["body"]))

        async def answer() -> None:
            try:
                await self._application(_scope(call), receive, send)
            finally:
                await pieces.put(None)

        answering = asyncio.create_task(answer())
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await answering
        finally:
            has_left.set()
            if not answering.done():
                await self._end(answering, pieces)

    async def _end(self, answering: "asyncio.Task[None]", pieces: asyncio.Queue[Any]) -> None:
        """Let the application clean up after the client disconnected."""

        async def drain() -> None:
            while await pieces.get() is not None:
                pass

        with suppress(Exception):
            await asyncio.wait_for(asyncio.gather(drain(), answering), LEAVE_S)

    def status(self) -> ReplicaStatus:
        """Return the replica's state; the front calls this every second."""
        gateway = self._gateway
        is_running = gateway.engine.state is EngineState.RUNNING
        snapshot, store = gateway.engine.snapshot, self._config.store
        num_pages = snapshot.num_pages
        if snapshot.stored_page_bytes:
            lower_bytes = store.host_bytes + (store.disk_bytes if store.disk_dir else 0)
            num_pages += lower_bytes // snapshot.stored_page_bytes
        boot = f"{self._boot}.{gateway.engine.num_recoveries}"
        return ReplicaStatus(boot, is_running, num_pages * snapshot.page_size)

    def check_health(self) -> None:
        """Ray Serve restarts a replica if this raises."""
        if self._gateway.engine.state is EngineState.FAILED:
            raise RuntimeError("the engine failed")

    async def __del__(self) -> None:
        """Ray Serve awaits this after the replica's last reply."""
        gateway = getattr(self, "_gateway", None)
        if gateway is not None:
            await gateway.close()


def _scope(call: HttpCall) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": call.scheme,
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
    }


def open_gateway(settings: ReplicaSettings, config: EngineConfig) -> Gateway:
    """Load the model in a separate process; raises ConfigError."""
    model = config.model
    folder, tokenizer = fetch_model(model)
    begin = BeginEngine(config, str(folder), settings.log_level, None)
    return make_gateway(
        GatewaySettings(
            config,
            settings.names or (Path(model.model).name,),
            Access(_keys(settings.api_key_file), _keys(settings.admin_key_file)),
            AppRegistry([App(name, prompt) for name, prompt in settings.apps.items()]),
            _sampling(tokenizer),
            ServerLimits(open_answers=settings.max_queue, body_bytes=settings.max_body_bytes),
        ),
        tokenizer,
        partial(EngineProcess.start, begin),
    )


def _keys(path: str | None) -> KeyRing | None:
    return None if path is None else KeyRing.load(Path(path))


def _sampling(tokenizer: Tokenizer) -> Mapping[str, object]:
    """Default sampling parameters of the model's generation config."""
    try:
        SamplingParams(**tokenizer.sampling_defaults)  # type: ignore[arg-type]  # it checks them
    except MainstemError as error:
        raise ConfigError(f"the model's generation config: {error}") from None
    return tokenizer.sampling_defaults
