"""Finds the pages of waiting sequences on the device, and loads pages from lower tiers."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from mainstem.core.errors import OutOfPages
from mainstem.core.ids import PageKey
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Step, StepId
from mainstem.kv.keys import PageChain
from mainstem.kv.loading import StoredRun
from mainstem.kv.page_logprobs import MAX_TOP
from mainstem.kv.store import Lookup, Match
from mainstem.sched.admission import Admission
from mainstem.sched.fetching import Fetching
from mainstem.sched.lookahead import OutputLengths
from mainstem.sched.prompt_work import PromptWork
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import Sequence

LOAD_AHEAD = 64  # waiting sequences whose pages are loaded before their turn
AWAITS_LOGPROBS = PageKey(b"logprobs")  # not the name of a page


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence and its cached pages."""

    sequence: Sequence
    num_known: int  # number of tokens in its prompt and its output so far
    chain: PageChain | None  # names of the pages of these tokens; None: nothing is shared
    match: Match
    logprobs: Collection[TokenLogprobs | None] = ()  # of its first tokens, if wanted

    def pages_to_find(self, page_size: int) -> range:
        """Page numbers after the cached ones that may be loaded from lower tiers."""
        end = self.sequence.num_reusable(self.num_known) // page_size
        return range(len(self.match.pages), end)

    @property
    def may_fetch(self) -> bool:
        """False if pages that were loaded for the sequence were evicted again. Then it computes
        them, so that sequences do not evict each other's pages for ever."""
        return len(self.match.pages) > self.sequence.num_pages_then


class Loader:
    """Looks up waiting sequences, and starts loads where loading is faster."""

    def __init__(
        self,
        running: RunningSet,
        queue: WaitingQueue,
        lengths: OutputLengths,
        fetching: Fetching | None,
    ) -> None:
        """`fetching` decides between loading and computing; None: nothing is loaded."""
        self.fetching = fetching
        self._last_end_s = 0.0  # end of the latest step that has ended
        self._last_start_s = 0.0  # when the latest step was made
        # sequences that were not loaded in the last step, because a link was busy
        self._put_off: dict[Sequence, Candidate] = {}
        self._starts: dict[StepId, float] = {}  # start times of steps that may still run
        self._running = running
        self._queue = queue
        self._lengths = lengths
        self._store = running.store
        self._page_size = running.page_size
        self._admission = Admission(running.page_size)
        self._collectors: list[tuple[Sequence, set[PageKey]]] = []  # of prompt logprobs

    def tokens_ahead(self) -> int:
        """The number of prompt tokens that the device computes before those of a sequence that
        starts now."""
        return 0 if self.fetching is None else self._running.num_unfinished_tokens()

    def look_up(self, sequence: Sequence) -> Candidate:
        """The cached pages of a waiting sequence."""
        known = sequence.known_ids()
        if sequence.awaited_cut is not None:
            match = Match(np.empty(0, np.int32), Lookup.LOADING, sequence.awaited_cut.key)
            return Candidate(sequence, len(known), None, match)
        chain = sequence.chain
        if chain is not None and len(known) > len(chain.token_ids):
            chain = chain.extended(known)
        if chain is None:
            match = Match(np.empty(0, np.int32), Lookup.MISS)
        elif sequence.prompt_logprobs is not None:
            return self._look_up_logprobs(sequence, len(known), chain)
        else:
            match = self._store.lookup(chain, sequence.num_reusable(len(known)))
        return Candidate(sequence, len(known), chain, match)

    def _look_up_logprobs(self, sequence: Sequence, num_known: int, chain: PageChain) -> Candidate:
        """Find the cached pages whose prompt logprobs are known as well. The token before the first
        unknown logprob is always computed, for its logits."""
        scoring = sequence.request.scoring
        if scoring is not None:
            match = self._store.lookup(chain, scoring.first - 1)
            return Candidate(sequence, num_known, chain, match)
        whole = self._store.lookup(chain, len(sequence.request.prompt_ids))
        if whole.outcome is Lookup.LOADING:
            return Candidate(sequence, num_known, chain, whole)
        num_top = sequence.request.sampling.prompt_logprobs or 0
        logprobs = self._store.known_logprobs(whole, num_top)
        can_use = num_top <= MAX_TOP
        if can_use and self._are_coming(chain.keys[: len(whole.pages)], len(logprobs)):
            match = Match(whole.pages, Lookup.LOADING, AWAITS_LOGPROBS)
        else:
            match = self._store.lookup(chain, max(len(logprobs), 1) - 1)
        return Candidate(sequence, num_known, chain, match, logprobs)

    def _are_coming(self, ready: tuple[PageKey, ...], num_tokens: int) -> bool:
        """Whether another sequence is computing the next logprobs: those of the page in which
        token `num_tokens` is. `ready` has the pages whose K and V are READY."""
        place = num_tokens // self._page_size
        if place == len(ready):
            return False
        return any(seq.is_collecting and ready[place] in keys for seq, keys in self._collectors)

    def note_collector(self, sequence: Sequence, chain: PageChain) -> None:
        """Record that a sequence begins to compute prompt logprobs. If they will be kept, other
        sequences wait for the logprobs of common pages."""
        if sequence.request.sampling.prompt_logprobs:
            self._collectors.append((sequence, set(chain.keys)))

    def settled(self) -> list[PageKey]:
        """Keys to unpark, because sequences have stopped computing prompt logprobs."""
        before = len(self._collectors)
        self._collectors = [each for each in self._collectors if each[0].is_collecting]
        return [AWAITS_LOGPROBS] if len(self._collectors) < before else []

    def load_ahead(self, work: PromptWork) -> None:
        """Start loads for the next sequences in the queue, in order, while others run. Stops when
        no pages are left beyond those that earlier sequences need. A sequence whose link is busy
        waits for it; later sequences may use another link."""
        if self.fetching is None:
            return
        put_off, self._put_off = self._put_off, {}
        tokens_ahead, pages_ahead = self.tokens_ahead(), 0
        available = self._store.num_available()
        for sequence in self._queue.first(LOAD_AHEAD):
            num_tokens = sequence.num_to_compute
            if num_tokens is None:
                found = put_off.get(sequence)
                must_wait = found is not None and self.must_wait(found, tokens_ahead)
                if found is None or not must_wait:  # the earlier result may be out of date
                    if not work.may_look_ahead:
                        return
                    work.num_pages_ahead += sequence.num_named_pages
                    found = self.look_up(sequence)
                    must_wait = self.must_wait(found, tokens_ahead)
                match = found.match
                if match.outcome is Lookup.LOADING:
                    continue
                is_asking = self._ask(found) is not None
                pages_ahead += -(-found.num_known // self._page_size) - len(match.pages)
                if not self._fits(sequence, pages_ahead, available, work):
                    return
                num_tokens = found.num_known - len(match.pages) * self._page_size
                if must_wait:
                    self._put_off[sequence] = found
                    if not match.stored.num_below:
                        # the link from host memory is busy, and every load passes through it
                        return
                elif self.load(found, tokens_ahead) is not None:
                    num_tokens -= match.stored.num_pages * self._page_size
                    pages_ahead -= match.stored.num_pages
                    available = self._store.num_available()
                    sequence.num_to_compute = num_tokens
                    sequence.num_loaded_pages = match.stored.num_pages
                    self._queue.move_up(sequence)
                elif not (is_asking or (found.may_fetch and self.fetching.is_open(match.stored))):
                    sequence.num_to_compute = num_tokens
            elif sequence.has_fetched:
                # idle pages count as available, so those loaded for this sequence count as needed
                pages_ahead += sequence.num_loaded_pages - (-num_tokens // self._page_size)
            tokens_ahead += num_tokens

    def _ask(self, found: Candidate) -> PageKey | None:
        """Ask shared tiers, once, for the pages of a sequence that are not stored here; returns the
        key of the answer while it is awaited."""
        sequence, chain = found.sequence, found.chain
        if chain is None or self.fetching is None or not self.fetching.may_ask:
            return None
        if not sequence.has_asked:
            sequence.has_asked = True
            wanted = found.pages_to_find(self._page_size)
            sequence.asked = self._store.loader.ask(chain.keys[wanted.start : wanted.stop])
        if sequence.asked is not None and not self._store.loader.questions.is_open(sequence.asked):
            sequence.asked = None
        return sequence.asked

    def awaited_answer(self, found: Candidate) -> PageKey | None:
        """The answer that a sequence waits for before it starts, because it should come soon.
        None: the sequence starts, and a later answer helps other sequences."""
        asked = self._ask(found)
        if asked is None or self.fetching is None:
            return None
        num_there = len(found.match.pages) + found.match.stored.num_pages
        num_tokens = found.num_known - num_there * self._page_size
        patience_s = self.fetching.patience_s(num_tokens)
        return asked if self._store.loader.questions.awaits(asked, patience_s) else None

    def _fits(self, sequence: Sequence, num_pages: int, available: int, work: PromptWork) -> bool:
        """Whether a sequence that takes `num_pages` could start, together with the sequences before
        it in the queue."""
        expected = self._lengths.expect(sequence) - len(sequence.output_ids)
        if work.outlook is None:
            work.outlook = self._running.outlook()
        return self._admission.may_start(num_pages, expected, available, work.outlook)

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

    def lead_s(self, in_flight: Step | None) -> float:
        """Return the least time that a step made now will wait for the step in flight."""
        if self.fetching is None or in_flight is None:
            return 0.0
        prompt_tokens = in_flight.num_tokens - in_flight.num_decodes
        began_s = max(self._last_start_s, self._last_end_s)
        return self.fetching.lead_s(prompt_tokens, perf_counter() - began_s)

    def must_wait(self, found: Candidate, tokens_ahead: int) -> bool:
        """Whether a sequence should wait: loading is faster, but the link is busy."""
        fetching, stored = self.fetching, found.match.stored
        if fetching is None or not stored.num_pages or not found.may_fetch:
            return False
        if not fetching.is_busy(stored):
            return False
        return fetching.is_worth_it(stored, tokens_ahead, len(self._queue))

    def load(self, found: Candidate, tokens_ahead: int) -> PageKey | None:
        """Load the stored pages of a sequence, if that is faster; returns the key to wait for."""
        fetching, sequence, chain, match = self.fetching, found.sequence, found.chain, found.match
        if fetching is None or chain is None:
            return None
        if not found.may_fetch:
            sequence.has_fetched = False
            return None
        runs, kept = [StoredRun(chain, len(match.pages), match.stored.num_pages)], match.pages
        if sequence.origins is not None:
            wanted = found.pages_to_find(self._page_size)
            runs, sources = sequence.origins.find_stored(self._store, chain, wanted)
            kept = np.union1d(kept, sources).astype(np.int32)
        stored = self._store.loader.stored([key for run in runs for key in run.keys])
        if not stored.num_pages:
            return None
        if not fetching.is_worth_it(stored, tokens_ahead, len(self._queue)):
            self._store.dismiss(sequence.queue_place)  # the sequence needs no prefetch any more
            return None
        num_there = (len(kept) + stored.num_pages) * self._page_size
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
            sequence.has_fetched, sequence.num_pages_then = True, len(match.pages)
        return awaited
