"""Stored pages and their places in the tiers below the device.

Three words of a page have one bit for each tier; tier 0 is host memory:

    wanted   where the policy wants it (kv/policy.py)
    taken    where it has a place
    full     where its bytes are

The bytes follow the policy as soon as no copy uses them (kv/stack.py); then all three are equal.
The simulator has no bytes: its pages have no places but those that the policy wants.

All places have the size of a page: K and V of some tokens over all layers. States of recurrent
layers are stored in pieces of this size (kv/stored_states.py).
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

HOST = 0  # the number of the fastest tier
IN_HOST = 1 << HOST
NOWHERE = 1 << 10  # the fastest tier of a page that the policy wants in none
# what a piece of a state (kv/stored_states.py) has instead of token ids; no page has so few bytes
# and an odd number of them
PIECE = b"state"


@dataclass(slots=True, eq=False)
class StoredPage(Generic[K]):
    """A page below the device: its places, its rank, and the copies that use it."""

    key: K
    wanted: int = 0
    taken: int = 0
    full: int = 0
    top: int = NOWHERE  # the fastest tier in `wanted`
    rank: int = 0  # its order of eviction while no request waits for it
    filed: int = 0  # its worth in the heap of its fastest tier (kv/eviction.py), or less than now
    used_s: float = 0.0
    is_exempt: bool = False  # not evicted at present
    holds: int = 0  # copies that use its places
    token_ids: bytes = b""
    previous: K | None = None  # the page before it in its chain
    is_recovered: bool = False  # from an earlier or another process: `previous` is not known
    is_lost: bool = False
    skips_load: bool = False  # a load that began with it failed: the next request computes it

    @property
    def is_piece(self) -> bool:
        """Whether it holds a piece of a state: nobody is told of it."""
        return self.token_ids == PIECE


@dataclass(slots=True)
class Moves(Generic[K]):
    """What has to happen to pages. A key is in one list at most.

    `StoredPage.wanted` says where a page belongs afterwards. Later moves may follow while these
    are in progress: a copy that is being read is freed only after the read.
    """

    load: list[K] = field(default_factory=list)  # copy to host; the lower tier keeps its copy
    write: list[K] = field(default_factory=list)  # to a lower tier, then free the old place
    free: list[K] = field(default_factory=list)  # free in one tier; another one has it
    drop: list[K] = field(default_factory=list)  # evicted from every tier, or refused on arrival
    # (tier, key) of copies freed in this call; their bytes are still there
    forgotten: set[tuple[int, K]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.load or self.write or self.free or self.drop)

    def settled(self) -> "Moves[K]":
        """The same moves, with only one per page: the one to its final place."""
        if self.free or self.drop or len(set(self.write)) < len(self.write):
            gone = set(self.drop)
            written = dict.fromkeys(key for key in self.write if key not in gone)
            self.free = [k for k in dict.fromkeys(self.free) if k not in gone and k not in written]
            self.write = list(written)
        return self


class PageTable(Generic[K]):
    """Which tiers should have which pages, and how many each has.

    Invariant between two calls of the stack: a page is in `stored` if the policy wants it in a
    tier. It is in `unwanted` if the policy does not, but a copy still uses its place.
    """

    def __init__(self, tier_pages: Sequence[int]) -> None:
        self.stored: dict[K, StoredPage[K]] = {}
        self.unwanted: dict[K, StoredPage[K]] = {}
        self.counts = [0] * len(tier_pages)
        # by tier: its pages that a faster tier has, too
        self.copies: list[dict[K, None]] = [{} for _ in tier_pages]
        # the pages in `stored`, least recently used first; kept only if pages expire
        self.by_use: dict[K, None] = {}
        self._tier_pages = tier_pages

    def get(self, key: K) -> StoredPage[K] | None:
        """A page that has a place, or should have one."""
        return self.stored.get(key) or self.unwanted.get(key)

    def leading(self, keys: Sequence[K]) -> list[StoredPage[K]]:
        """The pages of the first `keys`, up to the first that has no place."""
        found: list[StoredPage[K]] = []
        with suppress(KeyError):  # the first key that is not stored
            found.extend(map(self.stored.__getitem__, keys))
        if self.unwanted:
            for key in islice(keys, len(found), None):
                if (page := self.get(key)) is None:
                    break
                found.append(page)
        return found

    def __getitem__(self, key: K) -> StoredPage[K]:
        page = self.get(key)
        assert page is not None, "a page with a place was forgotten"
        return page

    def all(self) -> list[StoredPage[K]]:
        return [*self.stored.values(), *self.unwanted.values()]

    def found(self, key: K, tier: int, token_ids: bytes) -> StoredPage[K]:
        """A page of another process, whose bytes were found in a tier."""
        page = self.get(key)
        if page is None:
            page = self.unwanted[key] = StoredPage(key)
            page.token_ids, page.is_recovered = token_ids, True
        page.taken |= 1 << tier
        page.full |= 1 << tier
        return page

    def add(self, key: K) -> StoredPage[K]:
        """A page that the policy wants from now on; its caller gives it to a tier."""
        page = self.unwanted.pop(key, None) if self.unwanted else None
        if page is None:
            page = StoredPage(key)
        page.rank = 0
        self.stored[key] = page
        return page

    def remove(self, page: StoredPage[K]) -> None:
        """Want a page nowhere."""
        del self.stored[page.key]
        self.by_use.pop(page.key, None)
        for tier, copies in enumerate(self.copies):
            if page.wanted >> tier & 1:
                self.counts[tier] -= 1
                copies.pop(page.key, None)
        page.wanted, page.top = 0, NOWHERE
        if page.taken or page.holds:
            self.unwanted[page.key] = page

    def forget(self, page: StoredPage[K]) -> None:
        """Drop the record of a page that has no place."""
        self.unwanted.pop(page.key, None)

    def check(self) -> None:
        """Raise if the invariant is broken."""
        for tier, most in enumerate(self._tier_pages):
            pages = [page for page in self.stored.values() if page.wanted >> tier & 1]
            assert len(pages) == self.counts[tier] <= most, f"pages of tier {tier} miscounted"
            copies = {page.key for page in pages if page.top < tier}
            assert self.copies[tier].keys() == copies, "copies differ"
        for page in self.stored.values():
            assert page.wanted, "a stored page is wanted in no tier"
            assert page.top == fastest(page.wanted), "a page is in a faster tier than it knows"
            assert not page.wanted >> len(self._tier_pages), "a page is in a tier that is not there"
        for page in self.unwanted.values():
            assert not page.wanted, "a page is wanted and not stored"
        assert not self.stored.keys() & self.unwanted.keys(), "a page has two records"


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """How many pages after a chain's device pages lower tiers have."""

    num_pages: int = 0
    below: tuple[int, ...] = ()  # how many of the pages must be read from each lower tier
    # tokens that need not be computed with them; None: those of the pages. Pieces of a state count
    # as pages that save no tokens, and a state may also make pages on the device useful
    saved_tokens: int | None = None

    @property
    def num_below(self) -> int:
        """Pages that must be read into host memory first."""
        return sum(self.below)

    def num_tokens(self, page_size: int) -> int:
        """Tokens that need not be computed if these pages are loaded."""
        return self.num_pages * page_size if self.saved_tokens is None else self.saved_tokens

    def plus(self, other: "StoredCounts", saved_tokens: int) -> "StoredCounts":
        """Both together."""
        below = tuple(a + b for a, b in zip_longest(self.below, other.below, fillvalue=0))
        return StoredCounts(self.num_pages + other.num_pages, below, saved_tokens)


def fastest(places: int) -> int:
    """The number of the fastest of these tiers."""
    return (places & -places).bit_length() - 1
