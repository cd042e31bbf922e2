"""KVStore and PrefixIndex, compared with a dictionary that evicts nothing."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mainstem.core.errors import OutOfPages
from mainstem.core.events import EventBus, PagesEvicted
from mainstem.core.step import Int32s
from mainstem.kv.finder import Lookup
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain, page_keys, root_key
from mainstem.kv.pool import PagePool
from mainstem.kv.store import KVStore

PAGE = 2


def ids(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


def a_store(num_pages: int = 8) -> KVStore:
    return KVStore(num_pages, PAGE, b"model", EventBus())


def fill(store: KVStore, tokens: Int32s) -> Int32s:
    """Compute and cache `tokens`, as a finished sequence would."""
    chain = store.chain(tokens, b"")
    pages = store.take(len(chain.keys))
    store.reserve(chain, 0, pages)
    store.commit(pages)
    store.give_back(pages)
    return pages


def num_found(store: KVStore, tokens: Int32s) -> int:
    return len(store.lookup(store.chain(tokens, b""), len(tokens)).pages)


def test_keys_name_the_whole_prefix() -> None:
    root = root_key(b"m", PAGE, b"")
    a = page_keys(root, ids(1, 2, 3, 4), PAGE)
    b = page_keys(root, ids(9, 2, 3, 4), PAGE)
    assert len(a) == 2
    assert a[1] != b[1], "the same tokens after a different prefix are another page"
    assert page_keys(a[0], ids(3, 4, 5), PAGE) == [a[1]], "chains can be continued"


def test_keys_depend_on_model_page_size_and_salt() -> None:
    roots = {root_key(b"m", 2, b""), root_key(b"n", 2, b""), root_key(b"m", 4, b"")}
    roots |= {root_key(b"m", 2, b"s"), root_key(b"", 2, b"m")}
    assert len(roots) == 5


def test_every_page_but_the_first_has_a_previous_page() -> None:
    """After a branch, too: its first page follows a page of the chain, not the branch's mark."""
    pool = PagePool(4)
    index = PrefixIndex(pool, PAGE, EventBus())
    chain = PageChain.of(root_key(b"m", PAGE, b""), PAGE, ids(1, 2, 3, 4))
    branch = chain.branched(1, b"salt").extended(ids(1, 2, 5, 6))
    pages = pool.take(4)
    index.reserve(chain, 0, pages[:2])
    index.reserve(branch, 1, pages[2:3])
    assert index.previous(pages[:3]) == [None, chain.keys[0], chain.keys[0]]


def test_a_page_is_loading_until_its_step_is_launched() -> None:
    store = a_store()
    chain = store.chain(ids(1, 2, 3, 4, 5, 6), b"")
    keys = chain.keys
    pages = store.take(3)
    store.reserve(chain, 0, pages)
    store.commit(pages[:1])
    match = store.lookup(chain, 6)
    assert match.outcome is Lookup.LOADING
    assert match.awaited == keys[2]
    assert match.pages.tolist() == pages[:1].tolist()
    assert store.abort(pages) == list(keys[1:])
    assert store.lookup(chain, 6).outcome is Lookup.MISS


def test_the_tail_is_evicted_before_the_prefix_and_the_oldest_first() -> None:
    store = a_store(num_pages=6)
    old, new = ids(1, 2, 3, 4, 5, 6), ids(7, 8, 9, 9)
    fill(store, old)
    fill(store, new)
    store.take(2)  # one is free, one must be evicted
    assert num_found(store, old) == 2
    assert num_found(store, new) == 2
    store.take(2)
    assert num_found(store, old) == 0
    assert num_found(store, new) == 2


def test_a_page_with_the_same_first_tokens_is_found() -> None:
    store = KVStore(8, 4, b"model", EventBus())
    pages = fill(store, ids(1, 2, 3, 4, 5, 6, 7, 8))
    fill(store, ids(1, 2, 3, 4, 5, 9, 9, 9))
    match = store.lookup(store.chain(ids(1, 2, 3, 4, 5, 6, 7, 0, 0), b""), 8)
    assert match.pages.tolist() == pages[:1].tolist()
    assert match.outcome is Lookup.MISS
    assert (match.similar_page, match.similar_tokens) == (pages[1], 3)
    short = store.lookup(store.chain(ids(1, 2, 3, 4, 5, 6), b""), 5)
    assert short.similar_tokens == 1
    none = store.lookup(store.chain(ids(1, 2, 3, 4, 0), b""), 5)
    assert none.similar_page is None


def test_a_page_with_the_same_first_tokens_is_found_among_many() -> None:
    store = a_store(num_pages=400)
    page = fill(store, ids(7, 1))[0]
    for number in range(300):
        fill(store, ids(8 + number, 1))
    match = store.lookup(store.chain(ids(7, 5), b""), 2)
    assert (match.similar_page, match.similar_tokens) == (page, 1)


def test_evictions_are_reported_as_events() -> None:
    bus = EventBus()
    seen: list[PagesEvicted] = []
    bus.subscribe(PagesEvicted, seen.append)
    store = KVStore(2, PAGE, b"model", bus)
    fill(store, ids(1, 2, 3, 4))
    store.take(1)
    assert seen == [PagesEvicted(1, "room")]


def compute(store: KVStore, chain: PageChain) -> None:
    """Compute a chain's full pages and leave them as cache."""
    match = store.lookup(chain, len(chain.token_ids))
    store.lease(match.pages)
    fresh = store.take(len(chain.keys) - len(match.pages))
    store.reserve(chain, len(match.pages), fresh)
    store.commit(fresh)
    store.give_back(np.concatenate([match.pages, fresh]))


def test_pinned_pages_are_evicted_last() -> None:
    store = a_store(8)
    app, other = store.chain(ids(1, 1, 2, 2), b""), store.chain(ids(3, 3, 4, 4, 5, 5), b"")
    compute(store, app)
    pinned = store.pin(app)
    assert len(pinned.pages) == 2
    compute(store, other)
    assert (store.num_available(), store.num_takeable()) == (6, 8)
    pages = store.take(6)  # everything that is not pinned
    assert len(store.lookup(app, 4).pages) == 2
    more = store.take(1)
    assert len(store.lookup(app, 4).pages) == 1
    store.give_back(pages)
    store.give_back(more)
    store.unpin(pinned)  # one of them is evicted already
    assert store.num_available() == 8
    store.check()


def test_a_page_pinned_twice_needs_two_unpins() -> None:
    store = a_store(4)
    chain = store.chain(ids(1, 1, 2, 2), b"")
    compute(store, chain)
    first, second = store.pin(chain), store.pin(chain)
    store.unpin(first)
    assert store.num_available() == 2
    store.unpin(second)
    assert store.num_available() == 4


def test_public_pages_are_found_with_any_salt_and_later_pages_only_with_theirs() -> None:
    store = a_store(16)
    tokens = ids(1, 1, 2, 2, 3, 3, 4, 4)
    compute(store, store.chain(tokens[:4], b""))
    alice = store.chain(
        tokens, b"alice", public_tokens=5
    )  # the third page is not public as a whole
    bob = store.chain(tokens, b"bob", public_tokens=5)
    assert len(store.lookup(alice, 8).pages) == len(store.lookup(bob, 8).pages) == 2
    compute(store, alice)
    assert len(store.lookup(alice, 8).pages) == 4
    match = store.lookup(bob, 8)
    assert len(match.pages) == 2
    assert match.similar_page is None
    # without a salt: the app's 5 public tokens and a 6th token, on three pages
    compute(store, store.chain(ids(1, 1, 2, 2, 3, 9), b""))
    match = store.lookup(bob, 8)
    assert (len(match.pages), match.similar_tokens) == (2, 1), (
        "other salts find only the 5 public tokens"
    )
    assert len(store.lookup(store.chain(tokens, b"bob"), 8).pages) == 0


class StoreMachine(RuleBasedStateMachine):
    """Sequences start, fill pages or abort, and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.store = a_store(6)
        self.running: list[tuple[list[int], Int32s, bool]] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # page -> whole prefix it was filled with

    @rule(tokens=st.lists(st.integers(0, 1), min_size=PAGE, max_size=8))
    def start(self, tokens: list[int]) -> None:
        store = self.store
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        chain = store.chain(ids(*tokens), b"")
        match = store.lookup(chain, len(tokens))
        for depth, page in enumerate(match.pages.tolist()):
            assert self.contents[page] == tuple(tokens[: (depth + 1) * PAGE]), "a wrong page"
        if match.outcome is Lookup.LOADING:
            return
        cached = match.pages
        store.lease(cached)
        try:
            fresh = store.take(len(chain.keys) - len(cached))
        except OutOfPages:
            store.give_back(cached)
            return
        if match.similar_page is not None:
            place, count = len(cached) * PAGE, match.similar_tokens
            similar = self.contents[match.similar_page]
            assert similar[: place + count] == tuple(tokens[: place + count]), "not similar"
        store.reserve(chain, len(cached), fresh)
        for offset, page in enumerate(fresh.tolist()):
            self.contents[page] = tuple(tokens[: (len(cached) + offset + 1) * PAGE])
        self.running.append((tokens, np.concatenate([cached, fresh]), False))

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        if self.running:
            place = data.draw(st.integers(0, len(self.running) - 1))
            tokens, pages, _ = self.running[place]
            self.store.commit(pages)
            self.running[place] = (tokens, pages, True)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            _, pages, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.store.abort(pages)
            self.store.give_back(pages)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert self.store.num_available() == 6 - self.store.num_held()

    @invariant()
    def whole(self) -> None:
        self.store.check()
        held = {page for _, pages, _ in self.running for page in pages.tolist()}
        assert self.store.num_held() == len(held)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
