"""What goes down: device pages to host memory, and on to the tiers below it.

    commit --launched(step)--> filling --settle(step)--> save ---> copied: the hold ends
    note_filled: pages of answers, whose steps have run -^           `--> backed up: written below

A copy holds its pages, so they are neither lent nor evicted until it ends. No step depends on a
save: a failed save is reported as skipped and may be tried again.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import monotonic

import numpy as np

from mainstem.core.config import Saving
from mainstem.core.events import EventBus, PagesSaved, SavesSkipped
from mainstem.core.ids import PageKey
from mainstem.core.interrupts import held_interrupts
from mainstem.core.step import Int32s, StepId
from mainstem.kv.index import PrefixIndex
from mainstem.kv.places import HOST, IN_HOST
from mainstem.kv.pool import PagePool
from mainstem.kv.stack import Page, TierStack

WRITE_BUFFER = 2  # at most 1/2 of the device pages may be under a save
SAVE_PIECE = 64  # postponed saves are tried again when a save ends, or this many slots are free


class PageSaver:
    """Saves the pages that steps fill. Without tiers it does nothing."""

    def __init__(
        self, pool: PagePool, index: PrefixIndex, stack: TierStack, bus: EventBus, when: Saving
    ) -> None:
        self._pool = pool
        self._parts = pool.parts
        self._index = index
        self._stack = stack
        self._bus = bus
        self._has_tiers = bool(stack.tiers)
        self.when = when
        self._committed: list[Int32s] = []  # pages committed by the step that is being made
        self._filling: dict[StepId, list[Int32s]] = {}
        self._is_filling = np.zeros(pool.num_pages, np.bool_)
        # pages to save when the write buffer has room, in the order in which they were postponed
        self._postponed: OrderedDict[int, PageKey] = OrderedDict()
        self.end_pieces: Callable[[Int32s], None] = lambda _: None  # of states (stored_states.py)
        self._has_ended = False  # whether a copy has ended since the last `resume`
        self._max_saving = max(1, pool.num_pages // WRITE_BUFFER)
        # by tier: pages to be copied there as well. If a tier cannot keep up, the oldest keys are
        # dropped: by then their pages have left host memory
        self._to_back_up = [deque[PageKey](maxlen=stack.host.num_places) for _ in stack.tiers]

    @property
    def saves_while_decoding(self) -> bool:
        """Whether pages of answers are saved as soon as they have names. Pages with windowed parts
        always are: at the end of the answer most of these parts are gone."""
        is_early = self.when is Saving.DECODING or self._parts is not None
        return self._has_tiers and is_early

    @property
    def num_saves(self) -> int:
        """Copies to host memory in progress."""
        return self._stack.host.num_saves if self._has_tiers else 0

    @property
    def num_saving(self) -> int:
        """Pages that are being copied to host memory."""
        return self._stack.host.num_pages_saving if self._has_tiers else 0

    @property
    def is_busy(self) -> bool:
        """Whether pages are being copied to host memory, or wait for that."""
        return bool(self._postponed or self.num_saving)

    @property
    def num_unsaved(self) -> int:
        """Pages to be written to the disk, or being written; 0 without a disk."""
        own = [(number, tier) for number, tier in self._stack.below if not tier.is_shared]
        counts = [len(self._to_back_up[number]) + tier.num_writes_pending for number, tier in own]
        return sum(counts) + len(self._postponed) if own else 0

    # --- which pages, and when ------------------------------------------------------------------

    def commit(self, pages: Int32s) -> None:
        """Note the pages that the step being made will fill."""
        if self._has_tiers and len(pages):
            self._committed.append(pages.copy())
            self._is_filling[pages] = True
            if self._parts is not None:
                self._parts.hold(pages)

    def launched(self, step_id: StepId) -> None:
        """Note that this step fills the pages committed since the last step."""
        if self._committed:
            self._filling[step_id] = self._committed
            self._committed = []

    def settle(self, step_id: StepId) -> None:
        """Save the pages that steps up to this one have filled, since these steps have run."""
        for filled in [step for step in self._filling if step <= step_id]:
            pages = np.concatenate(self._filling.pop(filled))
            self._is_filling[pages] = False
            if self.when is not Saving.SYNC or self._parts is not None:
                self.save(pages)
            if self._parts is not None:
                self._parts.end(pages)

    def note_filled(self, pages: Int32s) -> None:
        """Note that these pages of answers are filled, by steps that have run."""
        if self.saves_while_decoding:
            self.save(pages)

    def note_use(self, pages: Int32s) -> None:
        """Save those pages of an ended sequence, given in chain order, that are not stored yet."""
        if self._has_tiers:
            self._stack.note_use(list(self._index.named(pages)))
            self.save(pages)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """In this context nothing is saved. Pages of steps that were launched before it are never
        saved."""
        if self._parts is not None:
            for held in [*self._committed, *chain.from_iterable(self._filling.values())]:
                self._parts.end(held)
        self._committed.clear()
        self._filling.clear()
        self._is_filling[:] = True
        try:
            yield
        finally:
            self._is_filling[:] = False

    def save(self, pages: Int32s) -> None:
        """Save the `pages` that are named, filled and not stored. A page whose windowed part is
        gone is not saved: a stored page has all its parts."""
        pages = pages[~self._is_filling[pages]]
        if self._parts is not None:
            pages = pages[self._parts.has(pages)]
        named = self._index.named(pages)
        wanted = [item for item in named.items() if not self._stack.has(item[0])]
        room = self._save_room(len(wanted))
        self._postpone(wanted[room:])
        if not wanted[:room]:
            return
        chosen = np.array([page for _, page in wanted[:room]], np.int32)
        keys = [key for key, _ in wanted[:room]]
        self.copy_down(chosen, keys, self._index.previous(chosen), self._index.tokens(chosen))

    def _save_room(self, count: int) -> int:
        """Return how many of `count` pages may be saved now."""
        room = min(count, self._max_saving - self.num_saving)
        return self.make_room(room) if room > 0 else 0

    def _postpone(self, wanted: Iterable[tuple[PageKey, int]]) -> None:
        num_gone = 0  # pages whose name has changed since their save was postponed
        for key, page in wanted:
            num_gone += self._postponed.get(page, key) != key
            self._postponed[page] = key
        self._report_gone(num_gone)

    def _save_postponed(self) -> None:
        """Save as many postponed pages as there is room for, if they are still on the device."""
        room, num_gone = self._save_room(len(self._postponed)), 0
        chosen: list[int] = []
        while self._postponed and len(chosen) < room:
            count = min(room - len(chosen), len(self._postponed))
            some = dict(self._postponed.popitem(last=False) for _ in range(count))
            named = self._index.named(np.array(list(some), np.int32)).items()
            still = np.array([page for key, page in named if some[page] == key], np.int32)
            if self._parts is not None:
                still = still[self._parts.has(still)]
            num_gone += count - len(still)
            chosen += still.tolist()
        self._report_gone(num_gone)
        self.save(np.array(chosen, np.int32))

    def _report_gone(self, num_pages: int) -> None:
        """Report pages that left the device, all or in part, before they could be saved."""
        if num_pages:
            self._bus.publish(SavesSkipped(num_pages, "host", "write buffer full"))

    # --- copies ---------------------------------------------------------------------------------

    def make_room(self, count: int) -> int:
        """Return how many of `count` pages can be saved now. To make room, pages that no request
        waits for leave host memory. If a lower tier has to write one first, its slot becomes free
        when the write ends."""
        stack, host = self._stack, self._stack.host
        if not stack.below:
            return count
        num_leaving = host.num_places - host.num_free - stack.policy.num_pages(HOST)
        short = count - host.num_free - max(0, num_leaving)
        if short > 0:
            stack.carry_out(stack.policy.free_unawaited(short))
        return min(count, host.num_free)

    def copy_down(
        self,
        pages: Int32s,
        keys: Sequence[PageKey],
        previous: Sequence[PageKey | None],
        token_ids: Sequence[bytes],
    ) -> bool:
        """Start copying device pages, or pieces of a state, to host memory; returns whether a copy
        was started.

        `keys` of one chain are in chain order; `previous` names the page before each, None for the
        first. None of them is stored yet, except in a shared tier.
        """
        stack, host = self._stack, self._stack.host
        stack.carry_out(stack.policy.admit(keys, monotonic(), previous))
        kept: list[int] = []
        saved: list[Page] = []
        refused = 0
        for index, key in enumerate(keys):
            page = stack.pages.get(key)
            if page is not None and page.taken and not page.wanted & ~page.taken:
                continue  # a shared tier has the page, and the policy wants it in no other tier
            if page is None or not page.wanted or not host.take_place(key):
                if page is not None:
                    stack.drop([page])
                refused += 1
                continue
            if not page.taken:
                page.token_ids, page.previous = token_ids[index], previous[index]
            page.taken |= IN_HOST
            page.holds += 1
            saved.append(page)
            kept.append(index)
        if refused:
            self._bus.publish(SavesSkipped(refused, "host", "no room in host memory"))
        if not saved:
            return False
        parts = self._pool.parts_of(pages[kept])
        if not host.save([page.key for page in saved], pages[kept], parts):
            self._give_up(saved)
            return False
        for page in saved:
            if page.wanted != IN_HOST:  # it goes on to a lower tier
                stack.place(page)
        for number, _ in stack.below:
            self._to_back_up[number].extend(page.key for page in saved)
        self.back_up()
        self._pool.begin_copy(self._only_pages(pages[kept]))
        return True

    def _only_pages(self, pages: Int32s) -> Int32s:
        """Without pieces of states, whose slots are held by those who save them."""
        return pages[pages < self._pool.num_pages]

    def _give_up(self, pages: Sequence[Page]) -> None:
        self._bus.publish(SavesSkipped(len(pages), "host", "copy failed"))
        self._stack.policy.drop([page.key for page in pages])
        for page in pages:
            self._stack.release(page)

    def back_up(self) -> None:
        """Copy pages in host memory to lower tiers as well, so that they outlive the process."""
        for number, tier in self._stack.below:
            waiting = self._to_back_up[number]
            if not tier.can_write:
                waiting.clear()
            # a write keeps its slot until it ends, and a slow server must not use all slots
            most = max(1, self._stack.host.num_places // (8 if tier.is_shared else 2))
            while waiting and (room := most - tier.num_writes_pending) > 0:
                keys = [waiting.popleft() for _ in range(min(room, len(waiting)))]
                self._stack.carry_out(self._stack.policy.back_up(number, keys))

    def poll(self) -> None:
        """Collect the copies that have ended."""
        num_saved = 0
        for save, is_good in self._stack.host.poll_saves():
            self._has_ended = True
            self._pool.end_copy(self._only_pages(save.pages))
            self.end_pieces(save.pages[save.pages >= self._pool.num_pages])
            pages = [self._stack.pages[key] for key in save.keys]
            if not is_good:
                self._give_up(pages)
                continue
            num_saved += len(pages)
            self._stack.publish_stored(HOST, pages)
            for page in pages:
                page.full |= IN_HOST
                self._stack.release(page)
        if num_saved:
            self._bus.publish(PagesSaved(num_saved, "host"))

    def resume(self) -> None:
        """Try postponed saves if a copy has ended, if many fit, or if waiting would not free more
        slots."""
        has_ended, self._has_ended = self._has_ended, False
        if not self._postponed:
            return
        host = self._stack.host
        is_writing = any(tier.num_writes_pending for _, tier in self._stack.below)
        has_room = host.num_free >= SAVE_PIECE or not (host.num_saves or is_writing)
        if has_ended or has_room:
            self._save_postponed()

    def finish_copies(self) -> None:
        """Return when copies from the device are done, or have failed; `poll` says which."""
        for host in self._stack.tiers[:1]:
            host.flush()

    def flush(self) -> None:
        """Return when every saved page is in all the tiers where the policy wants it."""
        self.finish_copies()
        while any(self._to_back_up[n] or t.num_writes_pending for n, t in self._stack.below):
            for _, tier in self._stack.below:
                tier.flush()
            with held_interrupts():
                self._stack.poll()
                self.back_up()
        self._stack.write_uses()
