"""In which order pages leave a tier: the smallest rank goes first.

A ranking computes a page's new rank at each use. `TierPolicy` has one page at a time, the
device's index has arrays of pages. So `used` takes one rank or an array of ranks.
"""

from enum import Enum
from typing import Protocol, TypeVar

import numpy as np

from mainstem.core.step import Int64s

R = TypeVar("R", int, Int64s)


class Ranking(Protocol):
    """How pages are ordered while no queued request waits for them."""

    @property
    def sees_queue(self) -> bool:
        """Whether pages of queued requests leave after all others. Among them, those of the last
        requests leave first."""
        ...

    @property
    def has_headroom(self) -> bool:
        """Whether part of host memory is kept free for new pages."""
        ...

    def used(self, rank: R, clock: int) -> R:
        """The rank after a use at `clock`, which grows with every use; 0 is a page's first rank."""
        ...


class Lru:
    """The least recently used page goes first."""

    sees_queue = False
    has_headroom = True

    def used(self, rank: R, clock: int) -> R:
        return clock  # type: ignore[return-value]  # one number serves for a whole array


class Fifo:
    """The page that came first goes first."""

    sees_queue = False
    has_headroom = True

    def used(self, rank: R, clock: int) -> R:
        return np.where(rank == 0, clock, rank) if isinstance(rank, np.ndarray) else rank or clock


class Lookahead(Lru):
    """First to leave are pages without a queued request, the least recently used first; then pages
    of queued requests, beginning with the last request (AttentionStore 3.3)."""

    sees_queue = True


class Belady(Lookahead):
    """Like lookahead, without headroom: the best possible hit rate with this knowledge of the
    queue."""

    has_headroom = False


class PolicyKind(Enum):
    LOOKAHEAD = "lookahead"
    LRU = "lru"
    FIFO = "fifo"
    BELADY = "belady"


RANKINGS: dict[PolicyKind, Ranking] = {
    PolicyKind.LOOKAHEAD: Lookahead(),
    PolicyKind.LRU: Lru(),
    PolicyKind.FIFO: Fifo(),
    PolicyKind.BELADY: Belady(),
}
