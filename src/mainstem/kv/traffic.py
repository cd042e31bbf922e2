"""Device pages that are saved to lower tiers or loaded from them.

    commit --launched(step)--> filling --settle(step)--> save ---> copied: the hold ends
    note_filled: pages of answers, whose steps have run -^
    load: pages taken, named, LOADING ---> copied: READY        or failed: no names

A copy holds its pages, so they are neither lent nor evicted until it ends.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np

from mainstem.core.config import Saving
from mainstem.core.events import EventBus, SavesSkipped
from mainstem.core.ids import PageKey
from mainstem.core.interrupts import held_interrupts
from mainstem.core.step import Int32s, StepId
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain
from mainstem.kv.pool import PagePool
from mainstem.kv.stored import Load, Stored
from mainstem.kv.tiers import LowerTiers
from mainstem.kv.transfer import LoadId

WRITE_BUFFER = 2  # at most 1/2 of the device pages may be under a save
SAVE_PIECE = 64  # postponed saves are tried again when a save ends, or this many slots are free
READ_PIECE = 32  # pages read from a lower tier, then copied to the device, at a time


class Traffic:
    """Copies between the device and the tiers below it; owned by the store."""

    def __init__(
        self,
        pool: PagePool,
        index: PrefixIndex,
        tiers: LowerTiers,
        bus: EventBus,
        saving: Saving = Saving.DECODING,
    ) -> None:
        self._pool = pool
        self.saving = saving
        self._index = index
        self.tiers = tiers
        self._bus = bus
        self._copying = np.zeros(pool.num_pages, np.int32)  # by page: its holders that are copies
        self._committed: list[Int32s] = []  # pages committed by the step that is being made
        self._filling: dict[StepId, list[Int32s]] = {}
        self._is_filling = np.zeros(pool.num_pages, np.bool_)
        self._load_ids = count()
        self._load_of: dict[int, Load] = {}  # by device page
        self._loads: dict[LoadId, Load] = {}
        self._news: list[PageKey] = []  # keys that the next `poll` returns
        # pages to save when the write buffer has room, in the order in which they were postponed
        self._postponed: OrderedDict[int, PageKey] = OrderedDict()
        self._max_saving = max(1, pool.num_pages // WRITE_BUFFER)

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def num_unsaved(self) -> int:
        """Pages to be written to the disk, or being written; 0 without a disk."""
        return self.tiers.num_unsaved + len(self._postponed) if self.tiers.has_disk else 0

    @property
    def num_copies(self) -> Int32s:
        """For each page, how many copies hold it. Read only."""
        return self._copying

    def num_only_copied(self) -> int:
        """The number of pages that only copies hold, and no sequence."""
        others = self._pool.holders - self._copying - self._index.is_indexed
        return int(np.count_nonzero((self._copying > 0) & (others == 0)))

    # --- down -----------------------------------------------------------------------------------

    def commit(self, pages: Int32s) -> None:
        """Note the pages that the step being made will fill."""
        if len(pages):
            self._committed.append(pages.copy())
            self._is_filling[pages] = True

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
            if self.saving is not Saving.SYNC:
                self.save(pages)

    def note_filled(self, pages: Int32s) -> None:
        """Note that these pages of answers are filled, by steps that have run."""
        if self.saving is Saving.DECODING:
            self.save(pages)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """In this context nothing is saved. Pages of steps that were launched before it are never
        saved."""
        self._committed.clear()
        self._filling.clear()
        self._is_filling[:] = True
        try:
            yield
        finally:
            self._is_filling[:] = False

    def save(self, pages: Int32s) -> None:
        """Save the `pages` that are named, filled and not stored."""
        self._save_named(self._index.named(pages[~self._is_filling[pages]]))

    def _save_named(self, named: dict[PageKey, int]) -> None:
        wanted = [item for item in named.items() if not self.tiers.has(item[0])]
        room = self._save_room(len(wanted))
        self._postpone(wanted[room:])
        wanted = wanted[:room]
        if not wanted:
            return
        pages = np.array([page for _, page in wanted], np.int32)
        index, keys = self._index, [key for key, _ in wanted]
        self._hold(self.tiers.save(pages, keys, index.previous(pages), index.tokens(pages)))

    def _save_room(self, count: int) -> int:
        """Return how many of `count` pages may be saved now."""
        room = min(count, self._max_saving - self.tiers.num_pages_saving)
        return self.tiers.make_room(room) if room > 0 else 0

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
            still = [page for key, page in named if some[page] == key]
            num_gone += count - len(still)
            chosen += still
        self._report_gone(num_gone)
        self.save(np.array(chosen, np.int32))

    def _report_gone(self, num_pages: int) -> None:
        """Report pages that left the device before they could be saved."""
        if num_pages:
            self._bus.publish(SavesSkipped(num_pages, "host", "write buffer full"))

    def note_use(self, pages: Int32s) -> None:
        """Save those pages of an ended sequence, given in chain order, that are not stored yet."""
        self.tiers.note_use(list(self._index.named(pages)))
        self.save(pages)
        if self.saving is Saving.SYNC:
            self._finish_saves()

    def _finish_saves(self) -> None:
        """Return when no save is in progress; saves without a slot are postponed."""
        while self.tiers.num_pages_saving:
            self.tiers.finish_saves()
            self._news = self.poll()  # `poll` may start postponed saves

    # --- up -------------------------------------------------------------------------------------

    def find(self, keys: Sequence[PageKey]) -> Stored:
        """How many leading pages of `keys` lower tiers have."""
        return self.tiers.find(keys)

    def load(
        self, chain: PageChain, first: int, pages: Int32s, start_layers: int, limit_s: float
    ) -> PageKey | None:
        """Fill `pages`, which were just taken, with the chain's stored pages from number `first`
        on.

        Returns the key to wait for, which is the deepest. None: nothing can be loaded now, and the
        pages were given back.
        """
        place = 0
        keys = chain.keys[first : first + len(pages)]
        try:
            while place < len(pages):
                size = self.tiers.run_length(keys[place:], READ_PIECE)
                piece = pages[place : place + size]
                started = self._start(chain, first + place, piece, start_layers, limit_s)
                place += started
                if started < size:
                    break
        finally:
            self._pool.give_back(pages[place:])
        return chain.keys[first + place - 1] if place else None

    def startable(self, pages: Sequence[int]) -> Int32s | None:
        """Return the loads that a step must wait for before it reads `pages`, which are all
        LOADING. None: it is too early for such a step, or another sequence computes the pages."""
        loads: dict[LoadId, None] = {}
        for page in pages:
            load = self._load_of.get(page)
            if load is None or not load.is_startable:
                return None
            loads[load.load_id] = None
        return np.array(list(loads), np.int32)

    def poll(self, lead_s: float = 0.0) -> list[PageKey]:
        """Check copies in progress; returns the keys that requests need not wait for any longer."""
        arrivals = self.tiers.poll(lead_s)
        for pages in arrivals.saved:
            self._let_go(pages)
        self._news += arrivals.answered
        for load in arrivals.startable:
            self._news += load.keys
        for load in arrivals.loaded:
            self._index.commit(load.pages)
            self._index.touch(load.pages)
            self._finish(load)
        for load in arrivals.failed:
            self._index.abort(load.pages)
            self._finish(load)
        if self._postponed and (arrivals.saved or self.tiers.has_room(SAVE_PIECE)):
            self._save_postponed()
        news, self._news = self._news, []
        return news

    def flush(self) -> None:
        """Return when all pending saves are done or refused."""
        self.tiers.flush()
        with held_interrupts():
            self._news = self.poll()  # the next `poll` returns these keys
        while self._postponed or self.tiers.num_pages_saving:  # each round starts or ends saves
            self.tiers.flush()
            with held_interrupts():
                self._news = self.poll()

    def check(self) -> None:
        """Raise if a copy's page was lost."""
        self.tiers.check()
        assert (self._copying >= 0).all(), "negative number of copies of a page"
        assert (self._pool.holders >= self._copying).all(), "a copy does not hold its page"
        if not self.tiers.num_copies:
            assert not self._copying.any(), "a page is held for a copy that is over"
        named = {page for load in self._loads.values() for page in load.pages.tolist()}
        assert self._load_of.keys() == named, "a load lost its pages"

    # --- inside ---------------------------------------------------------------------------------

    def _start(
        self, chain: PageChain, first: int, pages: Int32s, start_layers: int, limit_s: float
    ) -> int:
        """Start to load the chain's pages from number `first` on; returns how many."""
        size = chain.page_size
        keys = chain.keys[first : first + len(pages)]
        token_ids = chain.token_ids[first * size : (first + len(pages)) * size].tobytes()
        if not self.tiers.has_all(keys, token_ids):  # some may be evicted by now
            return 0
        load_id = LoadId(next(self._load_ids))
        load = self.tiers.load(load_id, keys, pages, start_layers, limit_s)
        if load is None:
            return 0
        self._copying[load.pages] += 1  # the caller's hold passes to the copy
        self._index.reserve(chain, first, load.pages)
        self._loads[load_id] = load
        self._load_of.update(dict.fromkeys(load.pages.tolist(), load))
        return len(load.pages)

    def _finish(self, load: Load) -> None:
        self._news += load.keys
        del self._loads[load.load_id]
        for page in load.pages.tolist():
            del self._load_of[page]
        self._let_go(load.pages)

    def _hold(self, pages: Int32s) -> None:
        self._pool.share(pages)
        self._copying[pages] += 1

    def _let_go(self, pages: Int32s) -> None:
        self._copying[pages] -= 1
        self._pool.give_back(pages)
