"""`/v1/files` and `/v1/batches`, as in OpenAI's API."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import time

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mainstem.server.gateway import BatchService, Gateway
from mainstem.server.http.auth import Tenant
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, busy, disk_is_needed, unavailable
from mainstem.server.http.pages import page_of
from mainstem.server.http.upload import expected_bytes, receive_form
from mainstem.server.kept.batch_store import Batch
from mainstem.server.kept.file_store import StoredFile
from mainstem.server.link.answering import SHUTTING_DOWN
from mainstem.wire.bodies import BatchBody, ExpiresAfter
from mainstem.wire.errors import WireError
from mainstem.wire.fields import read_fields

PURPOSE = "batch"


class BatchRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._arriving: Counter[str] = Counter()  # bytes of uploads in progress, by owner
        self._num_arriving: Counter[str] = Counter()  # number of uploads in progress, by owner

    def listed(self) -> list[Route]:
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", self.file, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list_batches, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    # --- files ----------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Store a file; it exists when the reply is sent."""
        self._service()
        owner, limits = _owner(request), self._gateway.limits
        if self._gateway.is_draining:
            raise unavailable(SHUTTING_DOWN)
        async with self._room(owner, expected_bytes(request, limits)):
            with disk_is_needed():
                made = await self._receive(request)
        return JSONResponse(self._shown(made))

    @asynccontextmanager
    async def _room(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Reserve room for one more file of an owner; raises ApiError 413 if there is none. Uploads
        are counted before files are listed, so a file that is completed in between counts twice,
        which is safe. Answers of a batch also count twice while its files are made.
        """
        limits = self._gateway.limits
        self._arriving[owner] += num_bytes
        self._num_arriving[owner] += 1
        arriving_bytes, num_arriving = self._arriving[owner], self._num_arriving[owner]
        try:
            work_bytes = self._service().batches.work_bytes(owner)
            stored = await asyncio.to_thread(self._service().files.listed, owner)
            stored_bytes = work_bytes + sum(item.num_bytes for item in stored)
            if stored_bytes + arriving_bytes > limits.stored_bytes:
                raise _too_much(f"files of this key may have at most {limits.stored_bytes} bytes")
            if len(stored) + num_arriving > limits.stored_files:
                raise _too_much(f"this key may have at most {limits.stored_files} files")
            yield
        finally:
            self._arriving[owner] -= num_bytes
            self._num_arriving[owner] -= 1

    async def _receive(self, request: Request) -> StoredFile:
        service, owner, limits = self._service(), _owner(request), self._gateway.limits
        with service.files.writing(owner) as (file_id, path):
            form = await receive_form(request, path, limits)
            purpose = form.fields.get("purpose", b"").decode(errors="replace")
            if purpose != PURPOSE:
                message = f"purpose: must be {PURPOSE!r}, got {purpose!r}"
                raise ApiError(400, message, "purpose", "invalid_value")
            name = form.filename or ""
            ttl_s = _ttl_s(form.fields)
            put = service.files.put
            return await asyncio.to_thread(put, owner, file_id, name, purpose, ttl_s)

    async def list_files(self, request: Request) -> Response:
        files = await asyncio.to_thread(self._service().files.listed, _owner(request))
        purpose = request.query_params.get("purpose")
        chosen = [item for item in files if purpose in (None, item.purpose)]
        return page_of(request, [(item.file_id, self._shown(item)) for item in chosen])

    async def file(self, request: Request) -> Response:
        return JSONResponse(self._shown(await self._found_file(request)))

    async def content(self, request: Request) -> Response:
        stored = await self._found_file(request)
        path = self._service().files.path(_owner(request), stored.file_id)
        headers = {"x-content-type-options": "nosniff"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def delete_file(self, request: Request) -> Response:
        stored = await self._found_file(request)
        await asyncio.to_thread(self._service().files.remove, _owner(request), stored.file_id)
        return JSONResponse({"id": stored.file_id, "object": "file", "deleted": True})

    def _shown(self, stored: StoredFile) -> dict[str, object]:
        return stored.to_json(self._gateway.limits.file_ttl_s)

    async def _found_file(self, request: Request) -> StoredFile:
        return await self._file_of(request, request.path_params["file_id"], 404)

    async def _file_of(self, request: Request, file_id: str, status: int) -> StoredFile:
        found = await asyncio.to_thread(self._service().files.find, _owner(request), file_id)
        if found is None:
            message = f"there is no file {file_id!r}"
            raise ApiError(status, message, "input_file_id", "file_not_found")
        return found

    # --- batches --------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        service, owner, limits = self._service(), _owner(request), self._gateway.limits
        body = read_fields(await read_json(request, limits), BatchBody)
        stored = await self._file_of(request, body.input_file_id, 400)
        await self._forget_one(owner)
        async with self._room(owner, 0):  # the batch's answers will become a file
            batch = self._created(owner, stored, body)
        service.runner.wake()
        return JSONResponse(batch.to_json())

    def _created(self, owner: str, stored: StoredFile, body: BatchBody) -> Batch:
        service, limits = self._service(), self._gateway.limits
        if time() >= stored.expires_s(limits.file_ttl_s):  # it may be removed at any moment
            message = f"the file {stored.file_id!r} has expired"
            raise ApiError(400, message, "input_file_id", "file_expired")
        if (
            sum(not batch.is_ended for batch in service.batches.listed(owner))
            >= limits.open_batches
        ):
            raise busy(f"this key may have at most {limits.open_batches} open batches", 60)
        with disk_is_needed():
            return service.batches.create(owner, body)

    async def _forget_one(self, owner: str) -> None:
        """Make room for one more batch of an owner; raises ApiError 413 if there is none. A batch
        is dropped early only if it has no files left to fetch.
        """
        service, limits = self._service(), self._gateway.limits
        if len(service.batches.listed(owner)) < limits.kept_batches:
            return
        stored = {item.file_id for item in await asyncio.to_thread(service.files.listed, owner)}
        for batch in reversed(service.batches.listed(owner)):
            if batch.is_ended and not stored & {batch.output_file_id, batch.error_file_id}:
                with disk_is_needed():
                    service.batches.remove(batch)
                return
        message = (
            f"this key may have at most {limits.kept_batches} batches: delete files of ended ones"
        )
        raise ApiError(413, message, "input_file_id", "storage_full")

    async def list_batches(self, request: Request) -> Response:
        batches = self._service().batches.listed(_owner(request))
        return page_of(request, [(batch.batch_id, batch.to_json()) for batch in batches])

    async def batch(self, request: Request) -> Response:
        return JSONResponse(self._found_batch(request).to_json())

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(self._service().runner.cancel(self._found_batch(request)).to_json())

    def _found_batch(self, request: Request) -> Batch:
        batch_id = request.path_params["batch_id"]
        found = self._service().batches.find(_owner(request), batch_id)
        if found is None:
            raise ApiError(404, f"there is no batch {batch_id!r}", "batch_id", "batch_not_found")
        return found

    def _service(self) -> BatchService:
        if self._gateway.batches is None:
            message = "this server keeps no files: it was started without --data-dir"
            raise ApiError(404, message, code="not_enabled")
        return self._gateway.batches


def _ttl_s(fields: Mapping[str, bytes]) -> int | None:
    """When an uploaded file expires, by the fields `expires_after[...]` of its form."""
    given = {
        name.removeprefix("expires_after[").removesuffix("]"): value.decode(errors="replace")
        for name, value in fields.items()
        if name.startswith("expires_after[")
    }
    if not given:
        return None
    seconds = given.get("seconds", "")
    is_number = seconds.isascii() and seconds.isdecimal() and len(seconds) < 9
    try:
        read = read_fields(given | {"seconds": int(seconds) if is_number else None}, ExpiresAfter)
    except WireError as error:
        message = f"expires_after: {error.message}"
        raise ApiError(400, message, "expires_after", "invalid_value") from None
    return read.seconds


def _too_much(message: str) -> ApiError:
    return ApiError(413, f"{message}: delete some", "file", "storage_full")


def _owner(request: Request) -> str:
    tenant: Tenant = request.state.tenant
    return tenant.owner
