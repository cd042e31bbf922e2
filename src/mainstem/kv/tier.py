"""The protocol of a tier: a store of pages, and the link to it.

    host memory    the fastest; copies to and from the device (kv/host.py)
    disk           kv/bytes/disk.py
    a server       kv/bytes/remote.py; other processes put pages there, too

Each tier is slower than the one above. All pages pass through host memory.

A tier knows where its pages are and moves their bytes; kv/policy.py decides which pages it gets.
One thread owns a tier. Only `flush` and `close` block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mainstem.core.events import StoreOpened
from mainstem.core.ids import PageKey
from mainstem.kv.transfer import SharedLink, TierLink


@dataclass(frozen=True, slots=True)
class WriteJob:
    key: PageKey
    token_ids: bytes
    buffer: memoryview
    after: Callable[[], None] | None = None  # waits until `buffer` is filled


@dataclass(frozen=True, slots=True)
class ReadJob:
    key: PageKey
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """A page is in the tier, or `problem` says why not: then its place is free again."""

    key: PageKey
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """A page was read, or `problem` says why not."""

    key: PageKey
    num_bytes: int
    began_s: float
    ended_s: float
    problem: str | None = None
    token_ids: bytes | None = None  # the page's tokens, if the tier knows them


@dataclass(frozen=True, slots=True)
class Answer:
    """A shared tier's answer: `keys` are those of a question that it has, in the same order."""

    asked: PageKey  # the last key of the question
    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Emptied:
    """A tier may have lost everything that was written before."""


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page that an earlier process stored."""

    key: PageKey
    token_ids: bytes
    used_at: float  # seconds since 1970


class Tier(Protocol):
    """A bounded number of places for pages."""

    @property
    def name(self) -> str: ...

    @property
    def num_places(self) -> int: ...

    @property
    def link(self) -> TierLink:
        """The link by which pages are read from the tier, with its latest measured rate."""

    def take_place(self, key: PageKey) -> bool:
        """Take a place for a page; False: there is no room."""

    def delete(self, key: PageKey) -> None:
        """Forget a page and give its place back, whether it was written or not."""

    def flush(self) -> None:
        """Return when every write and delete so far is done, or has failed."""

    def close(self) -> None:
        """Finish all writes and deletes."""


class LowerTier(Tier, Protocol):
    """A tier below host memory: it writes from slots and reads into them."""

    @property
    def link(self) -> SharedLink: ...

    @property
    def is_shared(self) -> bool:
        """Whether other processes put pages there: then `ask` finds them."""

    @property
    def is_open(self) -> bool:
        """Whether questions can be answered at present."""

    @property
    def can_write(self) -> bool:
        """Whether writes can succeed at present."""

    @property
    def num_writes_pending(self) -> int:
        """Pages given to `write` whose outcome `poll` has not returned."""

    def recover(self) -> Sequence[FoundPage]:
        """The pages in the tier at the start, least recently used first; called once."""

    def opened(self, num_pages: int) -> StoreOpened | None:
        """The event that the tier was opened with `num_pages`; None: no event."""

    def write(self, job: WriteJob) -> None:
        """Write a page that has a place; its buffer must not change until `poll` returns the
        outcome."""

    def read(self, jobs: Sequence[ReadJob], limit_s: float) -> None:
        """Read pages into their buffers, which belong to the tier until `poll` returns the outcome.
        After `limit_s` no request needs them, and a tier may skip them."""

    def touch(self, used_at: dict[PageKey, float]) -> None:
        """Record when pages were last used, for other processes and the next start."""

    def ask(self, keys: Sequence[PageKey]) -> None:
        """Ask a shared tier which of `keys` it has; `poll` returns an Answer, without keys if the
        tier cannot be asked."""

    def end_soon(self) -> None:
        """`close` will be called: a slow shared tier may skip its remaining writes."""

    def poll(self) -> Iterator[Written | Read | Answer | Emptied]:
        """Return what was done since the last call."""
