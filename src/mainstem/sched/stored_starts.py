"""Recurrent layers: where a sequence could start if states and pages of lower tiers were loaded."""

from dataclasses import replace

from mainstem.core.errors import OutOfPages
from mainstem.core.ids import PageKey
from mainstem.kv.finder import Match
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import StoredRun
from mainstem.kv.states import StatePlace, StateStore
from mainstem.kv.store import KVStore
from mainstem.kv.stored_states import StoredStates
from mainstem.sched.queue import Candidate, StoredStart


class StoredStarts:
    """Looks for states that are stored below the device, and loads them with the pages before
    them."""

    def __init__(self, store: KVStore, on_device: StateStore, stored: StoredStates) -> None:
        self.states = stored
        self._store = store
        self._on_device = on_device

    @classmethod
    def of(cls, store: KVStore) -> "StoredStarts | None":
        """None: no states are stored."""
        if store.states is None or store.stored_states is None:
            return None
        return cls(store, store.states, store.stored_states)

    def look_up(self, start: Candidate, match: Match, position: int) -> Candidate:
        """Add the deepest state, after `position`, where the sequence could start once it is
        loaded, or the pages before it are; or make the sequence wait for its load. `match` has all
        pages that are cached, `start` those up to `position`."""
        chain = start.chain
        assert chain is not None, "a sequence without names has nothing in the tiers"
        page_size, num_there = self._store.page_size, len(match.pages)
        for depth in range(num_there + match.stored.num_pages, position // page_size, -1):
            place = StatePlace.of(chain, depth * page_size)
            if (awaited := self.states.awaited(place)) is not None:
                return replace(start, awaited=awaited)
            is_on_device = self._on_device.has(place)
            if not is_on_device and not self.states.has(place):
                continue
            run = StoredRun(chain, num_there, max(0, depth - num_there))
            counts = self._store.loader.stored(run.keys)
            saved_tokens = depth * page_size - position
            of_state = None if is_on_device else self.states.counts(place)
            counts = replace(counts, saved_tokens=saved_tokens)
            if of_state is not None:
                counts = counts.plus(of_state, saved_tokens)
            there = match.pages[:depth]
            return replace(start, stored=StoredStart(place, is_on_device, run, there, counts))
        return start

    def note_use(self, chain: PageChain, position: int) -> None:
        """A sequence starts from the state at this position."""
        self.states.note_use(StatePlace.of(chain, position))


def load(store: KVStore, wanted: StoredStart, limit_s: float) -> PageKey | None:
    """Load a state, and the pages before it that are not on the device; returns the key to wait
    for. None: nothing can be loaded now. The sequence can start when everything is there, so no
    step waits for a load layer by layer."""
    awaited: PageKey | None = None
    if wanted.run.num_pages:
        run = replace(wanted.run, limit_s=limit_s)
        try:
            awaited = store.load(run, wanted.there, store.loader.num_layers)
        except OutOfPages:  # pages that the sequence itself holds had been counted as available
            return None
        if awaited is None:
            return None
    if wanted.is_on_device or store.stored_states is None:
        return awaited
    return store.stored_states.load(wanted.place, limit_s) or awaited


def progress(found: Candidate) -> int:
    """A number that grows as what a sequence wants comes to the device."""
    stored = found.stored
    return len(found.match.pages) if stored is None else len(stored.there) + stored.is_on_device
