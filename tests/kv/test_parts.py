"""Windowed parts of pages: needed ones stay, and of the others the least useful go first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mainstem.core.errors import ConfigError, OutOfPages
from mainstem.core.events import EventBus
from mainstem.core.step import Int32s, StepId
from mainstem.kv.finder import Lookup
from mainstem.kv.parts import FORK, WindowParts
from mainstem.kv.pool import PagePool
from mainstem.kv.store import KVStore

NUM_PAGES = 24


def ids(*pages: int) -> Int32s:
    return np.array(pages, np.int32)


def filled(parts: WindowParts, *pages: int) -> None:
    """Give these pages windowed parts that nobody needs."""
    for page in pages:
        parts.need(ids(page))
        parts.end(ids(page))


class PartsMachine(RuleBasedStateMachine):
    """In any order of calls, a needed part keeps its place, and a free page has none."""

    @initialize(num_parts=st.integers(5, NUM_PAGES), window=st.integers(1, 9))
    def start(self, num_parts: int, window: int) -> None:
        self.parts = WindowParts(NUM_PAGES, num_parts, window, page_size=4)
        self.pool = PagePool(NUM_PAGES, self.parts)
        self.taken: list[int] = []
        self.needs: list[tuple[Int32s, Int32s]] = []  # pages, and their places when needed
        self.copies: list[Int32s] = []
        self.step = -1
        self.used_in: dict[int, int] = {}  # place -> the last step that may use it

    def some(self, data: st.DataObject) -> Int32s:
        return ids(*sorted(data.draw(st.sets(st.sampled_from(self.taken), max_size=6))))

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        if count <= self.pool.num_free:
            pages = self.pool.take(count)
            assert not self.parts.has(pages).any()
            self.taken += pages.tolist()

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        needed = {page for pages, _ in self.needs for page in pages.tolist()}
        idle = [page for page in self.taken if page not in needed]
        if idle:
            page = data.draw(st.sampled_from(idle))
            self.taken.remove(page)
            self.pool.give_back(ids(page))

    @rule(data=st.data())
    def need(self, data: st.DataObject) -> None:
        if not self.taken:
            return
        pages = self.some(data)
        # a page that is copied without its part gets none before the copy has ended
        is_copied = (self.pool.copies[pages] > 0) & ~self.parts.has(pages)
        pages = pages[~is_copied]
        before = self.parts.part_of.copy()
        try:
            self.parts.need(pages)
        except OutOfPages:
            assert (self.parts.part_of == before).all()
            return
        self.needs.append((pages, self.parts.part_of[pages].copy()))

    @rule(data=st.data(), rank=st.sampled_from([None, 1, 2]))
    def end(self, data: st.DataObject, rank: int | None) -> None:
        if self.needs:
            pages, places = self.needs.pop(data.draw(st.integers(0, len(self.needs) - 1)))
            if rank is not None:
                self.parts.keep(pages, rank)
            self.used_in |= dict.fromkeys(places.tolist(), self.step)
            self.parts.end(pages)

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        if self.taken:
            self.copies.append(self.some(data))
            self.pool.begin_copy(self.copies[-1])

    @rule()
    def end_copy(self) -> None:
        if self.copies:
            self.pool.end_copy(self.copies.pop(0))

    @rule(count=st.integers(1, 4))
    def load(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        pages = self.pool.take(count)
        self.taken += pages.tolist()
        try:
            self.parts.lend_to_load(pages)
        except OutOfPages:
            assert not self.parts.has(pages).any()
            return
        for place in self.parts.part_of[pages].tolist():
            assert self.used_in.get(place, -1) <= self.parts._settled, "a step may use this place"

    @rule(is_settled=st.booleans())
    def make_step(self, is_settled: bool) -> None:
        self.step += 1
        self.parts.made(StepId(self.step))
        if is_settled:
            self.parts.settled(StepId(self.step))

    @rule()
    def recount(self) -> None:
        """After a failure nobody needs anything but copies."""
        self.needs.clear()
        holders = np.zeros(NUM_PAGES, np.int32)
        holders[self.taken] = 1
        self.pool.recount(holders)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "parts"):
            self.pool.check()
            for pages, places in self.needs:
                assert (self.parts.part_of[pages] == places).all(), "a needed part moved"


TestParts = PartsMachine.TestCase
TestParts.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 20))
def test_the_deepest_place_to_continue_has_a_whole_window(has: list[bool], window: int) -> None:
    parts = WindowParts(20, 20, window, page_size=4)
    pages = np.arange(len(has), dtype=np.int32)
    parts.need(pages[np.array(has, np.bool_)])
    first_key = [max(0, 4 * depth - window + 1) // 4 for depth in range(len(has) + 1)]
    serving = [depth for depth, low in enumerate(first_key) if all(has[low:depth])]
    assert parts.deepest(pages) == max(serving)


def test_passed_parts_go_before_ends_and_ends_before_forks() -> None:
    parts = WindowParts(8, 6, window=5, page_size=4)
    filled(parts, 0, 1, 2, 3, 4, 5)
    parts.keep(ids(0), FORK)
    parts.keep(ids(1, 2))
    gone = []
    for page in (6, 7):
        before = parts.has(np.arange(6, dtype=np.int32))
        parts.need(ids(page))
        gone += np.flatnonzero(before & ~parts.has(np.arange(6, dtype=np.int32))).tolist()
    assert gone == [3, 4]  # the least recently used of those that were passed
    parts.need(ids(5))
    parts.need(ids(3))
    assert parts.has(np.arange(8, dtype=np.int32)).tolist() == [1, 0, 1, 1, 0, 1, 1, 1]


def test_a_fork_that_nobody_uses_leaves_in_the_end() -> None:
    parts = WindowParts(100, 6, window=5, page_size=4)
    filled(parts, 0)
    parts.keep(ids(0), FORK)
    for page in range(1, 100):
        filled(parts, page)
        parts.keep(ids(page))
        if not parts.has(ids(0))[0]:
            break
    assert 10 < page < 50


def test_parts_of_pinned_pages_go_last() -> None:
    parts = WindowParts(8, 4, window=2, page_size=4)
    parts.pinned = lambda: [0]
    filled(parts, 0, 1, 2, 3)
    parts.keep(ids(1, 2, 3), FORK)
    parts.need(ids(4, 5, 6))
    assert parts.has(ids(0))[0]


def test_too_few_parts_for_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8 are needed"):
        WindowParts(100, 7, window=18, page_size=4)
    WindowParts(4, 4, window=17, page_size=4)  # each page has one


def a_store(num_parts: int = 16, window: int = 9) -> tuple[KVStore, WindowParts]:
    parts = WindowParts(32, num_parts, window, page_size=4)
    return KVStore(32, 4, b"fake", EventBus(), parts=parts), parts


def cache(store: KVStore, parts: WindowParts, token_ids: Int32s) -> Int32s:
    """Fill the pages of these tokens, as a sequence does that runs and ends."""
    chain = store.chain(token_ids, b"")
    pages = store.take(len(chain.keys))
    store.reserve(chain, 0, pages)
    parts.need(pages)
    store.commit(pages)
    parts.end(pages)
    store.give_back(pages)
    return pages


def test_a_match_ends_where_the_last_window_is_whole() -> None:
    store, parts = a_store()
    tokens = np.arange(24, dtype=np.int32)
    pages = cache(store, parts, tokens)
    chain = store.chain(tokens, b"")
    assert len(store.lookup(chain, 24).pages) == 6
    parts._push(parts.part_of[pages[[0, 1]]])
    assert len(store.lookup(chain, 24).pages) == 6  # two pages before it are a whole window
    parts._push(parts.part_of[pages[[4]]])
    match = store.lookup(chain, 24)
    assert (len(match.pages), match.num_lost, match.outcome) == (4, 2, Lookup.MISS)
    parts._push(parts.part_of[pages[[3]]])
    assert (len(store.lookup(chain, 24).pages), store.lookup(chain, 24).num_lost) == (0, 6)
    store.check()


def test_a_page_without_its_windowed_part_is_not_copied_in_part() -> None:
    store, parts = a_store()
    pages = cache(store, parts, np.arange(12, dtype=np.int32))
    chain = store.chain(np.array([0, 1, 2, 3, 4, 5, 90, 91], np.int32), b"")
    assert store.lookup(chain, 7).similar_tokens == 2
    parts._push(parts.part_of[pages[[1]]])
    assert store.lookup(chain, 7).similar_page is None


def test_pages_that_are_computed_again_take_the_names_and_pins_of_lost_ones() -> None:
    store, parts = a_store()
    tokens = np.arange(24, dtype=np.int32)
    old = cache(store, parts, tokens)
    chain = store.chain(tokens, b"")
    pins = store.pin(chain)
    parts._push(parts.part_of[old[3:5]])
    assert len(store.lookup(chain, 24).pages) == 3
    new = store.take(3)
    store.reserve(chain, 3, new)
    assert store.lookup(chain, 24).outcome is Lookup.LOADING
    parts.need(new)
    store.commit(new)
    assert store.lookup(chain, 24).pages.tolist() == [*old[:3], *new]
    parts.end(new)
    store.give_back(new)
    store.check()
    assert store.num_takeable() - store.num_available() == 6  # pages are still pinned
    store.unpin(pins)
    assert store.num_takeable() == store.num_available()
