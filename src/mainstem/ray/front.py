"""The front of many replicas under Ray Serve: it gets HTTP requests, chooses a replica for each,
and passes on its reply.

    client --HTTP--> Serve's proxy --> Front: Router --serve(call)--> Replica 0
                                          |  `------------------------> Replica 1 ...
                                          `-- status(), every second --> all of them

If a replica dies before the first piece of its reply, does not accept the request, or replies 503,
the request is retried on another replica. After the first piece, a request cannot be retried: the
stream ends with an error event. A reply that is not a stream is passed on when it is complete. A
request that continues a stored response goes to the replica that has the response, and to no other;
while that replica cannot answer, the reply is 503.

The router learns from answered requests (2xx) only: replicas check keys, the front does not.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mainstem.core.errors import MainstemError
from mainstem.core.words import last_line
from mainstem.ray.prompts import PAGE_TOKENS, PREVIOUS, read_request, session_of
from mainstem.ray.replica import ACCEPTED, Head, HttpCall, Piece, ReplicaStatus
from mainstem.ray.router import (
    NoReplica,
    ReplicaState,
    Router,
    RouterConfig,
    RouteRequest,
    RouterKind,
    Ticket,
)
from mainstem.server.http.auth import shown_key
from mainstem.server.http.body import parse_json
from mainstem.server.http.faults import (
    ApiError,
    error_response,
    is_messages_path,
    messages_error,
    unavailable,
)
from mainstem.server.http.limits import ServerLimits
from mainstem.server.http.stream import PING
from mainstem.wire.chat.stored import CHATS_URL
from mainstem.wire.events import event, named_event

LOOK_S = 1.0  # between two status calls to a replica
STATUS_S = 5.0  # timeout of a status call; then the replica counts as down
ACCEPT_S = 15.0  # timeout for a replica to accept a request, which normally takes no time
UNAVAILABLE = 503
NOT_FOUND = 404
OK = 200
NOT_ANSWERED = 300  # and above: refused, failed or redirected
REPLICA_HEADER = "x-mainstem-replica"  # number of the replica that answered
STREAM_TYPE = b"text/event-stream"
MAX_JSON_DEPTH = ServerLimits().max_depth
NOT_OVER_REPLICAS = ("/v1/files", "/v1/batches", "/v1/messages/batches")
OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
UNKNOWN_ID = b'"previous_response_not_found"'  # another replica may have the response
EVENT = b"data: "
FAULT = "server_error"
FIRST_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,128})"')

log = logging.getLogger("mainstem.server")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How requests are distributed."""

    kind: RouterKind = RouterKind.AFFINE
    # apps that are on some replicas only, and the numbers of these replicas
    apps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    max_body_bytes: int = ServerLimits().body_bytes


class ReplicaLost(MainstemError):
    """A replica has died, or accepts no requests; the message says why."""


class ReplicaFailed(MainstemError):
    """A replica is up and failed on this request, so another replica would fail, too."""


class Front:
    """Routes HTTP requests to replicas; a Ray Serve deployment is made of it.

    There is one instance, since it holds the router's state. After a restart the state is learned
    again.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, settings: FrontSettings, replicas: Sequence[Any]
    ) -> None:
        """`replicas` are handles of Ray Serve, each of a deployment with one replica."""
        self._settings = settings
        self._replicas = list(replicas)
        config = RouterConfig(kind=settings.kind, page_tokens=PAGE_TOKENS)
        self._router = Router(len(self._replicas), config)
        for app, places in settings.apps:
            self._router.place_app(app, places)
        self._boots: list[str | None] = [None] * len(self._replicas)
        self._drained: set[int] = set()
        for replica in range(len(self._replicas)):
            self._router.set_state(replica, ReplicaState.DOWN)  # until it reports that it is up
        self._num_retries = 0
        self._watching = [
            asyncio.create_task(self._watch(replica)) for replica in range(len(self._replicas))
        ]

    async def __call__(self, request: Request) -> Response:
        """Return the reply to any request."""
        request.scope.setdefault("state", {})["request_id"] = uuid4().hex
        try:
            return await self._answer(request)
        except ApiError as error:
            return error_response(error, request.scope)
        except NoReplica as error:
            return error_response(unavailable(str(error)), request.scope)
        except ReplicaFailed as error:
            log.error("a replica failed", extra={"facts": {"reason": str(error)}})
            return error_response(ApiError(500, "internal error", kind=FAULT), request.scope)

    async def _answer(self, request: Request) -> Response:
        path = _path(request)
        if path in ("/health", "/ready"):
            return self._health()
        if path.startswith(NOT_OVER_REPLICAS):
            message = "files and batches do not work with replicas: use `mainstem batch --ray`"
            raise ApiError(501, f"{message} or --workers", code="not_supported")
        call = await self._read(request)
        if path.startswith("/admin/replicas"):
            return await self._admin(call)
        if path.startswith("/admin/") and call.method != "GET":
            return await self._ask_all(call, self._places(path))
        if path == CHATS_URL and request.method == "GET":
            message = "stored chats of many replicas are not listed; ask for one by its id"
            raise ApiError(501, message, code="not_supported")
        if path.startswith(("/v1/responses/", "/v1/sessions/", f"{CHATS_URL}/")):
            return await self._ask_home(call)
        if path == "/v1/sessions":
            return await self._list_sessions(call)
        return await self._ask(call, _routed(call))

    # --- one replica ----------------------------------------------------------------------------

    async def _ask(self, call: HttpCall, routed: RouteRequest) -> Response:
        """Return the reply of the replica that the router chooses, or of another replica if that
        one fails."""
        failed: set[int] = set()
        refusal: Response | None = None
        is_lost = routed.must_stay and self._router.home(routed.session) is None
        while True:
            try:
                ticket = self._router.choose(routed, frozenset(failed))
            except NoReplica:
                if refusal is not None:
                    return refusal
                raise
            try:
                reply = _ReplicaReply(self._replicas[ticket.replica], call)
                await reply.begin()
            except ReplicaLost as error:
                self._lose(ticket, error)
            except BaseException:
                self._router.finish(ticket, None)
                raise
            else:
                is_refused = reply.head.status == UNAVAILABLE
                if not is_refused and not (is_lost and UNKNOWN_ID in reply.first):
                    return self._passed_on(reply, ticket, call)
                self._router.finish(ticket, None)
                if is_refused or refusal is None:  # a replica that refuses may have the response
                    refusal = reply.whole()
            failed.add(ticket.replica)
            self._num_retries += 1

    def _lose(self, ticket: Ticket, error: ReplicaLost) -> None:
        self._router.finish(ticket, None)
        self._set_down(ticket.replica, str(error))

    def _passed_on(self, reply: "_ReplicaReply", ticket: Ticket, call: HttpCall) -> Response:
        if reply.head.status < NOT_ANSWERED:
            self._learn(reply, ticket, call)
        if reply.is_stream:
            response: Response = _Stream(reply, call.path, lambda found: self._end(ticket, found))
            self._router.start(ticket)
        else:
            self._router.finish(ticket, _output_tokens(reply.first))
            response = reply.whole()
        response.headers[REPLICA_HEADER] = str(ticket.replica)
        return response

    def _learn(self, reply: "_ReplicaReply", ticket: Ticket, call: HttpCall) -> None:
        self._router.learn(ticket)
        found = FIRST_ID.search(reply.first) if call.path == "/v1/responses" else None
        if found is not None:
            session = session_of(PREVIOUS, found[1].decode(), _key(call))
            self._router.settle(session, ticket.replica)

    def _end(self, ticket: Ticket, found: int | ReplicaLost | None) -> None:
        """Record the end of a stream. `found` is its number of events, or how its replica was lost;
        None: it ended in another way."""
        if isinstance(found, ReplicaLost):
            self._lose(ticket, found)
        else:
            self._router.finish(ticket, found)

    # --- several replicas -----------------------------------------------------------------------

    async def _ask_home(self, call: HttpCall) -> Response:
        """Ask for what is stored under an id: one replica after the other, its known replica first.
        A stored response with a known replica is asked for only there."""
        kind, name = call.path.removeprefix("/v1/").removeprefix("chat/").split("/")[:2]
        field = "session_id" if kind == "sessions" else PREVIOUS
        home = self._router.home(session_of(field, name, _key(call)))
        places = self._up()
        if home is not None and field == PREVIOUS:
            if home not in places:
                raise unavailable(f"replica {home}, which has {name}, is down")
            places = [home]
        places.sort(key=lambda place: place != home)
        reply: Response | None = None
        for place in places:
            with suppress(ReplicaLost):
                reply = await self._whole(place, call)
                if reply.status_code != NOT_FOUND:
                    return reply
        return reply or self._nobody()

    async def _ask_all(self, call: HttpCall, places: Sequence[int]) -> Response:
        """Apply a change to these replicas; the reply is the first refusal, or the last success."""
        reply: Response | None = None
        for place in places:
            try:
                reply = await self._whole(place, call)
            except ReplicaLost as error:
                self._set_down(place, str(error))
                raise unavailable(f"replica {place} was lost: {error}; please retry") from None
            if reply.status_code != OK:
                return reply
        return reply or self._nobody()

    async def _list_sessions(self, call: HttpCall) -> Response:
        """The sessions of all replicas, the most recently used first."""
        found: list[dict[str, Any]] = []
        for place in self._up():
            with suppress(ReplicaLost):
                reply = await self._whole(place, call)
                if reply.status_code != OK:
                    return reply
                found += json.loads(bytes(reply.body))["data"]
        found.sort(key=lambda session: -session["last_used"])
        return JSONResponse({"object": "list", "data": found})

    async def _whole(self, replica: int, call: HttpCall) -> Response:
        """Return the reply of one replica; raises ReplicaLost."""
        reply = _ReplicaReply(self._replicas[replica], call)
        await reply.begin()
        if reply.is_stream:  # a stored response, streamed again
            return _Stream(reply, call.path, lambda _: None)
        return reply.whole()

    def _places(self, path: str) -> list[int]:
        """The replicas that a change applies to: for an app, those that have it."""
        name = path.removeprefix("/admin/apps/")
        chosen = dict(self._settings.apps).get(name)
        return [place for place in self._up() if chosen is None or place in chosen]

    def _up(self) -> list[int]:
        states = [self._router.state(place) for place in range(len(self._replicas))]
        return [place for place, state in enumerate(states) if state is not ReplicaState.DOWN]

    def _nobody(self) -> Response:
        raise unavailable("no replica is up")

    # --- health ---------------------------------------------------------------------------------

    async def _watch(self, replica: int) -> None:
        while True:
            try:
                asked = self._replicas[replica].status.remote()
                status = await asyncio.wait_for(_awaited(asked), STATUS_S)
                self._note(replica, status)
            except Exception as error:
                self._set_down(replica, last_line(error))
            await asyncio.sleep(LOOK_S)

    def _note(self, replica: int, status: ReplicaStatus) -> None:
        if not status.is_ready:
            self._set_down(replica, "its engine is being started")
            return
        if status.boot != self._boots[replica]:
            self._router.forget(replica)
            self._boots[replica] = status.boot
            self._router.set_capacity(replica, status.kv_tokens)
        self._set_up(replica)

    def _set_up(self, replica: int) -> None:
        is_drained = replica in self._drained
        self._router.set_state(replica, ReplicaState.DRAINING if is_drained else ReplicaState.UP)

    def _set_down(self, replica: int, reason: str) -> None:
        if self._router.state(replica) is not ReplicaState.DOWN:
            log.warning("replica down", extra={"facts": {"replica": replica, "reason": reason}})
            self._router.set_state(replica, ReplicaState.DOWN)

    def _health(self) -> Response:
        states = [self._router.state(place).value for place in range(len(self._replicas))]
        is_up = ReplicaState.UP.value in states
        body = {"status": "ok" if is_up else "no replica is up", "replicas": states}
        return JSONResponse(body, OK if is_up else UNAVAILABLE)

    # --- admin ----------------------------------------------------------------------------------

    async def _admin(self, call: HttpCall) -> Response:
        """GET /admin/replicas; POST /admin/replicas/N/drain, /admin/replicas/N/resume."""
        probe = HttpCall("GET", "/admin/apps", b"", call.headers, b"", call.client, call.scheme)
        allowed = await self._ask(probe, RouteRequest((), 0))
        if allowed.status_code != OK:
            return allowed  # the caller has no admin key
        if call.method == "GET" and call.path == "/admin/replicas":
            return JSONResponse({"replicas": self._listed(), "retries": self._num_retries})
        found = re.fullmatch(r"/admin/replicas/(\d{1,6})/(drain|resume)", call.path)
        if found is None or call.method != "POST" or int(found[1]) >= len(self._replicas):
            raise ApiError(404, f"there is no {call.method} {call.path}", code="not_found")
        replica = int(found[1])
        if found[2] == "drain":
            self._drained.add(replica)
        else:
            self._drained.discard(replica)
        if self._router.state(replica) is not ReplicaState.DOWN:
            self._set_up(replica)
        return JSONResponse(self._listed()[replica])

    def _listed(self) -> list[dict[str, object]]:
        router = self._router
        return [
            {
                "replica": place,
                "state": router.state(place).value,
                "open_requests": router.num_open(place),
                "open_work_tokens": round(router.open_work(place)),
                "pages": router.num_pages(place),
            }
            for place in range(len(self._replicas))
        ]

    async def _read(self, request: Request) -> HttpCall:
        most = self._settings.max_body_bytes
        too_large = ApiError(413, f"the body may have at most {most} bytes", code="too_large")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise too_large
        client = request.client
        return HttpCall(
            request.method,
            _path(request),
            request.scope.get("query_string", b""),
            request.headers.raw,
            bytes(body),
            None if client is None else (client.host, client.port),
            request.url.scheme,
        )


class _ReplicaReply:
    """The reply of one replica to one call, piece by piece."""

    def __init__(self, replica: Any, call: HttpCall) -> None:
        self._pieces = replica.options(stream=True).serve.remote(call)
        self.head = Head(0, ())
        self.first = b""  # the first piece of a stream, or the whole body

    @property
    def is_stream(self) -> bool:
        kind = next((value for name, value in self.head.headers if name == b"content-type"), b"")
        return kind.startswith(STREAM_TYPE)

    async def begin(self) -> None:
        """Wait for the first piece of a stream, or for a whole reply; raises ReplicaLost."""
        try:
            accepted = await asyncio.wait_for(self._next(), ACCEPT_S)
            assert accepted == ACCEPTED, "a replica begins with ACCEPTED"
            head = await self._next()
            assert isinstance(head, Head), "a reply begins with its head"
            self.head = head
            if self.is_stream:
                while (first := await self._next()) == PING:
                    pass  # another replica can still begin the answer
                self.first = first if isinstance(first, bytes) else b""
            else:
                self.first = b"".join([piece async for piece in self.rest()])
        except TimeoutError:
            self.cancel()
            raise ReplicaLost(f"it accepted no request for {ACCEPT_S:.0f} s") from None
        except BaseException:
            self.cancel()
            raise

    async def rest(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces that follow; raises ReplicaLost."""
        while (piece := await self._next()) is not None:
            if isinstance(piece, bytes):
                yield piece

    def whole(self) -> Response:
        """The reply, if it is not a stream."""
        response = Response(self.first, self.head.status)
        response.raw_headers = list(self.head.headers)
        return response

    def cancel(self) -> None:
        """Cancel the call, because the reply is no longer needed."""
        with suppress(Exception):
            self._pieces.cancel()

    async def _next(self) -> Piece | None:
        from ray import exceptions  # noqa: PLC0415  # an extra
        from ray.serve.exceptions import RayServeException  # noqa: PLC0415

        try:
            piece: Piece = await anext(self._pieces)
        except StopAsyncIteration:
            return None
        except exceptions.RayTaskError as error:  # raised by the replica's own code
            raise ReplicaFailed(last_line(error)) from None
        except (exceptions.RayError, RayServeException) as error:
            raise ReplicaLost(last_line(error)) from None
        return piece


class _Stream(Response):
    """Passes on the stream of a replica. `on_end` is always called, with how the stream ended."""

    def __init__(
        self, reply: _ReplicaReply, path: str, on_end: Callable[[int | ReplicaLost | None], None]
    ) -> None:
        super().__init__(status_code=reply.head.status)
        self.raw_headers = list(reply.head.headers)
        self._reply, self._path, self._on_end = reply, path, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found: int | ReplicaLost | None = None
        try:
            status = self.status_code
            await send(
                {"type": "http.response.start", "status": status, "headers": self.raw_headers}
            )
            try:
                found = await self._pass_on(send)
            except (ReplicaLost, ReplicaFailed) as error:
                found = error if isinstance(error, ReplicaLost) else None
                await _send(send, _last_words(self._path, error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:  # also when the client has left
            self._reply.cancel()
            self._on_end(found)

    async def _pass_on(self, send: Send) -> int:
        """Returns the number of events, which is about the number of tokens."""
        num_events = self._reply.first.count(EVENT)
        await _send(send, self._reply.first)
        async for piece in self._reply.rest():
            num_events += piece.count(EVENT)
            await _send(send, piece)
        return num_events


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _routed(call: HttpCall) -> RouteRequest:
    """Return what the router must know about a call: nothing, if the call has no prompt or its body
    cannot be read. The replica then reports what is wrong with the body."""
    if call.method == "POST" and call.body:
        with suppress(ApiError):
            return read_request(parse_json(call.body, MAX_JSON_DEPTH), _key(call))
    return RouteRequest((), 0)


def _path(request: Request) -> str:
    """The path without the application's prefix."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", "").rstrip("/"))


def _key(call: HttpCall) -> bytes:
    """Identifies the caller; the key itself is not stored."""
    return sha256(shown_key(list(call.headers))).digest()


def _output_tokens(body: bytes) -> int | None:
    """Return the number of output tokens of a whole reply; None if the reply has no count."""
    found = OUTPUT_TOKENS.search(body)
    return None if found is None else int(found[1])


def _last_words(path: str, reason: ReplicaLost | ReplicaFailed) -> bytes:
    """The event that ends a stream after its replica failed."""
    error = unavailable(f"the replica was lost while it answered: {reason}")
    if is_messages_path(path):
        return named_event(messages_error(error, uuid4().hex))
    return event(error.body())


async def _awaited(response: Any) -> ReplicaStatus:
    status: ReplicaStatus = await response
    return status
