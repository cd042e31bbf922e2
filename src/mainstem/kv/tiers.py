"""The tiers below the device; the policy decides which pages stay where.

Where the bytes of a stored page can be, and the copies between these places (tier 0 is host
memory):

    save ---> slot (filling) ---> slot (full) ---> lower tier (being written) ---> lower tier (full)
                                    ^  |                                              |
                                    |  `--> device: a load                            |
                                    `----------------- read: a load or a prefetch ----'

The policy says where a page should be; the bytes follow as soon as no copy uses them (`_settle`).
Copies count as `holds`, so a place is never reused during a copy. A page that moves from one lower
tier to the next passes through a slot, too. The engine's thread owns this object; copies and lower
tiers work on other threads, and `poll` collects their results.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
)
from mainstem.core.ids import PageKey
from mainstem.core.interrupts import held_interrupts
from mainstem.core.step import Int32s
from mainstem.kv.host import HostTier
from mainstem.kv.policy import HOST, Moves, PolicyConfig, TierPolicy
from mainstem.kv.questions import Questions
from mainstem.kv.ranking import PolicyKind
from mainstem.kv.stored import Arrivals, Entry, Load, Stored
from mainstem.kv.tier import Answer, LowerTier, Read, ReadJob, Tier, WriteJob, Written
from mainstem.kv.transfer import Link, LoadId, PageCopier

SLACK = 16  # 1/16 of the slots is reserved for copies in flight
READ_LIMIT_S = 5.0  # limit of a read, unless the request that needs it sets another
READ_AHEAD_S = 0.02  # no more work than this is queued in a tier by prefetches: loads come first
CHORE_S = 0.5  # between checks for expired pages and headroom
IN_HOST = 1 << HOST
NO_PAGES = np.empty(0, np.int32)


class LowerTiers:
    """Host memory and the tiers below it, fastest first. `copier` reaches the device."""

    def __init__(
        self,
        copier: PageCopier,
        kind: PolicyKind,
        ttl_s: float | None,
        below: Sequence[LowerTier],
        bus: EventBus,
    ) -> None:
        self._host = host = HostTier(copier)
        self._below: list[tuple[int, LowerTier]] = list(enumerate(below, HOST + 1))
        self._tiers: list[Tier] = [host, *below]
        self.links: list[Link] = [tier.link for tier in self._tiers]  # from each tier upwards
        self._bus = bus
        host_pages = max(1, host.num_places - 1 - host.num_places // SLACK)
        tier_pages = (host_pages, *(tier.num_places for tier in below))
        self._policy: TierPolicy[PageKey] = TierPolicy(PolicyConfig(tier_pages, kind, ttl_s=ttl_s))
        self._entries: dict[PageKey, Entry] = {}
        self._loads: list[Load] = []
        self._arrivals = Arrivals()  # what `poll` has not returned yet
        # if a tier cannot keep up, the oldest keys are dropped: by then their pages have left host
        # memory
        self._to_back_up = [deque[PageKey](maxlen=host.num_places) for _ in self._tiers]
        self._shared = [(number, tier) for number, tier in self._below if tier.is_shared]
        self._shared_names = {tier.name for _, tier in self._shared}  # no PagesStored for these
        self._in_shared = sum(1 << number for number, _ in self._shared)
        self.questions = Questions([tier for _, tier in self._shared])
        self._used: set[PageKey] = set()  # used pages that were not reported to lower tiers yet
        self._next_chore_s = 0.0
        for number, tier in self._below:
            self._recover(number, tier, ttl_s)

    @property
    def page_bytes(self) -> int:
        return self._host.page_bytes

    @property
    def num_layers(self) -> int:
        return self._host.num_layers

    def num_pages(self, name: str) -> int:
        """Pages in a tier; 0 if there is no such tier."""
        numbers = [n for n, tier in enumerate(self._tiers) if tier.name == name]
        return self._policy.num_pages(numbers[0]) if numbers else 0

    @property
    def num_copies(self) -> int:
        """Saves and loads in progress."""
        return self._host.num_saves + len(self._loads)

    @property
    def has_disk(self) -> bool:
        return len(self._below) > len(self._shared)

    @property
    def num_unsaved(self) -> int:
        """Pages of these tiers to be written to the disk, or being written."""
        own = [(number, tier) for number, tier in self._below if not tier.is_shared]
        return sum(len(self._to_back_up[number]) + tier.num_writes_pending for number, tier in own)

    @property
    def is_reading(self) -> bool:
        """Whether a load waits for a lower tier."""
        return any(load.transfer is None for load in self._loads)

    @property
    def num_pages_saving(self) -> int:
        return self._host.num_pages_saving

    def has(self, key: PageKey) -> bool:
        """Whether a page is stored or being saved. Pages that only shared tiers have do not
        count."""
        entry = self._entries.get(key)
        if entry is None or not self._in_shared:
            return entry is not None
        return entry.holds > 0 or bool(entry.full & ~self._in_shared)

    def find(self, keys: Iterable[PageKey]) -> Stored:
        """How many leading pages of `keys` could be loaded."""
        num_pages, below = 0, list[int]()
        entries = self._entries
        for key in keys:
            entry = entries.get(key)
            if entry is None or not (full := entry.full):
                break
            num_pages += 1
            if not full & IN_HOST:
                below.append(full)
        if not below:
            return Stored(num_pages)
        counts = [0] * len(self._tiers)
        for full, count in Counter(below).items():
            counts[_fastest(full)] += count
        return Stored(num_pages, tuple(counts[HOST + 1 :]))

    def stored_keys(self) -> dict[str, set[PageKey]]:
        """The pages that could be loaded, by tier, without shared tiers."""
        entries = self._entries.values()
        return {
            tier.name: {entry.key for entry in entries if entry.full >> number & 1}
            for number, tier in enumerate(self._tiers)
            if not self._in_shared >> number & 1
        }

    # --- the queue ------------------------------------------------------------------------------

    def expect(self, place: int, keys: Sequence[PageKey]) -> None:
        """Note that a request for `keys` entered the queue at `place`; a smaller place is served
        sooner. The pages that the request needs are prefetched."""
        self._policy.expect(place, keys, place)

    def dismiss(self, place: int) -> None:
        """Note that the request at this place left the queue."""
        self._policy.dismiss(place)

    def note_use(self, keys: Sequence[PageKey]) -> None:
        """Note that a chain was used on the device."""
        self._policy.note_use(keys, monotonic())
        if self._below:
            self._used.update(keys)

    # --- what other processes have ---------------------------------------------------------------

    def ask(self, keys: Sequence[PageKey]) -> PageKey | None:
        """Ask shared tiers for the pages of a chain after those that `find` counts; returns the key
        of the answer. None: there is no tier to ask, or no such page."""
        return self.questions.ask(keys[self.find(keys).num_pages :]) if self._shared else None

    def _take_answer(self, number: int, answer: Answer) -> None:
        """Add pages that a shared tier has: written by other processes, or by this one before it
        lost the connection."""
        if self.questions.note_answer(answer.asked):
            self._arrivals.answered.append(answer.asked)
        bit = 1 << number
        entries: list[Entry] = []
        for key in answer.keys:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, b"", None, is_recovered=True)
            if not entry.taken & bit:
                entry.taken |= bit
                entry.full |= bit
                entries.append(entry)
        # least recently used first: the head of a chain is evicted last
        moves = self._policy.recover(number, [e.key for e in reversed(entries)], monotonic())
        self._carry_out(moves, "room")
        for key in answer.keys:
            if (entry := self._entries.get(key)) is not None:
                self._settle(entry)

    def _empty(self, number: int) -> None:
        """Forget all pages of a tier."""
        there = [entry for entry in self._entries.values() if entry.taken >> number & 1]
        self._policy.drop_from(number, [entry.key for entry in there])
        for entry in there:
            self._settle(entry)

    # --- saving ---------------------------------------------------------------------------------

    def make_room(self, count: int) -> int:
        """Return how many of `count` pages can be saved now. To make room, pages that no request
        waits for leave host memory. If a lower tier has to write one first, its slot becomes free
        when the write ends."""
        if not self._below:
            return count
        num_free = self._host.num_free
        num_leaving = self._host.num_places - num_free - self._policy.num_pages(HOST)
        short = count - num_free - max(0, num_leaving)
        if short > 0:
            self._carry_out(self._policy.free_unwaited(short), "room")
        return min(count, self._host.num_free)

    def has_room(self, count: int) -> bool:
        """Whether to save now: `count` pages fit, or waiting would not free more slots."""
        if self._host.num_free >= count:
            return True
        is_writing = any(tier.num_writes_pending for _, tier in self._below)
        return not (self._host.num_saves or is_writing)

    def save(
        self,
        pages: Int32s,
        keys: Sequence[PageKey],
        after: Sequence[PageKey | None],
        token_ids: Sequence[bytes],
    ) -> Int32s:
        """Start copying device pages to host memory; returns the pages that are being copied.

        `keys` of one chain are in chain order; `after` names the page before each, None for the
        first. None of them is stored yet, except in a shared tier. No step depends on a save: a
        failed save is reported as skipped and may be tried again.
        """
        self._carry_out(self._policy.admit(keys, monotonic(), after), "room")
        kept: list[int] = []
        entries: list[Entry] = []
        refused = 0
        for index, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None:
                entry = Entry(key, token_ids[index], after[index])
            elif not self._policy.places(key) & ~entry.taken:
                continue  # a shared tier has the page, and the policy wants it in no other tier
            if key not in self._policy or not self._host.take(key):
                self._policy.drop([key])
                self._settle(entry)
                refused += 1
                continue
            entry.taken |= IN_HOST
            entry.holds += 1
            self._entries[key] = entry
            entries.append(entry)
            kept.append(index)
        if refused:
            self._bus.publish(SavesSkipped(refused, "host", "no room in host memory"))
        if not entries:
            return NO_PAGES
        copied = pages[kept]
        if not self._host.save([entry.key for entry in entries], copied):
            self._give_up_save(entries)
            return NO_PAGES
        for entry in entries:
            if self._policy.places(entry.key) != IN_HOST:  # it goes on to a lower tier
                self._place(entry)
        for number, _ in self._below:
            self._to_back_up[number].extend(entry.key for entry in entries)
        self._back_up()
        return copied

    def finish_saves(self) -> None:
        """Return when copies from the device are done, or have failed; `poll` says which."""
        self._host.flush()

    def _give_up_save(self, entries: Sequence[Entry]) -> None:
        self._bus.publish(SavesSkipped(len(entries), "host", "copy failed"))
        self._policy.drop([entry.key for entry in entries])
        for entry in entries:
            self._release(entry)

    # --- loading --------------------------------------------------------------------------------

    def load(
        self,
        load_id: LoadId,
        keys: Sequence[PageKey],
        pages: Int32s,
        start_layers: int,
        limit_s: float = READ_LIMIT_S,
    ) -> Load | None:
        """Start loading stored pages to the device: as many leading ones as have slots to read
        into. None: not even the first has one, the copy failed, or the last load that began with
        this page failed. A tier may cancel reads that take longer than `limit_s`."""
        entries = [self._entries[key] for key in keys]
        if entries[0].skips_load:
            entries[0].skips_load = False
            return None
        for entry in entries:
            entry.holds += 1
        short = sum(not entry.taken & IN_HOST for entry in entries) - self._host.num_free
        if short > 0:
            self._carry_out(self._policy.choose_victims(HOST, short), "room")
        count = self._num_with_slots(entries)
        for entry in entries[count:]:
            self._release(entry)
        if not count:
            return None
        keys, pages, entries = keys[:count], pages[:count], entries[:count]
        below = [_fastest(entry.full) for entry in entries if not entry.full & IN_HOST]
        num_below = {tier.name: below.count(number) for number, tier in self._below}
        self._read([entry for entry in entries if not entry.taken & IN_HOST], limit_s)
        load = Load(load_id, keys, pages, entries, start_layers, perf_counter(), num_below)
        self._host.link.start(len(pages) * self.page_bytes)
        self._loads.append(load)
        self._advance(load)
        if load.has_failed:
            self._end(load, None)
            return None
        return load

    def is_crowded(self, num_pages: int) -> bool:
        """Whether loads in progress use the slots that `num_pages` pages would need."""
        return self.is_reading and self._host.num_free < num_pages

    def _num_with_slots(self, entries: Sequence[Entry]) -> int:
        """How many leading entries have a slot or can be given one."""
        num_free = self._host.num_free
        for index, entry in enumerate(entries):
            num_free -= not entry.taken & IN_HOST
            if num_free < 0:
                return index
        return len(entries)

    def run_length(self, keys: Sequence[PageKey], most_read: int) -> int:
        """How many leading pages to load together: all that are in host memory; if the first is
        not, up to `most_read` that must be read first."""
        first = self._entries.get(keys[0])
        in_host = 0 if first is None else first.full & IN_HOST
        limit = len(keys) if in_host else min(len(keys), most_read)
        for index in range(1, limit):
            entry = self._entries.get(keys[index])
            if entry is not None and entry.full & IN_HOST != in_host:
                return index
        return limit

    def has_all(self, keys: Sequence[PageKey], token_ids: bytes) -> bool:
        """Whether all pages could be loaded and hold the tokens that their names stand for. A page
        with other tokens is dropped."""
        width = len(token_ids) // len(keys)
        for index, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or not entry.full:
                return False
            wanted = token_ids[index * width : (index + 1) * width]
            if not entry.token_ids:  # from a shared tier: the name alone guarantees the tokens
                entry.token_ids = wanted
            if entry.token_ids != wanted:
                slowest = self._tiers[entry.full.bit_length() - 1]
                self._bus.publish(PagesLost(1, slowest.name, "tokens"))
                self._policy.drop([key])
                self._settle(entry)
                return False
        return True

    # --- what came to an end --------------------------------------------------------------------

    def poll(self, lead_s: float = 0.0) -> Arrivals:
        """Collect copies that have ended, and start those that are ready. A step that is made now
        reads pages at the earliest in `lead_s` seconds."""
        self._poll_below()
        self._poll_saves()
        left_s = lead_s
        for load in list(self._loads):
            left_s = self._poll_load(load, left_s)
        self._back_up()
        now_s = monotonic()
        self._arrivals.answered += self.questions.take_late()
        if now_s >= self._next_chore_s:
            self._next_chore_s = now_s + CHORE_S
            self._expire(now_s)
            self._carry_out(self._policy.make_headroom(), "room")
            self._write_uses()
        arrivals, self._arrivals = self._arrivals, Arrivals()
        return arrivals

    def clear(self) -> int:
        """Forget every page that no copy uses; returns how many were forgotten."""
        keys = [entry.key for entry in self._entries.values() if not entry.holds]
        self._policy.drop(keys)
        for key in keys:
            self._settle(self._entries[key])
        return len(keys)

    def flush(self) -> None:
        """Return when every saved page is in all the tiers where the policy wants it."""
        self._host.flush()
        while any(self._to_back_up[n] or tier.num_writes_pending for n, tier in self._below):
            for _, tier in self._below:
                tier.flush()
            with held_interrupts():
                self._poll_below()
                self._back_up()
        self._write_uses()

    def end_soon(self) -> None:
        """`close` will be called: slow shared tiers may skip writes."""
        for _, tier in self._below:
            tier.end_soon()

    def close(self) -> None:
        """Finish saves and loads, and close the tiers."""
        self.end_soon()
        for load in self._loads:
            if load.transfer is not None:
                with suppress(Exception):  # no request needs the load any more
                    load.transfer.wait()
        self.flush()
        for tier in self._tiers:
            tier.close()

    def check(self) -> None:
        """Raise if a place was lost, or if bytes and policy disagree while no copy runs."""
        self._policy.check()
        in_slots = {key for key, entry in self._entries.items() if entry.taken & IN_HOST}
        self._host.check(in_slots)
        loading = [entry for load in self._loads for entry in load.entries]
        assert not any(entry.taken for entry in loading if entry.is_lost), "a lost page has a place"
        assert self._policy.keys() <= self._entries.keys(), "a page is nowhere"
        for key, entry in self._entries.items():
            assert entry.key == key, "an entry has another key"
            assert entry.holds >= 0, "negative hold count"
            assert not entry.full & ~entry.taken, "a page has bytes where it has no place"
            if entry.holds == 0:
                assert entry.full == entry.taken, "a place is taken and never filled"
                assert entry.full == self._policy.places(key), "bytes and policy disagree"

    # --- inside ---------------------------------------------------------------------------------

    def _recover(self, number: int, tier: LowerTier, ttl_s: float | None) -> None:
        """Take over the pages that an earlier process left in a tier."""
        found, bit = tier.recover(), 1 << number
        fresh = [page for page in found if ttl_s is None or page.used_at + ttl_s > time()]
        for page in found:
            entry = self._entries.get(page.key)
            if entry is None:
                entry = Entry(page.key, page.token_ids, None, is_recovered=True)
                self._entries[page.key] = entry
            entry.taken |= bit
            entry.full |= bit
        entries = [self._entries[page.key] for page in found]
        self._publish_stored(tier.name, entries)
        moves = self._policy.recover(number, [page.key for page in fresh], monotonic())
        for count, reason in ((len(found) - len(fresh), "ttl"), (len(moves.drop), "room")):
            if count:
                self._bus.publish(PagesEvicted(count, reason, tier.name))
        for entry in entries:
            self._settle(entry)
        if (opened := tier.opened(self._policy.num_pages(number))) is not None:
            self._bus.publish(opened)

    def _settle(self, entry: Entry) -> None:
        """Free the places of a page that the policy does not list. If a copy uses the page, this is
        done when the copy ends."""
        if entry.holds:
            return
        extra = entry.taken & ~self._policy.places(entry.key)
        if extra:
            self._free(entry, extra)
        if not entry.taken:
            self._entries.pop(entry.key, None)

    def _free(self, entry: Entry, places: int) -> None:
        """Give back the places of a page in some tiers."""
        for number, tier in enumerate(self._tiers):
            if places >> number & 1:
                tier.delete(entry.key)
                if entry.full >> number & 1:
                    self._publish_removed(tier.name, entry)
        entry.taken &= ~places
        entry.full &= ~places

    def _release(self, entry: Entry) -> None:
        """Note that a copy no longer uses the page."""
        entry.holds -= 1
        if not entry.is_lost:
            self._settle(entry)

    def _lose(self, entry: Entry, tier: Tier, reason: str) -> None:
        """Forget a page that a tier lost or damaged: it is a miss from now on."""
        # a server evicts pages by itself: that is no loss
        is_gone = reason == "missing" and tier.name in self._shared_names
        lost = PagesEvicted(1, "room", tier.name) if is_gone else PagesLost(1, tier.name, reason)
        self._bus.publish(lost)
        self._policy.drop([entry.key])
        entry.is_lost = True
        self._free(entry, entry.taken)
        del self._entries[entry.key]

    def _carry_out(self, moves: Moves[PageKey], reason: str) -> None:
        """Do what the policy decided."""
        if moves.drop:
            self._publish_dropped(moves.drop, reason)
        for keys in (moves.drop, moves.free):
            for key in keys:
                if (entry := self._entries.get(key)) is not None:
                    self._settle(entry)
        if moves.load:
            self._prefetch(moves.load)
        # writes come last: they may evict pages, but the pages to be read are held by now
        for key in moves.write:
            if (entry := self._entries.get(key)) is not None:
                self._place(entry)

    def _prefetch(self, keys: Sequence[PageKey]) -> None:
        """Read pages into slots; pages without a free slot stay in their lower tier."""
        # skip a page that has a slot: a copy already uses it
        entries = [e for key in keys if not (e := self._entries[key]).taken & IN_HOST]
        num_free = self._host.num_free
        self._read(entries[:num_free])
        self._policy.drop_from(HOST, [entry.key for entry in entries[num_free:]])

    def _publish_dropped(self, keys: Sequence[PageKey], reason: str) -> None:
        stored = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        slowest = [max(entry.full.bit_length() - 1, HOST) for entry in stored]
        for number, tier in reversed(list(enumerate(self._tiers))):
            if count := slowest.count(number):
                self._bus.publish(PagesEvicted(count, reason, tier.name))

    def _publish_stored(self, tier: str, entries: Sequence[Entry]) -> None:
        if entries and tier not in self._shared_names and self._bus.has_listeners(PagesStored):
            keys = [entry.key for entry in entries]
            token_ids = [b"" if entry.is_recovered else entry.token_ids for entry in entries]
            parents = [entry.parent for entry in entries]
            self._bus.publish(PagesStored(tier, keys, parents, token_ids))

    def _publish_removed(self, tier: str, entry: Entry) -> None:
        if tier not in self._shared_names and self._bus.has_listeners(PagesRemoved):
            self._bus.publish(PagesRemoved(tier, [entry.key]))

    def _place(self, entry: Entry) -> None:
        """Write a page, through a slot, to the lower tiers where the policy wants it."""
        missing = self._policy.places(entry.key) & ~entry.taken & ~IN_HOST
        if not missing:
            self._settle(entry)
        elif entry.taken & IN_HOST:
            after = self._host.filled(entry.key)
            if after is None and not entry.full & IN_HOST:
                return  # the page is being read: `_take_read` writes it afterwards
            for number, tier in self._below:
                if missing >> number & 1:
                    self._write(entry, number, tier, after)
        elif self._host.num_free:
            self._read([entry])
        else:
            self._policy.drop([entry.key])
            self._bus.publish(SavesSkipped(1, "host", "no room in host memory"))
            self._settle(entry)

    def _write(
        self, entry: Entry, number: int, tier: LowerTier, after: Callable[[], None] | None
    ) -> None:
        """Write a page from its slot to a lower tier; `after` waits until the slot is filled."""
        key = entry.key
        has_place = tier.take(key)
        if not has_place and tier.can_write:
            self._carry_out(self._policy.choose_victims(number, 1), "room")
            has_place = tier.take(key)
        if not has_place or not self._policy.places(key) >> number & 1:
            if has_place:
                tier.delete(key)
            reason = f"no room on {tier.name}" if tier.can_write else "not reachable, or full"
            self._keep_off(entry, number, reason)
            return
        entry.taken |= 1 << number
        entry.holds += 1
        tier.write(WriteJob(key, entry.token_ids, self._host.view(key), after))

    def _keep_off(self, entry: Entry, number: int, reason: str) -> None:
        """Forget that a page should be in a lower tier, because the write failed; its other copies
        stay."""
        self._bus.publish(SavesSkipped(1, self._tiers[number].name, reason))
        self._policy.drop_from(number, [entry.key])
        self._settle(entry)

    def _back_up(self) -> None:
        """Copy pages in host memory to lower tiers as well, so that they outlive the process."""
        for number, tier in self._below:
            waiting = self._to_back_up[number]
            if not tier.can_write:
                waiting.clear()
            # a write keeps its slot until it ends, and a slow server must not use all slots
            most = max(1, self._host.num_places // (8 if tier.is_shared else 2))
            while waiting and (room := most - tier.num_writes_pending) > 0:
                keys = [waiting.popleft() for _ in range(min(room, len(waiting)))]
                self._carry_out(self._policy.back_up(number, keys), "room")

    def _read(self, entries: Sequence[Entry], limit_s: float = READ_LIMIT_S) -> None:
        """Read each page from the fastest tier that has it; there must be enough slots."""
        jobs: dict[int, list[ReadJob]] = {}
        for entry in entries:
            key = entry.key
            has_slot = self._host.take(key)
            assert has_slot, "a page is read without a free slot"
            entry.taken |= IN_HOST
            entry.holds += 1
            jobs.setdefault(_fastest(entry.full), []).append(ReadJob(key, self._host.view(key)))
        for number, tier in self._below:
            if number in jobs:
                tier.link.start(sum(len(job.buffer) for job in jobs[number]))
                tier.read(jobs[number], limit_s)

    def _poll_below(self) -> None:
        num_read = 0
        for number, tier in self._below:
            num_written = 0
            for done in tier.poll():
                if isinstance(done, Written):
                    num_written += self._take_written(number, done)
                elif isinstance(done, Read):
                    num_read += self._take_read(tier, done)
                elif isinstance(done, Answer):
                    self._take_answer(number, done)
                else:
                    self._empty(number)
            if num_written:
                self._bus.publish(PagesSaved(num_written, tier.name))
        if num_read:
            self._bus.publish(PagesPrefetched(num_read))

    def _take_written(self, number: int, done: Written) -> bool:
        entry = self._entries[done.key]  # a page with a copy in progress is not forgotten
        if done.problem is None:
            entry.full |= 1 << number
            self._publish_stored(self._tiers[number].name, [entry])
            self._release(entry)
            return True
        entry.taken &= ~(1 << number)
        entry.holds -= 1
        self._keep_off(entry, number, done.problem)
        return False

    def _take_read(self, tier: LowerTier, done: Read) -> bool:
        """Handle the end of a read; returns whether it was a prefetch."""
        entry = self._entries[done.key]
        if done.problem is not None:
            tier.link.give_up(done.num_bytes)
            entry.holds -= 1
            self._lose(entry, tier, done.problem)
            return False
        tier.link.finish_between(done.num_bytes, done.began_s, done.ended_s)
        entry.full |= IN_HOST
        if done.token_ids is not None:
            entry.token_ids = done.token_ids
        self._publish_stored("host", [entry])
        if self._policy.places(entry.key) & ~entry.taken:  # the page moves on to another tier
            self._place(entry)
        self._release(entry)
        return entry.holds == 0

    def _poll_saves(self) -> None:
        num_saved = 0
        for save, is_good in self._host.poll_saves():
            self._arrivals.saved.append(save.pages)
            entries = [self._entries[key] for key in save.keys]
            if not is_good:
                self._give_up_save(entries)
                continue
            num_saved += len(entries)
            self._publish_stored("host", entries)
            for entry in entries:
                entry.full |= IN_HOST
                self._release(entry)
        if num_saved:
            self._bus.publish(PagesSaved(num_saved, "host"))

    def _poll_load(self, load: Load, left_s: float) -> float:
        """Check a load. `left_s` is the time until a step reads its pages. Loads are copied one
        after the other, so this returns the time that is left for the next load."""
        self._advance(load)
        num_done: int | None = 0
        if load.transfer is not None:
            num_done = self._host.num_layers_done(load.transfer)
        if load.has_failed or num_done is None:
            load.entries[0].skips_load = True
            return self._fail(load, left_s)
        if load.transfer is None:
            is_lost = any(entry.is_lost for entry in load.entries)
            return self._fail(load, left_s) if is_lost else left_s
        if num_done == self.num_layers:
            self._arrivals.loaded.append(load)
            self._end(load, load.transfer.seconds())
            self._publish_loaded(load)
            return left_s
        layer_s = self._host.link.pass_s(len(load.pages) * self.page_bytes) / self.num_layers
        if not load.is_startable and num_done + left_s / layer_s >= load.start_layers:
            load.is_startable = True
            self._arrivals.startable.append(load)
        return max(0.0, left_s - (self.num_layers - num_done) * layer_s)

    def _fail(self, load: Load, left_s: float) -> float:
        self._arrivals.failed.append(load)
        self._end(load, None)
        return left_s

    def _advance(self, load: Load) -> None:
        """Start the copy to the device once all pages of the load are in host memory."""
        if load.transfer is None and all(entry.full & IN_HOST for entry in load.entries):
            load.transfer = self._host.load(load.load_id, load.keys, load.pages)
            load.has_failed = load.transfer is None

    def _end(self, load: Load, seconds: float | None) -> None:
        self._loads.remove(load)
        self._host.forget(load.load_id)
        num_bytes = len(load.pages) * self.page_bytes
        if seconds is None:
            self._host.link.give_up(num_bytes)
        else:
            self._host.link.finish(num_bytes, seconds)
            self._carry_out(self._policy.keep(load.keys, monotonic()), "room")
        for entry in load.entries:
            self._release(entry)

    def _publish_loaded(self, load: Load) -> None:
        seconds = perf_counter() - load.began_s
        num_from_host = len(load.pages) - sum(load.num_below.values())
        counts = {"host": num_from_host} | load.num_below
        for tier, count in reversed(counts.items()):  # slowest first: the load waited for it
            if count:
                self._bus.publish(PagesLoaded(count, tier, seconds))
                seconds = 0.0

    def prefetch(self) -> None:
        """Read the pages that waiting requests need next into host memory, from tiers with little
        queued work."""
        if not self._below or self.is_reading or not self._policy.num_queued:
            return
        limits = [self._num_to_prefetch(tier.link) for _, tier in self._below]
        if any(limits):
            self._carry_out(self._policy.choose_prefetch(*limits), "room")

    def _num_to_prefetch(self, link: Link) -> int:
        idle_s = READ_AHEAD_S - link.expect_s(0)
        if idle_s <= 0:
            return 0
        return min(ceil(idle_s / link.pass_s(self.page_bytes)), self._host.num_free)

    def _expire(self, now_s: float) -> None:
        gone = self._policy.expire(now_s)
        if gone:
            self._publish_dropped(gone, "ttl")
            for key in gone:
                self._settle(self._entries[key])

    def _write_uses(self) -> None:
        """Report to lower tiers which of their pages were used."""
        if not self._used:
            return
        now = time()
        for number, tier in self._below:
            found = [key for key in self._used if self._policy.places(key) >> number & 1]
            if found:
                tier.touch(dict.fromkeys(found, now))
        self._used.clear()


def _fastest(places: int) -> int:
    """The number of the fastest of these tiers."""
    return (places & -places).bit_length() - 1
