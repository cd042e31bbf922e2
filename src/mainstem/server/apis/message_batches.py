"""Anthropic's message batches: `/v1/messages/batches`.

The requests of a batch become a file of rows, which the runner answers like those of OpenAI's
batches (`apis/batches.py`), with the same limits. The files of requests and results are hidden from
`/v1/files`; they count in a key's storage and go with their batch.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mainstem.core.json import Json
from mainstem.server.gateway import BatchService, Gateway
from mainstem.server.http.auth import owner_of
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, disk_is_needed, unavailable
from mainstem.server.http.pages import messages_page
from mainstem.server.http.upload import expected_bytes
from mainstem.server.kept.batch_store import Batch
from mainstem.server.kept.file_store import HIDDEN
from mainstem.server.link.answering import SHUTTING_DOWN
from mainstem.wire.messages.batches import BATCHES_URL, MessageBatchBody, read_batch, rows
from mainstem.wire.messages.parsing import MESSAGES_URL
from mainstem.wire.messages.rendering import moment

BODY_TIMES = 10  # a body of requests may take this many times as long as another


class MessageBatchRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def listed(self) -> list[Route]:
        one = f"{BATCHES_URL}/{{batch_id}}"
        return [
            Route(BATCHES_URL, self.create, methods=["POST"]),
            Route(BATCHES_URL, self.list_batches, methods=["GET"]),
            Route(one, self.batch, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/results", self.results, methods=["GET"]),
        ]

    @property
    def _service(self) -> BatchService:
        return self._gateway.batch_service

    async def create(self, request: Request) -> Response:
        service, owner, limits = self._service, owner_of(request), self._gateway.limits
        if self._gateway.is_draining:
            raise unavailable(SHUTTING_DOWN)
        async with service.room.for_file(owner, expected_bytes(request, limits)):
            larger = replace(
                limits, body_bytes=limits.message_batch_bytes, body_s=BODY_TIMES * limits.body_s
            )
            body = await asyncio.to_thread(read_batch, await read_json(request, larger))
            await service.room.for_batch(owner)
            service.room.check_open(owner)
            with disk_is_needed():
                batch = await self._created(owner, body)
        service.runner.wake()
        return JSONResponse(_shown(request, batch))

    async def _created(self, owner: str, body: MessageBatchBody) -> Batch:
        """Store the requests, and then the batch."""
        files = self._service.files
        with files.writing(owner) as (file_id, path):
            await asyncio.to_thread(_write, path, body)
            await asyncio.to_thread(files.put, owner, file_id, "requests.jsonl", HIDDEN)
        try:
            create, total = self._service.batches.create, len(body.requests)
            return create(owner, MESSAGES_URL, file_id, total=total)
        except OSError:
            await asyncio.to_thread(files.remove, owner, file_id)
            raise

    async def list_batches(self, request: Request) -> Response:
        batches = self._service.batches.listed(owner_of(request))
        shown = [batch for batch in batches if batch.is_of_messages]
        return messages_page(request, [(each.batch_id, _shown(request, each)) for each in shown])

    async def batch(self, request: Request) -> Response:
        return JSONResponse(_shown(request, self._found(request)))

    async def cancel(self, request: Request) -> Response:
        """End a batch early; one that has ended stays as it is."""
        return JSONResponse(_shown(request, self._service.runner.cancel(self._found(request))))

    async def delete(self, request: Request) -> Response:
        service, batch = self._service, self._found(request)
        if not batch.is_ended:
            message = f"{batch.batch_id} is still processing; cancel it, and delete it when it has "
            raise ApiError(400, f"{message}ended", "batch_id", "invalid_value")
        with disk_is_needed():
            for file_id in (batch.input_file_id, batch.output_file_id):
                if file_id is not None:
                    await asyncio.to_thread(service.files.remove, batch.owner, file_id)
            service.batches.remove(batch)
        return JSONResponse({"id": batch.batch_id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """The results as JSON lines, in the order in which the requests were answered."""
        batch, files = self._found(request), self._service.files
        if not batch.is_ended:
            message = f"{batch.batch_id} is still processing; its results come when it has ended"
            raise ApiError(400, message, "batch_id", "invalid_value")
        file_id = batch.output_file_id
        if file_id is None or await asyncio.to_thread(files.find, batch.owner, file_id) is None:
            raise ApiError(404, f"there are no results of {batch.batch_id}", "batch_id")
        headers = {"x-content-type-options": "nosniff"}
        path = files.path(batch.owner, file_id)
        return FileResponse(path, media_type="application/x-jsonl", headers=headers)

    def _found(self, request: Request) -> Batch:
        batch_id = request.path_params["batch_id"]
        found = self._service.batches.find(owner_of(request), batch_id)
        if found is None or not found.is_of_messages:
            raise ApiError(404, f"there is no message batch {batch_id!r:.80}", "batch_id")
        return found


def _write(path: Path, body: MessageBatchBody) -> None:
    with path.open("wb") as target:
        for row in rows(body):
            target.write(msgspec.json.encode(row) + b"\n")


def _shown(request: Request, batch: Batch) -> Json:
    """A batch in the format of Anthropic's API."""
    times, ended_s = batch.times, batch.ended_s
    cancelled_s = times.get("cancelling_at")
    status = "in_progress" if cancelled_s is None else "canceling"
    has_results = batch.is_ended and batch.output_file_id is not None
    path = f"{BATCHES_URL}/{batch.batch_id}/results"
    return {
        "id": batch.batch_id,
        "type": "message_batch",
        "processing_status": "ended" if batch.is_ended else status,
        "request_counts": _counts(batch),
        "created_at": moment(times["created_at"]),
        "expires_at": moment(times["expires_at"]),
        "ended_at": None if ended_s is None else moment(ended_s),
        "cancel_initiated_at": None if cancelled_s is None else moment(cancelled_s),
        "archived_at": None,
        "results_url": str(request.url.replace(path=path, query="")) if has_results else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Requests by state. As in Anthropic's API, all are in progress until the batch has ended."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not batch.is_ended:
        return counts | {"processing": batch.total}
    left = "expired" if batch.status.value == "expired" else "canceled"
    num_left = batch.total - batch.completed - batch.failed
    return counts | {"succeeded": batch.completed, "errored": batch.failed, left: num_left}
