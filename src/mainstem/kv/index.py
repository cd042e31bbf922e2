"""Maps a PageKey to its device page: finds how much of a prompt is already on the device."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import compress, islice
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mainstem.core.events import EventBus, PagesRemoved, PagesStored
from mainstem.core.ids import PageKey
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s
from mainstem.kv.eviction import DeviceOrder, Lru, Ranking
from mainstem.kv.keys import PageChain, PageName
from mainstem.kv.page_logprobs import PageLogprobs
from mainstem.kv.pool import PagePool

MAX_FOLLOWERS_TRIED = 256
NO_PAGE = NO_TOKEN = NOT_FILED = -1


class _LookedUp(NamedTuple):
    """The pages of an awaited chain at the last eviction."""

    keys: Sequence[PageKey]  # kept alive, so that no other list of keys gets the same id()
    pages: Int32s
    filed_as: NDArray[np.int64]


class PrefixIndex:
    """Finds pages by key, keeps them while there is room, and evicts the least useful ones.

    The index is itself a holder of every page in it, so a page outlives its sequences.

        reserve -> LOADING --commit--> READY --(no other holder)--> idle --evict--> gone
                      `----abort----> gone

    Invariant: keys and pages are one to one, and every indexed page has the index as a holder.
    """

    def __init__(
        self, pool: PagePool, page_size: int, bus: EventBus, ranking: Ranking | None = None
    ) -> None:
        """`ranking` orders idle pages; None: the least recently used page is evicted first."""
        self._pool = pool
        self.order = DeviceOrder(pool.num_pages, Lru() if ranking is None else ranking)
        self._bus = bus
        self._page_of: dict[PageKey, int] = {}
        # pages that follow the same key and begin with the same token form a doubly linked list;
        # most lists have one page, so there is no object per list
        self._latest_after: dict[tuple[PageKey, int], int] = {}
        self._older: list[int] = [NO_PAGE] * pool.num_pages
        self._newer: list[int] = [NO_PAGE] * pool.num_pages
        # of each page: its key, its parent (PageName), and the key of the page before it, which is
        # the parent unless a chain begins or branches there
        self._key_of: list[PageKey | None] = [None] * pool.num_pages
        self._parent_of, self._previous_of = self._key_of.copy(), self._key_of.copy()
        self._tokens = np.zeros((pool.num_pages, page_size), np.int32)
        self.is_indexed = np.zeros(pool.num_pages, np.bool_)  # whether a page has a name; read only
        self._is_ready = np.zeros(pool.num_pages, np.bool_)
        self._is_tail = np.zeros(pool.num_pages, np.bool_)  # not full, and never will be
        # a new serial number for each page that gets a name
        self._filed_as = np.full(pool.num_pages, NOT_FILED, np.int64)
        self._num_filed = 0
        self._looked_up: dict[int, _LookedUp] = {}  # by the id() of its keys
        self.logprobs = PageLogprobs(pool.num_pages, page_size)

    def __len__(self) -> int:
        return len(self._page_of)

    def num_idle(self) -> int:
        """Pages that only the index holds: `evict` can free them."""
        return int(np.count_nonzero(self.is_indexed & (self._pool.holders == 1)))

    def __contains__(self, key: PageKey) -> bool:
        return key in self._page_of

    def num_idle_pinned(self) -> int:
        """The idle pages that are pinned."""
        return int(np.count_nonzero(self._pool.holders[self.order.pinned] == 1))

    def pin(self, pages: Sequence[int]) -> list[PageKey]:
        """Pin READY pages: they are evicted only after all other idle pages; returns their keys."""
        keys: list[PageKey] = []
        for page in pages:
            key = self._key_of[page]
            assert key is not None, "only a named page can be pinned"
            self.order.pin(page)
            keys.append(key)
        return keys

    def indexed(self, keys: Sequence[PageKey]) -> Int32s:
        """The pages of those of `keys` that are indexed."""
        found = [page for key in keys if (page := self._page_of.get(key)) is not None]
        return np.array(found, np.int32)

    def unname(self, pages: Int32s) -> dict[PageKey, int]:
        """Take the names of pages, so that others can have them; returns how often each name is
        pinned."""
        pins = self.order.pins(pages.tolist())
        return dict(zip(self._remove(pages), pins, strict=True))

    def repin(self, pins: dict[PageKey, int]) -> None:
        """Pin the pages that have these names now."""
        for key, count in pins.items():
            if count and (page := self._page_of.get(key)) is not None:
                self.order.pin(page, count)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """End one pin of each page that is still indexed."""
        for key in keys:
            if (page := self._page_of.get(key)) is not None:
                self.order.unpin(page)

    def match(self, keys: Sequence[PageKey]) -> tuple[Int32s, int]:
        """Pages of the longest indexed prefix of `keys`, and how many leading ones are READY."""
        found: list[int] = []
        with suppress(KeyError):  # the first missing key; the pages before it are the match
            found.extend(map(self._page_of.__getitem__, keys))
        pages = np.array(found, np.int32)
        ready = self._is_ready[pages]
        return pages, len(pages) if ready.all() else int(ready.argmin())

    def ready_keys(self) -> list[PageKey]:
        """The names of all READY pages."""
        return list(self.named(np.flatnonzero(self._is_ready).astype(np.int32)))

    def named(self, pages: Int32s) -> dict[PageKey, int]:
        """The pages among `pages` that are full and READY, by key and in order."""
        found = pages[self._is_ready[pages] & ~self._is_tail[pages]]
        return dict(zip(self._keys(found), found.tolist(), strict=True))

    def previous(self, pages: Int32s) -> list[PageKey | None]:
        """For each of `pages`, which all have names: the key of the page before it in its chain;
        None: it is the first."""
        return [self._previous_of[page] for page in pages.tolist()]

    def _keys(self, pages: Int32s) -> list[PageKey]:
        """The keys of pages that have names."""
        keys = [self._key_of[page] for page in pages.tolist()]
        assert None not in keys
        return cast("list[PageKey]", keys)

    def tokens(self, pages: Int32s) -> list[bytes]:
        """The token ids of pages that have a name."""
        return [tokens.tobytes() for tokens in self._tokens[pages]]

    def loading(self, pages: Int32s) -> list[int]:
        """Indices of the `pages` that are not ready."""
        return np.flatnonzero(~self._is_ready[pages]).tolist()

    def best_follower(self, parent: PageKey, token_ids: Int32s) -> tuple[int, int] | None:
        """Return the READY page after `parent` that has the most leading tokens of `token_ids`, and
        how many it has.

        Only the latest pages with the same first token are compared. On a tie the page with the
        most logprobs wins.
        """
        after = (parent, int(token_ids[0])) if len(token_ids) else None
        if after not in self._latest_after:
            return None
        latest = np.array(list(islice(self._followers(after), MAX_FOLLOWERS_TRIED)))
        pages = latest[self._is_ready[latest]]
        if len(pages) == 0:
            return None
        is_equal = self._tokens[pages, : len(token_ids)] == token_ids[: self._tokens.shape[1]]
        lengths = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        worth = lengths * (self._tokens.shape[1] + 1) + self.logprobs.num_known(pages)
        best = int(worth.argmax())
        return (int(pages[best]), int(lengths[best])) if lengths[best] else None

    def loading_follower(self, parent: PageKey, token_ids: Int32s) -> PageKey | None:
        """The key of a page after `parent` that begins with `token_ids` and is not READY yet."""
        for page in islice(self._followers((parent, int(token_ids[0]))), MAX_FOLLOWERS_TRIED):
            is_equal = np.array_equal(self._tokens[page, : len(token_ids)], token_ids)
            if is_equal and not self._is_ready[page]:
                return self._key_of[page]
        return None

    def reserve(self, chain: PageChain, first: int, pages: Int32s) -> None:
        """Name pages that are about to be filled: the pages of the chain from number `first` on.

        A key that is already indexed keeps its page; the caller's page gets no name.
        """
        if not len(pages):
            return
        keys = list(chain.keys[first : first + len(pages)])
        previous = [chain.keys[first - 1] if first else None, *keys[:-1]]
        parents = [chain.parent(first), *keys[:-1]]
        for depth, parent in chain.branches:
            if first < depth < first + len(keys):
                parents[depth - first] = parent
        full = chain.token_ids[: len(chain.keys) * chain.page_size].reshape(-1, chain.page_size)
        tokens, depths = full[first : first + len(keys)], np.arange(first, first + len(keys))
        if not self._page_of.keys().isdisjoint(keys):
            new = [index for index, key in enumerate(keys) if key not in self._page_of]
            pages, tokens, depths = pages[new], tokens[new], depths[new]
            keys, parents = [keys[index] for index in new], [parents[index] for index in new]
            previous = [previous[index] for index in new]
        if not keys:
            return
        self._enter(pages, keys, parents, previous, tokens, depths)

    def num_nameable(self, keys: Sequence[PageKey]) -> int:
        """Return how many of `keys`, in chain order, come before the first LOADING page."""
        for index, page in enumerate(map(self._page_of.get, keys)):
            if page is not None and not self._is_ready[page]:
                return index
        return len(keys)

    def name(self, pages: Int32s, names: Sequence[PageName], tokens: Int32s) -> None:
        """Name filled pages, of any chains, and mark them as READY. They hold `tokens`, [pages,
        page_size].

        A page gets no name if the page before it is not READY (no lookup would find it), or if
        another page has the same name.
        """
        kept: list[int] = []
        fresh: set[PageKey | None] = {None}
        for index, (key, _, previous, _) in enumerate(names):
            is_found = previous in fresh or (previous is not None and self.is_ready(previous))
            if is_found and key not in fresh and key not in self._page_of:
                fresh.add(key)
                kept.append(index)
        if kept:
            pages = pages[kept]
            keys, parents, before, depths = zip(*[names[index] for index in kept], strict=True)
            self._enter(pages, keys, parents, before, tokens[kept], np.array(depths))
            self.commit(pages)

    def is_ready(self, key: PageKey) -> bool:
        """Whether a page is indexed and filled."""
        page = self._page_of.get(key)
        return page is not None and bool(self._is_ready[page])

    def reserve_tail(self, chain: PageChain, page: int) -> None:
        """Name the page for the chain's last tokens, which do not fill it, so that `best_follower`
        finds it. Nothing may be written after these tokens."""
        key, depth = chain.tail_key(), len(chain.keys)
        tail = chain.page_tokens(depth)
        previous = chain.keys[-1] if depth else None
        if key is None or key in self._page_of:
            return
        tokens = np.full((1, chain.page_size), NO_TOKEN, np.int32)
        tokens[0, : len(tail)] = tail
        pages, parents = np.array([page], np.int32), [chain.parent(depth)]
        self._enter(pages, [key], parents, [previous], tokens, np.array([depth]))
        self._is_tail[page] = True

    def _enter(
        self,
        pages: Int32s,
        keys: Sequence[PageKey],
        parents: Sequence[PageKey],
        previous: Sequence[PageKey | None],
        tokens: Int32s,
        depths: NDArray[np.int64],
    ) -> None:
        """Add pages, which are not READY yet, with new keys; see `PageName`."""
        self._page_of.update(zip(keys, pages.tolist(), strict=True))
        key_of, parent_of, previous_of = self._key_of, self._parent_of, self._previous_of
        latest_after, firsts = self._latest_after, tokens[:, 0].tolist()
        each = zip(pages.tolist(), keys, parents, previous, firsts, strict=True)
        for page, key, parent, key_before, token in each:
            key_of[page], parent_of[page], previous_of[page] = key, parent, key_before
            after = (parent, token)
            before = latest_after.get(after, NO_PAGE)
            if before != NO_PAGE:
                self._older[page], self._newer[before] = before, page
            latest_after[after] = page
        self._tokens[pages] = tokens
        self.order.enter(pages, depths)
        self._pool.share(pages)
        self.is_indexed[pages] = True
        self._filed_as[pages] = np.arange(self._num_filed, self._num_filed + len(pages))
        self._num_filed += len(pages)
        self._is_ready[pages] = False
        self._is_tail[pages] = False
        self.logprobs.forget(pages)

    def keep_logprobs(self, chain: PageChain, found: Sequence[TokenLogprobs | None]) -> None:
        """Keep the logprobs of a chain's tokens with the pages of the chain that are indexed."""
        pages, _ = self.match(chain.keys)
        tail = self._page_of.get(chain.tail_key() or chain.root)
        if tail is not None and len(pages) == len(chain.keys):
            pages = np.append(pages, np.int32(tail))
        self.logprobs.keep(pages, found)

    def commit(self, pages: Int32s) -> list[PageKey]:
        """Mark pages that a launched step fills as READY. Returns the keys that became READY."""
        changed = pages[self.is_indexed[pages] & ~self._is_ready[pages]]
        self._is_ready[changed] = True
        keys = self._keys(changed)
        if keys and self._bus.has_listeners(PagesStored):
            full = changed[~self._is_tail[changed]]  # events name full pages only
            if len(full):
                previous, tokens = self.previous(full), self.tokens(full)
                self._bus.publish(PagesStored("device", self._keys(full), previous, tokens))
        return keys

    def abort(self, pages: Int32s) -> list[PageKey]:
        """Forget the `pages` that were reserved and never filled; returns their keys."""
        dropped = pages[self.is_indexed[pages] & ~self._is_ready[pages]]
        return self._remove(dropped)

    def evict(self, count: int, awaited: Sequence[Sequence[PageKey]] = ()) -> int:
        """Free up to `count` idle pages, in the order of kv/eviction.py; returns how many.
        `awaited` are the chains that requests wait for, soonest first."""
        idle = np.flatnonzero(self.is_indexed & (self._pool.holders == 1))
        if count < len(idle):
            looked_up, self._looked_up = self._looked_up, {}  # only chains that are still awaited
            pages = [self._pages_of(keys, looked_up.get(id(keys))) for keys in awaited]
            idle = np.sort(self.order.first(idle, count, pages))
        self._remove(idle.astype(np.int32))
        return len(idle)

    def _pages_of(self, keys: Sequence[PageKey], before: "_LookedUp | None") -> Int32s:
        """The pages of the longest indexed prefix, as `match` finds them. Pages that were found
        `before` and are still indexed are not looked up again: requests may wait for as many pages
        as the device has, and looking a page up costs more than evicting one."""
        pages = np.empty(0, np.int32)
        if before is not None:
            is_gone = self._filed_as[before.pages] != before.filed_as
            pages = before.pages[: is_gone.argmax()] if is_gone.any() else before.pages
        if len(pages) < len(keys):
            pages = np.append(pages, self.match(keys[len(pages) :])[0])
        self._looked_up[id(keys)] = _LookedUp(keys, pages, self._filed_as[pages])
        return pages

    def _remove(self, pages: Int32s) -> list[PageKey]:
        page_of, latest_after = self._page_of, self._latest_after
        older, newer = self._older, self._newer
        keys = self._keys(pages)
        firsts = self._tokens[pages, 0].tolist()
        for page, key, token in zip(pages.tolist(), keys, firsts, strict=True):
            parent = self._parent_of[page]
            assert parent is not None
            after = (parent, token)
            del page_of[key]
            self._key_of[page] = self._parent_of[page] = self._previous_of[page] = None
            before, behind = older[page], newer[page]
            older[page] = newer[page] = NO_PAGE
            if before != NO_PAGE:
                newer[before] = behind
            if behind != NO_PAGE:
                older[behind] = before
            elif before != NO_PAGE:
                latest_after[after] = before
            else:
                del latest_after[after]
        if keys and self._bus.has_listeners(PagesRemoved):
            is_told = self._is_ready[pages] & ~self._is_tail[pages]
            were_ready = list(compress(keys, is_told.tolist()))
            if were_ready:
                self._bus.publish(PagesRemoved("device", were_ready))
        self.is_indexed[pages] = False
        self._filed_as[pages] = NOT_FILED
        self._is_ready[pages] = False
        self.order.forget(pages)
        self._pool.give_back(pages)
        return keys

    def _followers(self, after: tuple[PageKey, int]) -> Iterator[int]:
        """Pages after a key that begin with a token, the latest first."""
        page = self._latest_after.get(after, NO_PAGE)
        while page != NO_PAGE:
            yield page
            page = self._older[page]

    def check(self) -> None:
        """Raise if the invariant is broken."""
        indexed = np.flatnonzero(self.is_indexed)
        assert len(indexed) == len(self._page_of), "keys and pages are not one to one"
        filed = [(page, *after) for after in self._latest_after for page in self._followers(after)]
        assert len(indexed) == len(filed), "a page is filed twice"
        for page, parent, token in filed:
            assert self._parent_of[page] == parent, "a page is not filed after its parent"
            assert self._tokens[page, 0] == token, "a page is filed under another token"
            after = self._newer[page]
            assert after == NO_PAGE or self._older[after] == page, "a list of followers is broken"
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, "a page has another key"
        assert (self._pool.holders[indexed] >= 1).all(), "an indexed page has no holder"
        assert not (self._is_ready & ~self.is_indexed).any(), "a page without a key is ready"
        assert self.is_indexed[self.order.pinned].all(), "a page without a key is pinned"
