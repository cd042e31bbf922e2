"""The stack of tiers below the device: what moves between host memory and the tiers below it.

Where the bytes of a stored page can be, and the copies between these places:

    save ---> slot (filling) ---> slot (full) ---> lower tier (being written) ---> lower tier (full)
                                    ^  |                                              |
                                    |  `--> device: a load                            |
                                    `----------------- read: a load or a prefetch ----'

The policy says where a page should be; the bytes follow as soon as no copy uses them (`settle`).
Copies count as `holds`, so a place is never reused during a copy. A page that moves from one lower
tier to the next passes through a slot, too. Copies from the device are in kv/saving.py, copies to
it in kv/loading.py. The engine's thread owns these objects; copies and lower tiers work on other
threads, and `poll` collects their results.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic, time

from mainstem.core import events
from mainstem.core.ids import PageKey
from mainstem.kv.host import HostTier
from mainstem.kv.places import HOST, IN_HOST, Moves, PageTable, StoredPage, fastest
from mainstem.kv.policy import PolicyConfig, TierPolicy
from mainstem.kv.tier import Answer, LowerTier, Read, ReadJob, Tier, WriteJob, Written
from mainstem.kv.transfer import PageCopier, TierLink

Page = StoredPage[PageKey]

MAX_DAMAGED = 256  # remembered pages that could not be read
SLACK = 16  # 1/16 of the slots is reserved for copies in flight
CHORE_S = 0.5  # between checks for expired pages and headroom
READ_LIMIT_S = 5.0  # limit of a read, unless the request that needs it sets another


class TierStack:
    """Host memory and the tiers below it, fastest first, and the pages in them."""

    host: HostTier  # not set without tiers

    def __init__(
        self,
        bus: events.EventBus,
        copier: PageCopier | None = None,
        below: Sequence[LowerTier] = (),
        policy: str = "lookahead",
        ttl_s: float | None = None,
    ) -> None:
        """`copier` reaches the device; None: there are no tiers below it."""
        self._bus = bus
        self.tiers: tuple[Tier, ...] = ()
        self.page_bytes = self.num_layers = host_pages = 0
        if copier is not None:
            self.host = host = HostTier(copier)
            self.tiers = (host, *below)
            self.page_bytes, self.num_layers = host.page_bytes, host.num_layers
            host_pages = max(1, host.num_places - 1 - host.num_places // SLACK)
        self.below: tuple[tuple[int, LowerTier], ...] = tuple(enumerate(below, HOST + 1))
        self.links: list[TierLink] = [tier.link for tier in self.tiers]  # upwards from each tier
        tier_pages = (host_pages, *(tier.num_places for tier in below))
        self.policy: TierPolicy[PageKey] = TierPolicy(PolicyConfig(tier_pages, policy, ttl_s=ttl_s))
        self.pages: PageTable[PageKey] = self.policy.table
        self.on_answer: Callable[[int, Answer], None] = lambda *_: None  # of a shared tier
        self.damaged: dict[PageKey, None] = {}  # pages that could not be read, the latest last
        self._next_chore_s = 0.0
        self._used: set[PageKey] = set()  # used pages that were not reported to lower tiers yet
        self._in_shared = sum(1 << number for number, tier in self.below if tier.is_shared)
        for number, tier in self.below:
            self._recover(number, tier, ttl_s)

    # --- what is where --------------------------------------------------------------------------

    def is_shared(self, number: int) -> bool:
        """Whether other processes use a tier, too. Its pages are not reported as ours."""
        return bool(self._in_shared >> number & 1)

    def num_pages(self, name: str) -> int:
        """Pages in a tier; 0 if there is no such tier."""
        named = [number for number, tier in enumerate(self.tiers) if tier.name == name]
        return sum(map(self.policy.num_pages, named))

    def has(self, key: PageKey) -> bool:
        """Whether a page is stored or being saved. Pages that only shared tiers have do not
        count."""
        page = self.pages.get(key)
        if page is None:
            return False
        places = page.full & ~self._in_shared if self._in_shared else page.taken
        return page.holds > 0 or places != 0

    def stored_keys(self) -> dict[str, set[PageKey]]:
        """The pages that could be loaded, by tier, without shared tiers."""
        pages = self.pages.all()
        return {
            tier.name: {p.key for p in pages if p.full >> number & 1 and not p.is_piece}
            for number, tier in enumerate(self.tiers)
            if not self.is_shared(number)
        }

    # --- a page's places ------------------------------------------------------------------------

    def settle(self, page: Page) -> None:
        """Free the places of a page that the policy does not list. If a copy uses the page, this is
        done when the copy ends."""
        if page.holds:
            return
        if extra := page.taken & ~page.wanted:
            self._free(page, extra)
        if not page.taken:
            self.pages.forget(page)

    def release(self, page: Page) -> None:
        """Note that a copy no longer uses the page."""
        self.release_all((page,))

    def release_all(self, pages: Iterable[Page]) -> None:
        """Note that a copy no longer uses any of these pages."""
        for page in pages:
            page.holds -= 1
            is_settled = page.taken == page.wanted and page.taken
            if not (is_settled or page.is_lost):
                self.settle(page)

    def drop(self, pages: Sequence[Page]) -> None:
        """Forget pages as soon as no copy uses them."""
        self.policy.drop([page.key for page in pages])
        for page in pages:
            self.settle(page)

    def empty(self, number: int) -> None:
        """Forget all pages of a tier."""
        there = [page for page in self.pages.all() if page.taken >> number & 1]
        self.policy.drop_from(number, [page.key for page in there])
        for page in there:
            self.settle(page)

    def clear(self) -> None:
        """Forget every page that no copy uses."""
        self.drop([page for page in self.pages.all() if not page.holds])

    def do_chores(self) -> None:
        """Now and then: drop expired pages, keep some slots free, and report uses."""
        now_s = monotonic()
        if now_s < self._next_chore_s:
            return
        self._next_chore_s = now_s + CHORE_S
        if gone := self.policy.expire(now_s):
            self._publish_dropped(gone, "ttl")
            for key in gone:
                self.settle(self.pages[key])
        self.carry_out(self.policy.make_headroom())
        self.write_uses()

    def note_use(self, keys: Sequence[PageKey]) -> None:
        """Note that a chain was used on the device."""
        self.policy.note_use(keys, monotonic())
        if self.below:
            self._used.update(keys)

    def write_uses(self) -> None:
        """Report to lower tiers which of their pages were used."""
        if not self._used:
            return
        now = time()
        for number, tier in self.below:
            found = [key for key in self._used if self.policy.places(key) >> number & 1]
            if found:
                tier.touch(dict.fromkeys(found, now))
        self._used.clear()

    def _free(self, page: Page, places: int) -> None:
        """Give back the places of a page in some tiers."""
        for number, tier in enumerate(self.tiers):
            if places >> number & 1:
                tier.delete(page.key)
                is_told = page.full >> number & 1 and not self.is_shared(number)
                if is_told and not page.is_piece and self._bus.has_listeners(events.PagesRemoved):
                    self._bus.publish(events.PagesRemoved(tier.name, [page.key]))
        page.taken &= ~places
        page.full &= ~places

    def _lose(self, page: Page, number: int, reason: str) -> None:
        """Forget a page that a tier lost or damaged: it is a miss from now on."""
        name = self.tiers[number].name
        # a server evicts pages by itself: that is no loss
        is_gone = reason == "missing" and self.is_shared(number)
        self._bus.publish(
            events.PagesEvicted(1, "room", name) if is_gone else events.PagesLost(1, name, reason)
        )
        self.policy.drop([page.key])
        page.is_lost = True
        self.damaged[page.key] = None
        if len(self.damaged) > MAX_DAMAGED:
            del self.damaged[next(iter(self.damaged))]
        self._free(page, page.taken)
        self.pages.forget(page)

    def _recover(self, number: int, tier: LowerTier, ttl_s: float | None) -> None:
        """Take over the pages that an earlier process left in a tier."""
        found = tier.recover()
        fresh = [page for page in found if ttl_s is None or page.used_at + ttl_s > time()]
        pages = [self.pages.found(page.key, number, page.token_ids) for page in found]
        self.publish_stored(number, pages)
        moves = self.policy.recover(number, [page.key for page in fresh], monotonic())
        self.policy.drop(moves.write)  # it has no room; they are not copied to a slower tier
        num_dropped = len(moves.drop) + len(moves.write)
        for count, reason in ((len(found) - len(fresh), "ttl"), (num_dropped, "room")):
            if count:
                self._bus.publish(events.PagesEvicted(count, reason, tier.name))
        for page in pages:
            self.settle(page)
        if (opened := tier.opened(self.policy.num_pages(number))) is not None:
            self._bus.publish(opened)

    # --- moves ----------------------------------------------------------------------------------

    def carry_out(self, moves: Moves[PageKey], reason: str = "room") -> None:
        """Do what the policy decided."""
        if moves.drop:
            self._publish_dropped(moves.drop, reason)
        for keys in (moves.drop, moves.free):
            for page in self._known(keys):
                self.settle(page)
        if moves.load:
            # skip a page that has a slot: a copy already uses it
            pages = [page for page in self._known(moves.load) if not page.taken & IN_HOST]
            num_free = self.host.num_free  # pages without a slot stay in their lower tier
            self.read(pages[:num_free])
            self.policy.drop_from(HOST, [page.key for page in pages[num_free:]])
        # writes come last: they may evict pages, but the pages to be read are held by now
        for page in self._known(moves.write):
            if page.taken:  # a page without bytes is about to be saved (kv/saving.py)
                self.place(page)

    def _known(self, keys: Sequence[PageKey]) -> Iterator[Page]:
        return (page for key in keys if (page := self.pages.get(key)) is not None)

    def place(self, page: Page) -> None:
        """Write a page, through a slot, to the lower tiers where the policy wants it."""
        missing = page.wanted & ~page.taken & ~IN_HOST
        if not missing:
            self.settle(page)
        elif page.taken & IN_HOST:
            after = self.host.filled(page.key)
            if after is None and not page.full & IN_HOST:
                return  # the page is being read: `_end_read` writes it afterwards
            for number, tier in self.below:
                if missing >> number & 1:
                    self._write(page, number, tier, after)
        elif self.host.num_free:
            self.read([page])
        else:
            self._bus.publish(events.SavesSkipped(1, "host", "no room in host memory"))
            self.drop([page])

    def _write(
        self, page: Page, number: int, tier: LowerTier, after: Callable[[], None] | None
    ) -> None:
        """Write a page from its slot to a lower tier; `after` waits until the slot is filled."""
        key = page.key
        has_place = tier.take_place(key)
        if not has_place and tier.can_write:
            self.carry_out(self.policy.choose_victims(number, 1))
            has_place = tier.take_place(key)
        if not has_place or not page.wanted >> number & 1:
            if has_place:
                tier.delete(key)
            reason = f"no room on {tier.name}" if tier.can_write else "not reachable, or full"
            self._keep_off(page, number, reason)
            return
        page.taken |= 1 << number
        page.holds += 1
        tier.write(WriteJob(key, page.token_ids, self.host.view(key), after))

    def _keep_off(self, page: Page, number: int, reason: str) -> None:
        """Forget that a page should be in a lower tier, because the write failed; its other copies
        stay."""
        self._bus.publish(events.SavesSkipped(1, self.tiers[number].name, reason))
        self.policy.drop_from(number, [page.key])
        self.settle(page)

    def read(self, pages: Sequence[Page], limit_s: float = READ_LIMIT_S) -> None:
        """Read each page from the fastest tier that has it; there must be enough slots."""
        jobs: dict[int, list[ReadJob]] = {}
        for page in pages:
            has_slot = self.host.take_place(page.key)
            assert has_slot, "a page is read without a free slot"
            page.taken |= IN_HOST
            page.holds += 1
            job = ReadJob(page.key, self.host.view(page.key))
            jobs.setdefault(fastest(page.full), []).append(job)
        for number, tier in self.below:
            if number in jobs:
                tier.link.start(sum(len(job.buffer) for job in jobs[number]))
                tier.read(jobs[number], limit_s)

    def poll(self) -> None:
        """Collect what lower tiers have done."""
        num_read = 0
        for number, tier in self.below:
            num_written = 0
            for done in tier.poll():
                if isinstance(done, Written):
                    num_written += self._end_write(number, done)
                elif isinstance(done, Read):
                    num_read += self._end_read(number, tier, done)
                elif isinstance(done, Answer):
                    self.on_answer(number, done)
                else:
                    self.empty(number)
            if num_written:
                self._bus.publish(events.PagesSaved(num_written, tier.name))
        if num_read:
            self._bus.publish(events.PagesPrefetched(num_read))

    def _end_write(self, number: int, done: Written) -> bool:
        """Handle the end of a write; returns whether the page is in the tier."""
        page = self.pages[done.key]
        if done.problem is None:
            page.full |= 1 << number
            self.publish_stored(number, [page])
            self.release(page)
            return True
        page.taken &= ~(1 << number)
        page.holds -= 1
        self._keep_off(page, number, done.problem)
        return False

    def _end_read(self, number: int, tier: LowerTier, done: Read) -> bool:
        """Handle the end of a read; returns whether it was a prefetch."""
        page = self.pages[done.key]
        if done.problem is not None:
            tier.link.give_up(done.num_bytes)
            page.holds -= 1
            self._lose(page, number, done.problem)
            return False
        tier.link.finish_between(done.num_bytes, done.began_s, done.ended_s)
        page.full |= IN_HOST
        if done.token_ids is not None:
            page.token_ids = done.token_ids
        self.publish_stored(HOST, [page])
        if page.wanted & ~page.taken:  # the page moves on to another tier
            self.place(page)
        self.release(page)
        return page.holds == 0

    # --- events ---------------------------------------------------------------------------------

    def publish_stored(self, number: int, pages: Sequence[Page]) -> None:
        """Tell routers of pages; pieces of states are not among them."""
        if self.is_shared(number) or not self._bus.has_listeners(events.PagesStored):
            return
        if pages := [page for page in pages if not page.is_piece]:
            keys = [page.key for page in pages]
            token_ids = [b"" if page.is_recovered else page.token_ids for page in pages]
            previous = [page.previous for page in pages]
            self._bus.publish(
                events.PagesStored(self.tiers[number].name, keys, previous, token_ids)
            )

    def _publish_dropped(self, keys: Sequence[PageKey], reason: str) -> None:
        slowest = [max(page.full.bit_length() - 1, HOST) for page in self._known(keys)]
        for number, tier in reversed(list(enumerate(self.tiers))):
            if count := slowest.count(number):
                self._bus.publish(events.PagesEvicted(count, reason, tier.name))

    def end_soon(self) -> None:
        """`close` will be called: slow shared tiers may skip writes."""
        for _, tier in self.below:
            tier.end_soon()

    def close(self) -> None:
        """Close the tiers; nothing may be in progress but what they finish by themselves."""
        for tier in self.tiers:
            tier.close()

    def check(self) -> None:
        """Raise if a place was lost, or if bytes and policy disagree while no copy runs."""
        self.policy.check()
        if self.tiers:
            self.host.check({page.key for page in self.pages.all() if page.taken & IN_HOST})
        for page in self.pages.all():
            assert self.pages.get(page.key) is page, "a page has another key"
            assert page.holds >= 0, "negative hold count"
            assert not page.full & ~page.taken, "a page has bytes where it has no place"
            if page.holds == 0:
                assert page.full == page.taken, "a place is taken and never filled"
                assert page.full == page.wanted, "bytes and policy disagree"
