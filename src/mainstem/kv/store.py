"""KVStore: all access to pages, on the device and in the tiers below it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from mainstem.core.config import Saving, StoreConfig
from mainstem.core.errors import OutOfPages
from mainstem.core.events import EventBus, PagesCleared, PagesEvicted
from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s
from mainstem.kv.copies import TierCopies
from mainstem.kv.eviction import policy_named
from mainstem.kv.finder import Match, PageFinder
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import Naming, PageChain, PageName
from mainstem.kv.loading import PageLoader, StoredRun
from mainstem.kv.parts import WindowParts
from mainstem.kv.pool import PagePool
from mainstem.kv.rows import RowSlots
from mainstem.kv.saving import PageSaver
from mainstem.kv.stack import TierStack
from mainstem.kv.states import StatePlace, StateStore
from mainstem.kv.stored_states import StoredStates

EVICT_SHARE = 64  # an eviction frees up to 1/64 of all pages, or more if more are needed
# histories return together: an eviction for one that is loaded makes room for this many, within
# 1/8 of all pages
LOADS_AT_ONCE, LOADS_SHARE = 4, 8
AWAITED_PAGES = 2048  # of waiting prompts whose states are looked up for an eviction
DEFAULT_CONFIG = StoreConfig()


class PinnedPrefix(NamedTuple):
    """What is pinned of a prefix."""

    pages: list[PageKey]
    state: StatePlace | None


class KVStore:
    """Lends pages to sequences and remembers what is in them.

    take/give_back lends empty pages; lease/release lends filled ones; reserve/commit/abort names
    pages while they are filled. Only idle pages are evicted. With tiers below the device (`stack`),
    `saver` saves filled pages as steps fill them, and `loader` knows what can be loaded. `finder`
    and `index` find what is on the device.
    """

    def __init__(  # noqa: PLR0913  # the parts it is joined from
        self,
        num_pages: int,
        page_size: int,
        identity: bytes,
        bus: EventBus,
        stack: TierStack | None = None,
        config: StoreConfig = DEFAULT_CONFIG,
        num_states: int = 0,
        *,
        pages_per_state: int = 1,
        rows_per_slot: int = 0,
        row_slots_per_state: int = 0,
        parts: WindowParts | None = None,
        state_cost: Callable[[int], float] = float,
        has_whole_pages: bool = False,
    ) -> None:
        """`stack` has the tiers below the device; None: there are none. `num_states` is 0 for
        models without recurrent layers; `state_cost` is that of a prompt's first tokens, by number.
        `row_slots_per_state`: see RowSlots; 0: no sequence keeps rows. `parts` has the windowed
        parts of pages, if they have a pool of their own. With `has_whole_pages` no page is shared
        in part: full pages are rounded, and a page that begins alike must be filled from unrounded
        numbers."""
        self.num_pages, self.page_size = num_pages, page_size
        ranking = policy_named(config.policy)
        self.states = StateStore(num_states, bus, ranking, state_cost) if num_states else None
        self.stored_states: StoredStates | None = None  # of a model with states and tiers
        self.rows: RowSlots | None = None
        if self.states is not None and row_slots_per_state:
            self.rows = RowSlots(self.states, row_slots_per_state, rows_per_slot)
        self.parts = parts
        self._pool = PagePool(num_pages, parts)
        self.index = PrefixIndex(self._pool, page_size, bus, ranking)
        if parts is not None:
            parts.pinned = lambda: self.index.order.pinned
        self._awaited: Callable[[int], Sequence[PageChain]] = lambda _: ()
        if self.states is not None and ranking.sees_queue:
            self.states.awaited = lambda: self._awaited(AWAITED_PAGES)
        self._naming = Naming(identity, page_size)
        self._bus = bus
        self.stack = stack = stack or TierStack(bus)
        self.saver = PageSaver(self._pool, self.index, stack, bus, config.save)
        self.loader = PageLoader(self._pool, self.index, stack, bus)
        self.finder = PageFinder(page_size, self.index, self.loader, parts, has_whole_pages)
        if self.states is not None and StoredStates.fits(stack, pages_per_state):
            self.stored_states = StoredStates(
                self.states, stack, self.saver, self.loader, bus, num_pages, pages_per_state
            )
        self._copies = TierCopies(stack, self.saver, self.loader, self.stored_states)

    @property
    def num_cached_pages(self) -> int:
        return len(self.index)

    def num_available(self) -> int:
        """Pages that `take` could lend now without evicting pinned ones."""
        return self.num_takeable() - self.index.num_idle_pinned()

    def num_takeable(self) -> int:
        """Pages that `take` could lend now, pinned ones as a last resort."""
        return self._pool.num_free + self.index.num_idle()

    def num_held(self) -> int:
        """Pages that sequences hold."""
        num_copied = self._pool.num_only_copied(self.index.is_indexed)
        return self.num_pages - self.num_takeable() - num_copied

    def watch_queue(self, awaited: Callable[[int], Sequence[PageChain]]) -> None:
        """Set `awaited`: it takes a number of pages and returns the chains that queued requests
        wait for, soonest first, up to that many pages. It is called when the device must evict:
        these pages, and the states from which these requests will start, are evicted last."""
        self._awaited = awaited

    def chain(self, token_ids: Int32s, salt: bytes, public_tokens: int = 0) -> PageChain:
        """The names of the pages of `token_ids`; see Naming."""
        return self._naming.chain(token_ids, salt, public_tokens)

    def pin(self, chain: PageChain) -> PinnedPrefix:
        """Pin the READY pages of a chain, the page that begins like its partial last page, and the
        deepest state: they are evicted only after all others. Pass the returned value to
        `unpin`."""
        pages, num_ready = self.finder.pinnable(chain)
        if self.parts is not None:
            self.parts.keep(pages[self.parts.first(num_ready) :])
        state = None if self.states is None else self.states.pin(chain)
        return PinnedPrefix(self.index.pin(pages.tolist()), state)

    def unpin(self, prefix: PinnedPrefix) -> None:
        """End a pin; what was evicted is skipped."""
        self.index.unpin(prefix.pages)
        if self.states is not None and prefix.state is not None:
            self.states.unpin(prefix.state)

    def lookup(self, chain: PageChain, num_tokens: int) -> Match:
        """How much of the first `num_tokens` of a chain the store has."""
        return self.finder.lookup(chain, num_tokens)

    def has(self, key: PageKey) -> bool:
        """Whether a page is indexed, READY or LOADING."""
        return key in self.index

    def is_ready(self, key: PageKey) -> bool:
        """Whether a page is indexed and filled."""
        return self.index.is_ready(key)

    def take(self, count: int, num_soon: int = 0) -> Int32s:
        """Lend `count` empty pages, evicting idle ones; or raise OutOfPages and lend none. About
        `num_soon` pages are taken soon: if any are evicted, these are, too."""
        short = count - self._pool.num_free
        if short > 0:
            idle = self.index.num_idle()
            if short > idle:
                raise OutOfPages(wanted=count, free=self._pool.num_free + idle)
            # evict more than needed: finding the oldest pages costs the same for one page as for
            # many
            spare = max(num_soon, self.num_pages // EVICT_SHARE)
            spare = min(spare, idle - self.index.num_idle_pinned())
            awaited = self._awaited(self.num_pages) if self.index.order.sees_queue else ()
            gone = self.index.evict(max(short, spare), [chain.keys for chain in awaited])
            self._bus.publish(PagesEvicted(num_pages=gone, reason="room"))
        return self._pool.take(count)

    def give_back(self, pages: Int32s, num_wanted: int | None = None) -> None:
        """A sequence no longer needs `pages`. Named pages stay in the cache, as the most recently
        used.

        If only the first `num_wanted` will be asked for again, the others are evicted first.
        """
        self.index.order.touch(pages[:num_wanted])
        if num_wanted is not None:
            self.index.order.retire(pages[num_wanted:])
            if self.parts is not None:
                self.parts.retire(pages[num_wanted:])
        self.saver.note_use(pages[:num_wanted])
        if self.saver.when is Saving.SYNC:
            self._copies.finish_saves()
        self._pool.give_back(pages)

    def lease(self, pages: Int32s) -> None:
        """Lend `pages` of a Match to a sequence, until `give_back` or `release`."""
        self._pool.share(pages)

    def release(self, pages: Int32s) -> None:
        """End a lease that does not count as a use: the order of eviction stays as before."""
        self._pool.give_back(pages)

    def reserve(self, chain: PageChain, first: int, pages: Int32s) -> None:
        """Name `pages`, which are about to hold the chain's full pages from number `first` on:
        other sequences find them LOADING and wait. Pages after a page that another sequence fills
        get their names later (`name`): they could not be found if that page were never filled."""
        keys = chain.keys[first : first + len(pages)]
        num_named = self.index.num_nameable(keys)
        pins = self._unname_lost(keys[:num_named])
        self.index.reserve(chain, first, pages[:num_named])
        self.index.repin(pins)

    def _unname_lost(self, keys: Sequence[PageKey]) -> dict[PageKey, int]:
        """Take the names of these READY pages, from the first without a windowed part on: pages
        that are filled now get them, and can be shared again. Returns the pins of each name."""
        if self.parts is None:
            return {}
        old = self.index.indexed(keys)
        lost = np.flatnonzero(~self.parts.has(old))
        return self.index.unname(old[lost[0] :]) if len(lost) else {}

    def reserve_tail(self, chain: PageChain, page: int) -> None:
        """Like `reserve`, for the page of the chain's last tokens, which do not fill it: other
        sequences find the tokens they share with it. It is not saved to lower tiers."""
        if not self.finder.has_whole_pages:
            self.index.reserve_tail(chain, page)

    def commit_tail(self, page: int) -> None:
        """Mark the page of a `reserve_tail` as filled by the launched step."""
        self.index.commit(np.array([page], np.int32))

    def name_tail(self, chain: PageChain, num_tokens: int, page: int) -> None:
        """Name a page that holds the last of a chain's first `num_tokens` and will not grow: other
        sequences find the tokens they share with it. Skipped unless the page before it is READY."""
        kept = chain.first(num_tokens)
        if not kept.keys or self.index.is_ready(kept.keys[-1]):
            self.reserve_tail(kept, page)
            self.commit_tail(page)

    def loading_follower(self, parent: PageKey, tokens: Int32s) -> PageKey | None:
        """The key of a page after `parent` that will begin with `tokens` and is being filled."""
        return self.index.loading_follower(parent, tokens)

    def commit(self, pages: Int32s) -> list[PageKey]:
        """Mark reserved pages as filled by a launched step; returns the keys that are now READY."""
        self.saver.commit(pages)
        return self.index.commit(pages)

    def name(self, pages: Int32s, names: Sequence[PageName], tokens: Int32s) -> None:
        """Name and save pages that steps have filled with `tokens`, [pages, page_size]. A page is
        skipped unless the page before it is READY."""
        self.index.name(pages, names, tokens)
        self.saver.note_filled(pages)

    def abort(self, pages: Int32s) -> list[PageKey]:
        """Forget the `pages` that were reserved and not filled; returns their keys."""
        return self.index.abort(pages)

    # --- tiers below the device -----------------------------------------------------------------

    @property
    def num_copies(self) -> int:
        """Saves and loads in progress."""
        return self._copies.num_copies

    def load(self, run: StoredRun, kept: Int32s, start_layers: int) -> PageKey | None:
        """Load a run of pages from lower tiers, without evicting any of `kept`.

        Returns the key to wait for; None: nothing can be loaded now. Raises OutOfPages. A prompt
        may start on the pages once `start_layers` layers of them are loaded.
        """
        self.lease(kept)
        num_soon = min(LOADS_AT_ONCE * run.num_pages, self.num_pages // LOADS_SHARE)
        try:
            pages = self.take(run.num_pages, num_soon)
        finally:
            self.release(kept)
        if self.parts is not None:
            try:
                self.parts.lend_to_run(run.first, pages, kept)
            except OutOfPages:
                self._pool.give_back(pages)
                raise
        self.index.order.touch(kept)
        pins = self._unname_lost(run.keys[: self.index.num_nameable(run.keys)])
        awaited = self.loader.load(run, pages, start_layers)
        self.index.repin(pins)
        return awaited

    def poll(self, lead_s: float = 0.0) -> list[PageKey]:
        """Check copies in progress; returns the keys that requests need not wait for any longer. A
        step that is made now starts at the earliest in `lead_s` seconds."""
        return self._copies.poll(lead_s)

    def expect(self, place: int, chain: PageChain) -> None:
        """Note that a request for the chain entered the queue, at a place that no other request
        has; a smaller place is served sooner. Lower tiers keep and prefetch the pages it needs."""
        if self.states is not None:
            self.states.expect(chain)
        if self.stack.tiers:
            keys = chain.keys
            if self.stored_states is not None:
                keys = (*keys, *self.stored_states.wanted_by(chain))
            self.stack.policy.expect(place, keys, place)

    def dismiss(self, place: int) -> None:
        """Note that the request at this place left the queue, or does not wait for stored pages."""
        if self.stack.tiers:
            self.stack.policy.dismiss(place)

    def flush(self) -> None:
        """Return when all pending saves are done or refused."""
        self._copies.flush()

    def close(self) -> None:
        """Finish pending saves, of which a slow shared tier may skip some, and close the tiers."""
        self._copies.close()

    def reclaim(self) -> None:
        """Make every page that no copy uses free or idle, whatever happened before. The caller
        makes sure that no sequence holds or fills a page."""
        if self.states is not None:
            self.clear_states()
        self._pool.recount(self.index.is_indexed.astype(np.int32))
        self.index.abort(np.flatnonzero(self._pool.copies == 0).astype(np.int32))

    def clear_states(self) -> None:
        """After a failed step: no state on the device can be trusted, and no sequence has one."""
        assert self.states is not None, "the model has no states"
        self.states.clear()
        if self.rows is not None:
            self.rows.clear()
        if self.stored_states is not None:
            self.stored_states.forget_unsaved()

    @contextmanager
    def distrust(self) -> Iterator[None]:
        """After a failed step: save nothing while sequences give their pages back, then forget all
        idle device pages."""
        with self.saver.closed():
            yield
        self._forget_idle()

    def clear_device(self) -> int:
        """Forget every page on the device that no sequence holds, without saving it; returns how
        many."""
        with self.saver.closed():
            return self._forget_idle()

    def clear(self) -> int:
        """Forget every page, in every tier, that no sequence or copy uses; returns how many of them
        were on the device."""
        self.stack.clear()
        count = self._forget_idle()
        if self._bus.has_listeners(PagesCleared) and not any(self.stored_keys().values()):
            self._bus.publish(PagesCleared())
        return count

    @property
    def can_rename_running(self) -> bool:
        """Whether `rename` may be called while sequences run."""
        return self.states is None and self.parts is None

    def rename(self, identity: bytes) -> None:
        """The model has other weights from now on: forget every page on the device and name the
        next ones with the new `identity`. What lower tiers have is found again if these weights
        come back.

        Waits for copies. Sequences that run keep their pages, without names.
        """
        self._copies.settle()
        if self.states is not None:
            self.states.forget_kept()
        indexed = np.flatnonzero(self.index.is_indexed).astype(np.int32)
        self.index.unname(indexed)
        self._naming = Naming(identity, self.page_size)
        self._bus.publish(PagesCleared())

    def stored_keys(self) -> dict[str, set[PageKey]]:
        """The pages that can be found, by tier."""
        return {"device": set(self.index.ready_keys()), **self.stack.stored_keys()}

    def _forget_idle(self) -> int:
        if self.states is not None:
            self.states.forget_kept()
        count = self.index.evict(self.num_pages)
        if count:
            self._bus.publish(PagesEvicted(num_pages=count, reason="clear"))
        return count

    def check(self) -> None:
        """Raise if pages were lost or named twice."""
        for part in (self._pool, self.index, self.states, self.rows, self.stack, self.loader):
            if part is not None:
                part.check()
        if self.stored_states is not None:
            self.stored_states.check()
        if not self.num_copies:
            assert not self._pool.copies.any(), "a page is held for a copy that is over"
