"""KVStore: all access to pages, on the device and in the tiers below it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from mainstem.core.config import Saving, StoreConfig
from mainstem.core.errors import OutOfPages
from mainstem.core.events import EventBus, PagesCleared, PagesEvicted
from mainstem.core.ids import PageKey
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s, StepId
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain, PageName, root_key
from mainstem.kv.page_logprobs import MAX_TOP
from mainstem.kv.pool import PagePool
from mainstem.kv.ranking import RANKINGS, PolicyKind
from mainstem.kv.stored import NOTHING_STORED, Stored
from mainstem.kv.tiers import READ_LIMIT_S, LowerTiers
from mainstem.kv.traffic import Traffic

EVICT_SHARE = 64  # an eviction frees up to 1/64 of all pages, or more if more are needed
DEFAULT_CONFIG = StoreConfig()


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
    stored: Stored = NOTHING_STORED  # MISS: the pages after `pages` that `load` can load
    loads: Int32s | None = None  # loads that fill the last of `pages`: a step must wait for them


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Pages of a chain, from number `first` on, that lower tiers have."""

    chain: PageChain
    first: int
    num_pages: int
    limit_s: float = READ_LIMIT_S  # if loading takes longer, computing is faster

    @property
    def keys(self) -> tuple[PageKey, ...]:
        return self.chain.keys[self.first : self.first + self.num_pages]


class KVStore:
    """Lends pages to sequences and remembers what is in them.

    take/give_back lends empty pages; lease/release lends filled ones; reserve/commit/abort names
    pages while they are filled. Only idle pages are evicted. With tiers below the
    device, filled pages are saved as steps fill them, and loaded on request.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        identity: bytes,
        bus: EventBus,
        tiers: LowerTiers | None = None,
        config: StoreConfig = DEFAULT_CONFIG,
    ) -> None:
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        ranking = RANKINGS[PolicyKind(config.policy.value)]
        self._index = PrefixIndex(self._pool, page_size, bus, ranking)
        self._awaited: Callable[[int], Sequence[Sequence[PageKey]]] = lambda _: ()
        self._identity = identity
        self._last_chain: PageChain | None = None  # reused: similar prompts arrive together
        self._bus = bus
        self._traffic: Traffic | None = None
        if tiers is not None:
            self._traffic = Traffic(self._pool, self._index, tiers, bus, config.save)

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
        only_copied = 0 if self._traffic is None else self._traffic.num_only_copied()
        return self.num_pages - self.num_takeable() - only_copied

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
        match = self.lookup(chain, len(chain.token_ids))
        similar = [] if match.similar_page is None else [match.similar_page]
        return self._index.pin([*match.pages.tolist(), *similar])

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """End a pin; pages that are already evicted are skipped."""
        self._index.unpin(keys)

    def lookup(self, chain: PageChain, num_tokens: int) -> Match:
        """How much of the first `num_tokens` of a chain the store has."""
        keys = chain.keys[: num_tokens // self.page_size]
        match = self.find(keys)
        if match.outcome is Lookup.LOADING:
            return match
        num_ready = len(match.pages)
        stored = self.stored(keys[num_ready:])
        if match.loads is not None:
            if not stored.num_pages:
                return match
            # the sequence must not start yet: it would compute pages that can be loaded
            loading = self._index.loading(match.pages)
            return Match(match.pages[: loading[0]], Lookup.LOADING, keys[loading[-1]])
        rest = chain.token_ids[num_ready * self.page_size : num_tokens]
        similar = self._similar(chain, num_ready, rest)
        outcome = Lookup.READY if len(rest) == 0 else Lookup.MISS
        page, num_tokens = similar or (None, 0)
        return Match(
            match.pages, outcome, similar_page=page, similar_tokens=num_tokens, stored=stored
        )

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

    def find(self, keys: Sequence[PageKey]) -> Match:
        """How many leading pages of this list are indexed. They may belong to different chains."""
        pages, num_ready = self._index.match(keys)
        if num_ready == len(pages):
            return Match(pages, Lookup.READY if num_ready == len(keys) else Lookup.MISS)
        loading = self._index.loading(pages)
        loads = None if self._traffic is None else self._traffic.startable(pages[loading].tolist())
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
            awaited = self._awaited(self.num_pages) if self._index.sees_queue else ()
            gone = self._index.evict(max(short, spare), awaited)
            self._bus.publish(PagesEvicted(num_pages=gone, reason="room"))
        return self._pool.take(count)

    def give_back(self, pages: Int32s, num_wanted: int | None = None) -> None:
        """A sequence no longer needs `pages`. Named pages stay in the cache, as the most recently
        used.

        If only the first `num_wanted` will be asked for again, the others are evicted first.
        """
        self._index.touch(pages[:num_wanted])
        if num_wanted is not None:
            self._index.retire(pages[num_wanted:])
        if self._traffic is not None:
            self._traffic.note_use(pages[:num_wanted])
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
        self._index.reserve(chain, first, pages[: self._index.num_nameable(keys)])

    def reserve_tail(self, chain: PageChain, page: int) -> None:
        """Like `reserve`, for the page of the chain's last tokens, which do not fill it: other
        sequences find the tokens they share with it. It is not saved to lower tiers."""
        self._index.reserve_tail(chain, page)

    def commit_tail(self, page: int) -> None:
        """Mark the page of a `reserve_tail` as filled by the launched step."""
        self._index.commit(np.array([page], np.int32))

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
        if self._traffic is not None:
            self._traffic.commit(pages)
        return self._index.commit(pages)

    def name(self, pages: Int32s, names: Sequence[PageName], tokens: Int32s) -> None:
        """Name and save pages that steps have filled with `tokens`, [pages, page_size]. A page is
        skipped unless the page before it is READY."""
        self._index.name(pages, names, tokens)
        if self._traffic is not None:
            self._traffic.note_filled(pages)

    def abort(self, pages: Int32s) -> list[PageKey]:
        """Forget the `pages` that were reserved and not filled; returns their keys."""
        return self._index.abort(pages)

    # --- tiers below the device -----------------------------------------------------------------

    @property
    def tiers(self) -> LowerTiers | None:
        return None if self._traffic is None else self._traffic.tiers

    @property
    def num_unsaved(self) -> int:
        """Pages to be written to the disk, or being written."""
        return 0 if self._traffic is None else self._traffic.num_unsaved

    @property
    def num_loads(self) -> int:
        """Loads in progress."""
        return 0 if self._traffic is None else self._traffic.num_loads

    @property
    def is_reading(self) -> bool:
        """Whether a load waits for a tier below host memory."""
        return self._traffic is not None and self._traffic.tiers.is_reading

    @property
    def saves_while_decoding(self) -> bool:
        """Whether pages of answers are saved as soon as they have names."""
        return self._traffic is not None and self._traffic.saving is Saving.DECODING

    def save_as(self, saving: Saving) -> None:
        """Change when pages are saved."""
        if self._traffic is not None:
            self._traffic.saving = saving

    def stored(self, keys: Sequence[PageKey]) -> Stored:
        """How many leading pages of this list lower tiers have."""
        return NOTHING_STORED if self._traffic is None else self._traffic.find(keys)

    def ask(self, keys: Sequence[PageKey]) -> PageKey | None:
        """Ask shared tiers for pages that are not stored here; returns the key that `poll`
        returns when the answer is there. None: there is no tier to ask."""
        return None if self._traffic is None else self._traffic.tiers.ask(keys)

    def is_asked(self, key: PageKey) -> bool:
        """Whether an answer is still expected."""
        return self._traffic is not None and self._traffic.tiers.questions.is_open(key)

    def awaits(self, key: PageKey, most_s: float) -> bool:
        """Whether a request should wait for an answer, up to `most_s` after the question."""
        return self._traffic is not None and self._traffic.tiers.questions.awaits(key, most_s)

    def load(self, run: StoredRun, kept: Int32s, start_layers: int) -> PageKey | None:
        """Load a run of pages from lower tiers, without evicting any of `kept`.

        Returns the key to wait for; None: nothing can be loaded now. Raises OutOfPages. A prompt
        may start on the pages once `start_layers` layers of them are loaded.
        """
        assert self._traffic is not None
        self.lease(kept)
        try:
            pages = self.take(run.num_pages)
        finally:
            self.release(kept)
        self._index.touch(kept)
        return self._traffic.load(run.chain, run.first, pages, start_layers, run.limit_s)

    def launched(self, step_id: StepId) -> None:
        """Note that this step fills the pages committed since the last step."""
        if self._traffic is not None:
            self._traffic.launched(step_id)

    def settle(self, step_id: StepId) -> None:
        """Save the pages that steps up to this one have filled, since these steps have run."""
        if self._traffic is not None:
            self._traffic.settle(step_id)

    def poll(self, lead_s: float = 0.0) -> list[PageKey]:
        """Check copies in progress; returns the keys that requests need not wait for any longer. A
        step that is made now starts at the earliest in `lead_s` seconds."""
        return [] if self._traffic is None else self._traffic.poll(lead_s)

    def expect(self, place: int, chain: PageChain) -> None:
        """Note that a request for the chain entered the queue, at a place that no other request
        has. Lower tiers keep and prefetch the pages it needs."""
        if self._traffic is not None:
            self._traffic.tiers.expect(place, chain.keys)

    def prefetch(self) -> None:
        """Copy to host memory the pages that waiting requests need next."""
        if self._traffic is not None:
            self._traffic.tiers.prefetch()

    def dismiss(self, place: int) -> None:
        """Note that the request at this place left the queue, or does not wait for stored pages."""
        if self._traffic is not None:
            self._traffic.tiers.dismiss(place)

    def flush(self) -> None:
        """Return when all pending saves are done."""
        if self._traffic is not None:
            self._traffic.flush()

    def close(self) -> None:
        """Finish pending saves, of which a slow shared tier may skip some, and close the tiers."""
        if self._traffic is not None:
            self._traffic.tiers.end_soon()
            self._traffic.flush()
            self._traffic.tiers.close()

    def reclaim(self) -> None:
        """Make every page that no copy uses free or idle, whatever happened before. The caller
        makes sure that no sequence holds or fills a page."""
        num_copies = np.zeros(self.num_pages, np.int32)
        if self._traffic is not None:
            num_copies = self._traffic.num_copies
        self._pool.recount(self._index.is_indexed + num_copies)
        self._index.abort(np.flatnonzero(num_copies == 0).astype(np.int32))

    @contextmanager
    def distrust(self) -> Iterator[None]:
        """After a failed step: save nothing while sequences give their pages back, then forget all
        idle device pages."""
        if self._traffic is None:
            yield
        else:
            with self._traffic.closed():
                yield
        self._clear_device()

    def clear(self) -> int:
        """Forget every page, in every tier, that no sequence or copy uses; returns how many of them
        were on the device."""
        if self._traffic is not None:
            self._traffic.tiers.clear()
        count = self._clear_device()
        if self._bus.has_listeners(PagesCleared) and not any(self.stored_keys().values()):
            self._bus.publish(PagesCleared())
        return count

    def stored_keys(self) -> dict[str, set[PageKey]]:
        """The pages that can be found, by tier."""
        lower = {} if self._traffic is None else self._traffic.tiers.stored_keys()
        return {"device": set(self._index.ready_keys()), **lower}

    def _clear_device(self) -> int:
        count = self._index.evict(self.num_pages)
        if count:
            self._bus.publish(PagesEvicted(num_pages=count, reason="clear"))
        return count

    def check(self) -> None:
        """Raise if pages were lost or named twice."""
        self._pool.check()
        self._index.check()
        if self._traffic is not None:
            self._traffic.check()
