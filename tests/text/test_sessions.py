"""Sessions: bounded, private to their owner, and back after a restart."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s
from mainstem.text.encoding import begin_prompt
from mainstem.text.kept_file import KeptFile
from mainstem.text.session_file import session_file
from mainstem.text.sessions import (
    MAX_SESSION_TOKENS,
    Session,
    SessionLimits,
    Sessions,
    said_before,
    spoken_text,
    tokenizer_identity,
)
from tests.fake_engines import EOS_ID, a_tokenizer


def ids(count: int) -> Int32s:
    return np.arange(count, dtype=np.int32)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_session_is_private_to_its_owner() -> None:
    sessions = Sessions(SessionLimits())
    sessions.keep("alice", "s", ids(3), "abc")
    assert sessions.find("bob", "s") is None
    assert sessions.listed("bob") == []
    assert sessions.remove("bob", "s") is None
    assert sessions.find("alice", "s") is not None
    assert sessions.remove("alice", "s") is not None
    assert sessions.find("alice", "s") is None


def test_turns_are_counted_and_the_latest_comes_first() -> None:
    sessions = Sessions(SessionLimits())
    for session_id in ("a", "b", "a"):
        sessions.keep("me", session_id, ids(3), "abc")
    assert [(s.session_id, s.num_turns) for s in sessions.listed("me")] == [("a", 2), ("b", 1)]


def test_unused_sessions_are_forgotten() -> None:
    clock = Clock()
    sessions = Sessions(SessionLimits(ttl_s=10), clock)
    sessions.keep("me", "old", ids(3), "")
    clock.now_s += 6
    sessions.keep("me", "new", ids(3), "")
    clock.now_s += 6
    assert [session.session_id for session in sessions.listed("me")] == ["new"]
    assert sessions.num_tokens == 3


def test_if_sessions_exceed_a_limit_the_oldest_are_forgotten() -> None:
    sessions = Sessions(SessionLimits(max_sessions=2, max_tokens=10))
    for name, count in (("a", 3), ("b", 3), ("c", 3), ("d", 6)):
        sessions.keep("me", name, ids(count), "")
        sessions.check()
    assert [session.session_id for session in sessions.listed("me")] == ["d", "c"]
    sessions.keep("me", "e", ids(8), "")
    assert [session.session_id for session in sessions.listed("me")] == ["e"]
    wide = Sessions(SessionLimits())
    wide.keep("me", "x", ids(MAX_SESSION_TOKENS + 1), "")
    assert len(wide) == 0


def save(sessions: Sessions, file: KeptFile[Session]) -> None:
    file.save(sessions.take_changes())


def restored(file: KeptFile[Session], limits: SessionLimits, clock: Clock) -> Sessions:
    sessions = Sessions(limits, clock)
    sessions.restore(file.load())
    sessions.check()
    return sessions


def test_sessions_come_back_from_their_file(tmp_path: Path) -> None:
    path, clock, limits = tmp_path / "sessions.sqlite", Clock(), SessionLimits(ttl_s=100)
    file = session_file(path, "t")
    sessions = Sessions(limits, clock)
    sessions.keep("alice", "s", ids(5), "häß\x00")
    clock.now_s += 90
    sessions.keep("bob", "s", ids(2), "b")
    save(sessions, file)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(restored(file, limits, clock)) == 2
    clock.now_s += 20  # the session of alice is too old by now
    again = restored(file, limits, clock)
    found = again.find("bob", "s")
    assert found is not None
    assert (found.token_ids.tolist(), found.text, found.num_turns) == ([0, 1], "b", 1)
    save(again, file)
    assert [key[0] for key in file.load()] == ["bob"]
    assert session_file(path, "another tokenizer").load() == {}
    assert session_file(tmp_path / "none", "t").load() == {}


def test_only_what_has_changed_is_saved(tmp_path: Path) -> None:
    file = session_file(tmp_path / "sessions.sqlite", "t")
    sessions = Sessions(SessionLimits())
    for name in "abc":
        sessions.keep("me", name, ids(3), name)
    save(sessions, file)
    assert sessions.take_changes() == {}
    sessions.remove("me", "a")
    sessions.keep("me", "b", ids(4), "bb")
    changes = sessions.take_changes()
    assert changes.keys() == {("me", "a"), ("me", "b")}
    sessions.put_back(changes)  # the disk was full
    save(sessions, file)
    assert {key[1]: session.text for key, session in file.load().items()} == {"b": "bb", "c": "c"}


def test_sessions_of_another_tokenizer_are_removed(tmp_path: Path) -> None:
    old, new = (session_file(tmp_path / "sessions.sqlite", name) for name in ("old", "new"))
    sessions = Sessions(SessionLimits())
    sessions.keep("me", "s", ids(3), "")
    save(sessions, old)
    new.save({})
    assert old.load() == new.load() == {}


KILLED_SAVE = """
import os, pathlib, sqlite3, sys
from mainstem.text import kept_file, session_file

class Mortal(sqlite3.Connection):
    def executemany(self, *_): os.kill(os.getpid(), 9)

connect = sqlite3.connect
kept_file.sqlite3.connect = lambda *args, **fields: connect(*args, **fields, factory=Mortal)
session_file.session_file(pathlib.Path(sys.argv[1]), sys.argv[2]).save({("me", "s"): None})
"""


@pytest.mark.parametrize("identity", ["t", "another tokenizer"])
def test_a_save_that_is_killed_changes_nothing(tmp_path: Path, identity: str) -> None:
    """The kill comes before changed rows are deleted and written; with another tokenizer, all old
    rows were deleted before it."""
    path = tmp_path / "sessions.sqlite"
    kill = [sys.executable, "-c", KILLED_SAVE, str(path), identity]
    assert subprocess.run(kill, check=False).returncode == -signal.SIGKILL
    assert session_file(path, "t").load() == {}  # killed in the very first save
    sessions = Sessions(SessionLimits())
    sessions.keep("me", "s", ids(3), "text")
    save(sessions, session_file(path, "t"))
    assert subprocess.run(kill, check=False).returncode == -signal.SIGKILL
    assert [session.text for session in session_file(path, "t").load().values()] == ["text"]


def test_a_file_that_does_not_hold_sessions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        session_file(path, "t").load()
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 9")
    database.commit()
    database.close()
    with pytest.raises(ConfigError, match="format 9"):
        session_file(path, "t").load()


def test_a_turn_extends_the_stored_ids_not_the_text() -> None:
    tokenizer = a_tokenizer()
    sessions = Sessions(SessionLimits())
    prompt, answer = tokenizer.encode("Hello."), [1, 2, EOS_ID]
    text = spoken_text("Hello.", answer, tokenizer)
    assert text == 'Hello.!"<|end|>'
    strange = np.array([*prompt[:-1], 0, *answer], np.int32)  # ids that no encoder would return
    sessions.keep("me", "s", strange, text)
    session = sessions.find("me", "s")
    more = begin_prompt(tokenizer, text + " Go on", None, session)
    assert more.pending.finish() == [*strange.tolist(), *tokenizer.encode(" Go on")]
    assert said_before(session, "Hello!", tokenizer) is None
    assert said_before(None, text, tokenizer) is None


def test_a_tokenizers_identity_does_not_depend_on_its_template() -> None:
    assert tokenizer_identity(a_tokenizer()) == tokenizer_identity(a_tokenizer("another template"))


class SessionMachine(RuleBasedStateMachine):
    """Any order of turns, removals and time keeps the counts right."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.sessions = Sessions(SessionLimits(ttl_s=10, max_sessions=3, max_tokens=12), self.clock)

    @rule(owner=st.sampled_from("ab"), name=st.sampled_from("xyz"), count=st.integers(0, 14))
    def keep(self, owner: str, name: str, count: int) -> None:
        self.sessions.keep(owner, name, ids(count), "")
        found = self.sessions.find(owner, name)
        assert (found is None) == (count > 12)

    @rule(owner=st.sampled_from("ab"), name=st.sampled_from("xyz"))
    def remove(self, owner: str, name: str) -> None:
        self.sessions.remove(owner, name)
        assert self.sessions.find(owner, name) is None

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.sessions.listed("a")

    @invariant()
    def whole(self) -> None:
        self.sessions.check()
        assert len(self.sessions) <= 3
        assert self.sessions.num_tokens <= 12


TestSessions = SessionMachine.TestCase
