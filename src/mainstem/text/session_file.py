"""Stores sessions on disk."""

from pathlib import Path

import numpy as np

from mainstem.text.kept_file import KeptFile, KeptTable
from mainstem.text.sessions import Session

_STATEMENTS = (
    "CREATE TABLE IF NOT EXISTS identity (value TEXT)",
    """CREATE TABLE IF NOT EXISTS sessions (owner TEXT, session_id TEXT, token_ids BLOB, text TEXT,
    num_turns INTEGER, created_s REAL, used_s REAL)""",
    "CREATE UNIQUE INDEX IF NOT EXISTS sessions_by_key ON sessions (owner, session_id)",
)


def session_file(path: Path, identity: str) -> KeptFile[Session]:
    """A file of sessions. `identity` names the tokenizer that their ids belong to."""
    return KeptFile(path, _TABLE, identity)


def _columns(session: Session) -> tuple[object, ...]:
    ids, times = session.token_ids.tobytes(), (session.created_s, session.used_s)
    return (session.session_id, ids, session.text, session.num_turns, *times)


def _session(session_id: str, ids: bytes, *others: object) -> Session:
    return Session(session_id, np.frombuffer(ids, np.int32), *others)  # type: ignore[arg-type]


_TABLE = KeptTable("sessions", "session_id", _STATEMENTS, _session, _columns)
