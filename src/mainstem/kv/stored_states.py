"""States of recurrent layers in the tiers below the device.

    kept by a step --the step ends--> pieces copied down, like pages ---> host memory, disk, server
    wanted by a prompt --a slot is taken--> pieces read --> copied up --> kept

A state at the end of a page is stored in pieces of the size of a page, so tiers, indexes, checksums
and the order of eviction know only pages. The pieces' names derive from the name of the page that
ends where the state is. A state is stored if all its pieces are: a damaged or missing one makes it
a miss. States inside a page are not stored: the first tokens of a page could not be found again.

On the device a piece has a number, too, as if it were a page: they follow the numbers of pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

import numpy as np

from mainstem.core.events import EventBus, PagesLoaded, SavesSkipped
from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s, StepId
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import PageLoader
from mainstem.kv.places import HOST, IN_HOST, PIECE, StoredCounts, fastest
from mainstem.kv.saving import PageSaver
from mainstem.kv.stack import READ_LIMIT_S, Page, TierStack
from mainstem.kv.states import StatePlace, StateStore
from mainstem.kv.transfer import LoadId, Transfer

MARK = b"stat"  # the rest of a piece's name: this, and the piece's number
NUMBER_BYTES = 4
LEAST_STATES = 2  # host memory with fewer places than these states have pieces stores none
NO_STEP = StepId(-1)


def piece_keys(place: StatePlace, count: int) -> list[PageKey]:
    """The names of the pieces of a state at the end of a page."""
    return _numbered(place.parent[: -len(MARK) - NUMBER_BYTES] + MARK, count)


def _numbered(stem: bytes, count: int) -> list[PageKey]:
    return [PageKey(stem + number.to_bytes(NUMBER_BYTES, "big")) for number in range(count)]


@dataclass(slots=True, eq=False)
class StateLoad:
    """A state being loaded to a slot on the device."""

    load_id: LoadId
    place: StatePlace
    slot: int
    keys: Sequence[PageKey]
    pages: list[Page]
    num_below: dict[str, int]  # number of pieces that are read from each tier
    after: StepId  # steps up to this one may still use the slot
    began_s: float
    transfer: Transfer | None = None  # None: still being read
    is_wanted: bool = True  # False: the slot is freed when the copy ends


@dataclass(frozen=True, slots=True)
class _Save:
    """A kept state that is to be saved, unless it is evicted before."""

    place: StatePlace
    version: tuple[int, int]


class StoredStates:
    """Saves states as they are kept, and loads them."""

    def __init__(
        self,
        states: StateStore,
        stack: TierStack,
        saver: PageSaver,
        loader: PageLoader,
        bus: EventBus,
        first_piece: int,
        num_pieces: int,
    ) -> None:
        """A state has `num_pieces`; `first_piece` is the number of the first one on the device."""
        self._states = states
        self._stack = stack
        self._saver = saver
        self._loader = loader
        self._bus = bus
        self._first_piece = first_piece
        self.num_pieces = num_pieces
        saver.end_pieces = self._end_save
        loader.questions.pieces_after = lambda first: _numbered(first[:-NUMBER_BYTES], num_pieces)
        self._committed: list[_Save] = []  # kept by the step that is being made
        self._filling: dict[StepId, list[_Save]] = {}
        self._postponed: dict[_Save, None] = {}  # until host memory has room, oldest first
        self._has_news = False  # whether postponed saves may have room now
        self._launched = self._settled = NO_STEP
        self._loads: dict[StatePlace, StateLoad] = {}
        self._unwanted: list[StateLoad] = []
        self._news: list[PageKey] = []

    @classmethod
    def fits(cls, stack: TierStack, num_pieces: int) -> bool:
        """Whether host memory is large enough for states."""
        return bool(stack.tiers) and stack.host.num_places >= LEAST_STATES * num_pieces

    @property
    def num_loads(self) -> int:
        return len(self._loads) + len(self._unwanted)

    # --- what is stored -------------------------------------------------------------------------

    def has(self, place: StatePlace) -> bool:
        """Whether the state could be loaded. What is left of one that lost a piece is dropped."""
        if place.tail:
            return False
        find, keys = self._stack.pages.get, piece_keys(place, 1)
        if (first := find(keys[0])) is None or not first.full:
            return False
        pieces = [find(key) for key in piece_keys(place, self.num_pieces)]
        there = [piece for piece in pieces if piece is not None]
        if len(there) == self.num_pieces and all(piece.full for piece in there):
            return True
        if not any(piece.holds for piece in there):
            self._stack.drop(there)
        return False

    def counts(self, place: StatePlace) -> StoredCounts:
        """How many pieces must be loaded, and from where."""
        return self._loader.stored(piece_keys(place, self.num_pieces))

    def wanted_by(self, chain: PageChain) -> list[PageKey]:
        """The pieces of the deepest state in a chain that is stored."""
        for depth in range(len(chain.keys), 0, -1):
            place = StatePlace.of(chain, depth * chain.page_size)
            if self.has(place):
                return piece_keys(place, self.num_pieces)
        return []

    def to_ask(self, chain: PageChain, depths: range) -> dict[PageKey, PageKey]:
        """The first piece of each state after these pages of a chain that is not stored here, and
        the page before it."""
        places = [StatePlace.of(chain, (depth + 1) * chain.page_size) for depth in depths]
        firsts = (piece_keys(place, 1)[0] for place in places)
        named = zip(firsts, depths, places, strict=True)
        return {first: chain.keys[d] for first, d, place in named if not self.has(place)}

    def note_use(self, place: StatePlace) -> None:
        """A sequence starts from this state, in the step that is being made. It is saved again if
        the tiers have evicted it."""
        if self.has(place):
            self._stack.note_use(piece_keys(place, self.num_pieces))
        else:
            self.note_kept(place, is_written=False)

    # --- down -----------------------------------------------------------------------------------

    def note_kept(self, place: StatePlace, *, is_written: bool) -> None:
        """A state is kept from now on: save it if it is at the end of a page. `is_written`: the
        step that wrote it has ended; otherwise, it is the step that is being made."""
        version = self._states.version(place)
        if place.tail or version is None:
            return
        if is_written:
            self._save(_Save(place, version))
        else:
            self._committed.append(_Save(place, version))

    def launched(self, step_id: StepId) -> None:
        """The step was made: it writes the states that were kept since the last one."""
        self._launched = step_id
        if self._committed:
            self._filling[step_id] = self._committed
            self._committed = []

    def settle(self, step_id: StepId) -> None:
        """Save the states that steps up to this one have written: these steps have ended."""
        self._settled = max(self._settled, step_id)
        for filled in [step for step in self._filling if step <= step_id]:
            for save in self._filling.pop(filled):
                self._save(save)

    def _save(self, save: _Save) -> None:
        """Copy a state down, unless it is stored. It is tried again later if there is no room."""
        keys, stack, count = piece_keys(save.place, self.num_pieces), self._stack, self.num_pieces
        if self._states.version(save.place) != save.version:
            self._skip("evicted before it was saved")
            return
        if all(map(stack.has, keys)):
            return
        there = [piece for key in keys if (piece := stack.pages.get(key)) is not None]
        is_used = any(piece.holds for piece in there)
        if is_used or self._saver.make_room(count) < count:
            self._postponed[save] = None
            return
        stack.drop(there)  # pieces of one save belong together
        slot = save.version[0]
        self._states.begin_copy(slot)
        previous, marks = [save.place.parent] * count, [PIECE] * count
        if not self._saver.copy_down(self._numbers(slot), keys, previous, marks):
            self._states.end_copy(slot)
        if not all(map(stack.has, keys)):  # some were refused: the others are useless
            stack.drop([piece for key in keys if (piece := stack.pages.get(key)) is not None])

    def _end_save(self, numbers: Int32s) -> None:
        """A copy of pieces has ended, well or not."""
        self._has_news = True
        for slot in np.unique((numbers - self._first_piece) // self.num_pieces).tolist():
            self._states.end_copy(slot)

    def _numbers(self, slot: int) -> Int32s:
        """The numbers of a slot's pieces on the device."""
        first = self._first_piece + slot * self.num_pieces
        return np.arange(first, first + self.num_pieces, dtype=np.int32)

    def _skip(self, reason: str) -> None:
        self._bus.publish(SavesSkipped(self.num_pieces, "host", reason))

    def resume(self) -> None:
        """Try postponed saves again if copies have ended, or if nothing else makes room."""
        writes = any(tier.num_writes_pending for _, tier in self._stack.below)
        if self._postponed and (self._has_news or not (writes or self._stack.host.num_saves)):
            postponed, self._postponed = list(self._postponed), {}
            for save in postponed:
                self._save(save)
        self._has_news = False

    def drop_postponed(self) -> None:
        """Do not save the states that still wait for room."""
        for _ in self._postponed:
            self._skip("no room in host memory")
        self._postponed.clear()

    def forget_unsaved(self) -> None:
        """After a failed step: what it wrote is not saved, and what is being loaded gets no name,
        because all slots are free. No step runs any more."""
        self._committed.clear()
        self._filling.clear()
        self._postponed.clear()
        self._settled = self._launched
        for load in self._loads.values():
            load.is_wanted = False
            self._unwanted.append(load)
            self._news.append(load.place.name())
        self._loads.clear()

    # --- up -------------------------------------------------------------------------------------

    def awaited(self, place: StatePlace) -> PageKey | None:
        """The key of a load of this state that is in progress."""
        return place.name() if place in self._loads else None

    def load(self, place: StatePlace, limit_s: float = READ_LIMIT_S) -> PageKey | None:
        """Load a stored state to a slot of the device; returns the key to wait for. None: there is
        no slot, or no room in host memory to read it into, or the state has just been evicted for
        the pages before it."""
        stack, host = self._stack, self._stack.host
        if not self.has(place) or not self._states.has_room():
            return None
        keys = piece_keys(place, self.num_pieces)
        pages = [stack.pages[key] for key in keys]
        for page in pages:
            page.holds += 1
        missing = [page for page in pages if not page.taken & IN_HOST]
        if (short := len(missing) - host.num_free) > 0:
            stack.carry_out(stack.policy.choose_victims(HOST, short))
        # the slot last: no state is evicted for one that is not loaded
        if len(missing) > host.num_free or (slot := self._states.take()) is None:
            for page in pages:
                stack.release(page)
            return None
        below = [fastest(page.full) for page in missing]
        num_below = {tier.name: below.count(number) for number, tier in stack.below}
        stack.read(missing, limit_s)
        self._states.begin_copy(slot)
        host.link.start(len(pages) * stack.page_bytes)
        self._loads[place] = StateLoad(
            self._loader.next_load_id(), place, slot, keys, pages, num_below, self._launched,
            perf_counter(),
        )  # fmt: skip
        return place.name()

    def poll(self) -> None:
        """Collect the loads that have ended, and start copies whose pieces were read."""
        for load in [*self._loads.values(), *self._unwanted]:
            self._poll_load(load)

    def _poll_load(self, load: StateLoad) -> None:
        host = self._stack.host
        if load.transfer is not None:
            num_layers = host.num_layers_done(load.transfer)
            if num_layers is None:
                self._fail(load)
            elif num_layers == self._loader.num_layers:
                self._end(load, load.transfer.seconds())
        elif not load.is_wanted:
            self._end(load, None)
        elif any(page.is_lost for page in load.pages):
            self._fail(load)
        elif all(page.full & IN_HOST for page in load.pages) and self._settled >= load.after:
            self._copy_up(load)

    def _copy_up(self, load: StateLoad) -> None:
        if all(page.is_piece for page in load.pages):  # a server may have something else
            numbers = self._numbers(load.slot)
            load.transfer = self._stack.host.load(load.load_id, load.keys, numbers, None)
        if load.transfer is None:
            self._fail(load)

    def _fail(self, load: StateLoad) -> None:
        """A piece is lost or cannot be copied: the others are useless, and the state is a miss."""
        self._stack.drop([page for page in load.pages if not page.is_lost])
        self._end(load, None)

    def _end(self, load: StateLoad, seconds: float | None) -> None:
        """End a load that took `seconds`, or was given up (None)."""
        stack, link = self._stack, self._stack.host.link
        num_bytes = len(load.pages) * stack.page_bytes
        self._states.end_copy(load.slot)
        if not load.is_wanted:
            self._unwanted.remove(load)
        else:
            del self._loads[load.place]
            self._news.append(load.place.name())
            if seconds is None:
                self._states.give_back(load.slot)
            else:
                self._states.keep(load.place, load.slot)
        stack.host.forget(load.load_id)
        if seconds is None:
            link.give_up(num_bytes)
        else:
            link.finish(num_bytes, seconds)
            stack.carry_out(stack.policy.keep(load.keys, monotonic()))
            self._publish_loaded(load)
        for page in load.pages:
            stack.release(page)

    def _publish_loaded(self, load: StateLoad) -> None:
        seconds = perf_counter() - load.began_s
        counts = {"host": len(load.pages) - sum(load.num_below.values())} | load.num_below
        for tier, number in reversed(counts.items()):  # slowest first: the load waited for it
            if number:
                self._bus.publish(PagesLoaded(number, tier, seconds))
                seconds = 0.0

    def take_news(self) -> list[PageKey]:
        """The keys that requests need not wait for any longer; each is returned once."""
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Return when copies to the device have ended."""
        for load in [*self._loads.values(), *self._unwanted]:
            if load.transfer is not None:
                load.transfer.wait()

    def check(self) -> None:
        """Raise if a load lost its pieces."""
        pieces = [page for load in self._loads.values() for page in load.pages]
        assert not any(page.taken for page in pieces if page.is_lost), "a lost piece has a place"
        assert all(load.is_wanted for load in self._loads.values()), "a load has no use"
