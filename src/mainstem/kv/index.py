"""PageKey -> device page: how much of this prompt is here already."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from mainstem.core.ids import PageKey
from mainstem.core.step import Bools, Int32s
from mainstem.kv.keys import PageChain
from mainstem.kv.pool import PagePool

MAX_FOLLOWERS_TRIED = 256


class PrefixIndex:
    """Finds pages by key, keeps them while there is room, gives the least useful up.

    The index is itself a holder of every page in it, so a page outlives its sequences.

        reserve -> LOADING --commit--> READY --(nobody else holds it)--> idle --evict--> gone
                      `----abort----> gone

    Invariant: keys and pages are one to one, and every indexed page has the index as a holder.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_of: dict[PageKey, int] = {}
        # key -> pages after it, oldest first; a dict of Nones is a set that keeps order
        self._followers: dict[PageKey, dict[int, None]] = defaultdict(dict)
        self._parent_of: list[PageKey | None] = [None] * pool.num_pages
        self._tokens = np.zeros((pool.num_pages, page_size), np.int32)
        self._key_of: list[PageKey | None] = [None] * pool.num_pages
        self._is_indexed = np.zeros(pool.num_pages, np.bool_)
        self._is_ready = np.zeros(pool.num_pages, np.bool_)
        self._last_used = np.zeros(pool.num_pages, np.int64)
        self._depth = np.zeros(pool.num_pages, np.int32)  # pages before it in its chain
        self._pins = np.zeros(pool.num_pages, np.int32)  # how often it was pinned
        self._clock = 0

    def __len__(self) -> int:
        return len(self._page_of)

    def num_idle(self) -> int:
        """Pages held by the index alone: `evict` can free them."""
        return int(np.count_nonzero(self._is_indexed & (self._pool.holders == 1)))

    def __contains__(self, key: PageKey) -> bool:
        return key in self._page_of

    def num_idle_pinned(self) -> int:
        """Of the idle pages those that are pinned."""
        is_idle = self._is_indexed & (self._pool.holders == 1)
        return int(np.count_nonzero(is_idle & (self._pins > 0)))

    def pin(self, pages: Sequence[int]) -> list[PageKey]:
        """READY pages are given up only when no other idle page is left; returns their keys."""
        keys: list[PageKey] = []
        for page in pages:
            key = self._key_of[page]
            assert key is not None, "only a named page can be pinned"
            self._pins[page] += 1
            keys.append(key)
        return keys

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """End one pin of each page that is still there."""
        for key in keys:
            page = self._page_of.get(key)
            if page is not None and self._pins[page]:
                self._pins[page] -= 1

    def match(self, keys: Sequence[PageKey]) -> tuple[Int32s, int]:
        """Pages of the longest indexed prefix of `keys`, and how many of them are ready."""
        found: list[int] = []
        with suppress(KeyError):  # the first key that is not there; what came before it stays
            found.extend(map(self._page_of.__getitem__, keys))
        pages = np.array(found, np.int32)
        ready = self._is_ready[pages]
        return pages, len(pages) if ready.all() else int(ready.argmin())

    @property
    def is_indexed(self) -> Bools:
        """By page, whether it has a name; not to be changed."""
        return self._is_indexed

    def named(self, pages: Int32s) -> list[tuple[int, PageKey, bytes]]:
        """Those of `pages` that are READY: page, key and token ids."""
        found: list[tuple[int, PageKey, bytes]] = []
        for page in pages[self._is_ready[pages]].tolist():
            key = self._key_of[page]
            assert key is not None
            found.append((page, key, self._tokens[page].tobytes()))
        return found

    def loading(self, pages: Int32s) -> list[int]:
        """Places of those of `pages` that are not ready."""
        return np.flatnonzero(~self._is_ready[pages]).tolist()

    def best_follower(self, parent: PageKey, token_ids: Int32s) -> tuple[int, int] | None:
        """The READY page after `parent` that begins most like `token_ids`, and how many tokens.

        Only the latest followers are looked at: unrelated prompts all follow the root.
        """
        followers = self._followers.get(parent)
        if not followers or len(token_ids) == 0:
            return None
        latest = np.array(list(islice(reversed(followers), MAX_FOLLOWERS_TRIED)))
        pages = latest[self._is_ready[latest]]
        if len(pages) == 0:
            return None
        is_equal = self._tokens[pages, : len(token_ids)] == token_ids[: self._tokens.shape[1]]
        lengths = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        best = int(lengths.argmax())
        return (int(pages[best]), int(lengths[best])) if lengths[best] else None

    def reserve(self, chain: PageChain, first: int, pages: Int32s) -> None:
        """Name pages somebody is about to fill: the chain's from page number `first` on.

        A key that is known already keeps its page; the caller's copy stays without a name.
        """
        kept: list[int] = []
        depths: list[int] = []
        for depth, page in enumerate(pages.tolist(), start=first):
            key = chain.keys[depth]
            if key in self._page_of:
                continue
            parent = chain.parent(depth)
            self._page_of[key] = page
            self._key_of[page] = key
            self._parent_of[page] = parent
            self._followers[parent][page] = None
            kept.append(page)
            depths.append(depth)
        if not kept:
            return
        full = chain.token_ids[: len(chain.keys) * chain.page_size]
        self._tokens[kept] = full.reshape(-1, chain.page_size)[depths]
        self._depth[kept] = depths
        self._pool.share(np.array(kept, np.int32))
        self._is_indexed[kept] = True
        self._is_ready[kept] = False

    def commit(self, pages: Int32s) -> list[PageKey]:
        """Pages are filled by a step that is on its way: READY. Returns the keys that became so."""
        changed = pages[self._is_indexed[pages] & ~self._is_ready[pages]]
        self._is_ready[changed] = True
        return [key for page in changed.tolist() if (key := self._key_of[page]) is not None]

    def abort(self, pages: Int32s) -> list[PageKey]:
        """Forget those of `pages` that were reserved and never filled; returns their keys."""
        dropped = pages[self._is_indexed[pages] & ~self._is_ready[pages]]
        return self._remove(dropped)

    def touch(self, pages: Int32s) -> None:
        """Pages were just used: they go last when room is needed."""
        self._clock += 1
        self._last_used[pages] = self._clock

    def retire(self, pages: Int32s) -> None:
        """Pages nobody is going to ask for: they go first when room is needed."""
        self._last_used[pages] = 0

    def evict(self, count: int) -> int:
        """Free up to `count` idle pages, least recently used first; returns how many.

        A chain is always touched as a whole, so of equals the deepest goes first and a prefix never
        goes before what follows it. Pinned pages go after all others.
        """
        idle = np.flatnonzero(self._is_indexed & (self._pool.holders == 1))
        if count < len(idle):
            is_pinned = self._pins[idle] > 0
            order = np.lexsort((-self._depth[idle], self._last_used[idle], is_pinned))
            idle = idle[order[:count]]
        self._remove(idle.astype(np.int32))
        return len(idle)

    def _remove(self, pages: Int32s) -> list[PageKey]:
        keys: list[PageKey] = []
        for page in pages.tolist():
            key = self._key_of[page]
            assert key is not None
            parent = self._parent_of[page]
            assert parent is not None
            del self._page_of[key]
            self._key_of[page] = self._parent_of[page] = None
            followers = self._followers[parent]
            del followers[page]
            if not followers:
                del self._followers[parent]
            keys.append(key)
        self._is_indexed[pages] = False
        self._is_ready[pages] = False
        self._pins[pages] = 0
        self._pool.give_back(pages)
        return keys

    def check(self) -> None:
        """Raise if the invariant is broken."""
        indexed = np.flatnonzero(self._is_indexed)
        assert len(indexed) == len(self._page_of), "keys and pages are not one to one"
        assert len(indexed) == sum(map(len, self._followers.values())), "a page is filed twice"
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, "a page answers to another key"
            parent = self._parent_of[page]
            assert parent is not None
            assert page in self._followers[parent], "a page is not filed after its parent"
        assert (self._pool.holders[indexed] >= 1).all(), "an indexed page has no holder"
        assert not (self._is_ready & ~self._is_indexed).any(), "a page without a key is ready"
        assert not self._pins[~self._is_indexed].any(), "a page without a key is pinned"
