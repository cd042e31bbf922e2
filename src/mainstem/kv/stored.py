"""Records of stored pages: where each page is, which loads are in progress, and which have
ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s
from mainstem.kv.transfer import LoadId, Transfer


@dataclass(slots=True, eq=False)
class Entry:
    """A page that is stored or being saved."""

    key: PageKey
    token_ids: bytes
    parent: PageKey | None  # key of the page before it
    taken: int = 0  # one bit for each tier where the page has a place
    full: int = 0  # one bit for each tier that has the page's bytes
    holds: int = 0  # copies that use its places
    is_lost: bool = False
    skips_load: bool = False  # a load that began with it failed: the next request computes it
    is_recovered: bool = False  # written by an earlier or another process: `parent` is not known


@dataclass(slots=True, eq=False)
class Load:
    """Pages being loaded to the device."""

    load_id: LoadId
    keys: Sequence[PageKey]
    pages: Int32s
    entries: list[Entry]
    start_layers: int  # a prompt may start when this many layers are loaded
    began_s: float
    num_below: dict[str, int]  # number of pages that are read from each tier
    transfer: Transfer | None = None  # None: still being read
    is_startable: bool = False
    has_failed: bool = False


@dataclass(slots=True)
class Arrivals:
    """What ended since the last `poll`."""

    loaded: list[Load] = field(default_factory=list)
    failed: list[Load] = field(default_factory=list)
    startable: list[Load] = field(default_factory=list)  # loaded far enough for a step to start
    saved: list[Int32s] = field(default_factory=list)  # device pages that were copied
    answered: list[PageKey] = field(default_factory=list)  # questions that are answered, or overdue


@dataclass(frozen=True, slots=True)
class Stored:
    """The pages after a chain's device pages that lower tiers have."""

    num_pages: int = 0
    below: tuple[int, ...] = ()  # how many of the pages must be read from each lower tier

    @property
    def num_below(self) -> int:
        """Pages that must be read into host memory first."""
        return sum(self.below)


NOTHING_STORED = Stored()
