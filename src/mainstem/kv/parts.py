"""Windowed parts of pages: which are needed, and which are given away first.

A layer with a window reads only the last tokens before a query, so the K and V of such layers, the
windowed part of a page, has a place of its own, in a pool with fewer places than there are pages:

    pages of a sequence    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
    windowed parts           -   -   x   -   n   n   n   n      window: the pages before a token
                                     |       '--- needed: the next token reads them
                                     '--- not needed, kept as cache while there is room

A running sequence needs the parts of its last window and of the pages it is about to fill
(sched/windows.py). Steps run in the order in which they are made, so a part may be given away as
soon as the last step that reads or writes it is made. Copies to and from host memory run beside the
steps: they hold the parts of their pages, and a load fills only places that no step in flight uses.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mainstem.core.errors import ConfigError, OutOfPages
from mainstem.core.step import Bools, Int32s, Int64s, StepId

NO_PAGE = -1
EVICT_SHARE = 64  # up to 1/64 of all places are freed at once, or more if more are needed
PASSED, END, FORK = 0, 1, 2  # ranks of parts
FORK_TURNS = 4  # an unused fork leaves after this many times all places were kept
TICKS = 20  # bits of a use that order the steps between two windows that are kept
PASSED_LAST = 1 << 60  # above every other worth
PINNED = 1 << 61
NEVER = StepId(-1)
SPARE_PARTS = 3  # a sequence alone: a page that it fills, one it is about to fill, one it copies


def span_of(window: int, page_size: int) -> int:
    """How many pages before a page boundary a window reaches."""
    return -(-(window - 1) // page_size)


class WindowParts:
    """Lends places to the windowed parts of pages, and counts what needs each part.

    Parts that nobody needs are cache. First to go are those that were only passed, the least
    recently used first. Then those of windows at whose end one request may continue, and those of
    forks, where several will: forks count as used later than they were, so that they survive many
    ends of prompts, and yet leave when nobody comes. Last are the parts of pinned pages.

    Invariant: a place belongs to one page, which has a holder, or is free. A part that is needed
    keeps its place.
    """

    def __init__(self, num_pages: int, num_parts: int, window: int, page_size: int) -> None:
        """`window` is the largest: how many tokens a token sees, its own included."""
        self.num_parts = num_parts
        self.span = span_of(window, page_size)
        if num_parts < min(num_pages, self.span + SPARE_PARTS):
            raise ConfigError(
                f"{num_parts} windowed parts of pages cannot hold a window of {window} tokens: at "
                f"least {self.span + SPARE_PARTS} are needed; set kv_tokens to more"
            )
        self._nowhere = num_parts  # the place of pages without a windowed part
        self.part_of = np.full(num_pages, num_parts, np.int32)  # others may only read it
        self.needers = np.zeros(num_pages, np.int32)  # read only, too
        self.pinned: Callable[[], Sequence[int]] = tuple  # pages whose parts go last
        self._page_of = np.full(num_parts, NO_PAGE, np.int32)
        self._free = np.arange(num_parts - 1, -1, -1, dtype=np.int32)  # a stack, place 0 on top
        self._num_free = num_parts
        self.num_needed = 0
        self._num_kept = 0  # places of windows that were kept, in all
        self._tick = 0  # ends of needs since then
        self._used: Int64s = np.zeros(num_parts, np.int64)  # when the last need ended; 0: retired
        self._rank = np.zeros(num_parts, np.int8)
        self._last_step: Int64s = np.full(num_parts, NEVER, np.int64)  # that may have used a place
        self._made = self._settled = NEVER  # the latest step that was made, and that has run
        self.num_evicted = 0

    @property
    def num_available(self) -> int:
        """Places that `need` could lend now."""
        return self.num_parts - self.num_needed

    def snapshot(self) -> Int32s:
        """The place of each page's part now, for a step (Step.window_parts)."""
        return self.part_of.copy()

    def has(self, pages: Int32s) -> Bools:
        """Which of these pages have a windowed part."""
        has_part: Bools = self.part_of[pages] != self._nowhere
        return has_part

    def first(self, num_pages: int) -> int:
        """The first page whose part is needed by a token that follows `num_pages` full pages."""
        return max(0, num_pages - self.span)

    def deepest(self, pages: Int32s) -> int:
        """After how many of these pages, which follow each other, a sequence can continue: the
        deepest whose last window has all its parts."""
        missing = np.flatnonzero(~self.has(pages))
        if not len(missing) or missing[-1] < len(pages) - self.span:
            return len(pages)
        # runs of present parts end at missing ones; a run serves if it is long enough, or the first
        begins = np.concatenate([[0], missing[:-1] + 1])
        serves = (missing - begins >= self.span) | (begins == 0)
        return int(missing[serves][-1]) if serves.any() else 0

    # --- what needs them ------------------------------------------------------------------------

    def need(self, pages: Int32s) -> None:
        """Add a needer to each of `pages`, no page twice; those without a windowed part get one.
        Raises OutOfPages, and changes nothing, if too few places are left."""
        is_new = self.needers[pages] == 0
        num_new = int(np.count_nonzero(is_new))
        if num_new > self.num_available:
            raise OutOfPages(wanted=num_new, free=self.num_available)
        self.needers[pages] += 1
        self.num_needed += num_new
        without = pages[~self.has(pages)]
        if len(without):
            if len(without) > self._num_free:
                self._evict(len(without) - self._num_free)
            top = self._num_free = self._num_free - len(without)
            self._give(without, np.sort(self._free[top : top + len(without)]))

    def hold(self, pages: Int32s) -> None:
        """Add a needer to those of `pages` that have a windowed part; the others get none until the
        caller calls `end`."""
        self.need(pages[self.has(pages)])

    def end(self, pages: Int32s) -> None:
        """Remove a needer from each of `pages`, which may name a page several times. Pages without
        a windowed part are skipped."""
        pages = pages[self.has(pages)]
        np.subtract.at(self.needers, pages, 1)
        ended = np.unique(pages[self.needers[pages] <= 0])
        self.num_needed -= len(ended)
        parts = self.part_of[ended]
        self._tick = min(self._tick + 1, (1 << TICKS) - 1)
        self._used[parts] = (self._num_kept << TICKS) + self._tick
        self._last_step[parts] = self._made

    def keep(self, pages: Int32s, rank: int = END) -> None:
        """Note that a request may continue after these pages, or that several will (FORK)."""
        parts = self.part_of[pages[self.has(pages)]]
        self._num_kept += int(np.count_nonzero(self._rank[parts] == PASSED))
        self._tick = 0
        self._rank[parts] = np.maximum(self._rank[parts], rank)

    def note_start(self, pages: Int32s) -> None:
        """Note that a request continues after these pages: if it is the second, more will come."""
        is_end = self._rank[self.part_of[pages]] != PASSED
        self.keep(pages)
        self.keep(pages[is_end], FORK)

    def retire(self, pages: Int32s) -> None:
        """Note that no request will ask for these pages."""
        parts = self.part_of[pages[self.has(pages)]]
        self._rank[parts], self._used[parts] = PASSED, 0

    def made(self, step_id: StepId) -> None:
        """Note that a step was made, and that the parts needed so far are those it uses."""
        self._made = step_id

    def settled(self, step_id: StepId) -> None:
        """Note that steps up to this one have run."""
        self._settled = step_id

    # --- pages ----------------------------------------------------------------------------------

    def lend_to_load(self, pages: Int32s) -> None:
        """Give a windowed part to each of `pages`, which were just taken and will be loaded. The
        load holds them (`hold`). Raises OutOfPages, and changes nothing, if too few places are left
        that no step in flight uses."""
        is_usable = self._last_step <= self._settled
        is_usable &= (self._page_of == NO_PAGE) | (self.needers[self._page_of] == 0)
        usable = np.flatnonzero(is_usable).astype(np.int32)
        if len(pages) > len(usable):
            raise OutOfPages(wanted=len(pages), free=len(usable))
        parts = np.sort(self._first(usable, len(pages)))
        self._take_away(parts)
        self._give(pages, parts)
        self.keep(pages)
        free = np.flatnonzero(self._page_of == NO_PAGE)
        self._num_free = len(free)
        self._free[: len(free)] = free[::-1]

    def lend_to_run(self, first: int, pages: Int32s, kept: Int32s) -> None:
        """`lend_to_load` for those of `pages`, a run that follows the first `first` of the pages
        `kept`, which are in the last window before its end. Pages before them are loaded without;
        parts of `kept` are not given away for this. Raises OutOfPages."""
        begin = self.first(first + len(pages))
        needed = kept[begin:first]
        needed = needed[self.has(needed)]
        self.need(needed)
        try:
            self.lend_to_load(pages[max(0, begin - first) :])
        finally:
            self.end(needed)

    def drop(self, pages: Int32s) -> None:
        """These pages became free."""
        pages = pages[self.has(pages)]
        self.num_needed -= int(np.count_nonzero(self.needers[pages]))
        self.needers[pages] = 0
        self._push(self.part_of[pages])

    def recount(self, is_held: Bools, copies: Int32s) -> None:
        """Only copies need parts, and only held pages have any: after a call that may have been
        interrupted."""
        pages = np.flatnonzero(is_held & (self.part_of != self._nowhere)).astype(np.int32)
        parts = self.part_of[pages]
        is_sure = self._page_of[parts] == pages
        pages, parts = pages[is_sure], parts[is_sure]
        self.part_of[:], self._page_of[:], self.needers[:] = self._nowhere, NO_PAGE, 0
        self.part_of[pages], self._page_of[parts] = parts, pages
        self.needers[pages] = copies[pages]
        self.num_needed = int(np.count_nonzero(self.needers))
        self._settled = self._made
        free = np.flatnonzero(self._page_of == NO_PAGE)
        self._num_free = len(free)
        self._free[: len(free)] = free[::-1]

    def _give(self, pages: Int32s, parts: Int32s) -> None:
        self.part_of[pages] = parts
        self._page_of[parts] = pages
        self._rank[parts] = PASSED

    def _push(self, parts: Int32s) -> None:
        self._take_away(parts)
        top = self._num_free
        self._free[top : top + len(parts)] = parts[::-1]
        self._num_free = top + len(parts)

    def _take_away(self, parts: Int32s) -> None:
        pages = self._page_of[parts]
        self.part_of[pages[pages != NO_PAGE]] = self._nowhere
        self._page_of[parts] = NO_PAGE

    def _evict(self, count: int) -> None:
        """Free at least `count` places that nobody needs; there are enough."""
        has_page = self._page_of != NO_PAGE
        usable = np.flatnonzero(has_page & (self.needers[self._page_of] == 0)).astype(np.int32)
        # finding the oldest parts costs the same for one as for many
        num_passed = int(np.count_nonzero(self._rank[usable] == PASSED))
        spare = min(self.num_parts // EVICT_SHARE, num_passed)
        parts = self._first(usable, max(count, spare))
        self.num_evicted += len(parts)
        self._push(parts)

    def _first(self, parts: Int32s, count: int) -> Int32s:
        """The `count` of these places that are given away first."""
        if count >= len(parts):
            return parts
        worth = self._used - np.where(self._rank == PASSED, PASSED_LAST, 0)
        worth[self._rank == FORK] += FORK_TURNS * self.num_parts << TICKS
        worth[self._page_of == NO_PAGE] = -2 * PASSED_LAST
        pinned = self.part_of[list(self.pinned())]
        worth[pinned[pinned != self._nowhere]] += PINNED
        return parts[np.argpartition(worth[parts], count)[:count]]

    def check(self, holders: Int32s) -> None:
        """Raise if the invariant is broken. `holders` are those of each page."""
        pages = np.flatnonzero(self.part_of != self._nowhere)
        assert (self._page_of[self.part_of[pages]] == pages).all(), "a place has another page"
        assert (self._page_of != NO_PAGE).sum() == len(pages), "a place has a page that left it"
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a place is free twice"
        assert (self._page_of[free] == NO_PAGE).all(), "a place is both free and used"
        assert len(free) + len(pages) == self.num_parts, "a place was lost"
        assert holders[pages].all(), "a free page has a windowed part"
        assert (self.needers >= 0).all(), "negative number of needers"
        assert (self.part_of[self.needers > 0] != self._nowhere).all(), "a needed part is gone"
        assert self.num_needed == np.count_nonzero(self.needers), "needed parts are miscounted"
