"""The front over fake replicas in this process: what it learns, and from which answers. Ray is not
needed: the front uses only Ray's handles and the names of its exceptions, which are fakes here.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from mainstem.ray.front import REPLICA_HEADER, Front, FrontSettings
from mainstem.ray.replica import ACCEPTED, Head, HttpCall, Piece, ReplicaStatus
from mainstem.server.http.stream import PING

UNKNOWN = b'{"error": {"code": "previous_response_not_found"}}'
JSON = ((b"content-type", b"application/json"),)


@pytest.fixture(autouse=True)
def names_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake modules of Ray with the names that the front imports."""
    names = ("ray", "ray.exceptions", "ray.serve", "ray.serve.exceptions")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    raised = modules["ray"].exceptions = modules["ray.exceptions"]
    raised.RayError = type("RayError", (Exception,), {})
    raised.RayTaskError = type("RayTaskError", (raised.RayError,), {})
    modules["ray.serve.exceptions"].RayServeException = type("RayServeException", (Exception,), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


class PlayedReplica:
    """A fake handle: keeps responses in memory and gives the prepared answers."""

    def __init__(self, place: int) -> None:
        self.status_code = 200  # status of its answers
        self.is_ready = True
        self.boot = "first"
        self.num_asked = 0
        self._place = place
        self._kept: set[str] = set()
        self.serve = SimpleNamespace(remote=self._serve)
        self.status = SimpleNamespace(remote=self._status)

    def options(self, stream: bool) -> "PlayedReplica":
        assert stream
        return self

    async def _status(self) -> ReplicaStatus:
        return ReplicaStatus(self.boot, self.is_ready, 100_000)

    async def _serve(self, call: HttpCall) -> AsyncGenerator[Piece, None]:
        self.num_asked += 1
        yield ACCEPTED
        if self.status_code != 200:
            yield Head(self.status_code, JSON)
            yield b'{"error": {}}'
            return
        name = json.loads(call.body).get("previous_response_id")
        if name is not None and name not in self._kept:
            yield Head(404, JSON)
            yield UNKNOWN
            return
        made = f"resp_{self._place}_{len(self._kept)}"
        self._kept.add(made)
        yield Head(200, JSON)
        yield json.dumps({"id": made}).encode()


Play = Callable[[Front, list[PlayedReplica]], Awaitable[None]]


def play(scene: Play, num_replicas: int = 2) -> None:
    async def run() -> None:
        replicas = [PlayedReplica(place) for place in range(num_replicas)]
        front = Front.__new__(Front)
        await front.__init__(FrontSettings(), replicas)  # type: ignore[misc]  # as Ray Serve does
        try:
            await looked(front, replicas)
            await scene(front, replicas)
            front._router.check()
        finally:
            for task in front._watching:
                task.cancel()

    asyncio.run(run())


async def looked(front: Front, replicas: list[PlayedReplica]) -> None:
    """Give the front the status of all replicas."""
    for place, replica in enumerate(replicas):
        front._note(place, await replica.status.remote())


async def post(front: Front, **body: object) -> Response:
    return await send(front, "POST", "/v1/responses", body)


async def send(front: Front, method: str, path: str, body: object) -> Response:
    data = json.dumps(body).encode()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": data, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
        "scheme": "http",
    }
    return await front(Request(scope, receive))


async def made(front: Front) -> tuple[str, int]:
    """A stored response and its replica."""
    reply = await post(front, input="hello")
    return json.loads(bytes(reply.body))["id"], int(reply.headers[REPLICA_HEADER])


@pytest.mark.parametrize("is_down", [False, True])
def test_a_stored_response_outlives_a_restart_of_the_engine(is_down: bool) -> None:
    async def scene(front: Front, replicas: list[PlayedReplica]) -> None:
        name, home = await made(front)
        replicas[home].is_ready = not is_down
        replicas[home].status_code = 503
        await looked(front, replicas)
        reply = await post(front, input="go on", previous_response_id=name)
        assert reply.status_code == 503
        assert not is_down or reply.headers["retry-after"]
        assert replicas[1 - home].num_asked == 0, "the replica does not have the response"
        replicas[home].is_ready, replicas[home].status_code = True, 200
        await looked(front, replicas)
        reply = await post(front, input="go on", previous_response_id=name)
        assert (reply.status_code, reply.headers[REPLICA_HEADER]) == (200, str(home))

    play(scene)


def test_a_response_whose_replica_is_unknown_is_searched_for() -> None:
    async def scene(front: Front, replicas: list[PlayedReplica]) -> None:
        name, home = await made(front)
        front._router._sessions.clear()  # as after a restart of the front
        replicas[home].status_code = 503
        reply = await post(front, input="go on", previous_response_id=name)
        assert reply.status_code == 503, "the replica that refuses may have the response"
        replicas[home].status_code = 200
        for _ in range(2):
            reply = await post(front, input="go on", previous_response_id=name)
            assert (reply.status_code, reply.headers[REPLICA_HEADER]) == (200, str(home))
        reply = await post(front, input="go on", previous_response_id="resp_of_nobody")
        assert reply.status_code == 404

    play(scene)


def test_a_stored_chat_is_searched_for_and_chats_are_not_listed() -> None:
    async def scene(front: Front, replicas: list[PlayedReplica]) -> None:
        replicas[0].status_code = 404
        path = "/v1/chat/completions/chatcmpl-1"
        assert (await send(front, "POST", path, {"metadata": None})).status_code == 200
        assert [replica.num_asked for replica in replicas] == [1, 1]
        replicas[1].status_code = 404
        assert (await send(front, "POST", path, {"metadata": None})).status_code == 404
        refused = await send(front, "GET", "/v1/chat/completions", {})
        batches = await send(front, "GET", "/v1/messages/batches", {})
        assert refused.status_code == batches.status_code == 501
        assert json.loads(bytes(batches.body))["type"] == "error"
        assert [replica.num_asked for replica in replicas] == [2, 2]

    play(scene)


@pytest.mark.parametrize("status", [401, 400, 500])
def test_refused_requests_leave_no_pages_or_sessions(status: int) -> None:
    async def scene(front: Front, replicas: list[PlayedReplica]) -> None:
        for replica in replicas:
            replica.status_code = status
        for n in range(4):
            reply = await post(front, input=f"{n}" * 20_000, session_id=f"talk {n}")
            assert reply.status_code == status
        assert [front._router.num_pages(place) for place in range(2)] == [0, 0]
        assert not front._router._sessions

    play(scene)


def test_pages_are_forgotten_after_a_new_boot_not_after_a_slow_status() -> None:
    async def scene(front: Front, replicas: list[PlayedReplica]) -> None:
        await post(front, input="y" * 20_480)
        assert front._router.num_pages(0) == 10
        front._set_down(0, "its status took 5 s")
        await looked(front, replicas)
        assert front._router.num_pages(0) == 10
        replicas[0].boot = "second"
        await looked(front, replicas)
        assert front._router.num_pages(0) == 0

    play(scene, num_replicas=1)


def test_a_replica_that_dies_after_a_ping_is_replaced() -> None:
    """A ping only keeps a silent stream open: the answer has not begun."""
    stream = Head(200, ((b"content-type", b"text/event-stream"),))

    async def scene(front: Front, replicas: list[PlayedReplica]) -> None:
        asked = []

        async def serve(call: HttpCall) -> AsyncGenerator[Piece, None]:
            asked.append(call)
            yield ACCEPTED
            yield stream
            yield PING
            if len(asked) == 1:
                raise sys.modules["ray.exceptions"].RayError("the actor died")
            yield b"data: [DONE]\n\n"

        for replica in replicas:
            replica.serve.remote = serve
        reply = await post(front, input="hello", stream=True)
        sent: list[bytes] = []

        async def send(message: dict[str, object]) -> None:
            sent.append(bytes(message.get("body", b"")))  # type: ignore[call-overload]

        async def receive() -> dict[str, object]:
            await asyncio.Event().wait()
            raise AssertionError

        await reply({"type": "http"}, receive, send)  # type: ignore[arg-type]
        assert b"".join(sent) == b"data: [DONE]\n\n"
        assert len(asked) == 2

    play(scene)
