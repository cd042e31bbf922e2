"""Remembers how many pages a store held at its last use. If it holds far fewer, pages were lost.

The count is kept in the user's cache folder, because the store's own folder may be missing:
deleted, or on a disk that is not mounted.
"""

import os
from contextlib import suppress
from pathlib import Path

from mainstem.core.cache_files import cache_file, write_cache_file

KIND = "stores"  # the folder of the counts, in the cache folder
WIDTH = 12  # digits of a count, which is overwritten in place


class Ledger:
    """The page count of one store. If the file cannot be written, the count is unknown."""

    def __init__(self, path: Path | None) -> None:
        """`path` is the file with the count; None: no count is kept."""
        self._path = path
        self._file: int | None = None

    def read(self) -> int | None:
        """Pages of the store at the last `note`; None: not known."""
        if self._path is None:
            return None
        try:
            return int(self._path.read_bytes()[:WIDTH])
        except (OSError, ValueError):
            return None

    def note(self, count: int) -> None:
        """Store a count. This takes microseconds. The count survives a kill but not a power
        failure."""
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, f"{count:>{WIDTH}}".encode(), 0)

    def open(self, folder: Path) -> None:
        """Begin to keep counts of the store in `folder`."""
        if self._path is not None:
            with suppress(OSError):
                write_cache_file(self._path, f"{0:>{WIDTH}} pages in {folder}\n")
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def ledger_of(folder: Path) -> Path:
    """Where the count of a store is kept."""
    return cache_file(KIND, folder)
