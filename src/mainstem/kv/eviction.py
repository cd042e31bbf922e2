"""The order in which pages and states are evicted, on the device and in the tiers below it.

    first   on the device, retired pages: a planned job will not need them again;
            in the tiers, copies of pages that a faster tier has
            by rank, the smallest first: the policy computes a page's rank at each use
            awaited: those of the last waiting request first, if the policy sees the queue
    last    pinned (on the device)

On a tie the deepest page of a chain is evicted first, because a prefix without its tail is still
useful. A page's worth is one number with this order. The device compares arrays of 64 bits
(`DeviceOrder`), the tiers keep heaps (`TierOrder`).

States of recurrent layers on the device have the same order (`StateOrder`), with a price added to
their rank: what it costs to compute a state again from the next kept state before it.

A new policy is a subclass of `Ranking`: simulations and benchmarks find it by its name. An entry in
the choices of `StoreConfig.policy` (core/config.py) makes it a setting for users.
"""

from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s, Int64s
from mainstem.kv.places import NOWHERE, Moves, PageTable, StoredPage, fastest
from mainstem.kv.window import MAX_DEPTH, QueueWindow

K = TypeVar("K", bound=Hashable)
R = TypeVar("R", int, Int64s)

# tiers: a page that requests wait for is worth this minus its `when` (window.py)
AWAITED = 1 << 100
UNAWAITED = 1 << 90  # tiers: above every rank, below pages that requests wait for
DEVICE_AWAITED = 1 << 61  # above the worth of pages that no request waits for, for 5 x 10^11 uses
DEVICE_PINNED = 1 << 62  # above the worth of every page that is not pinned
SPARE_ITEMS = 4096  # heaps with fewer outdated items are not rebuilt
MOST_USES = 4  # of a state; later ones do not raise its price, so it leaves when nobody comes
GUESS_SHARE = 8  # a guess has this part of the price of a state that is wanted
NOTHING_BEFORE = -1  # a state before which no other one is kept


POLICIES: dict[str, "Ranking"] = {}  # by name; every Ranking adds itself


class Ranking:
    """How pages are ordered while no queued request waits for them. The smallest rank is evicted
    first."""

    sees_queue = False  # whether pages of queued requests are evicted after all others
    has_headroom = True  # whether part of host memory is kept free for new pages

    def __init_subclass__(cls, name: str) -> None:
        POLICIES[name] = cls()

    def used(self, rank: R, clock: int) -> R:
        """The rank after a use at `clock`, which grows with every use; 0 is a page's first rank.
        The device passes an array of ranks."""
        raise NotImplementedError


class Lru(Ranking, name="lru"):
    """The least recently used page goes first."""

    def used(self, rank: R, clock: int) -> R:
        return clock  # type: ignore[return-value]  # one number serves for a whole array


class Lookahead(Lru, name="lookahead"):
    """First to leave are pages without a queued request, the least recently used first; then pages
    of queued requests, beginning with the last request (AttentionStore 3.3)."""

    sees_queue = True


class Fifo(Ranking, name="fifo"):
    """The page that came first goes first. A baseline: it may evict a prefix before its tail."""

    def used(self, rank: R, clock: int) -> R:
        return np.where(rank == 0, clock, rank) if isinstance(rank, np.ndarray) else rank or clock


class Belady(Lookahead, name="belady"):
    """Like lookahead, without headroom: of the pages that are known to be needed, the one that is
    needed last leaves first. For simulations."""

    has_headroom = False


def policy_named(name: str) -> Ranking:
    """Raises ConfigError if there is no such policy."""
    if name not in POLICIES:
        raise ConfigError(f"no store policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


class DeviceOrder:
    """The order of the device pages. The index decides which of them are idle."""

    def __init__(self, num_pages: int, ranking: Ranking) -> None:
        self.sees_queue = ranking.sees_queue
        self._used = ranking.used
        self._clock = 0
        self._rank = np.zeros(num_pages, np.int64)
        self._depth = np.zeros(num_pages, np.int32)  # pages before it in its chain
        self._pins: dict[int, int] = {}  # how often a page is pinned; few pages are

    @property
    def pinned(self) -> list[int]:
        return list(self._pins)

    def enter(self, pages: Int32s, depths: NDArray[np.int64]) -> None:
        """Note how deep in their chains pages are that have just got names."""
        self._depth[pages] = depths

    def forget(self, pages: Int32s) -> None:
        """Forget the uses and pins of pages that lose their names."""
        self._rank[pages] = 0
        for page in self._pins.keys() & set(pages.tolist()) if self._pins else ():
            del self._pins[page]

    def touch(self, pages: Int32s) -> None:
        """Note that pages are used."""
        self._clock += 1
        self._rank[pages] = self._used(self._rank[pages], self._clock)

    def retire(self, pages: Int32s) -> None:
        """Note that no request will ask for these pages."""
        self._rank[pages] = 0

    def pin(self, page: int, times: int = 1) -> None:
        self._pins[page] = self._pins.get(page, 0) + times

    def pins(self, pages: Sequence[int]) -> list[int]:
        """How often each of these pages is pinned."""
        return [self._pins.get(page, 0) for page in pages]

    def unpin(self, page: int) -> None:
        """End one pin of a page, if it has any."""
        if page in self._pins:
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]

    def first(
        self, idle: NDArray[np.int64], count: int, awaited: Sequence[Int32s]
    ) -> NDArray[np.int64]:
        """The `count` pages of `idle`, which has more, that are evicted first. `awaited` are the
        pages of waiting requests, the next request first."""
        worth = self._worth(self._rank, awaited)
        return idle[np.argpartition(worth[idle], count)[:count]]

    def _worth(self, rank: Int64s, awaited: Sequence[Int32s]) -> Int64s:
        """What all pages are worth. `rank` is that of pages that are neither awaited nor pinned."""
        worth = rank * MAX_DEPTH - self._depth
        for place in range(len(awaited) - 1, -1, -1):  # the next request is last and decides
            pages = awaited[place]
            worth[pages] = np.int64(DEVICE_AWAITED - place * MAX_DEPTH) - self._depth[pages]
        worth[self.pinned] += DEVICE_PINNED
        return worth


class StateOrder(DeviceOrder):
    """The order of the states that are kept on the device, by slot.

    Kept states form a tree: before each is the next kept one that its prompt passes. A state's
    price is what it costs to compute it from there, times its uses. When a state is evicted, those
    after it are worth more at once. The clock of ranks advances to the worth of what is evicted
    (GreedyDual, Young 1994): a price protects a state until states of the same price that were used
    later have gone.

        o-------- 1,500 tokens --------o- 20 -o        evicted first: the last one (20 tokens);
                                       '-- 700 --o     then the one after 700 tokens, unless the
                                                       one before it was not used for long

    A guess is a state where nobody is known to continue. Its price is an eighth, and the prices of
    others are as if it were not there.
    """

    def __init__(self, num_states: int, ranking: Ranking) -> None:
        super().__init__(num_states, ranking)
        # of all tokens before a state; the last is 0, for those with nothing before them
        self._cost = np.zeros(num_states + 1, np.int64)
        self._before = np.full(num_states, NOTHING_BEFORE, np.int32)
        self._num_uses = np.zeros(num_states, np.int64)
        self._is_guess = np.zeros(num_states, np.bool_)

    def insert(
        self, slot: int, cost: int, before: int, after: Sequence[int], *, is_guess: bool = False
    ) -> None:
        """A state is kept. `cost` is that of all tokens up to it; the states `after` it had the
        state `before` it in their place until now. No state is after a guess."""
        self._cost[slot], self._before[slot] = cost, before
        self._before[after] = slot
        self._is_guess[slot] = is_guess
        self.use(slot)

    def without_guess(self, slot: int) -> int:
        """The state, or the one before it if it is a guess."""
        return int(self._before[slot]) if slot >= 0 and self._is_guess[slot] else slot

    def is_below_guess(self, slot: int, cost: int, before: int) -> bool:
        """Whether a state is worth less than a guess of `cost` after `before` would be."""
        guess = self._clock + (cost - int(self._cost[before])) // GUESS_SHARE
        is_free = slot not in self._pins
        return is_free and int(self._rank[slot] + self._prices()[slot]) < guess

    def after(self, slot: int, cost: int = 0) -> list[int]:
        """The states that have this one (or NOTHING_BEFORE) before them, and cost more than
        `cost`."""
        return np.flatnonzero((self._before == slot) & (self._cost[:-1] > cost)).tolist()

    def use(self, slot: int) -> None:
        """A sequence starts from this state, or it was just kept."""
        self.touch(np.array([slot], np.int32))
        self._num_uses[slot] = min(self._num_uses[slot] + 1, MOST_USES)

    def remove(self, slot: int) -> None:
        """A state is not kept any more."""
        self._before[self._before == slot] = self._before[slot]
        self._before[slot], self._cost[slot], self._num_uses[slot] = NOTHING_BEFORE, 0, 0
        self._is_guess[slot] = False
        self.forget(np.array([slot], np.int32))

    def note_evicted(self, slot: int) -> None:
        """A state is about to be removed to make room: what is used from now on is worth more."""
        self._clock = max(self._clock, int(self._rank[slot] + self._prices()[slot]))

    def sort(self, slots: Sequence[int], awaited: Sequence[int]) -> list[int]:
        """These states in the order in which they are evicted. `awaited` are those from which
        waiting requests will start, the next request first."""
        chosen = np.array(slots, np.int32)
        places = [np.array([slot], np.int32) for slot in awaited]
        worth = self._worth(self._rank + self._prices(), places)
        order: list[int] = chosen[np.lexsort((self._rank[chosen], worth[chosen]))].tolist()
        return order

    def _prices(self) -> Int64s:
        prices = (self._cost[:-1] - self._cost[self._before]) * self._num_uses
        return np.where(self._is_guess, prices // GUESS_SHARE, prices)


class TierOrder(Generic[K]):
    """The order of the pages in the tiers, and how room is made by it.

    A tier orders the pages for which it is the fastest that has them. The others are copies: they
    are evicted before all of them. Ranks include the depth: a chain is ranked page by page, from
    its tail to its head.

    A page whose worth grows, by a use or a waiting request, is not filed again: it is when its turn
    would come. Most pages gain and lose worth several times before that.

    Invariant: the heap of the fastest tier that has a page has an item with the worth that the page
    was filed with, which is at most its present worth. Outdated items are skipped.
    """

    def __init__(
        self, table: PageTable[K], window: QueueWindow[K], tier_pages: Sequence[int]
    ) -> None:
        self._table = table
        self._pages, self._counts, self._copies = table.stored, table.counts, table.copies
        self._window = window
        self._next_use, self._near = window.next_use, window.near
        self._tier_pages = tier_pages
        self._heaps: list[list[tuple[int, K]]] = [[] for _ in tier_pages]  # of (worth, key)

    def worth(self, page: StoredPage[K]) -> int:
        """The page with the smallest worth is evicted first."""
        when = self._next_use.get(page.key)
        return page.rank if when is None else AWAITED - when

    def file(self, page: StoredPage[K]) -> None:
        """Put the page, with its present worth, into the heap of the tier that may evict it."""
        if page.wanted and not page.is_exempt:
            page.filed = self.worth(page)
            heappush(self._heaps[page.top], (page.filed, page.key))

    def note_less(self, keys: Iterable[K]) -> None:
        """The pages of these keys may be worth less than before; those not stored are skipped."""
        find = self._pages.get
        for key in keys:
            page = find(key)
            # a worth is at least the rank, so that few pages are asked for it
            if page is not None and page.rank < page.filed and self.worth(page) < page.filed:
                self.file(page)

    def clean(self) -> None:
        """Rebuild heaps whose items are mostly outdated."""
        for tier, heap in enumerate(self._heaps):
            if len(heap) > 4 * self._counts[tier] + SPARE_ITEMS:
                pages = self._pages.values()
                here = [page for page in pages if page.top == tier and not page.is_exempt]
                for page in here:
                    page.filed = self.worth(page)
                self._heaps[tier] = [(page.filed, page.key) for page in here]
                heapify(self._heaps[tier])

    def make_room(self, tier: int, worth: int, moves: Moves[K], spared: int = 0) -> bool:
        """Make room for a page of `worth` without using the last `spared` places. False: no page
        is worth less."""
        if self._counts[tier] + spared < self._tier_pages[tier]:
            return True
        evict = self.evict if self._copies[tier] else self.push_out
        return evict(tier, worth, moves)

    def evict(self, tier: int, worth: int | None, moves: Moves[K]) -> bool:
        """Evict a copy, or else the page of least worth. False: none is worth less than `worth`."""
        copies = self._copies[tier]
        if not copies:
            return self.push_out(tier, worth, moves)
        key = next(iter(copies))
        self.leave(tier, self._pages[key])
        moves.forgotten.add((tier, key))
        moves.free.append(key)
        return True

    def push_out(self, tier: int, worth: int | None, moves: Moves[K]) -> bool:
        """Evict the page of least worth, and write it to a lower tier if it is worth a place there.
        False: no page is worth less than `worth`."""
        page = self._pop(tier, worth)
        if page is None:
            return False
        self.leave(tier, page)
        if page.wanted:
            moves.free.append(page.key)
        else:
            self.write_or_drop(tier + 1, page, moves)
        return True

    def _pop(self, tier: int, below: int | None) -> StoredPage[K] | None:
        """The page of least worth, taken off a heap; None if none is worth less than `below`."""
        pages, heap = self._pages, self._heaps[tier]
        while heap:
            filed, key = heap[0]
            if below is not None and filed >= below:
                return None
            page = pages.get(key)
            if page is None or page.top != tier or page.is_exempt or page.filed != filed:
                heappop(heap)
            elif (worth := self.worth(page)) != filed:
                page.filed = worth
                heapreplace(heap, (worth, key))
            else:
                heappop(heap)
                return page
        return None

    def write_or_drop(self, first: int, page: StoredPage[K], moves: Moves[K]) -> None:
        """A page goes to the fastest tier, from number `first` on, that has room for it."""
        for tier in range(first, len(self._tier_pages)):
            if self.make_room(tier, self.worth(page), moves):
                self.enter(tier, page)
                is_there = (tier, page.key) in moves.forgotten
                (moves.free if is_there else moves.write).append(page.key)
                return
        self._table.remove(page)
        moves.drop.append(page.key)

    def enter(self, tier: int, page: StoredPage[K]) -> None:
        """Put a page into a tier that has room."""
        page.wanted |= 1 << tier
        self._counts[tier] += 1
        before = page.top
        if tier > before:
            self._copies[tier][page.key] = None
            return
        if before != NOWHERE:
            self._copies[before][page.key] = None
        page.top = tier
        self._settle_at_top(page)

    def leave(self, tier: int, page: StoredPage[K]) -> None:
        """Take a page out of a tier."""
        page.wanted = wanted = page.wanted & ~(1 << tier)
        self._counts[tier] -= 1
        if tier != page.top:
            del self._copies[tier][page.key]
        elif wanted:
            page.top = fastest(wanted)
            self._copies[page.top].pop(page.key, None)  # absent if about to be read
            self._settle_at_top(page)
        else:
            page.top = NOWHERE

    def _settle_at_top(self, page: StoredPage[K]) -> None:
        """From now on, the page may be evicted from its fastest tier or prefetched from it."""
        self.file(page)
        if page.top and page.key in self._near:
            self._window.want(page.key)

    def check(self) -> None:
        """Raise if the invariant is broken."""
        items = [set(heap) for heap in self._heaps]
        for page in self._pages.values():
            assert (page.filed, page.key) in items[page.top], "a page is missing in its heap"
            assert page.filed <= self.worth(page), "a page is filed with more than its worth"
