"""The tiers below the device: host memory and disk behind the policy that decides who stays.

A stored page, its bytes and who uses them:

    save ---> slot (filling) ---> slot (full) ----> record (being written) ---> record (full)
                                    ^  |                                          |
                                    |  `--> device: a load                        |
                                    `---------------- read: a load or a prefetch -'

The policy says where a page should be; the bytes follow as soon as no copy uses them (`_settle`).
Copies count as `holds`, so a slot or record is never reused under one. Owned by the engine's
thread; copies and disk work go on elsewhere and are looked at in `poll`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import getLogger
from math import ceil
from time import monotonic, perf_counter, time

import numpy as np

from mainstem.core.events import (
    EventBus,
    PagesEvicted,
    PagesLoaded,
    PagesLost,
    PagesPrefetched,
    PagesRemoved,
    PagesSaved,
    PagesStored,
    SavesSkipped,
    StoreOpened,
)
from mainstem.core.ids import PageKey
from mainstem.core.interrupts import held_interrupts
from mainstem.core.step import Int32s
from mainstem.kv.bytes.disk import NUM_READERS, READ_RUN, DiskTier, Read, ReadJob, WriteJob, Written
from mainstem.kv.policy import Moves, PolicyConfig, PolicyKind, TierKind, TierPolicy
from mainstem.kv.transfer import Link, LoadId, PageCopier, SharedLink, Transfer

SLACK = 16  # one slot in so many is beyond what the policy gives away: copies under way need them
READ_AHEAD_S = 0.02  # reading ahead gives the disk so much to do: loads must not queue behind it
CHORE_S = 0.5  # between looks at what has expired
NO_PAGES = np.empty(0, np.int32)

log = getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """A page that is stored, or about to be."""

    key: PageKey
    token_ids: bytes
    parent: PageKey | None  # the page before it
    slot: int | None = None
    is_in_host: bool = False  # its slot is filled
    record: int | None = None
    is_on_disk: bool = False  # its record is committed
    crc32: int = 0
    holds: int = 0  # copies that use slot or record
    is_lost: bool = False
    skips_load: bool = False  # a load that began with it failed: whoever asks next computes it
    is_recovered: bool = False  # from disk, which does not know parents


@dataclass(slots=True, eq=False)
class Load:
    """Pages on their way to the device."""

    load_id: LoadId
    keys: Sequence[PageKey]
    pages: Int32s
    entries: list[_Entry]
    start_layers: int  # enough for a prompt to start on
    began_s: float
    num_from_disk: int
    transfer: Transfer | None = None  # None: still being read from disk
    is_startable: bool = False
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class _Save:
    pages: Int32s
    entries: list[_Entry]
    transfer: Transfer


@dataclass(slots=True)
class Arrivals:
    """What came to an end since the last look."""

    loaded: list[Load] = field(default_factory=list)
    failed: list[Load] = field(default_factory=list)
    startable: list[Load] = field(default_factory=list)  # not there yet, but soon enough
    saved: list[Int32s] = field(default_factory=list)  # device pages that were copied


@dataclass(frozen=True, slots=True)
class Stored:
    """The pages after a chain's device pages that lower tiers have."""

    num_pages: int = 0
    num_on_disk: int = 0  # of these, not in host memory


NOTHING_STORED = Stored()


class LowerTiers:
    """Host memory and disk. `copier` reaches the device; without `disk` there is none."""

    def __init__(
        self,
        copier: PageCopier,
        kind: PolicyKind,
        ttl_s: float | None,
        disk: DiskTier | None,
        bus: EventBus,
    ) -> None:
        self._copier = copier
        self._disk = disk
        self._bus = bus
        slack = 1 + copier.num_slots // SLACK
        disk_pages = 0 if disk is None else max(1, disk.num_records - 1 - disk.num_records // 64)
        host_pages = max(1, copier.num_slots - slack)
        self._policy: TierPolicy[PageKey] = TierPolicy(
            PolicyConfig(host_pages, disk_pages, kind, ttl_s=ttl_s)
        )
        self._entries: dict[PageKey, _Entry] = {}
        self._free_slots = list(range(copier.num_slots - 1, -1, -1))
        self._saves: list[_Save] = []
        self._loads: list[Load] = []
        self._arrivals = Arrivals()  # that nobody was told of yet
        self._filling: dict[PageKey, Transfer] = {}  # saves whose slot the writer must wait for
        self._to_back_up: deque[PageKey] = deque()
        self._max_pending_writes = max(1, copier.num_slots // 2)
        self._used: set[PageKey] = set()  # on disk, used since its row was last written
        self._next_chore_s = 0.0
        self.host_link = Link(20e9)
        self.disk_link = SharedLink(3e9, NUM_READERS * READ_RUN * copier.page_bytes)
        if disk is not None:
            self._recover(disk, ttl_s)

    @property
    def page_bytes(self) -> int:
        return self._copier.page_bytes

    @property
    def num_layers(self) -> int:
        return self._copier.num_layers

    @property
    def num_host_pages(self) -> int:
        return self._policy.num_host

    @property
    def num_disk_pages(self) -> int:
        return self._policy.num_disk

    @property
    def num_copies(self) -> int:
        """Saves and loads under way."""
        return len(self._saves) + len(self._loads)

    @property
    def is_reading(self) -> bool:
        """Whether a load waits for the disk."""
        return any(load.transfer is None for load in self._loads)

    @property
    def num_pages_saving(self) -> int:
        return sum(len(save.pages) for save in self._saves)

    def has(self, key: PageKey) -> bool:
        """Whether a page is stored or being saved."""
        return key in self._entries

    def find(self, keys: Iterable[PageKey]) -> Stored:
        """How many of `keys`, the leading ones, could be loaded."""
        num_pages = num_on_disk = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not (entry.is_in_host or entry.is_on_disk):
                break
            num_pages += 1
            num_on_disk += not entry.is_in_host
        return Stored(num_pages, num_on_disk)

    def stored_keys(self) -> dict[str, set[PageKey]]:
        """The pages that could be loaded, by tier."""
        entries = self._entries.values()
        found = {"host": {entry.key for entry in entries if entry.is_in_host}}
        if self._disk is not None:
            found["disk"] = {entry.key for entry in entries if entry.is_on_disk}
        return found

    # --- the queue ------------------------------------------------------------------------------

    def expect(self, place: int, keys: Sequence[PageKey]) -> None:
        """Somebody who wants `keys` waits, at a place of its own in the queue, small is soon; what
        it needs from disk is read ahead."""
        self._policy.expect(place, keys, place)

    def dismiss(self, place: int) -> None:
        """Who stood there waits no longer."""
        self._policy.dismiss(place)

    def note_use(self, keys: Sequence[PageKey]) -> None:
        """A chain was used on the device."""
        self._policy.note_use(keys, monotonic())
        if self._disk is not None:
            self._used.update(key for key in keys if self._policy.is_on_disk(key))

    # --- saving ---------------------------------------------------------------------------------

    def make_room(self, count: int) -> int:
        """How many of `count` pages can be saved now. Slots whose pages the disk has, or is about
        to have, are freed for them; some only when it has."""
        if self._disk is None:
            return count
        num_leaving = self._copier.num_slots - len(self._free_slots) - self._policy.num_host
        short = count - len(self._free_slots) - max(0, num_leaving)
        if short > 0:
            self._carry_out(self._policy.free_unwaited(short), "room")
        return min(count, len(self._free_slots))

    def has_room(self, count: int) -> bool:
        """Whether so many pages can be saved, or waiting would not make it more."""
        if len(self._free_slots) >= count:
            return True
        is_writing = self._disk is not None and self._disk.num_writes_pending > 0
        return not (self._saves or is_writing)

    def save(
        self,
        pages: Int32s,
        keys: Sequence[PageKey],
        after: Sequence[PageKey | None],
        token_ids: Sequence[bytes],
    ) -> Int32s:
        """Start copying device pages to host memory; returns those that are being copied.

        `keys` are in chain order where pages belong to one chain, each comes `after` another or is
        the first; none is stored yet. No step depends on a save: one that fails is told as skipped,
        and may be tried again.
        """
        moves = self._policy.admit(keys, monotonic(), after)
        self._carry_out(moves, "room")
        kept: list[int] = []
        entries: list[_Entry] = []
        refused = 0
        for index, key in enumerate(keys):
            slot = self._take_slot() if key in self._policy else None
            if slot is None:
                self._policy.drop([key])
                refused += 1
                continue
            entry = _Entry(key, token_ids[index], after[index], slot, holds=1)
            self._entries[key] = entry
            entries.append(entry)
            kept.append(index)
        if refused:
            self._bus.publish(SavesSkipped(refused, "host", "no room in host memory"))
        if not entries:
            return NO_PAGES
        copied = pages[kept]
        slots = np.array([entry.slot for entry in entries], np.int32)
        try:
            transfer = self._copier.save(copied, slots)
        except Exception as error:
            self._rest(error)
            self._give_up_save(entries)
            return NO_PAGES
        self._saves.append(_Save(copied, entries, transfer))
        for entry in entries:
            self._filling[entry.key] = transfer
            if self._policy.is_on_disk(entry.key):  # worth less than all in host memory
                self._write(entry)
        if self._disk is not None:
            self._to_back_up.extend(entry.key for entry in entries)
            self._back_up()
        return copied

    def _give_up_save(self, entries: Sequence[_Entry]) -> None:
        self._bus.publish(SavesSkipped(len(entries), "host", "copy failed"))
        self._policy.drop([entry.key for entry in entries])
        for entry in entries:
            self._release(entry)

    # --- loading --------------------------------------------------------------------------------

    def load(
        self, load_id: LoadId, keys: Sequence[PageKey], pages: Int32s, start_layers: int
    ) -> Load | None:
        """Start bringing stored pages to the device, the leading ones that there are slots to read
        into; None: there is not one, or copying fails."""
        entries = [self._entries[key] for key in keys]
        if entries[0].skips_load:
            entries[0].skips_load = False
            return None
        for entry in entries:
            entry.holds += 1
        short = sum(entry.slot is None for entry in entries) - len(self._free_slots)
        if short > 0:
            self._carry_out(self._policy.choose_victims(TierKind.HOST, short), "room")
        count = self._num_with_slots(entries)
        for entry in entries[count:]:
            self._release(entry)
        if not count:
            return None
        keys, pages, entries = keys[:count], pages[:count], entries[:count]
        num_from_disk = sum(not entry.is_in_host for entry in entries)
        missing = [entry for entry in entries if entry.slot is None]
        self._read([self._to_read(entry, self._free_slots.pop()) for entry in missing])
        load = Load(load_id, keys, pages, entries, start_layers, perf_counter(), num_from_disk)
        self.host_link.start(len(pages) * self.page_bytes)
        self._loads.append(load)
        self._advance(load)
        if load.has_failed:
            self._end(load, None)
            return None
        return load

    def is_crowded(self, num_pages: int) -> bool:
        """Whether loads under way have the slots that so many pages would be read into."""
        is_reading = any(load.transfer is None for load in self._loads)
        return is_reading and len(self._free_slots) < num_pages

    def _num_with_slots(self, entries: Sequence[_Entry]) -> int:
        """Leading entries that have a slot or can be given one."""
        num_free = len(self._free_slots)
        for index, entry in enumerate(entries):
            num_free -= entry.slot is None
            if num_free < 0:
                return index
        return len(entries)

    def run_length(self, keys: Sequence[PageKey], most_from_disk: int) -> int:
        """Leading pages that are loaded together: all in host memory, or some from disk."""
        first = self._entries.get(keys[0])
        in_host = first is not None and first.is_in_host
        limit = len(keys) if in_host else min(len(keys), most_from_disk)
        for index in range(1, limit):
            entry = self._entries.get(keys[index])
            if entry is not None and entry.is_in_host != in_host:
                return index
        return limit

    def has_all(self, keys: Sequence[PageKey], token_ids: bytes) -> bool:
        """Whether all pages could be loaded and are of the tokens that their names stand for; one
        that is of others goes."""
        width = len(token_ids) // len(keys)
        for index, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or not (entry.is_in_host or entry.is_on_disk):
                return False
            if entry.token_ids != token_ids[index * width : (index + 1) * width]:
                self._bus.publish(PagesLost(1, "disk" if entry.is_on_disk else "host", "tokens"))
                self._policy.drop([key])
                self._settle(entry)
                return False
        return True

    # --- what came to an end --------------------------------------------------------------------

    def poll(self, lead_s: float = 0.0) -> Arrivals:
        """Look at everything under way; start what can go on. Whoever starts now reads pages in
        `lead_s` at the earliest."""
        if self._disk is not None:
            self._poll_disk(self._disk)
        self._poll_saves()
        left_s = lead_s
        for load in list(self._loads):
            left_s = self._poll_load(load, left_s)
        if self._disk is not None:
            self._back_up()
        now_s = monotonic()
        if now_s >= self._next_chore_s:
            self._next_chore_s = now_s + CHORE_S
            self._expire(now_s)
            self._carry_out(self._policy.make_headroom(), "room")
            self._write_uses()
        arrivals, self._arrivals = self._arrivals, Arrivals()
        return arrivals

    def clear(self) -> int:
        """Forget every page that no copy uses; returns how many."""
        keys = [entry.key for entry in self._entries.values() if not entry.holds]
        self._policy.drop(keys)
        for key in keys:
            self._settle(self._entries[key])
        return len(keys)

    def flush(self) -> None:
        """Return when everything that was saved is where it belongs, on disk included."""
        for save in self._saves:
            with suppress(Exception):  # `poll` finds out
                save.transfer.wait()
        if self._disk is None:
            return
        while self._to_back_up or self._disk.num_writes_pending:
            self._disk.flush()
            with held_interrupts():
                self._poll_disk(self._disk)
                self._back_up()
        self._write_uses()

    def close(self) -> None:
        """Finish saves and loads, and let the folder go."""
        for load in self._loads:
            if load.transfer is not None:
                with suppress(Exception):  # nobody wants it any more
                    load.transfer.wait()
        self.flush()
        self._copier.close()
        if self._disk is not None:
            self._disk.close()

    def check(self) -> None:
        """Raise if a slot or record was lost, or bytes and policy disagree at rest."""
        self._policy.check()
        slots = [entry.slot for entry in self._entries.values() if entry.slot is not None]
        assert len(set(slots)) == len(slots), "two pages in one slot"
        lost = {e.slot for load in self._loads for e in load.entries if e.is_lost}
        assert not lost - {None}, "a lost page keeps a slot"
        used, free = set(slots), set(self._free_slots)
        assert len(free) == len(self._free_slots), "a slot is free twice"
        assert not used & free, "a slot is both free and used"
        assert len(used) + len(free) == self._copier.num_slots, "a slot was lost"
        records = [entry.record for entry in self._entries.values() if entry.record is not None]
        assert len(set(records)) == len(records), "two pages in one record"
        assert self._policy.keys() <= self._entries.keys(), "a page is nowhere"
        for key, entry in self._entries.items():
            assert entry.key == key, "a page answers to another key"
            assert entry.holds >= 0, "a page is held less than not at all"
            assert not entry.is_in_host or entry.slot is not None, "a page in no slot"
            assert not entry.is_on_disk or entry.record is not None, "a page in no record"
            if entry.holds == 0:
                in_host = self._policy.tier_of(key) is TierKind.HOST
                assert entry.is_in_host == in_host, "host memory and policy disagree"
                assert entry.is_on_disk == self._policy.is_on_disk(key), "disk, policy disagree"

    # --- inside ---------------------------------------------------------------------------------

    def _recover(self, disk: DiskTier, ttl_s: float | None) -> None:
        """Take over what an earlier process left on disk."""
        fresh = [row for row in disk.rows if ttl_s is None or row.used_at + ttl_s > time()]
        for row in disk.rows:
            self._entries[row.key] = _Entry(
                row.key,
                row.token_ids,
                None,
                record=row.record,
                is_on_disk=True,
                crc32=row.crc32,
                is_recovered=True,
            )
        self._tell_stored("disk", list(self._entries.values()))
        moves = self._policy.recover([row.key for row in fresh], monotonic())
        num_old = len(disk.rows) - len(fresh)
        if moves.drop or num_old:
            self._bus.publish(PagesEvicted(len(moves.drop) + num_old, "ttl", "disk"))
        for row in disk.rows:
            if row.key not in self._policy:
                self._settle(self._entries[row.key])
        self._bus.publish(
            StoreOpened(str(disk.folder), len(self._policy), disk.found, dict(+disk.lost))
        )
        disk.rows = []

    def _take_slot(self) -> int | None:
        return self._free_slots.pop() if self._free_slots else None

    def _settle(self, entry: _Entry) -> None:
        """Bring bytes in line with the policy, unless a copy uses them: then it happens later."""
        if entry.holds:
            return
        if entry.slot is not None and self._policy.tier_of(entry.key) is not TierKind.HOST:
            self._free_slots.append(entry.slot)
            if entry.is_in_host:
                self._tell_removed("host", entry)
            entry.slot, entry.is_in_host = None, False
        if entry.record is not None and not self._policy.is_on_disk(entry.key):
            assert self._disk is not None
            self._disk.delete([entry.key])
            self._disk.give_back_record(entry.record)
            if entry.is_on_disk:
                self._tell_removed("disk", entry)
            entry.record, entry.is_on_disk = None, False
        if entry.slot is None and entry.record is None:
            self._entries.pop(entry.key, None)

    def _release(self, entry: _Entry) -> None:
        """A copy no longer uses the page."""
        entry.holds -= 1
        if not entry.is_lost:
            self._settle(entry)

    def _lose(self, entry: _Entry, reason: str) -> None:
        """A tier did not give back what it was given: the page is a miss from here on."""
        tier = "disk" if entry.is_on_disk else "host"
        self._bus.publish(PagesLost(1, tier, reason))
        self._policy.drop([entry.key])
        entry.is_lost = True
        if entry.slot is not None:
            self._free_slots.append(entry.slot)
        if entry.record is not None:
            assert self._disk is not None
            self._disk.delete([entry.key])
            self._disk.give_back_record(entry.record)
        if entry.is_in_host:
            self._tell_removed("host", entry)
        if entry.is_on_disk:
            self._tell_removed("disk", entry)
        entry.slot = entry.record = None
        entry.is_in_host = entry.is_on_disk = False
        del self._entries[entry.key]

    def _carry_out(self, moves: Moves[PageKey], reason: str) -> None:
        """Do what the policy decided."""
        if moves.drop:
            self._tell_dropped(moves.drop, reason)
        for keys in (moves.drop, moves.release, moves.forget):
            for key in keys:
                if (entry := self._entries.get(key)) is not None:
                    self._settle(entry)
        jobs: list[ReadJob] = []
        without_slot: list[PageKey] = []  # copies under way have the spare ones: they stay on disk
        for key in moves.load:
            entry = self._entries[key]
            if entry.slot is not None:  # a copy that is under way has read it
                continue
            slot = self._take_slot()
            if slot is None:
                without_slot.append(key)
            else:
                jobs.append(self._to_read(entry, slot))
        self._read(jobs)
        for key in without_slot:
            self._policy.drop([key])
            self._carry_out(self._policy.recover([key], monotonic()), "room")
        # last, since room on disk may be made from what is read, which is held here
        for key in moves.write:
            if (entry := self._entries.get(key)) is not None and entry.record is None:
                self._write(entry)

    def _tell_dropped(self, keys: Sequence[PageKey], reason: str) -> None:
        stored = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        num_on_disk = sum(entry.is_on_disk for entry in stored)
        for count, tier in ((num_on_disk, "disk"), (len(stored) - num_on_disk, "host")):
            if count:
                self._bus.publish(PagesEvicted(count, reason, tier))

    def _tell_stored(self, tier: str, entries: Sequence[_Entry]) -> None:
        if entries and self._bus.has_listeners(PagesStored):
            keys = [entry.key for entry in entries]
            token_ids = [b"" if entry.is_recovered else entry.token_ids for entry in entries]
            parents = [entry.parent for entry in entries]
            self._bus.publish(PagesStored(tier, keys, parents, token_ids))

    def _tell_removed(self, tier: str, entry: _Entry) -> None:
        if self._bus.has_listeners(PagesRemoved):
            self._bus.publish(PagesRemoved(tier, [entry.key]))

    def _write(self, entry: _Entry) -> None:
        """Give a page in a slot, filled or filling, to the disk."""
        assert self._disk is not None
        assert entry.slot is not None
        record = self._disk.take_record()
        if record is None:
            self._carry_out(self._policy.choose_victims(TierKind.DISK, 1), "room")
            record = self._disk.take_record()
        if record is None or not self._policy.is_on_disk(entry.key):
            if record is not None:
                self._disk.give_back_record(record)
            self._keep_off_disk(entry, "no room on disk")
            return
        entry.record = record
        entry.holds += 1
        filling = self._filling.get(entry.key)
        self._disk.write(
            WriteJob(
                entry.key,
                record,
                entry.token_ids,
                self._copier.slot(entry.slot),
                None if filling is None else filling.wait,
            )
        )

    def _keep_off_disk(self, entry: _Entry, reason: str) -> None:
        """A page did not reach the disk; in host memory it stays if it was to be there."""
        self._bus.publish(SavesSkipped(1, "disk", reason))
        in_host = self._policy.tier_of(entry.key) is TierKind.HOST
        self._policy.drop([entry.key])
        if in_host:
            self._carry_out(self._policy.admit([entry.key], monotonic()), "room")
        self._settle(entry)

    def _back_up(self) -> None:
        """Have what is in host memory on disk too, so that it outlives the process."""
        disk = self._disk
        assert disk is not None
        while self._to_back_up and disk.num_writes_pending < self._max_pending_writes:
            key = self._to_back_up.popleft()
            if key not in self._entries:
                continue
            moves = self._policy.back_up([key])
            self._carry_out(moves, "room")

    def _to_read(self, entry: _Entry, slot: int) -> ReadJob:
        """A page's way into a slot, for `_read`."""
        assert entry.record is not None
        entry.slot = slot
        entry.holds += 1
        return ReadJob(entry.key, entry.record, entry.crc32, self._copier.slot(slot))

    def _read(self, jobs: list[ReadJob]) -> None:
        if jobs:
            assert self._disk is not None
            self.disk_link.start(sum(len(job.buffer) for job in jobs))
            self._disk.read(jobs)

    def _poll_disk(self, disk: DiskTier) -> None:
        num_written = num_read = 0
        for done in disk.poll():
            entry = self._entries.get(done.key)
            if isinstance(done, Written):
                assert entry is not None, "a page under way is not forgotten"
                num_written += self._take_written(entry, done)
            else:
                num_read += self._take_read(entry, done)
        if num_written:
            self._bus.publish(PagesSaved(num_written, "disk"))
        if num_read:
            self._bus.publish(PagesPrefetched(num_read))

    def _take_written(self, entry: _Entry, done: Written) -> bool:
        assert entry.record is not None
        if done.problem is None:
            entry.is_on_disk, entry.crc32 = True, done.crc32
            self._tell_stored("disk", [entry])
            self._release(entry)
            return True
        assert self._disk is not None
        self._disk.give_back_record(entry.record)
        entry.record = None
        entry.holds -= 1
        self._keep_off_disk(entry, done.problem)
        return False

    def _take_read(self, entry: _Entry | None, done: Read) -> bool:
        """Whether the page was read for nobody in particular yet."""
        assert entry is not None, "a page under way is not forgotten"
        if done.problem is not None:
            self.disk_link.give_up(done.num_bytes)
            entry.holds -= 1
            self._lose(entry, done.problem)
            return False
        self.disk_link.finish_between(done.num_bytes, done.began_s, done.ended_s)
        entry.is_in_host = True
        self._tell_stored("host", [entry])
        self._release(entry)
        return entry.holds == 0

    def _poll_saves(self) -> None:
        """Saves end in the order they were started."""
        num_saved = 0
        while self._saves:
            save = self._saves[0]
            num_done = self._num_layers_done(save.transfer)
            if num_done is not None and num_done < self.num_layers:
                break
            self._saves.pop(0)
            self._arrivals.saved.append(save.pages)
            for entry in save.entries:
                if self._filling.get(entry.key) is save.transfer:
                    del self._filling[entry.key]
            if num_done is None:
                self._give_up_save(save.entries)
                continue
            num_saved += len(save.entries)
            self._tell_stored("host", save.entries)
            for entry in save.entries:
                entry.is_in_host = True
                self._release(entry)
        if num_saved:
            self._bus.publish(PagesSaved(num_saved, "host"))

    def _poll_load(self, load: Load, left_s: float) -> float:
        """`left_s` is how long its copy can go on before anybody reads it; loads are copied one
        after the other, so the next has what this one leaves."""
        self._advance(load)
        num_done: int | None = 0
        if load.transfer is not None:
            num_done = self._num_layers_done(load.transfer)
        if load.has_failed or num_done is None:
            load.entries[0].skips_load = True
            return self._fail(load, left_s)
        if load.transfer is None:
            is_lost = any(entry.is_lost for entry in load.entries)
            return self._fail(load, left_s) if is_lost else left_s
        if num_done == self.num_layers:
            self._arrivals.loaded.append(load)
            self._end(load, load.transfer.seconds())
            self._tell_loaded(load)
            return left_s
        layer_s = self.host_link.pass_s(len(load.pages) * self.page_bytes) / self.num_layers
        if not load.is_startable and num_done + left_s / layer_s >= load.start_layers:
            load.is_startable = True
            self._arrivals.startable.append(load)
        return max(0.0, left_s - (self.num_layers - num_done) * layer_s)

    def _fail(self, load: Load, left_s: float) -> float:
        self._arrivals.failed.append(load)
        self._end(load, None)
        return left_s

    def _advance(self, load: Load) -> None:
        """Copy to the device once everything is in host memory."""
        if load.transfer is None and all(entry.is_in_host for entry in load.entries):
            slots = np.array([entry.slot for entry in load.entries], np.int32)
            try:
                load.transfer = self._copier.load(load.load_id, slots, load.pages)
            except Exception as error:
                self._rest(error)
                load.has_failed = True

    def _num_layers_done(self, transfer: Transfer) -> int | None:
        """None: the copy failed, and is at rest."""
        try:
            return transfer.num_layers_done()
        except Exception as error:
            self._rest(error)
            return None

    def _rest(self, error: Exception) -> None:
        """A copy failed: its pages and slots are anybody's once nothing moves."""
        log.warning("a copy of pages failed", exc_info=error)
        with suppress(Exception):  # a device that is lost says so to the next step
            self._copier.drain()

    def _end(self, load: Load, seconds: float | None) -> None:
        self._loads.remove(load)
        self._copier.forget(load.load_id)
        num_bytes = len(load.pages) * self.page_bytes
        if seconds is None:
            self.host_link.give_up(num_bytes)
        else:
            self.host_link.finish(num_bytes, seconds)
            self._carry_out(self._policy.keep(load.keys, monotonic()), "room")
        for entry in load.entries:
            self._release(entry)

    def _tell_loaded(self, load: Load) -> None:
        seconds = perf_counter() - load.began_s
        num_from_host = len(load.pages) - load.num_from_disk
        for count, tier in ((num_from_host, "host"), (load.num_from_disk, "disk")):
            if count:
                self._bus.publish(PagesLoaded(count, tier, seconds))

    def prefetch(self) -> None:
        """Read from disk what waiting requests will need next, while the disk has little to do."""
        idle_s = READ_AHEAD_S - self.disk_link.expect_s(0)
        if self._disk is None or idle_s <= 0 or self.is_reading or not self._policy.num_queued:
            return
        room = min(ceil(idle_s / self.disk_link.pass_s(self.page_bytes)), len(self._free_slots))
        if room:
            self._carry_out(self._policy.choose_prefetch(room), "room")

    def _expire(self, now_s: float) -> None:
        gone = self._policy.expire(now_s)
        if gone:
            self._tell_dropped(gone, "ttl")
            for key in gone:
                self._settle(self._entries[key])

    def _write_uses(self) -> None:
        if self._used and self._disk is not None:
            now = time()
            self._disk.touch(dict.fromkeys(self._used, now))
            self._used.clear()
