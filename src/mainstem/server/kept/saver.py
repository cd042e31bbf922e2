"""Saves changes to a file while the server runs, so that a kill loses little."""

import asyncio
import logging
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from mainstem.text.kept_file import KeptFile, Key

SAVE_S = 2.0  # between two saves; a kill may lose the changes of this time

log = logging.getLogger("mainstem.server")

T = TypeVar("T")


class Changing(Protocol[T]):
    """A store in memory whose changes are saved."""

    def __len__(self) -> int: ...

    def take_changes(self) -> dict[Key, T | None]:
        """Entries that changed since the last call; None: the entry was removed."""

    def put_back(self, changes: Iterable[Key]) -> None:
        """Mark entries as changed again, because they could not be saved."""


class Saver(Generic[T]):
    """Saves what has changed, every few seconds and at the end. Lives on the event loop."""

    def __init__(
        self, name: str, kept: Changing[T], file: KeptFile[T], every_s: float = SAVE_S
    ) -> None:
        self._name = name  # name of the entries, for logs
        self._kept = kept
        self._file = file
        self._every_s = every_s
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_saved = True  # whether the last save succeeded

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Save what is left, and end."""
        self._is_closing.set()
        if self._task is not None:
            await self._task
        else:  # the server ends before it was ready
            await self._save()
        if self._is_saved:
            log.info("%s saved", self._name, extra={"facts": {self._name: len(self._kept)}})

    async def _run(self) -> None:
        while not self._is_closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), self._every_s)
            await self._save()

    async def _save(self) -> None:
        """Save on a thread. Entries that cannot be written are tried again later."""
        changes = self._kept.take_changes()
        if not changes:
            return
        try:
            await asyncio.to_thread(self._file.save, changes)
            self._is_saved = True
        except (sqlite3.Error, OSError) as error:
            self._kept.put_back(changes)
            self._is_saved = False
            facts = {self._name: len(changes), "reason": str(error)}
            log.error("%s not saved", self._name, extra={"facts": facts})
