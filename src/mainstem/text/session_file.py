"""Stores sessions on disk, in an SQLite file with atomic changes."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from mainstem.core.errors import ConfigError
from mainstem.text.sessions import Key, Session

FORMAT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS identity (value TEXT);
CREATE TABLE IF NOT EXISTS sessions (owner TEXT, session_id TEXT, token_ids BLOB, text TEXT,
    num_turns INTEGER, created_s REAL, used_s REAL);
CREATE UNIQUE INDEX IF NOT EXISTS sessions_by_key ON sessions (owner, session_id);
"""


class SessionFile:
    """Keeps sessions on disk. `identity` names the tokenizer that their ids belong to.

    One thread at a time uses it.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity

    def load(self) -> dict[Key, Session]:
        """Return the saved sessions, least recently used first; none if they belong to another
        tokenizer. Raises ConfigError if the file is not a file of sessions.
        """
        if not self._path.exists():
            return {}
        try:
            with closing(sqlite3.connect(self._path)) as database:
                if not self._is_ours(database):
                    return {}
                rows = database.execute("SELECT * FROM sessions ORDER BY used_s").fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path} cannot be read as sessions: {error}") from None
        return {(owner, session_id): _session(session_id, *row) for owner, session_id, *row in rows}

    def save(self, changes: Mapping[Key, Session | None]) -> None:
        """Save these sessions, and delete those that are None; raises sqlite3.Error or OSError."""
        self._path.touch(mode=0o600)
        with closing(sqlite3.connect(self._path, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")  # atomic: nothing is saved without COMMIT
            database.execute(f"PRAGMA user_version = {FORMAT}")
            for statement in _TABLES.split(";"):
                database.execute(statement)
            if not self._is_ours(database):
                database.execute("DELETE FROM sessions")
                database.execute("DELETE FROM identity")
                database.execute("INSERT INTO identity VALUES (?)", (self._identity,))
            database.executemany(
                "DELETE FROM sessions WHERE owner = ? AND session_id = ?", changes.keys()
            )
            database.executemany(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)",
                (_row(key, session) for key, session in changes.items() if session is not None),
            )
            database.execute("COMMIT")

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        """Whether the file's sessions belong to this tokenizer; False for an empty file."""
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == num_tables == 0:
            return False  # the process that made the file was killed before the first save
        if version != FORMAT:
            raise ConfigError(f"{self._path} has format {version}, this version reads {FORMAT}")
        found = database.execute("SELECT value FROM identity").fetchone()
        return bool(found == (self._identity,))


def _row(key: Key, session: Session) -> tuple[object, ...]:
    ids = session.token_ids.tobytes()
    times = (session.created_s, session.used_s)
    return (*key, ids, session.text, session.num_turns, *times)


def _session(
    session_id: str, ids: bytes, text: str, num_turns: int, created_s: float, used_s: float
) -> Session:
    return Session(session_id, np.frombuffer(ids, np.int32), text, num_turns, created_s, used_s)
