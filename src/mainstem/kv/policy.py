"""Which stored pages stay, move and leave (AttentionStore 3.3). The policy decides; other classes
move the bytes.

    saved --admit--> tier 0 --write--> tier 1 --write--> tier 2 ... --drop--> gone
                      |  ^--load--------'|   load: before a request needs the page
                      |  ^--keep---------|   keep: after a request has read the page
                      `--free            `--free       a page may be in several tiers

Tiers are numbered, the fastest first; tier 0 is host memory, and all pages pass through it. The
engine's store and `mainstem simulate` drive the same object. It holds names and numbers only, so it
needs neither bytes nor a clock. Every decision is returned as `Moves` and already
recorded in the pages (kv/places.py). If a move fails, the caller reports the page with `drop`.

The order of eviction is the same in all tiers (kv/eviction.py). A page that is worth less than
every page of a tier goes to the next tier, or is refused.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from mainstem.core.errors import ConfigError
from mainstem.kv.eviction import AWAITED, UNAWAITED, TierOrder, policy_named
from mainstem.kv.places import HOST, Moves, PageTable, StoredPage
from mainstem.kv.window import QueueWindow

K = TypeVar("K", bound=Hashable)

HEADROOM = 0.05  # share of the host tier that is kept free for saves and loads
RETURNS_KNOWN = 0.25  # one load of this share of the host sets `_soon`; smaller ones adjust it


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How many pages each tier holds, fastest first, and the rule by which pages are evicted."""

    tier_pages: tuple[int, ...]
    kind: str = "lookahead"  # a name in kv/eviction.py
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
        if not policy_named(self.kind).has_headroom or not any(self.tier_pages[1:]):
            return 0
        return int(self.host_pages * self.headroom)

    def window_length(self, chain_pages: float) -> int:
        """How many queued requests the policy can use (AttentionStore 3.3): the pages of all tiers
        divided by `chain_pages`, the mean length of a chain."""
        return max(1, round(sum(self.tier_pages) / max(chain_pages, 1.0)))


class TierPolicy(Generic[K]):
    """Decides which tiers hold each stored page, and when it is evicted.

    Call order per request: `expect` when it is queued; `dismiss` when it is served; then `admit`
    with all its pages, used and new ones (`finish` does both). `admit` comes last, since until
    `dismiss` the pages of the request are worth more than all others. `make_headroom` and
    `choose_prefetch` may be called at any time. Calls cost O(log n) a page; only `TierOrder.clean`
    scans all pages, and rarely.

    Invariant: a tier never holds more pages than its size.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        ranking = policy_named(config.kind)
        self._sees_queue = ranking.sees_queue
        self._rank_used = ranking.used
        self._has_ttl = config.ttl_s is not None
        self._tier_pages = config.tier_pages
        self._headroom_pages = config.headroom_pages
        self.table: PageTable[K] = PageTable(config.tier_pages)
        self._pages = self.table.stored
        self._counts = self.table.counts
        can_prefetch = any(config.tier_pages[1:])
        near_pages = config.host_pages - config.headroom_pages if can_prefetch else 0
        self._window: QueueWindow[K] = QueueWindow(near_pages)
        self._next_use = self._window.next_use
        self._order = TierOrder(self.table, self._window, config.tier_pages)
        self._clock = 0  # counts uses
        self._soon = 0.0  # recent share of pages that returned soon (`_note_returns`)

    # -- what is where -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: K) -> bool:
        return key in self._pages

    def num_pages(self, tier: int) -> int:
        return self._counts[tier]

    @property
    def num_queued(self) -> int:
        return len(self._window)

    def tier_of(self, key: K) -> int | None:
        """The fastest tier that has `key`."""
        page = self._pages.get(key)
        return None if page is None else page.top

    def places(self, key: K) -> int:
        """The tiers that have `key`, a bit each."""
        page = self._pages.get(key)
        return 0 if page is None else page.wanted

    def match(self, keys: Sequence[K]) -> int:
        """How many leading pages of a chain are stored."""
        pages = self._pages
        for index, key in enumerate(keys):
            if key not in pages:
                return index
        return len(keys)

    def tiers_of(self, keys: Sequence[K]) -> list[int]:
        """For every leading page of a chain that is stored: the fastest tier that has it."""
        pages, found = self._pages, []
        for key in keys:
            page = pages.get(key)
            if page is None:
                break
            found.append(page.top)
        return found

    # -- the queue -----------------------------------------------------------------------------

    def expect(self, ticket: Hashable, keys: Sequence[K], place: int | None = None) -> None:
        """A request for `keys` enters the queue, at its tail if no `place` is given.

        `place` is a number that no other waiting request has; a smaller one is served sooner.
        `ticket` names the request for `dismiss`.
        """
        if not self._sees_queue:
            return
        self._window.enter(ticket, keys, place)

    def dismiss(self, ticket: Hashable) -> None:
        """The request left the queue: it was served or cancelled."""
        self._order.note_less(self._window.leave(ticket))
        self._order.clean()

    # -- pages come ----------------------------------------------------------------------------

    def note_use(self, keys: Sequence[K], now: float) -> None:
        """A request uses `keys`, the beginning of a chain; pages not stored are skipped."""
        find = self._pages.get
        self._use([page for key in keys if (page := find(key)) is not None], now)
        self._order.clean()

    def admit(self, keys: Sequence[K], now: float, after: Sequence[K | None] = ()) -> Moves[K]:
        """A chain, whose pages are all in memory, was used: put it into the host tier.

        Afterwards `places` says where each of its pages belongs. New pages in `write` go to a lower
        tier without staying in the host; those in `drop` are not kept. `after` names the page
        before each, if known. Under the stricter rule of `keep`, a page whose predecessor is only
        in lower tiers evicts nothing: a request for it has to wait for those tiers anyway.
        """
        moves: Moves[K] = Moves()
        pages, add = self._pages, self.table.add
        chain = [pages.get(key) or add(key) for key in keys]
        self._use(chain, now)
        missing = [page for page in chain if page.top]
        is_choosy = self._sees_queue and not self._is_lively
        before = dict(zip(keys, after, strict=True)) if after and is_choosy else {}
        for page in missing:
            if pages.get(page.key) is not page:  # evicted for a page before it in the chain
                continue
            worth, spared = self._order.worth(page), 0
            previous = before.get(page.key)
            if previous is not None and self.tier_of(previous):
                worth, spared = 0, self._headroom_pages
            if self._order.make_room(HOST, worth, moves, spared):
                self._order.enter(HOST, page)
            elif not page.wanted:
                self._order.write_or_drop(HOST + 1, page, moves)
        self._order.clean()
        return moves.settled()

    def keep(self, keys: Sequence[K], now: float) -> Moves[K]:
        """A request has loaded these stored pages: may those from lower tiers stay in the host?

        If most conversations return soon, yes: these pages evict the least recently used ones.
        Otherwise a page evicts only pages whose last use is older than its own previous use (as in
        LIRS, the distance between two uses decides). If more conversations return in turn than the
        host holds, LRU would evict each one before its next turn; this rule keeps some of them.
        Policies that do not see the queue admit all pages.
        """
        pages = [page for key in keys if (page := self._pages.get(key)) is not None]
        self._note_returns(pages)
        if not self._sees_queue or self._is_lively:
            return self.admit([page.key for page in pages], now)
        moves: Moves[K] = Moves()
        for page in pages:
            if not page.top or self._pages.get(page.key) is not page:
                continue
            page.is_exempt = True  # so that making room for the page does not evict the page
            is_welcome = self._order.make_room(HOST, page.rank, moves, self._headroom_pages)
            page.is_exempt = False
            if is_welcome:
                self._order.enter(HOST, page)
            else:
                self._order.file(page)
        self.note_use(keys, now)
        return moves.settled()

    def _note_returns(self, pages: Sequence[StoredPage[K]]) -> None:
        """Update the share of pages that return so soon that an LRU host would still have them."""
        host_pages = max(1, self.config.host_pages)
        num_soon = sum(self._clock - page.rank <= host_pages for page in pages)
        weight = min(1.0, len(pages) / (RETURNS_KNOWN * host_pages))
        self._soon += weight * (num_soon / max(1, len(pages)) - self._soon)

    @property
    def _is_lively(self) -> bool:
        """Whether a host that evicts by LRU finds a larger share of pages (`_soon`) than a host
        that never changes (the share of the stored pages that fits into it)."""
        return self._soon * len(self._pages) > self.config.host_pages

    def finish(self, ticket: Hashable, keys: Sequence[K], now: float) -> Moves[K]:
        """`dismiss` and `admit` for a request that was served."""
        self._order.note_less(self._window.leave(ticket))
        return self.admit(keys, now)

    def recover(self, tier: int, keys: Iterable[K], now: float) -> Moves[K]:
        """Record pages that were found in a tier at the start, least recently used first."""
        moves: Moves[K] = Moves()
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                page = self.table.add(key)
                self._use([page], now)
            elif page.wanted >> tier & 1:
                continue
            if self._order.make_room(tier, self._order.worth(page), moves):
                self._order.enter(tier, page)
            elif not page.wanted:
                self.table.remove(page)
                moves.drop.append(key)
        # a page that was dropped and then found again is not dropped
        moves.drop = [key for key in moves.drop if key not in self._pages]
        self._order.clean()
        return moves.settled()

    def back_up(self, tier: int, keys: Sequence[K]) -> Moves[K]:
        """Copy host pages to a lower tier too, unless that would evict newer pages.

        The copies are listed in `write`; unlike after other writes, the host keeps its own.
        """
        moves: Moves[K] = Moves()
        for key in keys:
            page = self._pages.get(key)
            if page is None or page.top or page.wanted >> tier & 1:
                continue
            is_full = self._counts[tier] >= self._tier_pages[tier]
            if is_full and not self._order.push_out(tier, self._order.worth(page), moves):
                continue
            self._order.enter(tier, page)
            moves.write.append(key)
        return moves.settled()

    def choose_prefetch(self, *limits: int) -> Moves[K]:
        """Load pages of the next requests from lower tiers into the host, soonest first. `limits`
        is the maximum number of pages for each tier, from tier 1 on.

        Host pages that are needed later than these, or not at all, are evicted for them; the
        headroom stays free.
        """
        moves: Moves[K] = Moves()
        left, sources = [0, *limits], list[tuple[int, K]]()
        put_off: list[K] = []  # pages in tiers whose limit is reached
        self._window.want_news(self._pages)
        while any(left) and (wanted := self._window.soonest(self._pages)) is not None:
            when, page = wanted
            key, source = page.key, page.top
            if source >= len(left) or not left[source]:
                put_off.append(key)
                self._window.drop_soonest()
                continue
            if not self._order.make_room(HOST, AWAITED - when, moves, self._headroom_pages):
                break
            self._window.drop_soonest()
            self._order.enter(HOST, page)
            # it is about to be read, so it must not be evicted yet
            del self.table.copies[source][key]
            sources.append((source, key))
            left[source] -= 1
            moves.load.append(key)
        for key in put_off:
            self._window.want(key)
        for source, key in sources:
            self.table.copies[source][key] = None
        return moves.settled()

    # -- pages go ------------------------------------------------------------------------------

    def choose_victims(self, tier: int, count: int) -> Moves[K]:
        """Free up to `count` pages of `tier`, those of least worth first."""
        moves: Moves[K] = Moves()
        for _ in range(count):
            if not self._order.evict(tier, None, moves):
                break
        return moves.settled()

    def free_unawaited(self, count: int) -> Moves[K]:
        """Free up to `count` host pages that no queued request waits for, the least worth first."""
        moves: Moves[K] = Moves()
        for _ in range(count):
            if not self._order.push_out(HOST, UNAWAITED, moves):
                break
        return moves.settled()

    def make_headroom(self) -> Moves[K]:
        """Free host pages until the headroom is free."""
        short = self._counts[HOST] + self._headroom_pages - self._tier_pages[HOST]
        return self.choose_victims(HOST, max(0, short))

    def expire(self, now: float) -> list[K]:
        """Drop pages that were not used for the TTL, even those that requests wait for; returns
        them. The TTL is a promise to the users who own the data.
        """
        ttl_s = self.config.ttl_s
        gone: list[K] = []
        if ttl_s is None:
            return gone
        while self.table.by_use:
            page = self._pages[next(iter(self.table.by_use))]
            if page.used_s + ttl_s > now:
                break
            self.table.remove(page)
            gone.append(page.key)
        return gone

    def hold(self, keys: Iterable[K]) -> None:
        """Do not evict these pages until `let_go`: a simulated request uses them."""
        for key in keys:
            if (page := self._pages.get(key)) is not None:
                page.is_exempt = True

    def let_go(self, keys: Iterable[K]) -> None:
        """From now on, these pages may be evicted."""
        for key in keys:
            if (page := self._pages.get(key)) is not None:
                page.is_exempt = False
                self._order.file(page)

    def drop(self, keys: Iterable[K]) -> None:
        """Remove pages from every tier: they are damaged or deleted, or a move failed."""
        for key in keys:
            if (page := self._pages.get(key)) is not None:
                self.table.remove(page)
        if not self._pages:
            self._soon = 0.0  # the store is empty, so no page can return soon

    def drop_from(self, tier: int, keys: Iterable[K]) -> None:
        """Remove pages from one tier; copies in other tiers stay."""
        for key in keys:
            page = self._pages.get(key)
            if page is None or not page.wanted >> tier & 1:
                continue
            if page.wanted == 1 << tier:
                self.table.remove(page)
            else:
                self._order.leave(tier, page)

    # -- inside --------------------------------------------------------------------------------

    def _use(self, pages: Sequence[StoredPage[K]], now: float) -> None:
        """A request uses pages of a chain: the head counts as used last, so the tail goes first."""
        clock, rank_used = self._clock, self._rank_used
        for page in reversed(pages):
            clock += 1 if page.rank else 2  # the first use of a page counts as its arrival, too
            page.used_s = now
            page.rank = rank_used(page.rank, clock)
        self._clock = clock
        self._order.note_less([page.key for page in pages if page.rank < page.filed])
        if self._has_ttl:
            by_use = self.table.by_use
            for page in reversed(pages):
                by_use.pop(page.key, None)
                by_use[page.key] = None

    def check(self) -> None:
        """Raise if the invariant is broken."""
        self._window.check()
        self.table.check()
        self._order.check()
        if self.config.ttl_s is not None:
            by_use = self.table.by_use
            assert by_use.keys() == self._pages.keys(), "a page is missing in the order of use"
            times = [self._pages[key].used_s for key in by_use]
            assert all(a <= b for a, b in zip(times, islice(times, 1, None), strict=False))
