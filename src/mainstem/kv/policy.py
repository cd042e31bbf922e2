"""Which stored pages stay, move and leave (AttentionStore 3.3). The policy decides; other classes
move the bytes.

    saved --admit--> tier 0 --write--> tier 1 --write--> tier 2 ... --drop--> gone
                      |  ^--load--------'|   load: before a request needs the page
                      |  ^--keep---------|   keep: after a request has read the page
                      `--free            `--free       a page may be in several tiers

Tiers are numbered, the fastest first; tier 0 is host memory, and all pages pass through it. The
engine's store and `mainstem simulate` drive the same object. It holds names and numbers only, so it
needs neither bytes nor a clock. Every decision is returned as `Moves` and already
recorded here. If a move fails, the caller reports the page with `drop`.

A `Ranking` (kv/ranking.py) orders evictions, the same in all tiers. If the ranking sees the queue,
pages that requests wait for are evicted after all others; those of the last requests go first.

Pages of one chain leave from its tail, because a prefix without its tail is still useful. A page
that is worth less than every page of a tier goes to the next tier, or is refused.
"""

from collections.abc import Hashable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from mainstem.core.errors import ConfigError
from mainstem.kv.ranking import RANKINGS, PolicyKind
from mainstem.kv.window import QueueWindow

K = TypeVar("K", bound=Hashable)

HOST = 0  # the number of the fastest tier
NOWHERE = 1 << 10  # the tier of a page that is in none
HEADROOM = 0.05  # share of the host tier that is kept free for saves and loads
WAITED_FOR = 1 << 100  # a page that requests wait for is worth this minus its `when` (window.py)
UNWAITED = 1 << 90  # above every rank, below pages that requests wait for
RETURNS_KNOWN = 0.25  # one load of this share of the host sets `_soon`; smaller ones adjust it
SPARE_ITEMS = 4096  # heaps with fewer outdated items are not rebuilt


@dataclass(slots=True)
class Moves(Generic[K]):
    """What has to happen to pages. A key is in one list at most.

    `TierPolicy.places` says where a page belongs afterwards. Later moves may follow while these
    are in progress: a copy that is being read is freed only after the read.
    """

    load: list[K] = field(default_factory=list)  # copy to host; the lower tier keeps its copy
    write: list[K] = field(default_factory=list)  # to a lower tier, then free the old place
    free: list[K] = field(default_factory=list)  # free in one tier; another one has it
    drop: list[K] = field(default_factory=list)  # evicted from every tier, or refused on arrival
    # (tier, key) of copies freed in this call; their bytes are still there
    forgotten: set[tuple[int, K]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.load or self.write or self.free or self.drop)

    def settled(self) -> "Moves[K]":
        """The same moves, with only one per page: the one to its final place."""
        if self.free or self.drop or len(set(self.write)) < len(self.write):
            gone = set(self.drop)
            written = dict.fromkeys(key for key in self.write if key not in gone)
            self.free = [k for k in dict.fromkeys(self.free) if k not in gone and k not in written]
            self.write = list(written)
        return self


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How many pages each tier holds, fastest first, and the rule by which pages are evicted."""

    tier_pages: tuple[int, ...]
    kind: PolicyKind = PolicyKind.LOOKAHEAD
    headroom: float = HEADROOM  # share of the host kept free; not used without lower tiers
    ttl_s: float | None = None  # pages unused for longer are dropped

    def __post_init__(self) -> None:
        if not self.tier_pages or min(self.tier_pages) < 0:
            raise ConfigError(f"tier sizes cannot be negative or missing: {self.tier_pages}")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom must be in [0, 1), got {self.headroom}")
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ConfigError(f"ttl_s must be above 0, got {self.ttl_s}")

    @property
    def host_pages(self) -> int:
        return self.tier_pages[HOST]

    @property
    def headroom_pages(self) -> int:
        if not RANKINGS[self.kind].has_headroom or not any(self.tier_pages[1:]):
            return 0
        return int(self.host_pages * self.headroom)

    def window_length(self, chain_pages: float) -> int:
        """How many queued requests the policy can use (AttentionStore 3.3): the pages of all tiers
        divided by `chain_pages`, the mean length of a chain."""
        return max(1, round(sum(self.tier_pages) / max(chain_pages, 1.0)))


class _Entry:
    """A stored page: where it is, and how it ranks while no request waits for it."""

    __slots__ = ("is_exempt", "places", "rank", "top", "used_s")

    def __init__(self) -> None:
        self.places = 0  # a bit for each tier that has it
        self.top = NOWHERE  # the fastest of these
        self.is_exempt = False  # not evicted at present
        self.rank = 0
        self.used_s = 0.0


class TierPolicy(Generic[K]):
    """Decides which tiers hold each stored page, and when it is evicted.

    Call order per request: `expect` when it is queued; `dismiss` when it is served; then `admit`
    with all its pages, used and new ones (`finish` does both). `admit` comes last, since until
    `dismiss` the pages of the request are worth more than all others. `make_headroom` and
    `choose_prefetch` may be called at any time. Calls cost O(log n) a page; only `_clean`
    scans all pages, and rarely.

    Invariant: a tier never holds more pages than its size, and every entry is in a tier. The heap
    of the fastest tier that has a page has an item of the page's present worth. In slower tiers the
    page is a copy: copies are evicted there before all other pages.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        ranking, num_tiers = RANKINGS[config.kind], len(config.tier_pages)
        self._sees_queue = ranking.sees_queue
        self._rank_used = ranking.used
        self._has_ttl = config.ttl_s is not None
        self._pages = config.tier_pages
        self._headroom_pages = config.headroom_pages
        self._entries: dict[K, _Entry] = {}
        # by tier: a heap of (worth, key), whose outdated items are skipped; the copies; the number
        # of pages
        self._heaps: list[list[tuple[int, K]]] = [[] for _ in range(num_tiers)]
        self._copies: list[dict[K, None]] = [{} for _ in range(num_tiers)]
        self._counts = [0] * num_tiers
        self._clock = 0  # counts uses
        self._by_use: dict[K, None] = {}  # least recently used first; filled only with a TTL
        self._window: QueueWindow[K] = QueueWindow(config.host_pages - config.headroom_pages)
        self._next_use = self._window.next_use
        self._soon = 0.0  # recent share of pages that returned soon (`_note_returns`)
        self._wanted: list[tuple[int, K]] = []  # heap of (when, key): soon needed, not in host

    # -- what is where -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def keys(self) -> KeysView[K]:
        """All stored pages."""
        return self._entries.keys()

    def num_pages(self, tier: int) -> int:
        return self._counts[tier]

    @property
    def num_queued(self) -> int:
        return len(self._window)

    def tier_of(self, key: K) -> int | None:
        """The fastest tier that has `key`."""
        entry = self._entries.get(key)
        return None if entry is None else entry.top

    def places(self, key: K) -> int:
        """The tiers that have `key`, a bit each."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.places

    def match(self, keys: Sequence[K]) -> int:
        """How many leading pages of a chain are stored."""
        entries = self._entries
        for index, key in enumerate(keys):
            if key not in entries:
                return index
        return len(keys)

    def find(self, keys: Sequence[K]) -> list[int]:
        """For every leading page of a chain that is stored: the fastest tier that has it."""
        entries, found = self._entries, []
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                break
            found.append(entry.top)
        return found

    # -- the queue -----------------------------------------------------------------------------

    def expect(self, ticket: Hashable, keys: Sequence[K], place: int | None = None) -> None:
        """A request for `keys` enters the queue, at its tail if no `place` is given.

        `place` is a number that no other waiting request has; a smaller one is served sooner.
        `ticket` names the request for `dismiss`.
        """
        if not self._sees_queue:
            return
        self._file_all(self._window.enter(ticket, keys, place))
        self._clean()

    def dismiss(self, ticket: Hashable) -> None:
        """The request left the queue: it was served or cancelled."""
        self._file_all(self._window.leave(ticket))
        self._clean()

    # -- pages come ----------------------------------------------------------------------------

    def note_use(self, keys: Sequence[K], now: float) -> None:
        """A request uses `keys`, the beginning of a chain; pages not stored are skipped."""
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None:
                self._touch(key, entry, now)
        self._clean()

    def admit(self, keys: Sequence[K], now: float, after: Sequence[K | None] = ()) -> Moves[K]:
        """A chain, whose pages are all in memory, was used: put it into the host tier.

        Afterwards `places` says where each of its pages belongs. New pages in `write` go to a lower
        tier without staying in the host; those in `drop` are not kept. `after` names the page
        before each, if known. Under the stricter rule of `keep`, a page whose predecessor is only
        in lower tiers evicts nothing: a request for it has to wait for those tiers anyway.
        """
        moves: Moves[K] = Moves()
        entries, missing = self._entries, []
        for key in reversed(keys):
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = self._new_entry()
            self._touch(key, entry, now)
            if entry.top:
                missing.append((key, entry))
        is_choosy = self._sees_queue and not self._is_lively
        before = dict(zip(keys, after, strict=True)) if after and is_choosy else {}
        for key, entry in reversed(missing):
            if entries.get(key) is not entry:  # evicted for a page before it in the chain
                continue
            worth, spared = self._worth(key, entry), 0
            previous = before.get(key)
            if previous is not None and self.tier_of(previous):
                worth, spared = 0, self._headroom_pages
            if self._make_room(HOST, worth, moves, spared):
                self._enter(HOST, key, entry)
            elif not entry.places:
                self._write_or_drop(HOST + 1, key, entry, moves)
        self._clean()
        return moves.settled()

    def keep(self, keys: Sequence[K], now: float) -> Moves[K]:
        """A request has loaded these stored pages: may those from lower tiers stay in the host?

        If most conversations return soon, yes: these pages evict the least recently used ones.
        Otherwise a page evicts only pages whose last use is older than its own previous use (as in
        LIRS, the distance between two uses decides). If more conversations return in turn than the
        host holds, LRU would evict each one before its next turn; this rule keeps some of them. The
        LRU and FIFO policies admit all pages.
        """
        entries = [(key, entry) for key in keys if (entry := self._entries.get(key)) is not None]
        self._note_returns([entry for _, entry in entries])
        if not self._sees_queue or self._is_lively:
            return self.admit([key for key, _ in entries], now)
        moves: Moves[K] = Moves()
        for key, entry in entries:
            if not entry.top or self._entries.get(key) is not entry:
                continue
            entry.is_exempt = True  # so that making room for the page does not evict the page
            is_welcome = self._make_room(HOST, entry.rank, moves, self._headroom_pages)
            entry.is_exempt = False
            if is_welcome:
                self._enter(HOST, key, entry)
            else:
                self._file(key, entry)
        self.note_use(keys, now)
        return moves.settled()

    def _note_returns(self, entries: Sequence[_Entry]) -> None:
        """Update the share of pages that return so soon that an LRU host would still have them."""
        host_pages = max(1, self.config.host_pages)
        num_soon = sum(self._clock - entry.rank <= host_pages for entry in entries)
        weight = min(1.0, len(entries) / (RETURNS_KNOWN * host_pages))
        self._soon += weight * (num_soon / max(1, len(entries)) - self._soon)

    @property
    def _is_lively(self) -> bool:
        """Whether a host that evicts by LRU finds a larger share of pages (`_soon`) than a host
        that never changes (the share of the stored pages that fits into it)."""
        return self._soon * len(self._entries) > self.config.host_pages

    def finish(self, ticket: Hashable, keys: Sequence[K], now: float) -> Moves[K]:
        """`dismiss` and `admit` for a request that was served; its pages are filed only once."""
        waited_for = self._window.leave(ticket)
        if keys[: len(waited_for)] == waited_for:  # `admit` files these pages anyway
            waited_for = [key for key in waited_for if key in self._next_use]
        self._file_all(waited_for)
        return self.admit(keys, now)

    def recover(self, tier: int, keys: Iterable[K], now: float) -> Moves[K]:
        """Record pages that were found in a tier at the start, least recently used first."""
        moves: Moves[K] = Moves()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = self._new_entry()
                self._touch(key, entry, now)
            elif entry.places >> tier & 1:
                continue
            if self._make_room(tier, self._worth(key, entry), moves):
                self._enter(tier, key, entry)
            elif not entry.places:
                self._remove(key)
                moves.drop.append(key)
        # a page that was dropped and then found again is not dropped
        moves.drop = [key for key in moves.drop if key not in self._entries]
        self._clean()
        return moves.settled()

    def back_up(self, tier: int, keys: Sequence[K]) -> Moves[K]:
        """Copy host pages to a lower tier too, unless that would evict newer pages.

        The copies are listed in `write`; unlike after other writes, the host keeps its own.
        """
        moves: Moves[K] = Moves()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.top or entry.places >> tier & 1:
                continue
            is_full = self._counts[tier] >= self._pages[tier]
            if is_full and not self._push_out(tier, self._worth(key, entry), moves):
                continue
            self._enter(tier, key, entry)
            moves.write.append(key)
        return moves.settled()

    def choose_prefetch(self, *limits: int) -> Moves[K]:
        """Load pages of the next requests from lower tiers into the host, soonest first. `limits`
        is the maximum number of pages for each tier, from tier 1 on.

        Host pages that are needed later than these, or not at all, are evicted for them; the
        headroom stays free.
        """
        moves: Moves[K] = Moves()
        entries, wanted, left = self._entries, self._wanted, [0, *limits]
        for key in self._window.take_news():
            entry = entries.get(key)
            if entry is not None and entry.top and self._window.is_near(key):
                self._want(key)
        put_off: list[tuple[int, K]] = []  # pages in tiers whose limit is reached
        sources: list[tuple[int, K]] = []
        while wanted and any(left):
            when, key = wanted[0]
            entry = entries.get(key)
            is_due = entry is not None and entry.top and self._window.is_near(key)
            if not is_due or self._next_use.get(key) != when:
                heappop(wanted)
                if is_due:
                    self._want(key)
                continue
            assert entry is not None
            source = entry.top
            if source >= len(left) or not left[source]:
                put_off.append(heappop(wanted))
                continue
            if not self._make_room(HOST, WAITED_FOR - when, moves, self._headroom_pages):
                break
            heappop(wanted)
            self._enter(HOST, key, entry)
            del self._copies[source][key]  # it is about to be read, so it must not be evicted yet
            sources.append((source, key))
            left[source] -= 1
            moves.load.append(key)
        for item in put_off:
            heappush(wanted, item)
        for source, key in sources:
            self._copies[source][key] = None
        return moves.settled()

    # -- pages go ------------------------------------------------------------------------------

    def choose_victims(self, tier: int, count: int) -> Moves[K]:
        """Free up to `count` pages of `tier`, those of least worth first."""
        moves: Moves[K] = Moves()
        for _ in range(count):
            if self._copies[tier]:
                self._forget_copy(tier, moves)
            elif not self._push_out(tier, None, moves):
                break
        return moves.settled()

    def free_unwaited(self, count: int) -> Moves[K]:
        """Free up to `count` host pages that no queued request waits for, the least worth first."""
        moves: Moves[K] = Moves()
        for _ in range(count):
            if not self._push_out(HOST, UNWAITED, moves):
                break
        return moves.settled()

    def make_headroom(self) -> Moves[K]:
        """Free host pages until the headroom is free."""
        short = self._counts[HOST] + self._headroom_pages - self._pages[HOST]
        return self.choose_victims(HOST, max(0, short))

    def expire(self, now: float) -> list[K]:
        """Drop pages that were not used for the TTL, even those that requests wait for; returns
        them. The TTL is a promise to the users who own the data.
        """
        ttl_s = self.config.ttl_s
        gone: list[K] = []
        if ttl_s is None:
            return gone
        while self._by_use:
            key = next(iter(self._by_use))
            entry = self._entries[key]
            if entry.used_s + ttl_s > now:
                break
            self._remove(key)
            gone.append(key)
        return gone

    def drop(self, keys: Iterable[K]) -> None:
        """Remove pages from every tier: they are damaged or deleted, or a move failed."""
        for key in keys:
            if key in self._entries:
                self._remove(key)
        if not self._entries:
            self._soon = 0.0  # the store is empty, so no page can return soon

    def drop_from(self, tier: int, keys: Iterable[K]) -> None:
        """Remove pages from one tier; copies in other tiers stay."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.places >> tier & 1:
                continue
            if entry.places == 1 << tier:
                self._remove(key)
            else:
                self._leave(tier, key, entry)

    # -- inside --------------------------------------------------------------------------------

    def _worth(self, key: K, entry: _Entry) -> int:
        """The page with the smallest worth is evicted first."""
        when = self._next_use.get(key)
        return entry.rank if when is None else WAITED_FOR - when

    def _new_entry(self) -> _Entry:
        self._clock += 1
        return _Entry()

    def _touch(self, key: K, entry: _Entry, now: float) -> None:
        entry.used_s = now
        if self._has_ttl:
            self._by_use.pop(key, None)
            self._by_use[key] = None
        self._clock = clock = self._clock + 1
        before = entry.rank
        entry.rank = rank = self._rank_used(before, clock)
        if rank != before and entry.places and not entry.is_exempt and key not in self._next_use:
            heappush(self._heaps[entry.top], (rank, key))

    def _file(self, key: K, entry: _Entry) -> None:
        """Put the page, with its present worth, into the heap of the tier that may evict it."""
        if entry.is_exempt or not entry.places:
            return
        when = self._next_use.get(key)
        worth = entry.rank if when is None else WAITED_FOR - when
        heappush(self._heaps[entry.top], (worth, key))

    def _file_all(self, keys: Iterable[K]) -> None:
        entries, file = self._entries, self._file
        for key in keys:
            entry = entries.get(key)
            if entry is not None:
                file(key, entry)

    def _clean(self) -> None:
        """Rebuild a heap that has become mostly outdated items."""
        for tier, heap in enumerate(self._heaps):
            if len(heap) > 4 * self._counts[tier] + SPARE_ITEMS:
                self._heaps[tier] = self._cleaned(tier)

    def _cleaned(self, tier: int) -> list[tuple[int, K]]:
        """A heap without outdated items."""
        items = [
            (self._worth(key, entry), key)
            for key, entry in self._entries.items()
            if entry.top == tier and not entry.is_exempt
        ]
        heapify(items)
        return items

    def _pop(self, tier: int, below: int | None) -> K | None:
        """The page of least worth, taken off a heap; None if none is worth less than `below`."""
        entries, next_use, heap = self._entries, self._next_use, self._heaps[tier]
        while heap:
            worth, key = heap[0]
            entry = entries.get(key)
            if entry is not None and not entry.is_exempt and entry.top == tier:
                when = next_use.get(key)
                if worth == (entry.rank if when is None else WAITED_FOR - when):
                    if below is not None and worth >= below:
                        return None
                    heappop(heap)
                    return key
            heappop(heap)
        return None

    def _make_room(self, tier: int, worth: int, moves: Moves[K], spared: int = 0) -> bool:
        """Make room for a page of `worth` without using the last `spared` places: evict a copy, or
        else the page of least worth. False: no page is worth less."""
        if self._counts[tier] + spared < self._pages[tier]:
            return True
        if self._copies[tier]:
            self._forget_copy(tier, moves)
            return True
        return self._push_out(tier, worth, moves)

    def _forget_copy(self, tier: int, moves: Moves[K]) -> None:
        key = next(iter(self._copies[tier]))
        self._leave(tier, key, self._entries[key])
        moves.forgotten.add((tier, key))
        moves.free.append(key)

    def _push_out(self, tier: int, worth: int | None, moves: Moves[K]) -> bool:
        """Evict the page of least worth from a tier, and write it to a lower one if it is worth a
        place there. False: no page is worth less than `worth`."""
        key = self._pop(tier, worth)
        if key is None:
            return False
        entry = self._entries[key]
        self._leave(tier, key, entry)
        if entry.places:
            moves.free.append(key)
        else:
            self._write_or_drop(tier + 1, key, entry, moves)
        return True

    def _write_or_drop(self, first: int, key: K, entry: _Entry, moves: Moves[K]) -> None:
        """A page goes to the fastest tier, from number `first` on, that has room for it."""
        for tier in range(first, len(self._pages)):
            if self._make_room(tier, self._worth(key, entry), moves):
                self._enter(tier, key, entry)
                is_there = (tier, key) in moves.forgotten
                (moves.free if is_there else moves.write).append(key)
                return
        self._remove(key)
        moves.drop.append(key)

    def _enter(self, tier: int, key: K, entry: _Entry) -> None:
        entry.places |= 1 << tier
        self._counts[tier] += 1
        before = entry.top
        if tier > before:
            self._copies[tier][key] = None
            return
        if before != NOWHERE:
            self._copies[before][key] = None
        entry.top = tier
        self._settle_at_top(key, entry)

    def _leave(self, tier: int, key: K, entry: _Entry) -> None:
        entry.places = places = entry.places & ~(1 << tier)
        self._counts[tier] -= 1
        if tier != entry.top:
            del self._copies[tier][key]
        elif places:
            entry.top = (places & -places).bit_length() - 1
            self._copies[entry.top].pop(key, None)  # absent if about to be read
            self._settle_at_top(key, entry)
        else:
            entry.top = NOWHERE

    def _settle_at_top(self, key: K, entry: _Entry) -> None:
        """From now on, the page may be evicted from its fastest tier or prefetched from it."""
        self._file(key, entry)
        if entry.top and self._window.is_near(key):
            self._want(key)

    def _want(self, key: K) -> None:
        when = self._next_use.get(key)
        assert when is not None, "a near page has no next use"
        heappush(self._wanted, (when, key))

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key)
        places, tier = entry.places, 0
        while places:
            if places & 1:
                self._counts[tier] -= 1
                self._copies[tier].pop(key, None)
            places >>= 1
            tier += 1
        self._by_use.pop(key, None)

    def check(self) -> None:
        """Raise if the invariant is broken."""
        self._window.check()
        entries, places = self._entries, 0
        for tier, most in enumerate(self._pages):
            keys = {key for key, entry in entries.items() if entry.places >> tier & 1}
            assert len(keys) == self._counts[tier] <= most, f"pages of tier {tier} miscounted"
            copies = {key for key in keys if entries[key].top < tier}
            assert self._copies[tier].keys() == copies, "copies differ"
            items = set(self._heaps[tier])
            for key in keys - copies:
                entry = entries[key]
                assert entry.top == tier, "a page is in a faster tier than it knows"
                assert (self._worth(key, entry), key) in items, "a page is missing in its heap"
            places |= 1 << tier
        for entry in entries.values():
            assert entry.places, "an entry is in no tier"
            assert not entry.places & ~places, "an entry is in a tier that does not exist"
        if self.config.ttl_s is not None:
            assert self._by_use.keys() == entries.keys(), "a page is missing in the order of use"
            times = [entries[key].used_s for key in self._by_use]
            assert all(a <= b for a, b in zip(times, islice(times, 1, None), strict=False))
