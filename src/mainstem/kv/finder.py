"""Finds pages: how much of a prompt the store has, on the device and below it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mainstem.core.ids import PageKey
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import PageLoader
from mainstem.kv.page_logprobs import MAX_TOP
from mainstem.kv.parts import WindowParts
from mainstem.kv.places import StoredCounts

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


@dataclass(frozen=True, slots=True)
class PageFinder:
    """Reads the index of the device and asks what can be loaded; changes nothing."""

    page_size: int
    index: PrefixIndex
    loader: PageLoader
    parts: WindowParts | None
    has_whole_pages: bool = False  # no page is shared in part

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
            loading = self.index.loading(ready)
            return Match(ready[: loading[0]], Lookup.LOADING, keys[loading[-1]])
        rest = chain.token_ids[usable * self.page_size : num_tokens]
        similar = self.similar(chain, usable, rest)
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

    def similar(self, chain: PageChain, depth: int, rest: Int32s) -> tuple[int, int] | None:
        """Return a page that begins like the tokens after page number `depth`, and how many tokens
        are equal.

        If the public tokens end inside a page, those on this page may be found under a public name.
        """
        if self.has_whole_pages:
            return None
        own = self.index.best_follower(chain.parent(depth), rest)
        num_public = chain.public_tokens - depth * self.page_size
        if not 0 < num_public < self.page_size:
            return own
        public = self.index.best_follower(chain.parent_unbranched(depth), rest[:num_public])
        found = [match for match in (own, public) if match is not None]
        return max(found, key=lambda match: match[1], default=None)

    def match(self, keys: Sequence[PageKey]) -> Match:
        """How many leading pages of this list are indexed. They may belong to different chains."""
        pages, num_ready = self.index.match(keys)
        if num_ready == len(pages):
            return Match(pages, Lookup.READY if num_ready == len(keys) else Lookup.MISS)
        loading = self.index.loading(pages)
        loads = self.loader.startable(pages[loading])
        if loads is None:
            return Match(pages[:num_ready], Lookup.LOADING, keys[loading[-1]])
        return Match(pages, Lookup.MISS, loads=loads)

    def known_logprobs(self, match: Match, num_top: int) -> list[TokenLogprobs | None]:
        """Return the logprobs of a match's first tokens, as many as are kept with its pages."""
        kept, found = self.index.logprobs, list[TokenLogprobs | None]()
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

    def pinnable(self, chain: PageChain) -> tuple[Int32s, int]:
        """The READY pages of a chain, then the page that begins like its partial last page; and the
        number of the former."""
        pages, num_ready = self.index.match(chain.keys)
        pages = pages[:num_ready]
        rest = chain.token_ids[num_ready * self.page_size : len(chain.token_ids)]
        if (similar := self.similar(chain, num_ready, rest)) is not None:
            pages = np.append(pages, np.int32(similar[0]))
        return pages, num_ready
