"""Stored responses: limited in number and size, separate for each owner, kept on disk."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mainstem.core.errors import ConfigError
from mainstem.server.http.limits import ServerLimits
from mainstem.server.kept.response_store import (
    RECORD_BYTES,
    Exchanged,
    ResponseStore,
    response_file,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_store(clock: Clock, **limits: float) -> ResponseStore:
    return ResponseStore(ServerLimits(**limits), clock)  # type: ignore[arg-type]


def keep(store: ResponseStore, owner: str, name: str, previous: str | None = None) -> None:
    response: dict[str, object] = {"id": name, "output": [{"said": name}]}
    store.keep(owner, name, previous, "s", Exchanged([{"asked": name}], response))


def test_a_chain_returns_the_conversation_in_order() -> None:
    store = a_store(Clock())
    keep(store, "me", "a")
    keep(store, "me", "b", "a")
    keep(store, "me", "c", "a")
    chain = store.chain("me", "c")
    assert chain is not None
    items = [item for kept in chain for item in kept.read().items]
    assert items == [{"asked": "a"}, {"said": "a"}, {"asked": "c"}, {"said": "c"}]
    assert store.chain("you", "c") is None
    store.remove("me", "a")
    assert store.chain("me", "c") is None
    assert store.find("me", "c") is not None


def test_continuing_a_response_restarts_its_time_to_live() -> None:
    clock = Clock()
    store = a_store(clock, response_ttl_s=10)
    keep(store, "me", "a")
    keep(store, "me", "b", "a")
    keep(store, "me", "other")
    clock.now_s = 9
    assert store.chain("me", "b") is not None
    clock.now_s = 15
    assert store.find("me", "other") is None
    assert store.chain("me", "b") is not None
    store.check()


def test_the_oldest_response_of_the_owner_with_most_is_removed_first() -> None:
    store = a_store(Clock(), kept_responses=4)
    for name in "abc":
        keep(store, "me", name)
    keep(store, "you", "x")
    keep(store, "you", "y")
    assert store.find("me", "a") is None
    assert store.find("you", "x") is not None
    assert len(store) == 4


def test_the_bytes_of_responses_are_bounded() -> None:
    store = a_store(Clock(), response_bytes=3 * (RECORD_BYTES + 100))
    for number in range(9):
        keep(store, "me", f"r{number}")
    assert 1 <= len(store) <= 3
    assert store.find("me", "r8") is not None
    store.check()


def test_responses_outlive_the_process(tmp_path: Path) -> None:
    file, clock = response_file(tmp_path / "responses.sqlite"), Clock()
    assert file.load() == {}
    store = a_store(clock)
    keep(store, "me", "a")
    keep(store, "me", "b", "a")
    keep(store, "you", "c")
    file.save(store.take_changes())
    clock.now_s = 5
    store.remove("you", "c")
    assert store.chain("me", "b") is not None
    changes = store.take_changes()
    store.put_back(changes)
    assert store.take_changes() == changes
    file.save(changes)
    again = a_store(clock)
    again.restore(file.load())
    assert len(again) == 2
    chain = again.chain("me", "b")
    assert chain is not None
    assert [(kept.response_id, kept.used_s) for kept in chain] == [("a", 5), ("b", 5)]
    again.check()
    assert b"asked" in (tmp_path / "responses.sqlite").read_bytes()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a database, but long enough to be looked at" * 9)
    with pytest.raises(ConfigError, match="cannot be read as responses"):
        response_file(tmp_path / "x").load()


class StoreMachine(RuleBasedStateMachine):
    """Any order of changes keeps the counts right."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = a_store(self.clock, kept_responses=5, response_ttl_s=20)

    @rule(owner=st.sampled_from("ab"), name=st.sampled_from("123456"))
    def keep(self, owner: str, name: str) -> None:
        keep(self.store, owner, name)
        assert self.store.find(owner, name) is not None

    @rule(owner=st.sampled_from("ab"), name=st.sampled_from("123456"))
    def remove(self, owner: str, name: str) -> None:
        self.store.remove(owner, name)
        assert self.store.find(owner, name) is None

    @rule(owner=st.sampled_from("ab"), name=st.sampled_from("123456"))
    def go_on(self, owner: str, name: str) -> None:
        self.store.chain(owner, name)

    @rule(seconds=st.integers(0, 30))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds

    @invariant()
    def is_whole(self) -> None:
        self.store.check()
        assert len(self.store) <= 5


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_chats_are_listed_apart_from_responses_and_by_owner() -> None:
    store = a_store(clock := Clock(), response_ttl_s=10)
    keep(store, "me", "resp_a")
    keep(store, "me", "chatcmpl-a")
    keep(store, "you", "chatcmpl-b")
    assert [kept.response_id for kept in store.chats("me")] == ["chatcmpl-a"]
    clock.now_s = 11
    assert store.chats("me") == store.chats("nobody") == []
