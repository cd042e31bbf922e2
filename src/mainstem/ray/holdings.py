"""What each replica probably holds: a guess from the requests sent to it, with a size limit for
each replica.

    who_holds   page -> replicas, as the bits of a number      one lookup serves all replicas
    in_order[i] the pages of replica i in order of use         at most `pages_per_replica`

The least recently used page is dropped first; within a chain, the last page. A replica evicts pages
without reporting it, but the same limit and the same order of eviction keep the guess close. A
wrong guess costs time: a prompt goes to a replica that has to compute it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from mainstem.core.step import Int64s

PageHash = int  # hash of all tokens or text up to a page's end


class Holdings:
    """The leading pages of prompts, by replica. Memory is limited by the sum of all bounds."""

    def __init__(self, num_replicas: int, pages_per_replica: int) -> None:
        self._most = [pages_per_replica] * num_replicas
        self._in_order: list[OrderedDict[PageHash, None]] = [
            OrderedDict() for _ in range(num_replicas)
        ]
        self._who_holds: dict[PageHash, int] = {}

    def num_pages(self, replica: int) -> int:
        return len(self._in_order[replica])

    def num_leading(self, keys: Sequence[PageHash]) -> Int64s:
        """Return [replicas] how many of a prompt's first pages each replica holds."""
        found = np.zeros(len(self._in_order), dtype=np.int64)
        who_holds, holders = self._who_holds, -1  # all bits set: every replica
        for depth, key in enumerate(keys):
            left = holders & who_holds.get(key, 0)
            if left != holders:
                if depth:
                    _set(found, holders & ~left, depth)
                if not left:
                    return found
                holders = left
        if keys:
            _set(found, holders, len(keys))
        return found

    def note(self, replica: int, keys: Sequence[PageHash]) -> None:
        """Record that a prompt was sent to a replica, which will hold it."""
        who_holds, in_order, bit = self._who_holds, self._in_order[replica], 1 << replica
        for key in reversed(keys):  # so that the first page becomes the most recently used
            if key in in_order:
                in_order.move_to_end(key)
            else:
                in_order[key] = None
                who_holds[key] = who_holds.get(key, 0) | bit
        self._shrink(replica)

    def bound(self, replica: int, num_pages: int) -> None:
        """Set how many pages a replica can hold."""
        self._most[replica] = num_pages
        self._shrink(replica)

    def forget(self, replica: int) -> None:
        """Record that a replica has lost all its pages."""
        for key in self._in_order[replica]:
            self._drop(key, 1 << replica)
        self._in_order[replica].clear()

    def remove(self, replica: int, keys: Sequence[PageHash]) -> None:
        """Record that a replica does not hold these pages."""
        in_order = self._in_order[replica]
        for key in keys:
            if key in in_order:
                del in_order[key]
                self._drop(key, 1 << replica)

    def _shrink(self, replica: int) -> None:
        in_order = self._in_order[replica]
        while len(in_order) > self._most[replica]:
            self._drop(in_order.popitem(last=False)[0], 1 << replica)

    def _drop(self, key: PageHash, bit: int) -> None:
        left = self._who_holds[key] & ~bit
        if left:
            self._who_holds[key] = left
        else:
            del self._who_holds[key]

    def check(self) -> None:
        """Raise if the two views differ, or a bound is exceeded."""
        seen: dict[PageHash, int] = {}
        for replica, in_order in enumerate(self._in_order):
            assert len(in_order) <= self._most[replica], "more pages than the bound"
            for key in in_order:
                seen[key] = seen.get(key, 0) | 1 << replica
        assert seen == self._who_holds, "the two views differ"


def _set(found: Int64s, replicas: int, depth: int) -> None:
    """Write `depth` for the replicas whose bits are set."""
    while replicas:
        lowest = replicas & -replicas
        found[lowest.bit_length() - 1] = depth
        replicas ^= lowest
