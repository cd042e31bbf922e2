"""Pins, for a while, the pages of prefixes that clients want to keep (`cache_control`).

Each key may keep a share of the device's pages. All keys together may keep half of the pages, or
one key's share if that is more. The least recently used prefixes are unpinned first. When the
engine loses its cache, it loses the pins, too: the next request with a prefix pins it again.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Int32s
from mainstem.server.link.answering import EngineFault
from mainstem.server.link.engine_client import EngineClient

TOTAL_SHARE = 0.5  # share of the device's pages for all keys together
MAX_PINS = 64  # most pins of a key

log = logging.getLogger("mainstem.server")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt, and how its pages are named."""

    token_ids: Int32s
    salt: bytes
    public_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def order(self) -> tuple[bytes, int, bytes]:
        """A sort key that puts prefixes with a common beginning next to each other."""
        return self.salt, self.public_tokens, self.token_ids.astype(">i4").tobytes()

    def num_common(self, other: "Prefix") -> int:
        """Return how many leading tokens of both prefixes have the same pages."""
        if (self.salt, self.public_tokens) != (other.salt, other.public_tokens):
            return 0
        return num_common(self.token_ids, other.token_ids)


@dataclass(slots=True)
class _Pin:
    """A prefix that is kept until `ends_s` of the event loop's clock."""

    name: str  # its name in commands to the engine
    owner: str
    prefix: Prefix
    ends_s: float
    timer: asyncio.TimerHandle = field(repr=False)


class PrefixPins:
    """The pinned prefixes of each key. Lives on the event loop."""

    def __init__(self, engine: EngineClient, share: float) -> None:
        """`share` is the part of the device's pages that each key may keep."""
        self._engine = engine
        self._share = share
        self._pins: list[_Pin] = []  # most recently used last
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens that one key may keep."""
        return self._max_pages(self._share) * self._engine.snapshot.page_size

    def num_pages(self, owner: str | None = None) -> int:
        """Return the number of pages that are kept for a key, or for all keys. A page that several
        prefixes of a key share counts once."""
        owners = {pin.owner for pin in self._pins} if owner is None else {owner}
        page_size = self._engine.snapshot.page_size
        return sum(
            _num_pages([pin.prefix for pin in self._pins if pin.owner == each], page_size)
            for each in owners
        )

    def keep(self, owner: str, prefix: Prefix, ttl_s: float) -> None:
        """Pin a computed prefix for `ttl_s` from now on. The key's earlier pin of the same prefix,
        or of its beginning if that pin ends sooner, becomes this one. A prefix that is longer than
        a key may keep is cut.
        """
        prefix = Prefix(prefix.token_ids[: self.max_tokens], prefix.salt, prefix.public_tokens)
        if not len(prefix):
            return
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + ttl_s
        pin = next((pin for pin in self._pins if _is_part(pin, owner, prefix, ends_s)), None)
        if pin is None:
            name = f"cache/{next(self._numbers)}"
            pin = _Pin(name, owner, prefix, ends_s, loop.call_later(ttl_s, self._end, name))
        else:
            self._pins.remove(pin)
            pin.timer.cancel()
            pin.prefix, pin.ends_s = prefix, max(ends_s, pin.ends_s)
            pin.timer = loop.call_at(pin.ends_s, self._end, pin.name)
        self._pins.append(pin)
        self._begin(
            self._engine.pin(pin.name, [prefix.token_ids], prefix.salt, prefix.public_tokens)
        )
        self._make_room(owner)

    def end_all(self) -> None:
        """Unpin everything, including pages that running sequences hold."""
        for pin in list(self._pins):
            self._end(pin.name)

    def forget(self) -> None:
        """Drop all pins without a command: the engine has lost its cache, or is closed."""
        for pin in self._pins:
            pin.timer.cancel()
        self._pins.clear()

    def _make_room(self, owner: str) -> None:
        """Unpin the least recently used prefixes until the limits hold. The last prefix always
        fits."""
        own = [pin for pin in self._pins if pin.owner == owner]
        most = self._max_pages(self._share)
        while len(own) > 1 and (len(own) > MAX_PINS or self.num_pages(owner) > most):
            self._end(own.pop(0).name)
        most = self._max_pages(max(TOTAL_SHARE, self._share))
        while len(self._pins) > 1 and self.num_pages() > most:
            self._end(self._pins[0].name)

    def _end(self, name: str) -> None:
        """Unpin a prefix; its pages are evicted when room is needed."""
        [pin] = [pin for pin in self._pins if pin.name == name]
        pin.timer.cancel()
        self._pins.remove(pin)
        self._begin(self._engine.pin(name, ()))

    def _begin(self, work: Coroutine[None, None, int]) -> None:
        """Send a command; commands keep their order."""
        task = asyncio.ensure_future(_told(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _max_pages(self, share: float) -> int:
        return int(share * self._engine.snapshot.num_pages)


def num_common(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """The length of the common prefix of two prompts."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


async def _told(work: Coroutine[None, None, int]) -> None:
    try:
        await work
    except EngineFault as fault:  # the cache is lost; the next request pins its prefix again
        log.debug("nothing pinned", extra={"facts": {"reason": str(fault)}})


def _is_part(pin: _Pin, owner: str, prefix: Prefix, ends_s: float) -> bool:
    """Whether the owner's pin has the same prefix, or has its beginning and ends sooner."""
    if pin.owner != owner or pin.prefix.num_common(prefix) < len(pin.prefix):
        return False
    return len(pin.prefix) == len(prefix) or pin.ends_s <= ends_s


def _num_pages(prefixes: Iterable[Prefix], page_size: int) -> int:
    """Pages of the tree of all prefixes; a partial page counts as one."""
    sorted_: Sequence[Prefix] = sorted(prefixes, key=lambda prefix: prefix.order)
    total = sum(-(-len(prefix) // page_size) for prefix in sorted_)
    return total - sum(one.num_common(other) // page_size for one, other in pairwise(sorted_))
