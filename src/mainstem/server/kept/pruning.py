"""Removes expired files, and expired batches that have ended.

file     made  --- ttl ---> removed, unless an open batch needs it
batch    ended --- ttl ---> removed
"""

import asyncio
import logging
from time import time

from mainstem.server.kept.batch_store import BatchStore
from mainstem.server.kept.file_store import FileStore, named_id

PRUNE_S = 600.0  # between two runs; an expired file may stay this long

log = logging.getLogger("mainstem.server")


class Pruner:
    """Removes what has expired, from time to time, in one task of the event loop."""

    def __init__(self, files: FileStore, batches: BatchStore, ttl_s: float) -> None:
        self._files = files
        self._batches = batches
        self._ttl_s = ttl_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.prune()
            except OSError as error:
                log.error("old files are not removed", extra={"facts": {"reason": str(error)}})
            await asyncio.sleep(PRUNE_S)

    async def prune(self) -> None:
        """Remove what has expired now.

        The files in use are determined before files are listed. This is safe: a batch that is made
        in between cannot name an expired file, and the files of a batch that ends in between are
        new.
        """
        now_s = time()
        needed = self._needed()
        num_batches = num_files = 0
        for batch in self._batches.ended_before(now_s - self._ttl_s):
            self._batches.remove(batch)
            num_batches += 1
            await asyncio.sleep(0)  # let other tasks run
        for owner, stored in await asyncio.to_thread(self._files.expired, now_s, self._ttl_s):
            if (owner, stored.file_id) not in needed:
                num_files += await asyncio.to_thread(self._files.remove, owner, stored.file_id)
        if num_batches or num_files:
            facts = {"batches": num_batches, "files": num_files}
            log.info("old files removed", extra={"facts": facts})

    def _needed(self) -> set[tuple[str, str]]:
        """Owners and ids of the files that open batches read, or are about to make."""
        return {
            (batch.owner, file_id)
            for batch in self._batches.opened()
            for file_id in (batch.input_file_id, *map(named_id, batch.answer_names))
        }
