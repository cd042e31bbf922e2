"""Health, numbers, sessions, and the page that shows them."""

from importlib.resources import files
from mimetypes import guess_type

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mainstem.core.version import __version__
from mainstem.server.gateway import Gateway
from mainstem.server.http.faults import ApiError, unavailable
from mainstem.server.link.engine_client import EngineState
from mainstem.server.metrics import CONTENT_TYPE
from mainstem.text.sessions import Session
from mainstem.wire.openapi import document

PAGE = files("mainstem.server") / "page"
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "content-security-policy": "frame-ancestors 'none'",  # in addition to the page's own policy
    "x-frame-options": "DENY",
}


class StatusRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def listed(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/page/{name}", self.asset, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/v1/sessions", self.list_sessions, methods=["GET"]),
            Route("/v1/sessions/{session_id}", self.delete_session, methods=["DELETE"]),
        ]

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
        tokenizer = self._gateway.engine.tokenizer
        return JSONResponse(document(has_any_role=tokenizer.allows_special_tokens))

    async def list_sessions(self, request: Request) -> Response:
        sessions = self._gateway.sessions.listed(request.state.tenant.owner)
        return JSONResponse({"object": "list", "data": [_session(item) for item in sessions]})

    async def delete_session(self, request: Request) -> Response:
        """Remove a session; its pages are evicted when room is needed."""
        session_id = request.path_params["session_id"]
        owner = request.state.tenant.owner
        if self._gateway.sessions.remove(owner, session_id) is None:
            message = f"there is no session {session_id!r}"
            raise ApiError(404, message, "session_id", "session_not_found")
        return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})

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
