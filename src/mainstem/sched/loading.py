"""Loads the history of a waiting sequence from lower tiers, where that is faster than computing it.

sched/fetching.py has the estimates; the Starter (sched/starting.py) calls the Loader.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, sleep

import numpy as np

from mainstem.core.errors import OutOfPages
from mainstem.core.ids import PageKey
from mainstem.core.step import Step, StepId
from mainstem.kv.loading import StoredRun
from mainstem.kv.store import KVStore
from mainstem.sched import stored_starts
from mainstem.sched.fetching import Fetching, StoredHistory
from mainstem.sched.queue import Candidate, StoredStart, WaitingQueue
from mainstem.sched.sequence import Sequence

MAKE_S = 0.006  # a step is made this long before the device needs it
LOOK_S = 0.001  # between two checks of disk reads


class Loader:
    """Starts loads, and observes how long steps take."""

    def __init__(self, store: KVStore, queue: WaitingQueue, fetching: Fetching | None) -> None:
        """`fetching` decides between loading and computing; None: nothing is loaded."""
        self.fetching = fetching
        self._store = store
        self._queue = queue
        # sequences that compute only up to a position, and then load what follows
        self.gap_ends: dict[Sequence, int] = {}
        self._last_end_s = 0.0  # end of the latest step that has ended
        self._last_start_s = 0.0  # when the latest step was made
        self._starts: dict[StepId, float] = {}  # start times of steps that may still run
        self._left_s = 0.0  # that the step in flight takes, at the latest `poll`

    def history(self, found: Candidate) -> StoredHistory:
        """Return what lower tiers do for a sequence. Shared tiers are asked, once, for its pages
        that are not stored here."""
        history, store, chain = found.sequence.history, self._store, found.chain
        if history is None:
            asked: PageKey | None = None
            if chain is not None and self.fetching is not None and self.fetching.may_ask:
                wanted = found.pages_to_find(store.page_size)
                stored = store.stored_states
                states = None if stored is None else stored.to_ask(chain, wanted)
                asked = store.loader.questions.ask(chain.keys[wanted.start : wanted.stop], states)
            history = found.sequence.history = StoredHistory(asked)
        if history.asked is not None and not store.loader.questions.is_open(history.asked):
            history.asked = None
        return history

    def may_load(self, found: Candidate) -> bool:
        """False if pages that were loaded for the sequence were evicted again. Then it computes
        them, so that sequences do not evict each other's pages for ever."""
        history = found.sequence.history
        return history is None or stored_starts.progress(found) > history.num_pages_then

    def awaited_answer(self, found: Candidate) -> PageKey | None:
        """The answer that a sequence waits for before it starts, because it should come soon.
        None: the sequence starts, and a later answer helps other sequences."""
        if self.fetching is None or (asked := self.history(found).asked) is None:
            return None
        num_there = len(found.match.before) + found.match.stored.num_pages
        num_tokens = found.num_known - num_there * self._store.page_size
        patience_s = self.fetching.patience_s(num_tokens)
        return asked if self._store.loader.questions.awaits(asked, patience_s) else None

    def must_wait(self, found: Candidate, tokens_ahead: int) -> bool:
        """Whether a sequence should wait: loading is faster, but the link is busy."""
        fetching, stored = self.fetching, found.to_load
        if fetching is None or not stored.num_pages or not self.may_load(found):
            return False
        if not fetching.is_busy(stored, self._left_s):
            return False
        return fetching.is_worth_it(stored, tokens_ahead, len(self._queue))

    def load(self, found: Candidate, tokens_ahead: int) -> PageKey | None:
        """Load the stored pages of a sequence, if that is faster; returns the key to wait for."""
        fetching, sequence, chain, match = self.fetching, found.sequence, found.chain, found.match
        if fetching is None or chain is None:
            return None
        history, page_size = self.history(found), self._store.page_size
        if not self.may_load(found):
            history.is_loaded = sequence.is_light = False
            return None
        if found.stored is not None:
            return self._load_state(found, found.stored, tokens_ahead)
        stored, kept = match.stored, match.before
        runs = [StoredRun(chain, len(kept), stored.num_pages)]
        if sequence.truncated is not None and sequence.truncated.origins is not None:
            wanted = found.pages_to_find(page_size)
            runs, sources = sequence.truncated.origins.find_stored(self._store, chain, wanted)
            kept = np.union1d(kept, sources).astype(np.int32)
            stored = self._store.loader.stored([key for run in runs for key in run.keys])
        if not stored.num_pages:
            return None
        if not fetching.is_worth_it(stored, tokens_ahead, len(self._queue)):
            self._store.dismiss(sequence.queue_place)  # the sequence needs no prefetch any more
            return None
        num_there = (len(kept) + stored.num_pages) * page_size
        layers = fetching.start_layers(stored, max(found.num_known - num_there, 1))
        if match.similar_page is not None:  # needed if nothing can be loaded
            kept = np.append(kept, np.int32(match.similar_page))
        awaited: PageKey | None = None
        try:
            limit_s = fetching.limit_s(stored)
            for run in runs:
                awaited = self._store.load(replace(run, limit_s=limit_s), kept, layers) or awaited
        except OutOfPages:  # pages that the sequence itself holds had been counted as available
            pass
        if awaited is not None:
            history.is_loaded, history.num_pages_then = True, len(match.pages)
        return awaited

    def stop_at_gap(self, found: Candidate, num_cached: int) -> None:
        """Let a sequence that starts now compute only the next pages, if they were found damaged,
        and loading those after them is faster than computing them."""
        fetching, sequence, chain = self.fetching, found.sequence, found.chain
        self.gap_ends.pop(sequence, None)
        damaged, stored_of = self._store.loader.damaged, self._store.loader.stored
        if not damaged:
            return
        if fetching is None or chain is None or sequence.truncated is not None:
            return
        if sequence.prompt_logprobs is not None:
            return
        page_size, history = self._store.page_size, self.history(found)
        if (history.gap_end or 0) > num_cached:
            return  # a gap is computed once, even if its pages were evicted again
        number, end = num_cached // page_size, sequence.num_reusable(found.num_known) // page_size
        while number < end and chain.keys[number] in damaged:
            number += 1
        stored = stored_of(chain.keys[number:end])
        gap_tokens = number * page_size - num_cached
        if gap_tokens > 0 and fetching.is_worth_it(stored, 0, len(self._queue)):
            history.gap_end = self.gap_ends[sequence] = number * page_size
            history.num_gap_tokens += gap_tokens

    def _load_state(
        self, found: Candidate, wanted: StoredStart, tokens_ahead: int
    ) -> PageKey | None:
        """Like `load`, for a model with recurrent layers: it starts where a state is."""
        fetching, history = self.fetching, self.history(found)
        assert fetching is not None, "nothing is loaded"
        if not fetching.is_worth_it(wanted.counts, tokens_ahead, len(self._queue)):
            self._store.dismiss(found.sequence.queue_place)
            return None
        awaited = stored_starts.load(self._store, wanted, fetching.limit_s(wanted.counts))
        if awaited is not None:
            history.is_loaded, history.num_pages_then = True, stored_starts.progress(found)
        return awaited

    # --- how long steps take --------------------------------------------------------------------

    def note_start(self, step_id: StepId) -> None:
        """Record that a step is made. It runs as soon as the previous step has ended."""
        self._last_start_s = self._starts[step_id] = perf_counter()

    def note_end(self, step: Step, device_s: float) -> None:
        """Record that a step has ended, perhaps a while ago; the step in flight runs now."""
        now_s = perf_counter()
        began_s = max(self._starts.get(step.step_id, now_s), self._last_end_s)
        self._starts = {i: at_s for i, at_s in self._starts.items() if i > step.step_id}
        before_s, self._last_end_s = self._last_end_s, min(began_s + device_s, now_s)
        if self.fetching is None:
            return
        self.fetching.steps.interval_s = min(self._last_end_s - before_s, device_s)
        if device_s and not len(step.load_ids):
            self.fetching.steps.observe(step.num_tokens - step.num_decodes, device_s)

    def poll(self, in_flight: Step | None) -> list[PageKey]:
        """Let sequences start whose pages are there when the step that is made now begins. Returns
        the keys that sequences need not wait for any longer."""
        self._left_s = self._expect_left_s(in_flight)
        news = self._store.poll(self.lead_s(in_flight))
        self._queue.unpark(news)
        return news

    def look_at_reads(self, in_flight: Step | None, has_ended: Callable[[], bool]) -> None:
        """Delay the next step while the device is busy anyway. Pages that arrive from disk in this
        time are copied to the device at once, and the step can still use them."""
        while self._store.loader.is_reading:
            left_s = self.lead_s(in_flight) - MAKE_S
            if left_s <= 0 or has_ended():
                return
            self._queue.unpark(self._store.poll(left_s))
            sleep(min(left_s, LOOK_S))

    def lead_s(self, in_flight: Step | None) -> float:
        """Return the least time that a step made now will wait for the step in flight."""
        if self.fetching is None:
            return 0.0
        return self.fetching.lead_s(self._expect_left_s(in_flight))

    def _expect_left_s(self, in_flight: Step | None) -> float:
        """Return the least time that the step in flight will still take."""
        if self.fetching is None or in_flight is None:
            return 0.0
        prompt_tokens = in_flight.num_tokens - in_flight.num_decodes
        began_s = max(self._last_start_s, self._last_end_s)
        return self.fetching.left_s(prompt_tokens, perf_counter() - began_s)
