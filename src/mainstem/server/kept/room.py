"""How much a key may store: files, and batches."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mainstem.server.http.faults import ApiError, busy, disk_is_needed
from mainstem.server.http.limits import ServerLimits
from mainstem.server.kept.batch_store import BatchStore
from mainstem.server.kept.file_store import FileStore


class Room:
    """What the keys have stored, compared with the limits. Used only on the event loop."""

    def __init__(self, files: FileStore, batches: BatchStore, limits: ServerLimits) -> None:
        self._files = files
        self._batches = batches
        self._limits = limits
        self._arriving: Counter[str] = Counter()  # bytes of uploads in progress, by owner
        self._num_arriving: Counter[str] = Counter()  # number of uploads in progress, by owner

    @asynccontextmanager
    async def for_file(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Reserve room for one more file of an owner; raises ApiError 413 if there is none. Uploads
        are counted before files are listed, so a file that is completed in between counts twice,
        which is safe. Answers of a batch also count twice while its files are made.
        """
        limits = self._limits
        self._arriving[owner] += num_bytes
        self._num_arriving[owner] += 1
        arriving_bytes, num_arriving = self._arriving[owner], self._num_arriving[owner]
        try:
            work_bytes = self._batches.work_bytes(owner)
            stored = await asyncio.to_thread(self._files.listed, owner)
            stored_bytes = work_bytes + sum(item.num_bytes for item in stored)
            if stored_bytes + arriving_bytes > limits.stored_bytes:
                raise _too_much(f"files of this key may have at most {limits.stored_bytes} bytes")
            if len(stored) + num_arriving > limits.stored_files:
                raise _too_much(f"this key may have at most {limits.stored_files} files")
            yield
        finally:
            self._arriving[owner] -= num_bytes
            self._num_arriving[owner] -= 1

    async def for_batch(self, owner: str) -> None:
        """Make room for one more batch of an owner; raises ApiError 413 if there is none. A batch
        is dropped early only if it has no files left to fetch.
        """
        limits = self._limits
        if len(self._batches.listed(owner)) < limits.kept_batches:
            return
        stored = {item.file_id for item in await asyncio.to_thread(self._files.listed, owner)}
        for batch in reversed(self._batches.listed(owner)):
            if batch.is_ended and not stored & {batch.output_file_id, batch.error_file_id}:
                with disk_is_needed():
                    self._batches.remove(batch)
                return
        message = f"this key may have at most {limits.kept_batches} batches: "
        message += "delete ended message batches, or files of other ended batches"
        raise ApiError(413, message, "input_file_id", "storage_full")

    def check_open(self, owner: str) -> None:
        """Raise ApiError 429 if an owner has too many batches that have not ended."""
        num_open = sum(not batch.is_ended for batch in self._batches.listed(owner))
        if num_open >= self._limits.open_batches:
            raise busy(f"this key may have at most {self._limits.open_batches} open batches", 60)


def _too_much(message: str) -> ApiError:
    return ApiError(413, f"{message}: delete some", "file", "storage_full")
