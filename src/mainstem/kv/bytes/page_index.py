"""The index of a disk store: which record holds which page. SQLite in WAL mode.

A row is committed only after its record is on the disk, and deleted before its record is written
again. So after a kill at any moment a row matches its record; the checksum finds other damage.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem.core.errors import StoreError
from mainstem.core.ids import PageKey

FORMAT = 1
FILE = "index.sqlite"
MODEL = "model"  # the model's name, for people: a store may be opened under another name

_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pages (
    key BLOB PRIMARY KEY,      -- chained SHA-256 of model identity and every token up to here
    record INTEGER NOT NULL UNIQUE,
    token_ids BLOB NOT NULL,   -- int32, of this page
    crc32 INTEGER NOT NULL,    -- of the record's page bytes
    used_at REAL NOT NULL      -- seconds since 1970
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row of the index: a page and its record."""

    key: PageKey
    record: int
    token_ids: bytes
    crc32: int
    used_at: float


class PageIndex:
    """One connection; used by one thread at a time."""

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        """Open or create an index. `about` describes the store: model identity, page bytes, and the
        model's name, which may change.

        Raises StoreError if the index has another format or belongs to another model, and
        sqlite3.DatabaseError if it cannot be read.
        """
        self._database = sqlite3.connect(folder / FILE, timeout=30.0, check_same_thread=False)
        try:
            self._open(folder, {"format": str(FORMAT), **about})
        except BaseException:
            self._database.close()
            raise

    def _open(self, folder: Path, about: dict[str, str]) -> None:
        database = self._database
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.executescript(_SCHEMA)
        found = dict(database.execute("SELECT name, value FROM about"))
        for name, value in about.items():
            if name != MODEL and name in found and found[name] != value:
                raise StoreError(
                    f"{folder} holds pages of {name} {found[name]}, and {name} {value} is needed; "
                    f"use another folder or `mainstem cache clear`"
                )
        with database:
            database.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())

    def rows(self) -> list[PageRow]:
        """All pages, least recently used first."""
        found = self._database.execute(
            "SELECT key, record, token_ids, crc32, used_at FROM pages ORDER BY used_at, record DESC"
        )
        return [PageRow(PageKey(row[0]), *row[1:]) for row in found]

    def insert(self, rows: Sequence[PageRow]) -> int:
        """Add pages; returns by how many rows the index grew. A stale row, of the same page or of
        the same record, is replaced."""
        with self._database:
            replaced = self._database.executemany(
                "DELETE FROM pages WHERE key = ? OR record = ?",
                [(row.key, row.record) for row in rows],
            ).rowcount
            self._database.executemany(
                "INSERT INTO pages VALUES (?, ?, ?, ?, ?)",
                [(row.key, row.record, row.token_ids, row.crc32, row.used_at) for row in rows],
            )
        return len(rows) - replaced

    def delete(self, keys: Sequence[PageKey]) -> int:
        """Forget pages; returns how many of them the index had."""
        with self._database:
            done = self._database.executemany(
                "DELETE FROM pages WHERE key = ?", [(key,) for key in keys]
            )
        return done.rowcount

    def touch(self, used_at: dict[PageKey, float]) -> None:
        """Note when pages were last used."""
        with self._database:
            self._database.executemany(
                "UPDATE pages SET used_at = ? WHERE key = ?",
                [(when, key) for key, when in used_at.items()],
            )

    def close(self) -> None:
        self._database.close()


def read_about(folder: Path) -> dict[str, str]:
    """Return the description of a store; raises sqlite3.Error if it cannot be read."""
    database = sqlite3.connect(f"file:{folder / FILE}?mode=ro", uri=True, timeout=30.0)
    try:
        found = dict(database.execute("SELECT name, value FROM about"))
    finally:
        database.close()
    return {name: value for name, value in found.items() if name != "format"}


def remove_index(folder: Path) -> None:
    """Delete the index and its journals."""
    for path in folder.glob(f"{FILE}*"):
        path.unlink(missing_ok=True)
