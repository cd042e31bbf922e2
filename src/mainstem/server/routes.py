"""The server's paths and their handlers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from mimetypes import guess_type
from time import perf_counter
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mainstem.core.errors import InvalidRequest
from mainstem.core.version import __version__
from mainstem.server.answering import EngineFault
from mainstem.server.batch_routes import BatchRoutes
from mainstem.server.body import read_json
from mainstem.server.engine_client import EngineState
from mainstem.server.error_shapes import error_response, is_messages_path
from mainstem.server.faults import ApiError, disk_is_needed, from_invalid, from_wire, unavailable
from mainstem.server.gateway import Gateway
from mainstem.server.ids import unique_ids
from mainstem.server.messages_routes import MessagesRoutes
from mainstem.server.metrics import CONTENT_TYPE
from mainstem.server.response_routes import ResponseRoutes
from mainstem.server.score_routes import ScoreRoutes
from mainstem.server.sites import Sites
from mainstem.server.turns import owner_of
from mainstem.server.unknown_routes import explained
from mainstem.text.encoding import App
from mainstem.text.sessions import Session
from mainstem.text.tokenizer import SPECIAL_ROLES
from mainstem.wire.bodies import AppBody
from mainstem.wire.calls import CallKind
from mainstem.wire.errors import WireError
from mainstem.wire.fields import read_fields
from mainstem.wire.openapi import document

PAGE = files("mainstem.server") / "page"
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "content-security-policy": "frame-ancestors 'none'",  # in addition to the page's own policy
    "x-frame-options": "DENY",
}

log = logging.getLogger("mainstem.server")
T = TypeVar("T")


class Routes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def listed(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/page/{name}", self.asset, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/sessions", self.list_sessions, methods=["GET"]),
            Route("/v1/sessions/{session_id}", self.delete_session, methods=["DELETE"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/admin/apps", self.list_apps, methods=["GET"]),
            Route("/admin/apps/{name}", self.put_app, methods=["PUT"]),
            Route("/admin/apps/{name}", self.delete_app, methods=["DELETE"]),
            Route("/admin/reset_prefix_cache", self.reset_cache, methods=["POST"]),
        ]

    # --- OpenAI's -------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._gateway.answer(request, CallKind.CHAT)

    async def completions(self, request: Request) -> Response:
        return await self._gateway.answer(request, CallKind.COMPLETION)

    async def models(self, request: Request) -> Response:
        names = self._model_names()
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._model_names():
            message = f"the model {name!r} does not exist"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model_names(self) -> list[str]:
        """Return the model's names, and then its first name combined with each app."""
        names = self._gateway.model.names
        return [*names, *(f"{names[0]}:{app}" for app in self._gateway.apps.names)]

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._gateway.model.created,
            "owned_by": "mainstem",
            "max_model_len": self._gateway.engine.max_model_len,
        }

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client needs to use the tokenizer remotely, under Hugging Face's names."""
        tokenizer = self._gateway.engine.tokenizer
        special = {f"{role}_token": None for role in SPECIAL_ROLES} | tokenizer.special_tokens
        found = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._gateway.engine.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.chat_template,
        }
        return JSONResponse(special | found)

    async def tokenize(self, request: Request) -> Response:
        gateway = self._gateway
        gateway.gate.allow(request.state.tenant)
        body = await read_json(request, gateway.limits)
        found = await gateway.tokenize(body, request.state.tenant)
        return await asyncio.to_thread(JSONResponse, found)  # there may be very many ids

    async def detokenize(self, request: Request) -> Response:
        gateway = self._gateway
        gateway.gate.allow(request.state.tenant)
        body = await read_json(request, gateway.limits)
        return JSONResponse(await gateway.detokenize(body))

    # --- sessions -------------------------------------------------------------------------------

    async def list_sessions(self, request: Request) -> Response:
        sessions = self._gateway.sessions.listed(owner_of(request.state.tenant))
        return JSONResponse({"object": "list", "data": [_session(item) for item in sessions]})

    async def delete_session(self, request: Request) -> Response:
        """Remove a session; its pages are evicted when room is needed."""
        session_id = request.path_params["session_id"]
        owner = owner_of(request.state.tenant)
        if self._gateway.sessions.remove(owner, session_id) is None:
            message = f"there is no session {session_id!r}"
            raise ApiError(404, message, "session_id", "session_not_found")
        return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})

    # --- health and numbers ---------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Reply 200, or 503 after the engine has failed several times in a row: then a supervisor
        should restart the server."""
        if self._gateway.engine.state is EngineState.FAILED:
            raise unavailable("the engine failed")
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Reply 200 while the engine runs and the apps are filled, until the server shuts down. For
        load balancers."""
        gateway = self._gateway
        is_running = gateway.engine.state is EngineState.RUNNING
        is_filled = gateway.is_ready and not gateway.filler.num_refills
        if not is_filled or gateway.is_draining or not is_running:
            raise unavailable("not ready")
        return JSONResponse({"status": "ready"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        metrics = self._gateway.metrics
        metrics.observe_engine(self._gateway.engine)
        sessions = self._gateway.sessions
        metrics.observe_sessions(len(sessions), sessions.num_tokens)
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def live(self, request: Request) -> Response:
        gateway = self._gateway
        view = gateway.live.view(gateway.engine, gateway.apps.names, request.state.tenant)
        return JSONResponse(view)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    # --- admin ----------------------------------------------------------------------------------

    async def list_apps(self, request: Request) -> Response:
        return JSONResponse({"apps": self._gateway.apps.names})

    async def put_app(self, request: Request) -> Response:
        """Add an app, or change its prompt; replies when its prefix is computed."""
        body = await read_json(request, self._gateway.limits)
        apps, filler = self._gateway.apps, self._gateway.filler
        try:
            app = App(request.path_params["name"], read_fields(body, AppBody).prompt)
            async with filler.changing:
                num_tokens = await filler.fill(app)
                try:
                    with disk_is_needed():
                        await asyncio.to_thread(apps.add, app)
                except (ApiError, InvalidRequest):
                    before = apps.find(app.name)
                    await (filler.forget(app.name) if before is None else filler.fill(before))
                    raise
        except InvalidRequest as error:
            raise from_invalid(error) from None
        except EngineFault as fault:
            raise unavailable(str(fault)) from None
        return JSONResponse({"name": app.name, "prefix_tokens": num_tokens})

    async def delete_app(self, request: Request) -> Response:
        name = request.path_params["name"]
        async with self._gateway.filler.changing:
            with disk_is_needed():
                was_there = await asyncio.to_thread(self._gateway.apps.remove, name)
            if not was_there:
                raise ApiError(404, f"there is no app {name!r}", "name", "app_not_found")
            await self._on_engine(self._gateway.filler.forget(name))
        return JSONResponse({"name": name, "deleted": True})

    async def reset_cache(self, request: Request) -> Response:
        """Unpin the prefixes of clients, forget every cached page that no sequence holds, then
        compute the pages of the apps again."""
        gateway = self._gateway
        gateway.pins.end_all()
        count = await self._on_engine(gateway.engine.clear_cache())
        await gateway.filler.fill_all()
        return JSONResponse({"forgotten_pages": count})

    async def _on_engine(self, work: Awaitable[T]) -> T:
        """The engine's answer to a command; 503 if it cannot answer."""
        try:
            return await work
        except EngineFault as fault:
            raise unavailable(str(fault)) from None

    # --- the page -------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        return _file("index.html")

    async def asset(self, request: Request) -> Response:
        return _file(request.path_params["name"])


def _session(session: Session) -> dict[str, object]:
    return {
        "id": session.session_id,
        "object": "session",
        "created": int(session.created_s),
        "last_used": int(session.used_s),
        "turns": session.num_turns,
        "tokens": len(session.token_ids),
    }


def _file(name: str) -> Response:
    """Reply with a file of the page's folder. Only names that exist are accepted, so no path leads
    out of the folder."""
    for entry in PAGE.iterdir():
        if entry.name == name and entry.is_file() and not name.startswith(("_", ".")):
            kind = guess_type(name)[0] or "application/octet-stream"
            return Response(entry.read_bytes(), media_type=kind, headers=PAGE_HEADERS)
    return PlainTextResponse("not found", 404)


# --- around all routes ---------------------------------------------------------------------------


class AccessMiddleware:
    """Checks keys and sites, gives every request an id, and logs and counts its outcome."""

    def __init__(self, inside: ASGIApp, gateway: Gateway, sites: Sites) -> None:
        self._inside = inside
        self._gateway = gateway
        self._sites = sites
        self._ids = unique_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        began_s = perf_counter()
        request_id = next(self._ids)
        facts: dict[str, object] = {}
        status = 500

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
                if is_messages_path(scope["path"]):  # its clients read the id from this header
                    message["headers"].append((b"request-id", request_id.encode()))
            await send(message)

        tenant = self._gateway.access.admit(scope["path"], scope["headers"])
        state = {"tenant": tenant, "facts": facts, "request_id": request_id}
        scope.setdefault("state", {}).update(state)
        try:
            refusal = self._sites.refusal(scope["method"], scope["path"], scope["headers"])
            if refusal is None and tenant is None:
                refusal = self._gateway.access.refusal(scope["path"], scope["headers"])
            if refusal is not None:
                await error_response(refusal, scope)(scope, receive, send_marked)
                return
            await self._inside(scope, receive, send_marked)
        finally:
            self._gateway.metrics.observe_response(status)
            facts |= {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round((perf_counter() - began_s) * 1e3, 1),
                "tenant": None if tenant is None else tenant.name,
            }
            is_quiet = scope["path"] in ("/health", "/ready", "/live", "/metrics")
            log.log(logging.DEBUG if is_quiet else logging.INFO, "request", extra={"facts": facts})


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _wire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WireError)
    return error_response(from_wire(error), request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """The error for an unknown path or method."""
    assert isinstance(error, HTTPException)
    return explained(request, error)


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "internal error", kind="server_error"), request.scope)


def make_app(
    gateway: Gateway, origins: Sequence[str] = (), hosts: Sequence[str] | None = None
) -> ASGIApp:
    """The server as an ASGI application; its lifespan is that of the engine.

    Web pages of `origins` may call it from a browser ("*": any page); its own page always may.
    Browsers may use the host names in `hosts` ("*": any). None: any name if the server has keys,
    otherwise only addresses and loopback names.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await gateway.engine.start()
        starting = asyncio.ensure_future(gateway.start())
        try:
            yield
        finally:
            await gateway.close()
            await asyncio.gather(starting, return_exceptions=True)

    handlers: dict[int | type[Exception], Handler] = {
        ApiError: _api_error,
        WireError: _wire_error,
        HTTPException: _http_error,
        Exception: _bug,
    }
    parts = (
        Routes(gateway),
        ResponseRoutes(gateway),
        MessagesRoutes(gateway),
        BatchRoutes(gateway),
        ScoreRoutes(gateway),
    )
    routes = [route for part in parts for route in part.listed()]
    starlette = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    checks_hosts = hosts is not None or not gateway.access.has_keys
    door = AccessMiddleware(starlette, gateway, Sites(origins, hosts or (), checks_hosts))
    if not origins:
        return door
    return CORSMiddleware(
        door,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
