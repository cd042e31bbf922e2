"""Keeps entries of owners on disk, in an SQLite file with atomic changes."""

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mainstem.core.errors import ConfigError

FORMAT = 1

Key = tuple[str, str]  # owner, id
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptTable(Generic[T]):
    """How entries are stored. The first columns are `owner` and `id_column`; one is `used_s`."""

    name: str  # also of the entries, in errors
    id_column: str
    statements: tuple[str, ...]  # make the table if there is none
    read: Callable[..., T]  # makes an entry of the columns after the owner
    columns: Callable[[T], tuple[object, ...]]  # these columns of an entry


class KeptFile(Generic[T]):
    """A file with one table of entries. One thread at a time uses it."""

    def __init__(self, path: Path, table: KeptTable[T], identity: str | None = None) -> None:
        """Entries belong to the `identity`, if one is given: those of another one are dropped."""
        self._path = path
        self._table = table
        self._identity = identity

    def load(self) -> dict[Key, T]:
        """Return the saved entries, least recently used first; none if they belong to another
        identity. Raises ConfigError if the file is not a file of such entries."""
        if not self._path.exists():
            return {}
        name, read = self._table.name, self._table.read
        try:
            with closing(sqlite3.connect(self._path)) as database:
                if not self._is_ours(database):
                    return {}
                rows = database.execute(f"SELECT * FROM {name} ORDER BY used_s").fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path} cannot be read as {name}: {error}") from None
        return {(owner, row[0]): read(*row) for owner, *row in rows}

    def save(self, changes: Mapping[Key, T | None]) -> None:
        """Save these entries, and delete those that are None; raises sqlite3.Error or OSError."""
        table = self._table
        rows = [
            (owner, *table.columns(entry))
            for (owner, _), entry in changes.items()
            if entry is not None
        ]
        self._path.touch(mode=0o600)
        with closing(sqlite3.connect(self._path, isolation_level=None)) as database:
            database.execute("PRAGMA secure_delete = ON")  # overwrites what is deleted
            database.execute("BEGIN IMMEDIATE")  # atomic: nothing is saved without COMMIT
            database.execute(f"PRAGMA user_version = {FORMAT}")
            for statement in table.statements:
                database.execute(statement)
            if self._identity is not None and not self._is_ours(database):
                database.execute(f"DELETE FROM {table.name}")
                database.execute("DELETE FROM identity")
                database.execute("INSERT INTO identity VALUES (?)", (self._identity,))
            database.executemany(
                f"DELETE FROM {table.name} WHERE owner = ? AND {table.id_column} = ?",
                changes.keys(),
            )
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                database.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
            database.execute("COMMIT")

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        """Whether the file has entries of this identity. It is empty if the process that made it
        was killed during its first save."""
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == num_tables == 0:
            return False
        if version != FORMAT:
            raise ConfigError(f"{self._path} has format {version}, this version reads {FORMAT}")
        if self._identity is None:
            return True
        found = database.execute("SELECT value FROM identity").fetchone()
        return bool(found == (self._identity,))
