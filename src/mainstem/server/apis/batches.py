"""`/v1/files` and `/v1/batches`, as in OpenAI's API."""

import asyncio
from collections.abc import Mapping
from time import time

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mainstem.server.gateway import BatchService, Gateway
from mainstem.server.http.auth import owner_of
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, disk_is_needed, unavailable
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

    @property
    def _service(self) -> BatchService:
        return self._gateway.batch_service

    # --- files ----------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Store a file; it exists when the reply is sent."""
        service, owner, limits = self._service, owner_of(request), self._gateway.limits
        if self._gateway.is_draining:
            raise unavailable(SHUTTING_DOWN)
        async with service.room.for_file(owner, expected_bytes(request, limits)):
            with disk_is_needed():
                made = await self._receive(request)
        return JSONResponse(self._shown(made))

    async def _receive(self, request: Request) -> StoredFile:
        service, owner, limits = self._service, owner_of(request), self._gateway.limits
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
        files = await asyncio.to_thread(self._service.files.listed, owner_of(request))
        purpose = request.query_params.get("purpose")
        shown = [item for item in files if not item.is_hidden]
        chosen = [item for item in shown if purpose in (None, item.purpose)]
        return page_of(request, [(item.file_id, self._shown(item)) for item in chosen])

    async def file(self, request: Request) -> Response:
        return JSONResponse(self._shown(await self._found_file(request)))

    async def content(self, request: Request) -> Response:
        stored = await self._found_file(request)
        path = self._service.files.path(owner_of(request), stored.file_id)
        headers = {"x-content-type-options": "nosniff"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def delete_file(self, request: Request) -> Response:
        stored = await self._found_file(request)
        await asyncio.to_thread(self._service.files.remove, owner_of(request), stored.file_id)
        return JSONResponse({"id": stored.file_id, "object": "file", "deleted": True})

    def _shown(self, stored: StoredFile) -> dict[str, object]:
        return stored.to_json(self._gateway.limits.file_ttl_s)

    async def _found_file(self, request: Request) -> StoredFile:
        return await self._file_of(request, request.path_params["file_id"], 404)

    async def _file_of(self, request: Request, file_id: str, status: int) -> StoredFile:
        found = await asyncio.to_thread(self._service.files.find, owner_of(request), file_id)
        if found is None or found.is_hidden:
            message = f"there is no file {file_id!r}"
            raise ApiError(status, message, "input_file_id", "file_not_found")
        return found

    # --- batches --------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        service, owner, limits = self._service, owner_of(request), self._gateway.limits
        body = read_fields(await read_json(request, limits), BatchBody)
        stored = await self._file_of(request, body.input_file_id, 400)
        await service.room.for_batch(owner)
        async with service.room.for_file(owner, 0):  # the batch's answers will become a file
            batch = self._created(owner, stored, body)
        service.runner.wake()
        return JSONResponse(batch.to_json())

    def _created(self, owner: str, stored: StoredFile, body: BatchBody) -> Batch:
        service, limits = self._service, self._gateway.limits
        if time() >= stored.expires_s(limits.file_ttl_s):  # it may be removed at any moment
            message = f"the file {stored.file_id!r} has expired"
            raise ApiError(400, message, "input_file_id", "file_expired")
        service.room.check_open(owner)
        with disk_is_needed():
            after = body.output_expires_after
            return service.batches.create(
                owner,
                body.endpoint,
                body.input_file_id,
                metadata=body.metadata,
                output_ttl_s=None if after is None else after.seconds,
            )

    async def list_batches(self, request: Request) -> Response:
        batches = self._service.batches.listed(owner_of(request))
        shown = [batch for batch in batches if not batch.is_of_messages]
        return page_of(request, [(batch.batch_id, batch.to_json()) for batch in shown])

    async def batch(self, request: Request) -> Response:
        return JSONResponse(self._found_batch(request).to_json())

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(self._service.runner.cancel(self._found_batch(request)).to_json())

    def _found_batch(self, request: Request) -> Batch:
        batch_id = request.path_params["batch_id"]
        found = self._service.batches.find(owner_of(request), batch_id)
        if found is None or found.is_of_messages:
            raise ApiError(404, f"there is no batch {batch_id!r}", "batch_id", "batch_not_found")
        return found


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
