"""The server as an ASGI application: the routes of all APIs, and what is done for every request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mainstem.core.ids import unique_ids
from mainstem.server.apis.admin import AdminRoutes
from mainstem.server.apis.batches import BatchRoutes
from mainstem.server.apis.completions import CompletionRoutes
from mainstem.server.apis.message_batches import MessageBatchRoutes
from mainstem.server.apis.messages import MessagesRoutes
from mainstem.server.apis.models import ModelRoutes
from mainstem.server.apis.responses import ResponseRoutes
from mainstem.server.apis.scores import ScoreRoutes
from mainstem.server.apis.status import StatusRoutes
from mainstem.server.apis.stored_chats import StoredChatRoutes
from mainstem.server.apis.weights import WeightRoutes
from mainstem.server.gateway import Gateway
from mainstem.server.http.auth import Tenant
from mainstem.server.http.faults import (
    ApiError,
    error_response,
    explained,
    from_wire,
    is_anthropics,
)
from mainstem.server.http.sites import Sites
from mainstem.wire.errors import WireError

APIS = (
    StatusRoutes,
    ModelRoutes,
    CompletionRoutes,
    StoredChatRoutes,
    ResponseRoutes,
    MessagesRoutes,
    MessageBatchRoutes,
    BatchRoutes,
    ScoreRoutes,
    AdminRoutes,
    WeightRoutes,
)

HANDLED = (ApiError, WireError, HTTPException, Exception)

log = logging.getLogger("mainstem.server")


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
                if is_anthropics(scope):  # its clients read the id from this header
                    message["headers"].append((b"request-id", request_id.encode()))
            await send(message)

        tenant = self._gateway.access.admit(scope["path"], scope["headers"])
        state = {"tenant": tenant, "facts": facts, "request_id": request_id}
        scope.setdefault("state", {}).update(state)
        try:
            refusal = self._sites.refusal(scope["method"], scope["path"], scope["headers"])
            if refusal is None and tenant is None:
                refusal = self._gateway.access.refusal(scope["path"], scope["headers"])
            if refusal is None and tenant is not None:
                refusal = self._too_many(tenant, scope["path"])
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

    def _too_many(self, tenant: Tenant, path: str) -> ApiError | None:
        """Count a request in its key's rate; returns the error if there were too many."""
        if not self._gateway.access.is_counted(path):
            return None
        try:
            self._gateway.gate.allow(tenant)
        except ApiError as error:
            return error
        return None


async def _error_reply(request: Request, error: Exception) -> Response:
    """The reply to a request whose handler, or lack of one, raised this."""
    match error:
        case HTTPException():
            return explained(request, error)
        case ApiError():
            told = error
        case WireError():
            told = from_wire(error)
        case _:
            told = ApiError(500, "internal error", kind="server_error")
    return error_response(told, request.scope)


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

    routes = [route for api in APIS for route in api(gateway).listed()]
    starlette = Starlette(
        routes=routes, exception_handlers=dict.fromkeys(HANDLED, _error_reply), lifespan=lifespan
    )
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
