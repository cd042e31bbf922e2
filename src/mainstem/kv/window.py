"""The queued requests in order, and when each page is wanted next.

    queue   head | r1 r2 r3 | r4 r5 r6 r7 | tail
                  near        far

Everything here is in the eviction window (AttentionStore 3.3.2). The *near* requests are those
whose pages fit the host tier together: the prefetch window (3.3.1). The paper computes its length
from the mean length of a chain; here the pages are counted.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from mainstem.kv.places import StoredPage

K = TypeVar("K", bound=Hashable)

# pages in one chain: 64 million tokens. A `when` is place * MAX_DEPTH + depth
MAX_DEPTH = 1 << 22


class QueueWindow(Generic[K]):
    """When each page is next wanted, kept up to date as requests come and go.

    A page's `when` orders page uses: by the place of the request in the queue, then by the depth of
    the page in its chain. The cost of `enter` and `leave` grows with the length of the chain, not
    of the queue.

    Invariant: for every page that a queued request wants, `next_use` has the smallest `when`, and
    `_later` has its other ones, sorted.
    """

    def __init__(self, near_pages: int) -> None:
        """`near_pages`: how many pages are prefetched at most; 0: none are."""
        self._near_pages = near_pages
        self._chains: dict[Hashable, tuple[int, Sequence[K]]] = {}  # ticket -> place, keys
        self._places: list[int] = []
        self._tickets: list[Hashable] = []  # in the order of _places
        self.next_use: dict[K, int] = {}  # others may only read it
        self._later: dict[K, deque[int]] = {}
        self._num_near = 0  # leading requests that are near
        self.near: dict[K, int] = {}  # key -> number of near requests that want it; read only
        self._news: dict[K, None] = {}  # keys that became near since the last `want_news`
        self._wanted: list[tuple[int, K]] = []  # heap of (when, key), some of them outdated

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: Hashable) -> bool:
        return ticket in self._chains

    def enter(self, ticket: Hashable, keys: Sequence[K], place: int | None) -> None:
        """Queue a request, at the tail if `place` is None."""
        assert ticket not in self._chains, "a ticket is queued twice"
        assert len(keys) < MAX_DEPTH, "a chain is too long"
        if place is None:
            place = self._places[-1] + 1 if self._places else 0
        index = bisect_left(self._places, place)
        assert self._places[index : index + 1] != [place], "a place is taken twice"
        self._chains[ticket] = (place, keys)
        self._places.insert(index, place)
        self._tickets.insert(index, ticket)
        when = place * MAX_DEPTH
        if self.next_use.keys().isdisjoint(keys):
            self.next_use.update(zip(keys, range(when, when + len(keys)), strict=True))
        else:
            for depth, key in enumerate(keys):
                self._add(key, when + depth)
        if index < self._num_near:
            self._num_near += 1
            self._approach(keys)
            self._recede()
        self._advance()

    def leave(self, ticket: Hashable) -> Sequence[K]:
        """Remove a request that was started or cancelled; returns its keys, or none if it was not
        queued."""
        if ticket not in self._chains:
            return ()
        place, keys = self._chains.pop(ticket)
        index = bisect_left(self._places, place)
        del self._places[index], self._tickets[index]
        self._remove(keys, place * MAX_DEPTH)
        if index < self._num_near:
            self._num_near -= 1
            self._part(keys)
        self._advance()
        return keys

    def want(self, key: K) -> None:
        """Note that a near page should be read into the host."""
        heappush(self._wanted, (self.next_use[key], key))

    def want_news(self, pages: Mapping[K, StoredPage[K]]) -> None:
        """Want the stored `pages` that became near since the last call and are below the host."""
        news, self._news = self._news, {}
        for key in news:
            if (page := pages.get(key)) is not None and page.top:
                self.want(key)

    def soonest(self, pages: Mapping[K, StoredPage[K]]) -> tuple[int, StoredPage[K]] | None:
        """When a request needs the first wanted page, and this page; only stored `pages` that are
        still near and below the host."""
        wanted = self._wanted
        while wanted:
            when, key = wanted[0]
            page = pages.get(key)
            is_due = page is not None and page.top and key in self.near
            if page is not None and is_due and self.next_use[key] == when:
                return when, page
            heappop(wanted)
            if is_due:
                self.want(key)
        return None

    def drop_soonest(self) -> None:
        """Do not want the page that `soonest` returned any more."""
        heappop(self._wanted)

    def _add(self, key: K, when: int) -> None:
        """Add one use of a page."""
        first = self.next_use.get(key)
        if first is None:
            self.next_use[key] = when
            return
        later = self._later.get(key)
        if later is None:
            later = self._later[key] = deque()
        if when < first:
            self.next_use[key] = when
            later.appendleft(first)
        elif not later or when > later[-1]:
            later.append(when)
        else:
            later.insert(bisect_left(later, when), when)

    def _remove(self, keys: Sequence[K], when: int) -> None:
        """Remove the uses of a chain whose first page has `when`."""
        next_use, all_later = self.next_use, self._later
        if all_later.keys().isdisjoint(keys):
            for key in keys:
                del next_use[key]
            return
        for key in keys:
            later = all_later.get(key)
            if later is None:
                del next_use[key]
            else:
                if next_use[key] == when:
                    next_use[key] = later.popleft()
                else:
                    del later[bisect_left(later, when)]
                if not later:
                    del all_later[key]
            when += 1

    def _advance(self) -> None:
        """Add requests to the near ones while the host has room for another page. The last request
        may need more pages than fit."""
        while self._num_near < len(self._places) and len(self.near) < self._near_pages:
            self._approach(self._chains[self._tickets[self._num_near]][1])
            self._num_near += 1

    def _recede(self) -> None:
        """Remove requests from the near ones after a request entered the queue before them."""
        while self._num_near > 1:
            keys = self._chains[self._tickets[self._num_near - 1]][1]
            if len(self.near) - len(keys) < self._near_pages:
                return
            self._num_near -= 1
            self._part(keys)

    def _approach(self, keys: Sequence[K]) -> None:
        near = self.near
        if near.keys().isdisjoint(keys):
            near.update(dict.fromkeys(keys, 1))
            self._news.update(dict.fromkeys(keys))
            return
        for key in keys:
            count = near.get(key, 0)
            near[key] = count + 1
            if not count:
                self._news[key] = None

    def _part(self, keys: Sequence[K]) -> None:
        near = self.near
        for key in keys:
            if near[key] == 1:
                del near[key]
                self._news.pop(key, None)
            else:
                near[key] -= 1

    def check(self) -> None:
        """Raise if the invariant is broken."""
        whens: dict[K, list[int]] = {}
        near: dict[K, int] = {}
        assert len(self._places) == len(self._tickets) == len(self._chains), "a request was lost"
        for index, (place, ticket) in enumerate(zip(self._places, self._tickets, strict=True)):
            own_place, keys = self._chains[ticket]
            assert own_place == place, "a request is at another place"
            for depth, key in enumerate(keys):
                whens.setdefault(key, []).append(place * MAX_DEPTH + depth)
                if index < self._num_near:
                    near[key] = near.get(key, 0) + 1
        assert self._places == sorted(self._places), "the queue is out of order"
        filed = {key: [when, *self._later.get(key, ())] for key, when in self.next_use.items()}
        assert whens == filed, "uses differ"
        assert self._later.keys() <= filed.keys(), "a page is wanted later and not next"
        assert near == self.near, "near pages differ"
        assert self._news.keys() <= near.keys(), "news of pages that are not near any more"
