"""What comes up: stored pages to the device, what is prefetched, and what other processes have.

    load: pages taken, named, LOADING ---> read into slots ---> copied: READY    or failed: no names

A copy holds its pages, so they are neither lent nor evicted until it ends. If a page of a load
cannot be read, the load goes on with the pages before it.

A shared tier does not list its pages, so it is asked which it has. An answer may take long: a
request that would wait too long for it starts without it, and the answer serves the next request.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, dropwhile, takewhile
from math import ceil
from time import monotonic, perf_counter

import numpy as np

from mainstem.core.events import EventBus, PagesLoaded, PagesLost
from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s
from mainstem.kv.index import PrefixIndex
from mainstem.kv.keys import PageChain
from mainstem.kv.places import HOST, IN_HOST, PIECE, StoredCounts, fastest
from mainstem.kv.pool import PagePool
from mainstem.kv.stack import READ_LIMIT_S, Page, TierStack
from mainstem.kv.tier import Answer
from mainstem.kv.transfer import LoadId, TierLink, Transfer

READ_PIECE = 32  # pages read from a lower tier, then copied to the device, at a time
READ_AHEAD_S = 0.02  # no more work than this is queued in a tier by prefetches: loads come first
MAX_ASKED = 4096  # maximum pages in one question
NO_LOAD = -1
SURE = 1.5  # a request waits for an answer only if it has time for this many round trips


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Pages of a chain, from number `first` on, that lower tiers have."""

    chain: PageChain
    first: int
    num_pages: int
    limit_s: float = READ_LIMIT_S  # if loading takes longer, computing is faster

    @property
    def keys(self) -> tuple[PageKey, ...]:
        return self.chain.keys[self.first : self.first + self.num_pages]


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages being loaded to the device."""

    load_id: LoadId
    keys: Sequence[PageKey]
    device_pages: Int32s
    pages: list[Page]
    start_layers: int  # a prompt may start when this many layers are loaded
    began_s: float
    tiers: list[int]  # the number of the tier that had each page at the start
    transfer: Transfer | None = None  # None: still being read
    is_startable: bool = False
    has_failed: bool = False


class PageLoader:
    """Loads pages to the device. Without tiers it finds none."""

    def __init__(self, pool: PagePool, index: PrefixIndex, stack: TierStack, bus: EventBus) -> None:
        self._pool = pool
        self._index = index
        self._stack = stack
        self._bus = bus
        self._load_ids = count()
        self._loads: dict[LoadId, PageLoad] = {}
        self._load_of = np.full(pool.num_pages, NO_LOAD, np.int64)  # by device page
        self._news: list[PageKey] = []  # keys that `take_news` has not returned yet
        self.damaged = stack.damaged  # pages that could not be read
        self.links = stack.links  # by which pages come up, from host memory first
        self.page_bytes, self.num_layers = stack.page_bytes, stack.num_layers
        self.questions = OpenQuestions(index, stack)

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def next_load_id(self) -> LoadId:
        return LoadId(next(self._load_ids))

    @property
    def is_reading(self) -> bool:
        """Whether a load waits for a lower tier."""
        return any(load.transfer is None for load in self._loads.values())

    def is_crowded(self, num_pages: int) -> bool:
        """Whether loads in progress use the slots that `num_pages` pages would need."""
        return self.is_reading and self._stack.host.num_free < num_pages

    def stored(self, keys: Sequence[PageKey]) -> StoredCounts:
        """How many leading pages of `keys` could be loaded."""
        places = [page.full for page in self._stack.pages.leading(keys)]
        if 0 in places:
            del places[places.index(0) :]
        below = [full for full in places if not full & IN_HOST]
        if not below:
            return StoredCounts(len(places))
        counts = [0] * len(self._stack.tiers)
        for full, number in Counter(below).items():
            counts[fastest(full)] += number
        return StoredCounts(len(places), tuple(counts[HOST + 1 :]))

    # --- loads ----------------------------------------------------------------------------------

    def load(self, run: StoredRun, device_pages: Int32s, start_layers: int) -> PageKey | None:
        """Fill `device_pages`, which were just taken, with a run of stored pages.

        Returns the key to wait for, which is the deepest. None: nothing can be loaded now, and the
        pages were given back.
        """
        place, keys = 0, run.keys
        try:
            while place < len(keys):
                pages = self._stack.pages.leading(keys[place:])
                size = num_together(pages, READ_PIECE)
                if not size:
                    break  # some were evicted for the pages before them
                target = device_pages[place : place + size]
                started = self._start(run, run.first + place, pages[:size], target, start_layers)
                place += started
                if started < size:
                    break
        finally:
            self._pool.give_back(device_pages[place:])
        return keys[place - 1] if place else None

    def _start(
        self, run: StoredRun, first: int, pages: list[Page], device_pages: Int32s, start_layers: int
    ) -> int:
        """Start to load these pages, the chain's from number `first` on; returns how many."""
        chain, size = run.chain, run.chain.page_size
        end = first + len(pages)
        if not self._hold_tokens(pages, chain.token_ids[first * size : end * size].tobytes()):
            return 0
        keys = chain.keys[first:end]
        load = self.copy_up(keys, device_pages, start_layers, run.limit_s)
        if load is None:
            return 0
        self._index.reserve(chain, first, load.device_pages)
        return len(load.device_pages)

    def _hold_tokens(self, pages: list[Page], token_ids: bytes) -> bool:
        """Whether pages hold the tokens that their names stand for. A page with other tokens is
        dropped."""
        if b"".join([page.token_ids for page in pages]) == token_ids:
            return True
        width = len(token_ids) // len(pages)
        for index, page in enumerate(pages):
            wanted = token_ids[index * width : (index + 1) * width]
            if not page.token_ids:  # from a shared tier: the name alone guarantees the tokens
                page.token_ids = wanted
            if page.token_ids != wanted:
                slowest = self._stack.tiers[page.full.bit_length() - 1]
                self._bus.publish(PagesLost(1, slowest.name, "tokens"))
                self._stack.drop([page])
                return False
        return True

    def copy_up(
        self,
        keys: Sequence[PageKey],
        device_pages: Int32s,
        start_layers: int,
        limit_s: float = READ_LIMIT_S,
    ) -> PageLoad | None:
        """Start loading stored pages to the device: as many leading ones as have slots to read
        into. None: not even the first has one, the copy failed, or the last load that began with
        this page failed. A tier may cancel reads that take longer than `limit_s`."""
        stack, host = self._stack, self._stack.host
        pages = stack.pages.leading(keys)
        assert len(pages) == len(keys), "a page with a place was forgotten"
        if pages[0].skips_load:
            pages[0].skips_load = False
            return None
        for page in pages:
            page.holds += 1
        absent = [index for index, page in enumerate(pages) if not page.taken & IN_HOST]
        if len(absent) > host.num_free:
            stack.carry_out(stack.policy.choose_victims(HOST, len(absent) - host.num_free))
        size = absent[host.num_free] if len(absent) > host.num_free else len(pages)
        stack.release_all(pages[size:])
        if not size:
            return None
        keys, device_pages, pages = keys[:size], device_pages[:size], pages[:size]
        tiers = [HOST if page.full & IN_HOST else fastest(page.full) for page in pages]
        stack.read([pages[index] for index in absent if index < size], limit_s)
        load = PageLoad(
            self.next_load_id(), keys, device_pages, pages, start_layers, perf_counter(), tiers
        )
        host.link.start(size * self.page_bytes)
        self._loads[load.load_id] = load
        self._advance(load)
        if load.has_failed:
            self._end(load, None)
            return None
        self._load_of[device_pages] = load.load_id
        self._pool.pass_to_copy(device_pages)
        return load

    def startable(self, device_pages: Int32s) -> Int32s | None:
        """Return the loads that a step must wait for before it reads `device_pages`, which are all
        LOADING. None: it is too early for such a step, or another sequence computes the pages."""
        found = dict.fromkeys(self._load_of[device_pages].tolist())
        for load_id in found:
            if load_id == NO_LOAD or not self._loads[load_id].is_startable:
                return None
        return np.array(list(found), np.int32)

    def prefetch(self) -> None:
        """Read the pages that waiting requests need next into host memory, from tiers with little
        queued work."""
        stack = self._stack
        if not stack.below or self.is_reading or not stack.policy.num_queued:
            return
        limits = [self._num_to_prefetch(tier.link) for _, tier in stack.below]
        if any(limits):
            stack.carry_out(stack.policy.choose_prefetch(*limits))

    def _num_to_prefetch(self, link: TierLink) -> int:
        idle_s, host = READ_AHEAD_S - link.expect_s(0), self._stack.host
        if idle_s <= 0:
            return 0
        return min(ceil(idle_s / link.pass_s(self.page_bytes)), host.num_free)

    # --- what came to an end --------------------------------------------------------------------

    def poll(self, lead_s: float) -> None:
        """Collect the loads that have ended, and start copies whose pages were read. A step that
        is made now reads pages at the earliest in `lead_s` seconds."""
        left_s = lead_s
        for load in list(self._loads.values()):
            left_s = self._poll_load(load, left_s)
        self._news += self.questions.take_news()

    def take_news(self) -> list[PageKey]:
        """The keys that requests need not wait for any longer; each is returned once."""
        news, self._news = self._news, []
        return news

    def _poll_load(self, load: PageLoad, left_s: float) -> float:
        """Check a load. `left_s` is the time until a step reads its pages. Loads are copied one
        after the other, so this returns the time that is left for the next load."""
        self._cut_at_lost(load)
        if load.pages:
            self._advance(load)
        host, num_done = self._stack.host, 0
        if load.transfer is not None:
            num_layers = host.num_layers_done(load.transfer)
            load.has_failed |= num_layers is None
            num_done = num_layers or 0
        if load.has_failed:
            load.pages[0].skips_load = True
        if load.has_failed or not load.pages:
            self._index.abort(load.device_pages)
            self._finish(load, None)
            return left_s
        if load.transfer is None:
            return left_s
        if num_done == self.num_layers:
            self._index.commit(load.device_pages)
            self._index.order.touch(load.device_pages)
            self._finish(load, load.transfer.seconds())
            self._publish_loaded(load)
            return left_s
        layer_s = host.link.pass_s(len(load.pages) * self.page_bytes) / self.num_layers
        if not load.is_startable and num_done + left_s / layer_s >= load.start_layers:
            load.is_startable = True
            self._news += load.keys
        return max(0.0, left_s - (self.num_layers - num_done) * layer_s)

    def _cut_at_lost(self, load: PageLoad) -> None:
        """Shorten a load whose pages are being read to those before the first that was lost."""
        if load.transfer is not None or not any(page.is_lost for page in load.pages):
            return
        size = next(index for index, page in enumerate(load.pages) if page.is_lost)
        device_pages, keys, pages = load.device_pages[size:], load.keys[size:], load.pages[size:]
        load.device_pages, load.keys = load.device_pages[:size], load.keys[:size]
        load.pages, load.tiers = load.pages[:size], load.tiers[:size]
        self._index.abort(device_pages)
        self._let_go(device_pages, keys)
        self._stack.host.link.give_up(len(pages) * self.page_bytes)
        self._stack.release_all(pages)

    def _let_go(self, device_pages: Int32s, keys: Sequence[PageKey]) -> None:
        """Note that a load no longer uses device pages."""
        self._news += keys
        self._load_of[device_pages] = NO_LOAD
        self._pool.end_copy(device_pages)

    def _advance(self, load: PageLoad) -> None:
        """Start the copy to the device once all pages of the load are in host memory."""
        if load.transfer is None and all(page.full & IN_HOST for page in load.pages):
            load.transfer = self._stack.host.load(
                load.load_id, load.keys, load.device_pages, self._pool.parts_of(load.device_pages)
            )
            load.has_failed = load.transfer is None

    def _finish(self, load: PageLoad, seconds: float | None) -> None:
        """End a load that took `seconds`, or failed (None). First what the device's pages need: an
        error while tiers are told must not leave them held."""
        self._let_go(load.device_pages, load.keys)
        self._end(load, seconds)

    def _end(self, load: PageLoad, seconds: float | None) -> None:
        stack, host = self._stack, self._stack.host
        del self._loads[load.load_id]
        host.forget(load.load_id)
        num_bytes = len(load.pages) * self.page_bytes
        if seconds is None:
            host.link.give_up(num_bytes)
        else:
            host.link.finish(num_bytes, seconds)
            stack.carry_out(stack.policy.keep(load.keys, monotonic()))
        stack.release_all(load.pages)

    def _publish_loaded(self, load: PageLoad) -> None:
        seconds = perf_counter() - load.began_s
        counts = Counter(load.tiers)
        for number in sorted(counts, reverse=True):  # slowest first: the load waited for it
            tier = self._stack.tiers[number].name
            self._bus.publish(PagesLoaded(counts[number], tier, seconds))
            seconds = 0.0

    def close(self) -> None:
        """Return when copies to the device have ended."""
        for load in self._loads.values():
            if load.transfer is not None:
                with suppress(Exception):  # no request needs the load any more
                    load.transfer.wait()

    def check(self) -> None:
        """Raise if a load lost its pages."""
        loading = [page for load in self._loads.values() for page in load.pages]
        assert not any(page.taken for page in loading if page.is_lost), "a lost page has a place"
        expected = np.full_like(self._load_of, NO_LOAD)
        for load in self._loads.values():
            expected[load.device_pages] = load.load_id
        assert np.array_equal(self._load_of, expected), "a load lost its pages"


def num_together(pages: Sequence[Page], most_read: int) -> int:
    """How many leading pages to load together: all that are in host memory; if the first is not, up
    to `most_read` that must be read first."""
    if not pages:
        return 0
    in_host = pages[0].full & IN_HOST
    places = [page.full for page in (pages if in_host else pages[:most_read])]
    is_like_first = [full > 0 and full & IN_HOST == in_host for full in places]
    return is_like_first.index(False) if False in is_like_first else len(places)


@dataclass(slots=True, eq=False)
class _Question:
    """Pages that shared tiers were asked for."""

    pages: Sequence[PageKey]  # in chain order
    states: dict[PageKey, PageKey]  # first pieces, and the pages before them
    asked_s: float
    num_open: int  # tiers that have not answered
    give_up_s: float = float("inf")  # when requests stop waiting for the answer
    is_late: bool = False


class OpenQuestions:
    """Questions to tiers that other processes fill. The key of a question is the last one that it
    asks for."""

    def __init__(self, index: PrefixIndex, stack: TierStack) -> None:
        self._index = index
        self._stack = stack
        self._tiers = [tier for _, tier in stack.below if tier.is_shared]
        self._open: dict[PageKey, _Question] = {}
        self._answered: list[PageKey] = []  # since `take_news`
        # the names of a state's pieces, given that of the first (kv/stored_states.py)
        self.pieces_after: Callable[[PageKey], list[PageKey]] = lambda first: [first]
        stack.on_answer = self._note_answer

    def ask(
        self, keys: Sequence[PageKey], states: dict[PageKey, PageKey] | None = None
    ) -> PageKey | None:
        """Ask for the pages of a chain after those that are stored here, and for states of
        recurrent layers: the first piece of each, and the page before it. Returns the key of the
        answer. None: there is no tier to ask, or nothing to ask for."""
        tiers = [tier for tier in self._tiers if tier.is_open]
        if not tiers:
            return None
        pages, states = list(dropwhile(self._is_stored, keys))[:MAX_ASKED], states or {}
        asked = [*list(states)[-MAX_ASKED:], *pages]
        if not asked:
            return None
        if asked[-1] not in self._open:
            self._open[asked[-1]] = _Question(pages, states, monotonic(), len(tiers))
            for tier in tiers:
                tier.ask(asked)
        return asked[-1]

    def _is_stored(self, key: PageKey) -> bool:
        page = self._stack.pages.get(key)
        return page is not None and bool(page.full)

    def is_open(self, key: PageKey) -> bool:
        """Whether an answer is still expected, late or not."""
        return key in self._open

    def awaits(self, key: PageKey, most_s: float) -> bool:
        """Whether a request should wait for the answer, because it is expected within `most_s`. The
        wait ends with the answer, or after `most_s`."""
        question = self._open.get(key)
        if question is None or question.is_late:
            return False
        if SURE * max(tier.link.round_trip_s for tier in self._tiers) > most_s:
            return False
        question.give_up_s = min(question.give_up_s, question.asked_s + most_s)
        return True

    def _note_answer(self, number: int, answer: Answer) -> None:
        """Add what a tier has: written by other processes, or by this one before it lost the
        connection."""
        question, there = self._open[answer.asked], set(answer.keys)
        question.num_open -= 1
        if not question.num_open:
            del self._open[answer.asked]
            self._answered.append(answer.asked)
        self._note_found(number, list(takewhile(there.__contains__, question.pages)), b"")
        for first, before in reversed(question.states.items()):  # the deepest that can be reached
            if first in there and (before in self._index or self._is_stored(before)):
                self._note_found(number, self.pieces_after(first), PIECE)
                return

    def _note_found(self, number: int, keys: Sequence[PageKey], token_ids: bytes) -> None:
        """A tier has these pages, in chain order."""
        stack, bit = self._stack, 1 << number
        known = [(key, stack.pages.get(key)) for key in keys]
        new = [key for key, page in known if page is None or not page.taken & bit]
        for key in new:
            stack.pages.found(key, number, token_ids)
        # least recently used first: the head of a chain is evicted last
        stack.carry_out(stack.policy.recover(number, new[::-1], monotonic()))
        for key in keys:
            if (page := stack.pages.get(key)) is not None:
                stack.settle(page)

    def take_news(self) -> list[PageKey]:
        """Return the questions that were answered, or whose wait is over, since the last call."""
        news, self._answered = self._answered, []
        if self._open:
            now_s = monotonic()
            late = [k for k, q in self._open.items() if not q.is_late and now_s >= q.give_up_s]
            for key in late:
                self._open[key].is_late = True
            news += late
        return news
