"""Stores responses on disk, in an SQLite file with atomic changes."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from mainstem.core.errors import ConfigError
from mainstem.server.response_store import Kept, Key

FORMAT = 1

_TABLE = """CREATE TABLE IF NOT EXISTS responses (owner TEXT, response_id TEXT, previous_id TEXT,
    session_id TEXT, data BLOB, used_s REAL, PRIMARY KEY (owner, response_id))"""


class ResponseFile:
    """Keeps responses on disk. One thread at a time uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[Key, Kept]:
        """Return the saved responses, least recently used first; raises ConfigError if the file is
        not a file of responses."""
        if not self._path.exists():
            return {}
        try:
            with closing(sqlite3.connect(self._path)) as database:
                if not self._has_table(database):
                    return {}
                rows = database.execute("SELECT * FROM responses ORDER BY used_s").fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path} cannot be read as responses: {error}") from None
        return {(owner, row[0]): Kept(*row) for owner, *row in rows}

    def save(self, changes: Mapping[Key, Kept | None]) -> None:
        """Save these responses, and delete those that are None; raises sqlite3.Error or OSError."""
        self._path.touch(mode=0o600)
        with closing(sqlite3.connect(self._path, isolation_level=None)) as database:
            database.execute("PRAGMA secure_delete = ON")  # overwrites what is deleted
            database.execute("BEGIN IMMEDIATE")  # atomic: nothing is saved without COMMIT
            database.execute(f"PRAGMA user_version = {FORMAT}")
            database.execute(_TABLE)
            database.executemany(
                "DELETE FROM responses WHERE owner = ? AND response_id = ?", changes.keys()
            )
            database.executemany(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)",
                ((key[0], *_row(kept)) for key, kept in changes.items() if kept is not None),
            )
            database.execute("COMMIT")

    def _has_table(self, database: sqlite3.Connection) -> bool:
        """Whether the file has the table. It has none if the process that made the file was killed
        during its first save."""
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == num_tables == 0:
            return False
        if version != FORMAT:
            raise ConfigError(f"{self._path} has format {version}, this version reads {FORMAT}")
        return True


def _row(kept: Kept) -> tuple[object, ...]:
    return (kept.response_id, kept.previous_id, kept.session_id, kept.data, kept.used_s)
