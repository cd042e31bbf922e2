"""The device pages and how many holders each has."""

import numpy as np
from numpy.typing import NDArray

from mainstem.core.errors import OutOfPages
from mainstem.core.step import Int32s
from mainstem.kv.parts import WindowParts


class PagePool:
    """Lends device pages and counts their holders; knows neither tokens nor tensors.

    Invariant: a page is free, or has at least one holder, never both. A free page has no windowed
    part.
    """

    def __init__(self, num_pages: int, parts: WindowParts | None = None) -> None:
        """`parts` has the windowed parts of the pages; None: all pages have one part."""
        self.num_pages = num_pages
        self.parts = parts
        self.holders = np.zeros(num_pages, np.int32)  # others may only read it
        self.copies = np.zeros(num_pages, np.int32)  # holders that are copies; read only, too
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack, page 0 on top
        self.num_free = num_pages

    def take(self, count: int) -> Int32s:
        """Lend `count` pages with one holder each, in order, or raise OutOfPages and lend none.

        Neighbouring pages are read faster than scattered ones, so the lent pages are sorted. Pages
        that were given back together tend to be lent together again.
        """
        if count > self.num_free:
            raise OutOfPages(wanted=count, free=self.num_free)
        top = self.num_free
        pages = np.sort(self._free[top - count : top])
        self.num_free = top - count
        self.holders[pages] = 1
        return pages

    def parts_of(self, pages: Int32s) -> Int32s | None:
        """Where the windowed parts of `pages` are; None: each at its page's number."""
        return None if self.parts is None else self.parts.part_of[pages]

    def share(self, pages: Int32s) -> None:
        """Add a holder to each of `pages`, which must be held already."""
        before = self.holders[pages]
        assert np.count_nonzero(before) == len(before), "a free page cannot be shared"
        self.holders[pages] = before + 1

    def give_back(self, pages: Int32s) -> None:
        """Remove a holder from each of `pages` (no page twice); a page without holders is free."""
        left = self.holders[pages] - 1
        assert not np.count_nonzero(left < 0), "a page was given back more often than it was lent"
        self.holders[pages] = left
        freed = pages[left == 0]
        top = self.num_free
        self._free[top : top + len(freed)] = freed[::-1]
        self.num_free = top + len(freed)
        if self.parts is not None and len(freed):
            self.parts.drop(freed)

    def begin_copy(self, pages: Int32s) -> None:
        """A copy holds `pages` from now on, so they are neither lent nor evicted until it ends."""
        self.share(pages)
        self.pass_to_copy(pages)

    def pass_to_copy(self, pages: Int32s) -> None:
        """Like `begin_copy`; the copy takes over the hold of the caller."""
        self.copies[pages] += 1
        if self.parts is not None:
            self.parts.hold(pages)

    def end_copy(self, pages: Int32s) -> None:
        """A copy has ended, or was cancelled."""
        self.copies[pages] -= 1
        if self.parts is not None:
            self.parts.end(pages)
        self.give_back(pages)

    def num_only_copied(self, is_indexed: NDArray[np.bool_]) -> int:
        """Pages that copies hold and no sequence. `is_indexed`: which pages the index holds."""
        is_in_use = self.holders > self.copies + is_indexed
        return int(np.count_nonzero((self.copies > 0) & ~is_in_use))

    def recount(self, holders: Int32s) -> None:
        """Set the holders of every page that are no copies, after a call that may have been
        interrupted."""
        holders = holders + self.copies
        self.holders[:] = holders
        free = np.flatnonzero(holders == 0)
        self.num_free = len(free)
        self._free[: len(free)] = free[::-1]
        if self.parts is not None:
            self.parts.recount(holders > 0, self.copies)

    def check(self) -> None:
        """Raise if the invariant is broken."""
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert not self.holders[free].any(), "a page is both free and held"
        held = int((self.holders > 0).sum())
        assert len(free) + held == self.num_pages, "a page was lost"
        assert (self.holders >= 0).all(), "negative number of holders"
        assert (self.copies >= 0).all(), "negative number of copies of a page"
        assert (self.holders >= self.copies).all(), "a copy does not hold its page"
        if self.parts is not None:
            self.parts.check(self.holders)
