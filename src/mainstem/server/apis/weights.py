"""`/admin/weights`, `/admin/sleep`, `/admin/wake_up`: the engine's weights and memory."""

import asyncio
import os
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mainstem.core.errors import InvalidRequest
from mainstem.core.weights import BOTH_TAGS, Tag, UpdateMode
from mainstem.server.gateway import Gateway
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, from_invalid, unavailable
from mainstem.server.link.answering import EngineFault
from mainstem.wire.bodies import SleepBody, WakeBody, WeightsBody
from mainstem.wire.fields import read_fields

TENSORS = "application/octet-stream"


class WeightRoutes:
    """The handlers, over one Gateway. One change is made at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._changing = asyncio.Lock()

    def listed(self) -> list[Route]:
        return [
            Route("/admin/weights", self.version, methods=["GET"]),
            Route("/admin/weights", self.update, methods=["POST"]),
            Route("/admin/sleep", self.sleep, methods=["POST"]),
            Route("/admin/wake_up", self.wake, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        engine = self._gateway.engine
        told = {"version": engine.weights_version, "is_sleeping": engine.is_asleep}
        return JSONResponse(told)

    async def update(self, request: Request) -> Response:
        """Take the tensors of a folder, or those of a body in the format of safetensors (with
        `?mode=`); replies when they are in force, with the name of their version."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == TENSORS:
            mode = _mode(request.query_params.get("mode", "finish"))
            with _memory_file() as file:
                await self._receive(request, file)
                path = f"/proc/{os.getpid()}/fd/{file}"
                return await self._change(self._gateway.engine.update_weights(path, mode))
        body = read_fields(await read_json(request, self._gateway.limits), WeightsBody)
        if body.resume:
            if body.folder is not None:
                raise ApiError(400, "resume takes no folder", "resume", "invalid_value")
            return await self._change(self._gateway.engine.resume_weights())
        folder = self._folder(body.folder)
        mode = UpdateMode(body.mode)
        return await self._change(self._gateway.engine.update_weights(str(folder), mode))

    async def sleep(self, request: Request) -> Response:
        body = read_fields(await read_json(request, self._gateway.limits), SleepBody)
        return await self._change(self._gateway.engine.sleep(body.level, UpdateMode(body.mode)))

    async def wake(self, request: Request) -> Response:
        body = read_fields(await read_json(request, self._gateway.limits), WakeBody)
        tags = BOTH_TAGS if body.tags is None else frozenset(Tag(tag) for tag in body.tags)
        return await self._change(self._gateway.engine.wake(tags))

    async def _change(self, work: Awaitable[str]) -> Response:
        """The reply to a change. It removes all pages: those of apps are computed again."""
        gateway = self._gateway
        async with self._changing:
            try:
                version = await work
            except InvalidRequest as error:
                raise from_invalid(error) from None
            except EngineFault as fault:
                raise unavailable(str(fault)) from None
            gateway.pins.end_all()
            if not gateway.engine.is_asleep:
                await gateway.filler.fill_all()
        return JSONResponse({"version": version, "is_sleeping": gateway.engine.is_asleep})

    def _folder(self, given: str | None) -> Path:
        """The folder that a client names; raises ApiError unless it is below the root."""
        root = self._gateway.weights_root
        if given is None:
            raise ApiError(400, "folder is missing", "folder", "missing_field")
        if root is None:
            message = "folders are not accepted: the server was started without --weights-root"
            raise ApiError(403, message, "folder", "not_allowed")
        folder = (root / given).resolve()
        if not folder.is_relative_to(root):
            raise ApiError(403, "folder must be below --weights-root", "folder", "not_allowed")
        if not folder.is_dir():
            raise ApiError(404, f"there is no folder {given!r}", "folder", "folder_not_found")
        return folder

    async def _receive(self, request: Request, file: int) -> None:
        """Write the body to a file in memory."""
        limits, num_bytes = self._gateway.limits, 0
        try:
            pieces = aiter(request.stream())
            while True:
                async with asyncio.timeout(limits.body_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                num_bytes += len(piece)
                if num_bytes > limits.weights_bytes:
                    message = f"tensors are limited to {limits.weights_bytes} bytes"
                    raise ApiError(413, message, code="too_large")
                view = memoryview(piece)
                while view:
                    view = view[os.write(file, view) :]
        except TimeoutError:
            raise ApiError(408, f"no piece came within {limits.body_s:g} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before its body was complete") from None


def _mode(given: str) -> UpdateMode:
    known = [mode.value for mode in UpdateMode]
    if given not in known:
        raise ApiError(400, f"mode must be one of {known}, not {given!r}", "mode", "invalid_value")
    return UpdateMode(given)


@contextmanager
def _memory_file() -> Iterator[int]:
    """A file that never reaches a disk; other processes of the same user can open it."""
    if not hasattr(os, "memfd_create"):
        raise ApiError(501, "tensors in a body need Linux; use a folder", code="not_supported")
    file = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
