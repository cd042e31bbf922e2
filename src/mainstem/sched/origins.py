"""Finds the KV of a truncated prompt, and names its pages.

Pages that a truncation keeps depend on tokens that it dropped. The sink keeps its usual names,
since it has not changed; the names of pages after it include the session and the cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from mainstem.core.ids import PageKey
from mainstem.core.request import Request
from mainstem.core.step import Int32s
from mainstem.kv.finder import Lookup
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import StoredRun
from mainstem.kv.store import KVStore
from mainstem.sched.cut import WHOLE, PromptCut
from mainstem.sched.important import Weighing
from mainstem.sched.truncation import Truncation


@dataclass(frozen=True, slots=True)
class MovablePages:
    """READY pages that hold what a sequence needs, but at other positions."""

    pages: Int32s
    distances: list[int]  # by how many positions each moves
    awaited: PageKey | None = None  # a page that is LOADING and must be waited for
    loads: Int32s | None = None  # loads that a step must wait for

    def lease(self, store: KVStore, num_new: int) -> int:
        """Lease the first pages, as long as `num_new` pages stay available; returns how many were
        leased."""
        store.lease(self.pages)
        count = len(self.pages)
        while count and store.num_takeable() < num_new:
            count -= 1
            store.release(self.pages[count : count + 1])
        return count


NOTHING_MOVABLE = MovablePages(np.empty(0, np.int32), [])


class Origins:
    """The names under which earlier turns of a conversation stored the kept pages."""

    def __init__(self, whole: PageChain, request: Request, truncation: Truncation) -> None:
        """`whole` names the pages of the request's prompt before it was cut."""
        self._whole = whole
        self._request = request
        self._truncation = truncation
        self._earlier: list[tuple[PromptCut, PageChain]] = []  # made on first use

    def find_on_device(
        self, store: KVStore, numbers: range, filled_pages: list[int]
    ) -> MovablePages:
        """Return from where to move the kept pages `numbers`, up to the first page that is not on
        the device.

        `filled_pages` are targets of copies and moves of this step, so they cannot be sources in
        it.
        """
        if numbers.start < self._truncation.cut.sink_pages:
            # the sink is not cached: it is computed, and so are all pages after it
            return NOTHING_MOVABLE
        keys: list[PageKey] = []
        distances: list[int] = []
        for number in numbers:
            for chain, place in self._sources(number):
                if store.has(chain.keys[place]):
                    keys.append(chain.keys[place])
                    distances.append((number - place) * chain.page_size)
                    break
            else:
                break
        match = store.finder.match(keys)
        if match.outcome is Lookup.LOADING:
            return replace(NOTHING_MOVABLE, awaited=match.awaited)
        is_late = np.isin(match.pages, filled_pages)
        count = int(is_late.argmax()) if is_late.any() else len(match.pages)
        return MovablePages(match.pages[:count], distances[:count], loads=match.loads)

    def find_stored(
        self, store: KVStore, chain: PageChain, numbers: range
    ) -> tuple[list[StoredRun], Int32s]:
        """Return what lower tiers have of the kept pages `numbers`, up to the first missing page:
        runs to load, and the device pages between them.

        `chain` names the pages of the truncated prompt itself, which need not move.
        """
        runs: list[StoredRun] = []
        on_device: list[PageKey] = []
        for number in numbers:
            sources = [(chain, number)] if number < len(chain.keys) else []
            if number >= self._truncation.cut.sink_pages:
                sources += self._sources(number)
            keys = [source.keys[place] for source, place in sources]
            there = [key for key in keys if store.has(key)]
            if there:
                on_device.append(there[0])
                continue
            stored = [
                source
                for key, source in zip(keys, sources, strict=True)
                if store.loader.stored([key]).num_pages
            ]
            if not stored:
                break
            _add_page(runs, *stored[0])
        return runs, store.finder.match(on_device).pages

    def _sources(self, number: int) -> Iterator[tuple[PageChain, int]]:
        """Yield chains and page numbers under which the kept page `number` may be found.

        The chain of the whole prompt comes first: its pages were never moved, and each move
        rounds K once more.
        """
        if not self._earlier:
            cuts = self._truncation.cuts_before
            named = [(cut, truncated_chain(self._whole, self._request, cut)) for cut in cuts]
            self._earlier = [(WHOLE, self._whole), *named]
        before = self._truncation.cut.place_before(number)
        for cut, chain in self._earlier:
            place = cut.place_after(before)
            if place is not None and place < len(chain.keys):
                yield chain, place


@dataclass(frozen=True, slots=True)
class TruncatedPrompt:
    """A part of a Sequence whose prompt was cut."""

    num_dropped: int  # prompt tokens that are gone
    origins: Origins | None = None  # where the kept pages are; None: they do not move
    # how the cut is found: a reader does this; an answer cannot start before it is done, but its
    # length is known already
    weighing: Weighing | None = None


def _add_page(runs: list[StoredRun], chain: PageChain, place: int) -> None:
    """Extend the last run by a page, or begin another run."""
    if runs and runs[-1].chain is chain and runs[-1].first + runs[-1].num_pages == place:
        runs[-1] = replace(runs[-1], num_pages=runs[-1].num_pages + 1)
    else:
        runs.append(StoredRun(chain, place, 1))


def truncated_chain(
    whole: PageChain, request: Request, cut: PromptCut, token_ids: Int32s | None = None
) -> PageChain:
    """Return the chain of a truncated prompt. The sink keeps its usual names; names of pages after
    it include the session and this cut. The chain's tokens are those the cut keeps, or `token_ids`,
    which begin with them."""
    digest = sha256(b"truncated")
    parts = (
        str(request.session).encode(),
        request.salt,
        np.array(cut.head, np.int64).tobytes(),
        whole.parent(cut.rest),  # this key depends on every token that was dropped
    )
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    branch = whole.branched(cut.sink_pages, digest.digest())
    if token_ids is None:
        token_ids = cut.token_ids(whole.token_ids, whole.page_size)
    return branch.extended(token_ids)
