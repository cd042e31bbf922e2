"""Writes sessions to their file while the server runs, so that a kill loses little."""

import asyncio
import logging
import sqlite3
from contextlib import suppress

from mainstem.text.session_file import SessionFile
from mainstem.text.sessions import Sessions

SAVE_S = 2.0  # so much a kill may lose

log = logging.getLogger("mainstem.server")


class SessionSaver:
    """Saves what has changed, every few seconds and at the end. Lives on the event loop."""

    def __init__(self, sessions: Sessions, file: SessionFile, every_s: float = SAVE_S) -> None:
        self._sessions = sessions
        self._file = file
        self._every_s = every_s
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Save what is left, and end."""
        self._is_closing.set()
        if self._task is not None:
            await self._task
        log.info("sessions saved", extra={"facts": {"sessions": len(self._sessions)}})

    async def _run(self) -> None:
        while not self._is_closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), self._every_s)
            await self._save()

    async def _save(self) -> None:
        """On a thread; what cannot be written is tried again."""
        changes = self._sessions.take_changes()
        if not changes:
            return
        try:
            await asyncio.to_thread(self._file.save, changes)
        except (sqlite3.Error, OSError) as error:
            self._sessions.put_back(changes)
            facts = {"sessions": len(changes), "reason": str(error)}
            log.error("sessions not saved", extra={"facts": facts})
