"""Which stored pages stay, move and go (AttentionStore 3.3): decided here, carried out elsewhere.

    saved --admit--> HOST --write--> DISK --drop--> gone
                      |  ^--load------'|
                      |  ^--keep-------|     load: ahead of a request; keep: read for one and used
                      `--release       `--forget     a page may be in both: either copy can go alone

The engine's store and `mainstem simulate` drive the same object. It holds names and numbers only,
so it needs neither bytes nor a clock of its own. Every decision comes back as `Moves`, already
written down here; whoever carries them out reports a page that could not be moved with `drop`.

Order of leaving, from both tiers:

    kind        not waited for        waited for by a queued request
    lookahead   least recent first    after those, the tail of the queue first
    belady      as lookahead, without headroom: the bound for what is known of the queue
    lru         least recent first    (does not look at the queue)
    fifo        oldest first          (does not look at the queue)

Pages of one chain leave from its tail, because a prefix without its tail is still useful. A page
that is worth less than all there is goes straight on to the next tier, or is refused.
"""

from collections.abc import Hashable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from mainstem.core.errors import ConfigError
from mainstem.kv.window import QueueWindow

K = TypeVar("K", bound=Hashable)

HEADROOM = 0.05  # share of the host tier that is kept free for saves and loads
WAITED_FOR = 1 << 100  # worth of a queued page is this less its `when`: above every rank
RETURNS_KNOWN = 0.25  # of the host, as many pages that return tell how soon others do
SPARE_ITEMS = 4096  # outdated heap items that are not worth a clean-up


class PolicyKind(Enum):
    LOOKAHEAD = "lookahead"
    LRU = "lru"
    FIFO = "fifo"
    BELADY = "belady"


class TierKind(Enum):
    HOST = "host"
    DISK = "disk"


@dataclass(slots=True)
class Moves(Generic[K]):
    """What has to happen to pages. A key is in one list at most.

    Later moves may follow while these are under way: a copy that is being read when it is to be
    forgotten has to be read first.
    """

    load: list[K] = field(default_factory=list)  # copy from disk to host; disk keeps its copy
    write: list[K] = field(default_factory=list)  # write to disk, then free in host
    release: list[K] = field(default_factory=list)  # free in host; disk has it
    forget: list[K] = field(default_factory=list)  # free on disk; host has it
    drop: list[K] = field(default_factory=list)  # gone from every tier, or refused on arrival

    def __bool__(self) -> bool:
        return bool(self.load or self.write or self.release or self.forget or self.drop)

    def settled(self) -> "Moves[K]":
        """The same, with what one page went through in one call shortened to where it ended up."""
        if gone := set(self.drop):
            self.write = [key for key in self.write if key not in gone]
            self.release = [key for key in self.release if key not in gone]
            self.forget = [key for key in self.forget if key not in gone]
        if kept := set(self.forget).intersection(self.write):  # its copy need not have gone
            self.write = [key for key in self.write if key not in kept]
            self.forget = [key for key in self.forget if key not in kept]
            self.release.extend(kept)
        return self


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How much the tiers hold, in pages, and by which rule pages leave them."""

    host_pages: int
    disk_pages: int = 0
    kind: PolicyKind = PolicyKind.LOOKAHEAD
    headroom: float = HEADROOM  # share of the host kept free; without a disk none is needed
    ttl_s: float | None = None  # a page unused for so long is dropped

    def __post_init__(self) -> None:
        if self.host_pages < 0 or self.disk_pages < 0:
            raise ConfigError(f"pages must not be negative: {self.host_pages}, {self.disk_pages}")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom must be in [0, 1), got {self.headroom}")
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ConfigError(f"ttl_s must be above 0, got {self.ttl_s}")

    @property
    def headroom_pages(self) -> int:
        if self.kind is PolicyKind.BELADY or not self.disk_pages:
            return 0
        return int(self.host_pages * self.headroom)

    def window_length(self, chain_pages: float) -> int:
        """Requests worth knowing ahead: (C_mem + C_disk) / S_kv, `chain_pages` a mean."""
        return max(1, round((self.host_pages + self.disk_pages) / max(chain_pages, 1.0)))


class _Entry:
    """A stored page: where it is, and how it ranks while nobody waits for it."""

    __slots__ = ("in_host", "is_exempt", "on_disk", "rank", "used_s")

    def __init__(self, rank: int) -> None:
        self.in_host = False
        self.on_disk = False
        self.is_exempt = False  # makes no room at present
        self.rank = rank
        self.used_s = 0.0


class TierPolicy(Generic[K]):
    """Decides for every stored page in which tier it lives, and when it goes.

    Call order per request: `expect` when it is queued; `dismiss` when it is served, and only then
    `admit` with all its pages, used and new ones (or `finish`, which is both): as long as a request
    waits, its pages are worth more than all others. `make_headroom` and `choose_prefetch` whenever
    there is time. All cost O(log n) a page; nothing scans a tier.

    Invariant: a tier never holds more than its pages, every entry is in a tier, and every page that
    may leave a tier has an item of its present worth in that tier's heap.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._sees_queue = config.kind in (PolicyKind.LOOKAHEAD, PolicyKind.BELADY)
        self._ranks_use = config.kind is not PolicyKind.FIFO
        self._has_ttl = config.ttl_s is not None
        self._entries: dict[K, _Entry] = {}
        self._host: list[tuple[int, K]] = []  # heaps of (worth, key); outdated items are skipped
        self._disk: list[tuple[int, K]] = []
        self._copies: dict[K, None] = {}  # on disk and in host too: the disk copies that go first
        self._num_host = 0
        self._num_disk = 0
        self._clock = 0  # the next rank
        self._by_use: dict[K, None] = {}  # least recently used first; filled only with a TTL
        self._window: QueueWindow[K] = QueueWindow(config.host_pages - config.headroom_pages)
        self._next_use = self._window.next_use
        self._soon = 0.0  # share of pages that returned soon, lately
        self._wanted: list[tuple[int, K]] = []  # heap of (when, key): near, and only on disk

    # -- what is where -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def keys(self) -> KeysView[K]:
        """All stored pages."""
        return self._entries.keys()

    @property
    def num_host(self) -> int:
        return self._num_host

    @property
    def num_disk(self) -> int:
        return self._num_disk

    @property
    def num_queued(self) -> int:
        return len(self._window)

    def tier_of(self, key: K) -> TierKind | None:
        """The fastest tier that has `key`."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return TierKind.HOST if entry.in_host else TierKind.DISK

    def is_on_disk(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.on_disk

    def match(self, keys: Sequence[K]) -> int:
        """How many leading pages of a chain are stored."""
        entries = self._entries
        for index, key in enumerate(keys):
            if key not in entries:
                return index
        return len(keys)

    def find(self, keys: Sequence[K]) -> list[bool]:
        """For every leading page of a chain that is stored: is it in host memory?"""
        entries, found = self._entries, []
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                break
            found.append(entry.in_host)
        return found

    # -- the queue -----------------------------------------------------------------------------

    def expect(self, ticket: Hashable, keys: Sequence[K], place: int | None = None) -> None:
        """A request that wants `keys` waits in the queue, at its tail if no `place` is given.

        `place` is any number that no other waiting request has, small is soon. `ticket` names the
        request for `dismiss`.
        """
        if not self._sees_queue:
            return
        self._file_all(self._window.enter(ticket, keys, place))
        self._clean()

    def dismiss(self, ticket: Hashable) -> None:
        """The request no longer waits: it was served, or given up."""
        self._file_all(self._window.leave(ticket))
        self._clean()

    # -- pages come ----------------------------------------------------------------------------

    def note_use(self, keys: Sequence[K], now: float) -> None:
        """A request uses `keys`, a chain from its head; those that are not stored are skipped."""
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None:
                self._touch(key, entry, now)
        self._clean()

    def admit(self, keys: Sequence[K], now: float, after: Sequence[K | None] = ()) -> Moves[K]:
        """A chain, whose pages are all in hand, is used and wants to be in the host tier.

        Afterwards `tier_of` says where each of its pages belongs; new ones that are among `write`
        go to disk without staying in the host, those among `drop` are not kept. `after` names the
        page before each, where that is known: what follows a page that only the disk has pushes
        nobody out of the host, since whoever wants it has to wait for the disk anyway.
        """
        moves: Moves[K] = Moves()
        entries, missing = self._entries, []
        for key in reversed(keys):
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = self._new_entry()
            self._touch(key, entry, now)
            if not entry.in_host:
                missing.append((key, entry))
        is_choosy = self._sees_queue and not self._is_lively
        before = dict(zip(keys, after, strict=True)) if after and is_choosy else {}
        for key, entry in reversed(missing):
            if entries.get(key) is not entry:  # made room for a page before it in the chain
                continue
            worth, spared = self._worth(key, entry), 0
            previous = before.get(key)
            if previous is not None and self.tier_of(previous) is TierKind.DISK:
                worth, spared = 0, self.config.headroom_pages
            if self._make_host_room(worth, moves, spared):
                self._enter_host(key, entry)
            elif not entry.on_disk:
                self._write_or_drop(key, entry, moves)
        self._clean()
        return moves.settled()

    def keep(self, keys: Sequence[K], now: float) -> Moves[K]:
        """Stored pages were brought up for a request, which has them now: may those that came from
        disk stay in the host?

        If conversations that return mostly do so soon, yes, in place of the least recent. Else they
        only push out what was last used before they were, until this use: who comes back later than
        all that is there would be gone again before its next turn. So where more conversations
        return in turn than the host holds, some are found there instead of none (as in LIRS, the
        distance between two uses decides). LRU and FIFO admit whatever comes.
        """
        entries = [(key, entry) for key in keys if (entry := self._entries.get(key)) is not None]
        self._note_returns([entry for _, entry in entries])
        if not self._sees_queue or self._is_lively:
            return self.admit([key for key, _ in entries], now)
        moves: Moves[K] = Moves()
        for key, entry in entries:
            if entry.in_host or self._entries.get(key) is not entry:
                continue
            entry.is_exempt = True  # it does not make room for itself
            is_welcome = self._make_host_room(entry.rank, moves, self.config.headroom_pages)
            entry.is_exempt = False
            if is_welcome:
                self._enter_host(key, entry)
            else:
                self._file(key, entry)
        self.note_use(keys, now)
        return moves.settled()

    def _note_returns(self, entries: Sequence[_Entry]) -> None:
        """What share of pages comes back so soon that the host would have had them all along."""
        host_pages = max(1, self.config.host_pages)
        num_soon = sum(self._clock - entry.rank <= host_pages for entry in entries)
        weight = min(1.0, len(entries) / (RETURNS_KNOWN * host_pages))
        self._soon += weight * (num_soon / max(1, len(entries)) - self._soon)

    @property
    def _is_lively(self) -> bool:
        """Whether more is found in the host if what returns pushes out the least recent than if it
        stays as it is: the latter finds its share of all that is stored."""
        return self._soon * len(self._entries) > self.config.host_pages

    def finish(self, ticket: Hashable, keys: Sequence[K], now: float) -> Moves[K]:
        """`dismiss` and `admit` for a request that was served; its pages are filed only once."""
        waited_for = self._window.leave(ticket)
        if keys[: len(waited_for)] == waited_for:  # then `admit` files what nobody waits for
            waited_for = [key for key in waited_for if key in self._next_use]
        self._file_all(waited_for)
        return self.admit(keys, now)

    def recover(self, keys: Iterable[K], now: float) -> Moves[K]:
        """Pages found on disk at the start, least recently used first."""
        moves: Moves[K] = Moves()
        for key in keys:
            if key in self._entries:
                continue
            entry = self._entries[key] = self._new_entry()
            self._touch(key, entry, now)
            if self._make_disk_room(self._worth(key, entry), moves):
                self._enter_disk(key, entry)
            else:
                self._remove(key)
                moves.drop.append(key)
        self._clean()
        return moves

    def back_up(self, keys: Sequence[K]) -> Moves[K]:
        """Have host pages on disk too, head first, as far as only older pages must go for it.

        The copies are listed in `write`; the host keeps its own.
        """
        moves: Moves[K] = Moves()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.in_host or entry.on_disk:
                continue
            if self._num_disk >= self.config.disk_pages and not self._drop_worst_on_disk(
                self._worth(key, entry), moves
            ):
                break
            self._enter_disk(key, entry)
            moves.write.append(key)
        return moves

    def choose_prefetch(self, limit: int) -> Moves[K]:
        """Bring up to `limit` pages of near requests from disk to host, soonest first.

        Host pages that are wanted later make room; the headroom is left alone.
        """
        moves: Moves[K] = Moves()
        entries, wanted = self._entries, self._wanted
        for key in self._window.take_news():
            entry = entries.get(key)
            if entry is not None and not entry.in_host and self._window.is_near(key):
                self._want(key)
        while wanted and len(moves.load) < limit:
            when, key = wanted[0]
            entry = entries.get(key)
            is_due = entry is not None and not entry.in_host and self._window.is_near(key)
            if not is_due or self._next_use.get(key) != when:
                heappop(wanted)
                if is_due:
                    self._want(key)
                continue
            assert entry is not None
            spared = self.config.headroom_pages
            if not self._make_host_room(WAITED_FOR - when, moves, spared):
                break
            heappop(wanted)
            self._enter_host(key, entry)
            del self._copies[key]  # the copy is what is to be loaded: it cannot make room yet
            moves.load.append(key)
        self._copies.update(dict.fromkeys(moves.load))
        return moves.settled()

    # -- pages go ------------------------------------------------------------------------------

    def choose_victims(self, tier: TierKind, count: int) -> Moves[K]:
        """Free up to `count` pages of `tier`, least worth first."""
        moves: Moves[K] = Moves()
        for _ in range(count):
            if tier is TierKind.DISK:
                if not self._free_on_disk(moves):
                    break
            else:
                key = self._pop(self._host, TierKind.HOST, None)
                if key is None:
                    break
                self._demote(key, self._entries[key], moves)
        return moves.settled()

    def free_unwaited(self, count: int) -> Moves[K]:
        """Free up to `count` host pages that no queued request waits for, least worth first."""
        moves: Moves[K] = Moves()
        for _ in range(count):
            key = self._pop(self._host, TierKind.HOST, self._clock + 1)
            if key is None:
                break
            self._demote(key, self._entries[key], moves)
        return moves.settled()

    def make_headroom(self) -> Moves[K]:
        """Free host pages until the headroom is there."""
        short = self._num_host + self.config.headroom_pages - self.config.host_pages
        return self.choose_victims(TierKind.HOST, max(0, short))

    def expire(self, now: float) -> list[K]:
        """Drop pages that were not used for the TTL; returns them.

        Those that are waited for, too: a TTL is a promise to those whose pages they are.
        """
        ttl_s = self.config.ttl_s
        gone: list[K] = []
        if ttl_s is None:
            return gone
        while self._by_use:
            key = next(iter(self._by_use))
            entry = self._entries[key]
            if entry.used_s + ttl_s > now:
                break
            self._remove(key)
            gone.append(key)
        return gone

    def drop(self, keys: Iterable[K]) -> None:
        """These pages are gone from every tier: damaged, deleted, or a move failed."""
        for key in keys:
            if key in self._entries:
                self._remove(key)
        if not self._entries:
            self._soon = 0.0  # who comes now is a stranger

    # -- inside --------------------------------------------------------------------------------

    def _worth(self, key: K, entry: _Entry) -> int:
        """What decides who leaves: the smallest goes first."""
        when = self._next_use.get(key)
        return entry.rank if when is None else WAITED_FOR - when

    def _new_entry(self) -> _Entry:
        self._clock += 1
        return _Entry(self._clock)

    def _touch(self, key: K, entry: _Entry, now: float) -> None:
        entry.used_s = now
        if self._has_ttl:
            self._by_use.pop(key, None)
            self._by_use[key] = None
        if self._ranks_use:
            self._clock += 1
            entry.rank = self._clock
            if (entry.in_host or entry.on_disk) and key not in self._next_use:
                self._file(key, entry)

    def _file(self, key: K, entry: _Entry) -> None:
        """Put an item of the page's present worth into the heap of the tier it may leave."""
        if entry.is_exempt:
            return
        when = self._next_use.get(key)
        worth = entry.rank if when is None else WAITED_FOR - when
        if entry.in_host:
            heappush(self._host, (worth, key))
        elif entry.on_disk:
            heappush(self._disk, (worth, key))

    def _file_all(self, keys: Iterable[K]) -> None:
        entries, file = self._entries, self._file
        for key in keys:
            entry = entries.get(key)
            if entry is not None:
                file(key, entry)

    def _clean(self) -> None:
        """Rebuild a heap that has become mostly outdated items."""
        if len(self._host) > 4 * self._num_host + SPARE_ITEMS:
            self._host = self._cleaned(TierKind.HOST)
        if len(self._disk) > 4 * self._num_disk + SPARE_ITEMS:
            self._disk = self._cleaned(TierKind.DISK)

    def _cleaned(self, tier: TierKind) -> list[tuple[int, K]]:
        """A heap without outdated items."""
        items = [
            (self._worth(key, entry), key)
            for key, entry in self._entries.items()
            if not entry.is_exempt and (entry.in_host or entry.on_disk)
            if entry.in_host == (tier is TierKind.HOST)
        ]
        heapify(items)
        return items

    def _pop(self, heap: list[tuple[int, K]], tier: TierKind, below: int | None) -> K | None:
        """The page of least worth, taken off `heap`; None if none is worth less than `below`."""
        entries, next_use, is_host = self._entries, self._next_use, tier is TierKind.HOST
        while heap:
            worth, key = heap[0]
            entry = entries.get(key)
            if entry is not None and not entry.is_exempt and entry.in_host == is_host:
                when = next_use.get(key)
                if worth == (entry.rank if when is None else WAITED_FOR - when):
                    if below is not None and worth >= below:
                        return None
                    heappop(heap)
                    return key
            heappop(heap)
        return None

    def _make_host_room(self, worth: int, moves: Moves[K], spared: int = 0) -> bool:
        """Room for a page of `worth`, `spared` pages apart; False if all there are worth more."""
        if self._num_host + spared < self.config.host_pages:
            return True
        key = self._pop(self._host, TierKind.HOST, worth)
        if key is None:
            return False
        self._demote(key, self._entries[key], moves)
        return True

    def _make_disk_room(self, worth: int, moves: Moves[K]) -> bool:
        """Room for a page of `worth`: copies of host pages go first, then what is worth less."""
        if self._num_disk < self.config.disk_pages:
            return True
        if self._copies:
            self._forget_copy(moves)
            return True
        return self._drop_worst_on_disk(worth, moves)

    def _free_on_disk(self, moves: Moves[K]) -> bool:
        if self._copies:
            self._forget_copy(moves)
            return True
        return self._drop_worst_on_disk(None, moves)

    def _forget_copy(self, moves: Moves[K]) -> None:
        key = next(iter(self._copies))
        self._leave_disk(key, self._entries[key])
        moves.forget.append(key)

    def _drop_worst_on_disk(self, worth: int | None, moves: Moves[K]) -> bool:
        key = self._pop(self._disk, TierKind.DISK, worth)
        if key is None:
            return False
        self._remove(key)
        moves.drop.append(key)
        return True

    def _demote(self, key: K, entry: _Entry, moves: Moves[K]) -> None:
        """A host page leaves the host: to disk if it is worth a place there."""
        self._leave_host(key, entry)
        if entry.on_disk:
            moves.release.append(key)
            self._settle_on_disk(key, entry)
        else:
            self._write_or_drop(key, entry, moves)

    def _write_or_drop(self, key: K, entry: _Entry, moves: Moves[K]) -> None:
        if self._make_disk_room(self._worth(key, entry), moves):
            self._enter_disk(key, entry)
            moves.write.append(key)
        else:
            self._remove(key)
            moves.drop.append(key)

    def _enter_host(self, key: K, entry: _Entry) -> None:
        entry.in_host = True
        self._num_host += 1
        if entry.on_disk:
            self._copies[key] = None
        self._file(key, entry)

    def _leave_host(self, key: K, entry: _Entry) -> None:
        entry.in_host = False
        self._num_host -= 1
        self._copies.pop(key, None)

    def _enter_disk(self, key: K, entry: _Entry) -> None:
        entry.on_disk = True
        self._num_disk += 1
        if entry.in_host:
            self._copies[key] = None
        else:
            self._settle_on_disk(key, entry)

    def _leave_disk(self, key: K, entry: _Entry) -> None:
        entry.on_disk = False
        self._num_disk -= 1
        self._copies.pop(key, None)

    def _settle_on_disk(self, key: K, entry: _Entry) -> None:
        """The page lives on disk alone: it may go from there, and may be wanted back."""
        self._file(key, entry)
        if self._window.is_near(key):
            self._want(key)

    def _want(self, key: K) -> None:
        when = self._next_use.get(key)
        assert when is not None, "near pages are waited for"
        heappush(self._wanted, (when, key))

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key)
        if entry.in_host:
            self._leave_host(key, entry)
        if entry.on_disk:
            self._leave_disk(key, entry)
        self._by_use.pop(key, None)

    def check(self) -> None:
        """Raise if the invariant is broken."""
        self._window.check()
        entries = self._entries
        host = {key for key, entry in entries.items() if entry.in_host}
        disk = {key for key, entry in entries.items() if entry.on_disk}
        assert len(host) == self._num_host <= self.config.host_pages, "host pages miscounted"
        assert len(disk) == self._num_disk <= self.config.disk_pages, "disk pages miscounted"
        assert host | disk == entries.keys(), "an entry is in no tier"
        assert self._copies.keys() == host & disk, "copies differ"
        for heap, keys in ((self._host, host), (self._disk, disk - host)):
            items = set(heap)
            for key in keys:
                entry = entries[key]
                assert (self._worth(key, entry), key) in items, "a page cannot leave"
        if self.config.ttl_s is not None:
            assert self._by_use.keys() == entries.keys(), "a page cannot expire"
            times = [entries[key].used_s for key in self._by_use]
            assert all(a <= b for a, b in zip(times, islice(times, 1, None), strict=False))
