"""KVStore: all access to pages, on the device and in the tiers below it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from time import sleep

import numpy as np

from mainstem.core.config import Saving, StoreConfig
from mainstem.core.errors import OutOfPages
from mainstem.core.events import (
    EventBus,
    PagesCleared,
    PagesEvicted,
    StatesEvicted,
    StatesRefused,
)
from mainstem.core.ids import PageKey
from mainstem.core.interrupts import held_interrupts
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s
from mainstem.kv.eviction import policy_named
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain, PageName, root_key
from mainstem.kv.loading import PageLoader, StoredRun
from mainstem.kv.page_logprobs import MAX_TOP
from mainstem.kv.parts import WindowParts
from mainstem.kv.places import StoredCounts
from mainstem.kv.pool import PagePool
from mainstem.kv.saving import PageSaver
from mainstem.kv.stack import TierStack
from mainstem.kv.states import StateStore
from mainstem.kv.stored_states import StoredStates

EVICT_SHARE = 64  # an eviction frees up to 1/64 of all pages, or more if more are needed
POLL_S = 0.0005
DEFAULT_CONFIG = StoreConfig()
NOTHING_STORED = StoredCounts()


class Lookup(Enum):
    """The state of a page in the store."""

    MISS = "miss"
    READY = "ready"
    LOADING = "loading"  # another sequence computes it, or a lower tier reads it


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a chain of keys the store has."""

    pages: Int32s  # the leading pages that are READY, or loaded far enough to start (`loads`)
    outcome: Lookup  # of the first page after `pages`; READY if there is none; MISS if `loads`
    awaited: PageKey | None = None  # LOADING: the deepest page that is being filled
    similar_page: int | None = None  # MISS: a READY page with the same first tokens
    similar_tokens: int = 0  # how many first tokens of `similar_page` are the same
    stored: StoredCounts = NOTHING_STORED  # MISS: the pages after `before` that `load` can load
    loads: Int32s | None = None  # loads that fill the last of `pages`: a step must wait for them
    # `pages` and the READY pages after them after which nobody can start, since windowed parts are
    # gone: once `stored` is loaded, they serve, too. None: `pages`
    before_stored: Int32s | None = None
    num_lost: int = 0  # READY pages after `pages`, without the windowed parts to start after them

    @property
    def before(self) -> Int32s:
        """The pages before those that can be loaded."""
        return self.pages if self.before_stored is None else self.before_stored


class KVStore:
    """Lends pages to sequences and remembers what is in them.

    take/give_back lends empty pages; lease/release lends filled ones; reserve/commit/abort names
    pages while they are filled. Only idle pages are evicted. With tiers below the device (`stack`),
    `saver` saves filled pages as steps fill them, and `loader` knows what can be loaded.
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
        parts: WindowParts | None = None,
    ) -> None:
        """`stack` has the tiers below the device; None: there are none. `num_states` is 0 for
        models without recurrent layers. `parts` has the windowed parts of pages, if they have a
        pool of their own."""
        self.page_size = page_size
        self.states = StateStore(num_states) if num_states else None
        self.stored_states: StoredStates | None = None  # of a model with states and tiers
        self.parts = parts
        self._pool = PagePool(num_pages, parts)
        self._index = PrefixIndex(self._pool, page_size, bus, policy_named(config.policy))
        if parts is not None:
            parts.pinned = lambda: self._index.order.pinned
        self._awaited: Callable[[int], Sequence[Sequence[PageKey]]] = lambda _: ()
        self._identity = identity
        self._last_chain: PageChain | None = None  # reused: similar prompts arrive together
        self._bus = bus
        self.stack = stack = stack or TierStack(bus)
        self.saver = PageSaver(self._pool, self._index, stack, bus, config.save)
        self.loader = PageLoader(self._pool, self._index, stack, bus)
        if self.states is not None and StoredStates.fits(stack, pages_per_state):
            self.stored_states = StoredStates(
                self.states, stack, self.saver, self.loader, bus, num_pages, pages_per_state
            )

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_cached_pages(self) -> int:
        return len(self._index)

    def num_available(self) -> int:
        """Pages that `take` could lend now without evicting pinned ones."""
        return self.num_takeable() - self._index.num_idle_pinned()

    def num_takeable(self) -> int:
        """Pages that `take` could lend now, pinned ones as a last resort."""
        return self._pool.num_free + self._index.num_idle()

    def num_held(self) -> int:
        """Pages that sequences hold."""
        pool = self._pool
        is_in_use = pool.holders > pool.copies + self._index.is_indexed
        is_only_copied = (pool.copies > 0) & ~is_in_use
        return self.num_pages - self.num_takeable() - int(np.count_nonzero(is_only_copied))

    def watch_queue(self, awaited: Callable[[int], Sequence[Sequence[PageKey]]]) -> None:
        """Set `awaited`: it takes a number of pages and returns the chains that queued requests
        wait for, soonest first, up to that many pages. It is called when the device must evict:
        these pages are evicted last."""
        self._awaited = awaited

    def chain(self, token_ids: Int32s, salt: bytes, public_tokens: int = 0) -> PageChain:
        """The names of the pages of `token_ids`.

        Full pages of the first `public_tokens` are named without the salt, so requests with any
        salt find them. The salt is mixed in after them.
        """
        num_public = public_tokens // self.page_size
        if not salt or not num_public:
            root = root_key(self._identity, self.page_size, salt)
            self._last_chain = PageChain.of(root, self.page_size, token_ids, self._last_chain)
            return self._last_chain
        root = root_key(self._identity, self.page_size, b"")
        public = PageChain.of(root, self.page_size, token_ids[: num_public * self.page_size])
        chain = public.branched(num_public, salt).extended(token_ids)
        return replace(chain, public_tokens=public_tokens)

    def pin(self, chain: PageChain) -> list[PageKey]:
        """Pin the READY pages of a chain, and the page that begins like its partial last page: they
        are evicted only after all others. Pass the returned value to `unpin`."""
        num_tokens = len(chain.token_ids)
        pages, num_ready = self._index.match(chain.keys)
        pages = pages[:num_ready]
        rest = chain.token_ids[num_ready * self.page_size : num_tokens]
        if (similar := self._similar(chain, num_ready, rest)) is not None:
            pages = np.append(pages, np.int32(similar[0]))
        if self.parts is not None:
            self.parts.keep(pages[self.parts.first(num_ready) :])
        return self._index.pin(pages.tolist())

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """End a pin; pages that are already evicted are skipped."""
        self._index.unpin(keys)

    def lookup(self, chain: PageChain, num_tokens: int) -> Match:
        """How much of the first `num_tokens` of a chain the store has."""
        keys = chain.keys[: num_tokens // self.page_size]
        match = self.match(keys)
        if match.outcome is Lookup.LOADING:
            return match
        ready = match.pages
        usable = len(ready) if self.parts is None else self.parts.deepest(ready)
        before, stored = self._find_stored(keys, ready, usable)
        if match.loads is not None:
            if not stored.num_pages and usable == len(ready):
                return match
            # the sequence must not start yet: it would compute pages that can be loaded
            loading = self._index.loading(ready)
            return Match(ready[: loading[0]], Lookup.LOADING, keys[loading[-1]])
        rest = chain.token_ids[usable * self.page_size : num_tokens]
        similar = self._similar(chain, usable, rest)
        if similar is not None and not self._can_copy(similar[0]):
            similar = None
        outcome = Lookup.READY if len(rest) == 0 else Lookup.MISS
        page, num_tokens = similar or (None, 0)
        return Match(
            ready[:usable],
            outcome,
            similar_page=page,
            similar_tokens=num_tokens,
            stored=stored,
            before_stored=ready[:before],
            num_lost=len(ready) - usable,
        )

    def _find_stored(
        self, keys: Sequence[PageKey], ready: Int32s, usable: int
    ) -> tuple[int, StoredCounts]:
        """After how many of the `ready` pages to load which pages, so that a sequence can start
        after them. It could start after `usable` pages without loading."""
        stored = self.loader.stored(keys[len(ready) :])
        if self.parts is None or (usable == len(ready) and not stored.num_pages):
            return len(ready), stored
        # the pages of the last window need their windowed parts; a stored page has all its parts
        end = len(ready) + stored.num_pages
        first = self.parts.first(end)
        missing = np.flatnonzero(~self.parts.has(ready[first:]))
        before = first + int(missing[0]) if len(missing) else len(ready)
        if before < len(ready):
            stored = self.loader.stored(keys[before:end])
            if stored.num_pages < end - before:
                return usable, self.loader.stored(keys[usable:])
        return before, stored

    def _can_copy(self, page: int) -> bool:
        """Whether the first tokens of a page can be copied, with their windowed part."""
        return self.parts is None or bool(self.parts.has(np.array([page], np.int32))[0])

    def _similar(self, chain: PageChain, depth: int, rest: Int32s) -> tuple[int, int] | None:
        """Return a page that begins like the tokens after page number `depth`, and how many tokens
        are equal.

        If the public tokens end inside a page, those on this page may be found under a public name.
        """
        own = self._index.best_follower(chain.parent(depth), rest)
        num_public = chain.public_tokens - depth * self.page_size
        if not 0 < num_public < self.page_size:
            return own
        public = self._index.best_follower(chain.parent_unbranched(depth), rest[:num_public])
        found = [match for match in (own, public) if match is not None]
        return max(found, key=lambda match: match[1], default=None)

    def has(self, key: PageKey) -> bool:
        """Whether a page is indexed, READY or LOADING."""
        return key in self._index

    def is_ready(self, key: PageKey) -> bool:
        """Whether a page is indexed and filled."""
        return self._index.is_ready(key)

    def match(self, keys: Sequence[PageKey]) -> Match:
        """How many leading pages of this list are indexed. They may belong to different chains."""
        pages, num_ready = self._index.match(keys)
        if num_ready == len(pages):
            return Match(pages, Lookup.READY if num_ready == len(keys) else Lookup.MISS)
        loading = self._index.loading(pages)
        loads = self.loader.startable(pages[loading].tolist())
        if loads is None:
            return Match(pages[:num_ready], Lookup.LOADING, keys[loading[-1]])
        return Match(pages, Lookup.MISS, loads=loads)

    def take(self, count: int) -> Int32s:
        """Lend `count` empty pages, evicting idle ones; or raise OutOfPages and lend none."""
        short = count - self._pool.num_free
        if short > 0:
            idle = self._index.num_idle()
            if short > idle:
                raise OutOfPages(wanted=count, free=self._pool.num_free + idle)
            # evict more than needed: finding the oldest pages costs the same for one page as for
            # many
            spare = min(self.num_pages // EVICT_SHARE, idle - self._index.num_idle_pinned())
            awaited = self._awaited(self.num_pages) if self._index.order.sees_queue else ()
            gone = self._index.evict(max(short, spare), awaited)
            self._bus.publish(PagesEvicted(num_pages=gone, reason="room"))
        return self._pool.take(count)

    def give_back(self, pages: Int32s, num_wanted: int | None = None) -> None:
        """A sequence no longer needs `pages`. Named pages stay in the cache, as the most recently
        used.

        If only the first `num_wanted` will be asked for again, the others are evicted first.
        """
        self._index.order.touch(pages[:num_wanted])
        if num_wanted is not None:
            self._index.order.retire(pages[num_wanted:])
            if self.parts is not None:
                self.parts.retire(pages[num_wanted:])
        self.saver.note_use(pages[:num_wanted])
        if self.saver.when is Saving.SYNC:
            while self.saver.num_saving:
                self.saver.finish_copies()
                self._check_copies(0.0)  # it may start postponed saves
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
        num_named = self._index.num_nameable(keys)
        pins = self._unname_lost(keys[:num_named])
        self._index.reserve(chain, first, pages[:num_named])
        self._index.repin(pins)

    def _unname_lost(self, keys: Sequence[PageKey]) -> dict[PageKey, int]:
        """Take the names of these READY pages, from the first without a windowed part on: pages
        that are filled now get them, and can be shared again. Returns the pins of each name."""
        if self.parts is None:
            return {}
        old = self._index.indexed(keys)
        lost = np.flatnonzero(~self.parts.has(old))
        return self._index.unname(old[lost[0] :]) if len(lost) else {}

    def reserve_tail(self, chain: PageChain, page: int) -> None:
        """Like `reserve`, for the page of the chain's last tokens, which do not fill it: other
        sequences find the tokens they share with it. It is not saved to lower tiers."""
        self._index.reserve_tail(chain, page)

    def commit_tail(self, page: int) -> None:
        """Mark the page of a `reserve_tail` as filled by the launched step."""
        self._index.commit(np.array([page], np.int32))

    def name_tail(self, chain: PageChain, num_tokens: int, page: int) -> None:
        """Name a page that holds the last of a chain's first `num_tokens` and will not grow: other
        sequences find the tokens they share with it. Skipped unless the page before it is READY."""
        kept = chain.first(num_tokens)
        if kept.keys and not self._index.is_ready(kept.keys[-1]):
            return
        self._index.reserve_tail(kept, page)
        self.commit_tail(page)

    def loading_follower(self, parent: PageKey, tokens: Int32s) -> PageKey | None:
        """The key of a page after `parent` that will begin with `tokens` and is being filled."""
        return self._index.loading_follower(parent, tokens)

    def keep_logprobs(self, chain: PageChain, found: Sequence[TokenLogprobs | None]) -> None:
        """Keep a prompt's logprobs for as long as its pages."""
        self._index.keep_logprobs(chain, found)

    def known_logprobs(self, match: Match, num_top: int) -> list[TokenLogprobs | None]:
        """Return the logprobs of a match's first tokens, as many as are kept with its pages."""
        kept, found = self._index.logprobs, list[TokenLogprobs | None]()
        if num_top > MAX_TOP:
            return found
        places = [(page, self.page_size) for page in match.pages.tolist()]
        if match.similar_page is not None:
            places.append((match.similar_page, match.similar_tokens))
        counts = kept.num_known(np.array([page for page, _ in places], np.int32)).tolist()
        for (page, num_tokens), count in zip(places, counts, strict=True):
            num_known = min(count, num_tokens)
            found += kept.read(page, num_known, num_top)
            if num_known < self.page_size:
                break
        return [None, *found[1:]] if found else found

    def commit(self, pages: Int32s) -> list[PageKey]:
        """Mark reserved pages as filled by a launched step; returns the keys that are now READY."""
        self.saver.commit(pages)
        return self._index.commit(pages)

    def name(self, pages: Int32s, names: Sequence[PageName], tokens: Int32s) -> None:
        """Name and save pages that steps have filled with `tokens`, [pages, page_size]. A page is
        skipped unless the page before it is READY."""
        self._index.name(pages, names, tokens)
        self.saver.note_filled(pages)

    def abort(self, pages: Int32s) -> list[PageKey]:
        """Forget the `pages` that were reserved and not filled; returns their keys."""
        return self._index.abort(pages)

    # --- tiers below the device -----------------------------------------------------------------

    @property
    def num_copies(self) -> int:
        """Saves and loads in progress."""
        stored = self.stored_states
        of_states = 0 if stored is None else stored.num_loads
        return self.loader.num_loads + self.saver.num_saves + of_states

    @property
    def saves_while_decoding(self) -> bool:
        """Whether pages of answers are saved as soon as they have names."""
        return self.saver.saves_while_decoding

    def load(self, run: StoredRun, kept: Int32s, start_layers: int) -> PageKey | None:
        """Load a run of pages from lower tiers, without evicting any of `kept`.

        Returns the key to wait for; None: nothing can be loaded now. Raises OutOfPages. A prompt
        may start on the pages once `start_layers` layers of them are loaded.
        """
        self.lease(kept)
        try:
            pages = self.take(run.num_pages)
        finally:
            self.release(kept)
        if self.parts is not None:
            self._lend_parts(run, pages, kept)
        self._index.order.touch(kept)
        pins = self._unname_lost(run.keys[: self._index.num_nameable(run.keys)])
        awaited = self.loader.load(run, pages, start_layers)
        self._index.repin(pins)
        return awaited

    def _lend_parts(self, run: StoredRun, pages: Int32s, kept: Int32s) -> None:
        """Give windowed parts to those of the `pages` to be loaded that are in the last window
        before the end of the run. Pages before them are loaded without."""
        assert self.parts is not None
        first = self.parts.first(run.first + run.num_pages)
        needed = kept[first : run.first]  # their parts must not be given away for this load
        needed = needed[self.parts.has(needed)]
        self.parts.need(needed)
        try:
            self.parts.lend_to_load(pages[max(0, first - run.first) :])
        except OutOfPages:
            self._pool.give_back(pages)
            raise
        finally:
            self.parts.end(needed)

    def poll(self, lead_s: float = 0.0) -> list[PageKey]:
        """Check copies in progress; returns the keys that requests need not wait for any longer. A
        step that is made now starts at the earliest in `lead_s` seconds."""
        self._check_copies(lead_s)
        news = self.loader.take_news()
        return news if self.stored_states is None else news + self.stored_states.take_news()

    def _check_copies(self, lead_s: float) -> None:
        """Collect copies that have ended, and start those that are ready."""
        if self.stack.tiers:
            self.stack.poll()
            self.saver.poll()
            self.loader.poll(lead_s)
            if self.stored_states is not None:
                self.stored_states.poll()
            self.saver.back_up()
            self.stack.do_chores()
            self.saver.resume()
            if self.stored_states is not None:
                self.stored_states.resume()

    def expect(self, place: int, chain: PageChain) -> None:
        """Note that a request for the chain entered the queue, at a place that no other request
        has; a smaller place is served sooner. Lower tiers keep and prefetch the pages it needs."""
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
        while True:  # each round starts or ends saves
            self.saver.flush()
            with held_interrupts():
                self._check_copies(0.0)  # the next `poll` returns what ended
            if not self.saver.is_busy:
                if self.stored_states is not None:
                    self.stored_states.drop_postponed()
                return

    def close(self) -> None:
        """Finish pending saves, of which a slow shared tier may skip some, and close the tiers."""
        self.stack.end_soon()
        self.flush()
        self.loader.close()
        if self.stored_states is not None:
            self.stored_states.close()
        self.saver.flush()
        self.stack.close()

    def reclaim(self) -> None:
        """Make every page that no copy uses free or idle, whatever happened before. The caller
        makes sure that no sequence holds or fills a page."""
        if self.states is not None:
            self.clear_states()
        self._pool.recount(self._index.is_indexed.astype(np.int32))
        self._index.abort(np.flatnonzero(self._pool.copies == 0).astype(np.int32))

    def report_states(self) -> None:
        """Publish what became of states since the last step."""
        if self.states is None:
            return
        num_evicted, num_refused = self.states.take_counts()
        if num_evicted:
            self._bus.publish(StatesEvicted(num_evicted))
        if num_refused:
            self._bus.publish(StatesRefused(num_refused))

    def clear_states(self) -> None:
        """After a failed step: no state on the device can be trusted, and no sequence has one."""
        assert self.states is not None, "the model has no states"
        self.states.clear()
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
        before = self.num_cached_pages
        with self.distrust():
            pass
        return before - self.num_cached_pages

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
        self.flush()
        while self.num_copies:
            self.poll()
            sleep(POLL_S)
        self.loader.take_news()
        if self.states is not None:
            self.states.forget_kept()
        indexed = np.flatnonzero(self._index.is_indexed).astype(np.int32)
        self._index.unname(indexed)
        self._identity, self._last_chain = identity, None
        if self._bus.has_listeners(PagesCleared):
            self._bus.publish(PagesCleared())

    def stored_keys(self) -> dict[str, set[PageKey]]:
        """The pages that can be found, by tier."""
        return {"device": set(self._index.ready_keys()), **self.stack.stored_keys()}

    def _forget_idle(self) -> int:
        if self.states is not None:
            self.states.forget_kept()
        count = self._index.evict(self.num_pages)
        if count:
            self._bus.publish(PagesEvicted(num_pages=count, reason="clear"))
        return count

    def check(self) -> None:
        """Raise if pages were lost or named twice."""
        self._pool.check()
        self._index.check()
        if self.states is not None:
            self.states.check()
        self.stack.check()
        self.loader.check()
        if self.stored_states is not None:
            self.stored_states.check()
        if not self.num_copies:
            assert not self._pool.copies.any(), "a page is held for a copy that is over"
