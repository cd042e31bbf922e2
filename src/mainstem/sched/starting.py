"""What starts next, and why: continues prompts in progress, and starts sequences from the queue.

queue's head --> looked up --> READY or MISS --> may start --> pages, slot, first chunk
                     |                              | no: it stays; no other overtakes it
                     '--> LOADING, or to be loaded: parked until its page is there

A sequence may start if, by a forecast, the running ones will not run out of pages (Outlook).
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mainstem.core.events import (
    EventBus,
    PagesMoved,
    SequenceAdmitted,
    SequenceResumed,
    WindowsLost,
)
from mainstem.core.ids import PageKey, SeqSlot
from mainstem.core.step import Float32s, Int32s, StartedSequence
from mainstem.kv.finder import Lookup, Match
from mainstem.sched.batching import Chunk, PageCopy, PageMove, StepWork
from mainstem.sched.loading import Loader
from mainstem.sched.origins import NOTHING_MOVABLE, MovablePages
from mainstem.sched.prompt_logprobs import Collectors
from mainstem.sched.queue import OVERTAKEN, Candidate
from mainstem.sched.retry import Retry
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import Sequence

LOAD_AHEAD = 64  # waiting sequences whose pages are loaded before their turn
# once this many pages were looked up for sequences that a step parks, it starts no more sequences;
# the same limit ends its look-ahead
LOOK_UP_PAGES = 8192
UNSEEN = 256  # tokens expected at first; a request's limit is often far above the real length
NO_PAGES: Int32s = np.empty(0, np.int32)
NO_MATCH = Match(NO_PAGES, Lookup.MISS)

A = TypeVar("A", Int32s, Float32s)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The pages that running sequences are expected to take and to give back. Sequences are in the
    order in which they are expected to end.

    Every running sequence grows by a token a step and gives its own pages back when it ends. Just
    before sequence k of n (from 0) ends, all running sequences have grown by the same number of
    tokens, and the sequences before it have ended:

        need_k = (n - k) * remaining_k / page_size  -  own pages of those that ended

    The largest need_k must be available now (memory-centric token batching, BatchLLM 4.3.3; the
    forecast replaces its fixed M_threshold).
    """

    remaining: Int32s  # [running] output tokens to come
    own_pages: Float32s  # [running] pages that its end frees; a shared page counts in part
    page_size: int

    @classmethod
    def of(cls, remaining: Int32s, own_pages: Float32s, page_size: int) -> "Outlook":
        """The outlook of sequences given in any order."""
        order = np.argsort(remaining)
        return cls(remaining[order], own_pages[order], page_size)

    def joined_by(self, new_pages: int, expected: int) -> "Outlook":
        """The outlook with one more sequence, which takes `new_pages` now and produces `expected`
        tokens."""
        place = int(self.remaining.searchsorted(np.int32(expected)))
        return Outlook(
            _inserted(self.remaining, place, expected),
            _inserted(self.own_pages, place, new_pages),
            self.page_size,
        )

    def peak_need(self) -> float:
        """Return the maximum number of additional pages that these sequences will hold at once."""
        given_back = self.own_pages.cumsum(dtype=np.float64)
        given_back -= self.own_pages
        alive = np.arange(len(given_back), 0, -1)
        # each sequence may be about to begin a page
        alive *= self.remaining // self.page_size + 1
        return float((alive - given_back).max())

    def may_start(self, new_pages: int, expected: int, available: int) -> bool:
        """Whether a sequence may start that takes `new_pages` now and is expected to produce
        `expected` tokens."""
        if len(self.remaining) == 0:
            return new_pages <= available  # nothing else runs: the forecast is not needed
        return new_pages + self.joined_by(new_pages, expected).peak_need() <= available


class OutputLengths:
    """The mean length of about the last `memory` answers; UNSEEN before the first answer.

    A sequence that starts again is expected to reach at least twice its length so far.
    """

    def __init__(self, memory: int = 256) -> None:
        self._memory = memory
        self._count = 0
        self._mean = 0.0

    def observe(self, num_output: int) -> None:
        self._count = min(self._count + 1, self._memory)
        self._mean += (num_output - self._mean) / self._count

    @property
    def likely(self) -> int:
        """Expected tokens of an answer of which nothing is known."""
        return round(self._mean) if self._count else UNSEEN

    def expect(self, sequence: Sequence) -> int:
        """Expected output tokens of a sequence that is about to start, including those it already
        has."""
        likely = sequence.request.expected_tokens
        if likely is None:
            likely = self.likely
        produced = len(sequence.output_ids)
        return min(sequence.max_output, max(likely, 2 * produced, 1))


class Starter:
    """Fills the prompt part of a step."""

    def __init__(
        self,
        running: RunningSet,
        lengths: OutputLengths,
        loader: Loader,
        retry: Retry,
        bus: EventBus,
        max_seqs: int | None,
    ) -> None:
        """`max_seqs` is the maximum number of slots, which the runner may have memory for; None: as
        many as fit into memory."""
        self._max_seqs = max_seqs
        self._running = running
        self._queue = running.queue
        self._lengths = lengths
        self._loader = loader
        self._retry = retry
        self._bus = bus
        self._store = running.store
        self._page_size = running.page_size
        self._states = running.states
        self._windows = running.windows
        self._collectors = Collectors()
        # sequences that were not loaded in the last step, because a link was busy
        self._put_off: dict[Sequence, Candidate] = {}
        # of the step being made
        self._outlook: Outlook | None = None  # made when the first sequence wants to start
        self._num_parked_pages = 0  # pages looked up for sequences that were then parked
        self._begun: dict[Sequence, PageKey] = {}  # loads, by what they make a sequence wait for

    def fill(self, work: StepWork) -> None:
        """Start loads for the next sequences, and add prompt chunks within the budget, by priority.
        At the same priority, sequences that have started come before new ones, but for those that
        have few tokens left to compute."""
        self._outlook, self._num_parked_pages = None, 0
        self._begun.clear()
        self._queue.unpark(self._collectors.remove_done())
        if self._windows is not None and len(self._queue):
            self._windows.forecast(self._running.slots, self._running.tree)
        self._load_ahead()
        if self._begun:  # beginning loads takes time, in which earlier ones arrive
            news = set(self._loader.poll(self._running.in_flight))
            self._begun = {s: awaited for s, awaited in self._begun.items() if awaited not in news}
        unfinished = self._running.unfinished()
        if unfinished:
            self._let_cached_overtake(unfinished[0])
        for sequence in unfinished:
            self._start_waiting(work, before=sequence)
            if work.budget <= 0:
                break
            assert sequence.slot is not None
            if (chunk := self._next_chunk(sequence.slot, work.budget)) is None:
                return  # no sequence takes parts of pages that a more urgent one needs
            work.add(chunk)
        self._start_waiting(work, before=None)

    def _let_cached_overtake(self, started: Sequence) -> None:
        """Let waiting prompts overtake `started` if few of their tokens are left to compute. With
        lower tiers, only those that `_load_ahead` loads overtake: what is loaded and evicted next
        follows the queue's order."""
        if self._loader.fetching is not None or self._running.num_slots == self._max_seqs:
            return
        num_looked_up = 0
        for sequence in self._queue.first(OVERTAKEN):
            if sequence.request.plan_place is not None or num_looked_up >= LOOK_UP_PAGES:
                return
            if sequence.is_light or sequence.request.priority > started.request.priority:
                continue
            num_looked_up += sequence.num_named_pages
            found = self._look_up(sequence)
            if found.awaited is None:
                num_cached = len(found.match.pages) * self._page_size
                self._queue.move_up(sequence, found.num_known - num_cached)

    def _start_waiting(self, work: StepWork, before: Sequence | None) -> None:
        """Start sequences from the queue, or only those that start before `before` goes on."""
        while work.budget > 0 and self._num_parked_pages < LOOK_UP_PAGES:
            sequence = self._queue.head()
            if sequence is None:
                return
            if before is not None and not self._queue.starts_before(sequence, before):
                return
            if self._running.num_slots == self._max_seqs or not self._retry.may_join(sequence):
                return
            slot = self._try_start(sequence, work)
            if slot is None:
                if sequence is self._queue.head():
                    return  # there is no room, and no other sequence may overtake it
                self._num_parked_pages += sequence.num_named_pages
                continue
            if sequence not in self._loader.gap_ends:
                self._announce(sequence, int(self._running.table.computed[slot]))
            if sequence.request.sampling.edits_logits:
                work.started.append(_started(sequence, slot))
            chunk = self._next_chunk(slot, work.budget)
            assert chunk is not None, "a sequence started and cannot compute a token"
            work.add(chunk)

    def _try_start(self, sequence: Sequence, work: StepWork) -> SeqSlot | None:
        """Give the queue's head its pages and a slot, or park it, or leave it where it is."""
        if (awaited := self._begun.get(sequence)) is not None:
            self._queue.park(self._queue.pop(), awaited)
            return None
        found = self._look_up(sequence)
        if found.awaited is not None:
            self._queue.park(self._queue.pop(), found.awaited)
            return None
        # lease before counting, since leased pages cannot be evicted
        self._lease(found.match)
        if self._states is not None and not self._may_copy(found):
            self._release(found.match)
            found = self._look_up(sequence, whole_pages=True)
            self._lease(found.match)
        try:
            return self._start_leased(found, work)
        except Exception:
            self._queue.push(sequence)  # it may have left the queue, and `fail` must find it there
            raise

    def _lease(self, match: Match) -> None:
        """Lease the pages of a match, and hold the windowed parts to start after them."""
        self._store.lease(match.pages)
        if self._windows is not None:
            self._windows.hold(match)

    def _release(self, match: Match) -> None:
        if self._windows is not None:
            self._windows.release(match)
        self._store.release(match.pages)

    def _may_copy(self, found: Candidate) -> bool:
        """Whether the page that a sequence shares in part, if any, can stay while it takes its own
        pages. A state after some tokens of a page needs all of them."""
        if found.match.similar_page is None:
            return True
        num_new, _ = self._demand(found)
        if can_lease := self._lease_similar(found.match, num_new):
            self._store.release(np.array([found.match.similar_page], np.int32))
        return can_lease

    def _look_up(self, sequence: Sequence, *, whole_pages: bool = False) -> Candidate:
        """The cached pages of a waiting sequence. With `whole_pages` it shares no page in part, if
        the model has recurrent layers."""
        known, chain, truncated = sequence.known_ids(), sequence.chain, sequence.truncated
        if truncated is not None and truncated.weighing is not None and sequence.weighing is None:
            return Candidate(sequence, len(known), None, NO_MATCH, truncated.weighing)
        if chain is None:
            return Candidate(sequence, len(known), None, NO_MATCH)
        if len(known) > len(chain.token_ids):
            chain = chain.extended(known)
        if (wanted := sequence.prompt_logprobs) is not None:
            match, logprobs, other = self._collectors.look_up(self._store, wanted, chain)
            awaited = other or match.awaited
            found = Candidate(sequence, len(known), chain, match, awaited, logprobs)
            return self._with_state(found, whole_pages)
        match = self._store.lookup(chain, sequence.num_reusable(len(known)))
        found = Candidate(sequence, len(known), chain, match, match.awaited)
        return self._with_state(found, whole_pages)

    def _with_state(self, found: Candidate, whole_pages: bool) -> Candidate:
        """The candidate, cut to a state that it can start from if the model has recurrent
        layers."""
        if self._states is None:
            return found
        return self._states.find(found, whole_pages=whole_pages)

    def _start_leased(self, found: Candidate, work: StepWork) -> SeqSlot | None:
        """Do the rest of `_try_start`, after the cached pages are leased."""
        tokens_ahead, store = self._tokens_ahead(), self._store
        # pinned pages are not used, unless nothing could run otherwise
        available = store.num_available() if len(self._running) else store.num_takeable()
        num_new, to_come = self._demand(found)
        may_start = self._forecast().may_start(num_new, to_come, available)
        if may_start and self._states is not None:
            may_start = self._states.may_start(found, work.budget)
        if self._windows is not None:
            may_start &= self._windows.may_start(num_new, to_come, work.budget)
        if not may_start or self._loader.must_wait(found, tokens_ahead):
            self._release(found.match)
            return None
        awaited = self._loader.awaited_answer(found) or self._loader.load(found, tokens_ahead)
        movable, truncated = NOTHING_MOVABLE, found.sequence.truncated
        if awaited is None and truncated is not None and truncated.origins is not None:
            wanted = found.pages_to_find(self._page_size)
            movable = truncated.origins.find_on_device(store, wanted, work.filled_pages())
            awaited = movable.awaited
        if awaited is not None:
            self._release(found.match)
            self._queue.park(self._queue.pop(), awaited)
            return None
        if self._windows is not None and not self._windows.can_fill(0, NO_PAGES):
            self._release(found.match)
            return None
        return self._start(found, movable, work)

    def _forecast(self) -> Outlook:
        """How long each running sequence is expected to run, and the pages it will give back."""
        if self._outlook is None:
            table, slots = self._running.table, self._running.slots
            in_tree, part = self._running.tree.shares(slots)
            remaining = table.expect_remaining(slots, at_least=self._page_size)
            own_pages = table.num_pages[slots] - in_tree + part
            self._outlook = Outlook.of(remaining, own_pages, self._page_size)
        return self._outlook

    def _demand(self, found: Candidate) -> tuple[int, int]:
        """Return the pages that a sequence takes at once, and the output tokens that it will
        probably produce."""
        num_new = -(-found.num_known // self._page_size) - len(found.match.pages)
        return num_new, self._lengths.expect(found.sequence) - len(found.sequence.output_ids)

    def _start(self, found: Candidate, movable: MovablePages, work: StepWork) -> SeqSlot:
        """Take pages for the queue's head, and let this step fill those that can be filled by
        copying."""
        store, sequence, cached = self._store, found.sequence, found.match.pages
        num_new, to_come = self._demand(found)
        self._outlook = self._forecast().joined_by(num_new, to_come)
        num_moved = movable.lease(store, num_new)
        if self._windows is not None:
            num_usable = self._windows.usable_moves(cached, movable.pages[:num_moved])
            store.release(movable.pages[num_usable:num_moved])
            num_moved = num_usable
        has_similar = not len(movable.pages) and self._lease_similar(found.match, num_new)
        fresh = store.take(num_new)
        self._queue.pop()
        num_cached = (len(cached) + num_moved) * self._page_size
        if found.match.num_lost:
            num_lost = found.match.num_lost * self._page_size
            self._bus.publish(WindowsLost(sequence.request.request_id, num_lost))
        if has_similar:
            assert found.match.similar_page is not None
            similar_tokens = found.match.similar_tokens
            work.copies.append(PageCopy(found.match.similar_page, int(fresh[0]), similar_tokens))
            num_cached += similar_tokens
        if found.chain is not None:
            store.reserve(found.chain, len(cached), fresh[: len(found.chain.keys) - len(cached)])
            if sequence.has_named_tail and len(fresh):
                store.reserve_tail(found.chain, int(fresh[-1]))
        work.loads += [loads for loads in (found.match.loads, movable.loads) if loads is not None]
        store.dismiss(sequence.queue_place)
        expected = self._lengths.expect(sequence)
        slot = self._running.enter(sequence, np.concatenate([cached, fresh]), num_cached, expected)
        if self._states is None and self._windows is None:
            self._loader.stop_at_gap(found, num_cached)
        if self._states is not None:
            place = sequence.request.plan_place
            forks = () if place is None else self._running.order.forks(place)
            coming = self._queue.coming() if place is None else ()
            self._states.start(slot, found, coming, forks, work.budget)
        if self._windows is not None:
            place = sequence.request.plan_place
            forks = () if place is None else self._running.order.forks(place)
            sources = movable.pages[:num_moved]
            if has_similar:
                sources = np.array([found.match.similar_page], np.int32)
            self._windows.start(slot, found.match, num_moved, sources)
            self._windows.plan(sequence, self._queue.coming() if place is None else (), forks)
        if num_moved:
            self._move(sequence, movable, fresh[:num_moved], work)
        if (wanted := sequence.prompt_logprobs) is not None and found.chain is not None:
            if found.logprobs:
                wanted.found, wanted.first = list(found.logprobs), len(found.logprobs)
            self._collectors.add(wanted, found.chain)
        if found.chain is not None and found.chain is not sequence.chain:
            self._running.note_named(slot, found.chain)  # it had an answer before it was preempted
        return slot

    def _lease_similar(self, match: Match, num_new: int) -> bool:
        """Lease the page to copy from; the lease ends after the step. False if there is no such
        page, or if it must be evicted to get `num_new` pages."""
        if match.similar_page is None:
            return False
        page = np.array([match.similar_page], np.int32)
        self._store.lease(page)
        has_room = self._store.num_takeable() >= num_new
        if self._windows is not None:
            has_room &= self._windows.can_fill(1, page)
        if not has_room:
            self._store.release(page)
        return has_room

    def _move(
        self, sequence: Sequence, movable: MovablePages, fresh: Int32s, work: StepWork
    ) -> None:
        """Let this step fill `fresh` with pages kept through a truncation."""
        moved = zip(movable.pages.tolist(), fresh.tolist(), movable.distances, strict=False)
        work.moves += [PageMove(*each) for each in moved]
        self._queue.unpark(self._store.commit(fresh))
        self._bus.publish(PagesMoved(sequence.request.request_id, len(fresh)))

    def _next_chunk(self, slot: SeqSlot, budget: int) -> Chunk | None:
        """Return the next tokens to compute. Pages that they fill can already be read in this
        step. None: there is no room for their windowed parts."""
        table, page_size = self._running.table, self._page_size
        num_before = int(table.computed[slot])
        end = self._loader.gap_ends.get(table.sequence(slot), int(table.prefill_end[slot]))
        end = min(num_before + budget, end)
        if self._windows is not None:
            end = min(end, self._windows.room(slot))
            if end <= num_before:
                return None
            self._windows.extend(slot, end)
        token_ids = table.tokens(slot, num_before, end)  # includes output tokens after a preemption
        filled = table.page_table[slot, num_before // page_size : end // page_size]
        self._queue.unpark(self._store.commit(filled))
        is_prompt_end = end == table.prompt_len[slot]
        if end % page_size and is_prompt_end and table.sequence(slot).has_named_tail:
            self._store.commit_tail(int(table.page_table[slot, end // page_size]))
        return Chunk(slot, num_before, token_ids)

    def _tokens_ahead(self) -> int:
        """The number of prompt tokens that the device computes before those of a sequence that
        starts now; 0 if nothing is loaded, where it does not matter."""
        return 0 if self._loader.fetching is None else self._running.num_unfinished_tokens()

    def _load_ahead(self) -> None:
        """Start loads for the next sequences in the queue, in order, while others run. Stops when
        no pages are left beyond those that earlier sequences need. A sequence whose link is busy
        waits for it; later sequences may use another link."""
        loader, fetching, page_size = self._loader, self._loader.fetching, self._page_size
        if fetching is None:
            return
        put_off, self._put_off = self._put_off, {}
        tokens_ahead, pages_ahead, num_looked_up = self._tokens_ahead(), 0, 0
        num_windows = 0  # of sequences whose history is loaded
        available = self._store.num_available()
        for sequence in self._queue.first(LOAD_AHEAD):
            history = sequence.history
            num_tokens = None if history is None else history.num_to_compute
            if history is None or num_tokens is None:
                found = put_off.get(sequence)
                must_wait = found is not None and loader.must_wait(found, tokens_ahead)
                if found is None or not must_wait:  # the earlier result may be out of date
                    if num_looked_up >= LOOK_UP_PAGES:
                        return
                    num_looked_up += sequence.num_named_pages
                    found = self._look_up(sequence)
                    must_wait = loader.must_wait(found, tokens_ahead)
                if found.awaited is not None:
                    continue
                history, stored = loader.history(found), found.to_load
                num_new, to_come = self._demand(found)
                pages_ahead += num_new
                if not self._forecast().may_start(pages_ahead, to_come, available):
                    return
                num_windows += 1
                if self._windows is not None and not self._windows.has_room(num_windows):
                    return
                num_tokens = found.num_known - len(found.match.pages) * page_size
                is_open = fetching.is_open(stored) and loader.may_load(found)
                if must_wait:
                    self._put_off[sequence] = found
                    if not stored.num_below:
                        # the link from host memory is busy, and every load passes through it
                        return
                elif (awaited := loader.load(found, tokens_ahead)) is not None:
                    self._begun[sequence] = awaited
                    if found.stored is None:
                        num_there = len(found.match.before) + stored.num_pages
                        num_tokens = found.num_known - num_there * page_size
                    else:
                        num_tokens -= stored.num_tokens(page_size)
                    pages_ahead -= found.num_pages_to_load
                    available = self._store.num_available()
                    history.num_to_compute = num_tokens
                    history.num_loaded_pages = found.num_pages_to_load
                    self._queue.move_up(sequence, num_tokens)
                elif history.asked is None and not is_open:
                    history.num_to_compute = num_tokens
            elif history.is_loaded:
                num_windows += 1
                # idle pages count as available, so those loaded for this sequence count as needed
                pages_ahead += history.num_loaded_pages - (-num_tokens // page_size)
            tokens_ahead += num_tokens

    def _announce(self, sequence: Sequence, num_cached: int) -> None:
        if (weighing := sequence.weighing) is not None:
            weighing.restart()
            return
        request_id, index = sequence.request.request_id, sequence.index
        num_known = len(sequence.request.prompt_ids) + len(sequence.output_ids)
        if sequence.num_cached_tokens is None:
            own = 0 if sequence.history is None else sequence.history.num_gap_tokens
            sequence.num_cached_tokens = num_cached = max(num_cached - own, 0)
            is_last = index == sequence.request.sampling.n - 1
            if is_last and sequence.request.plan_place is not None:
                self._running.order.start(sequence.request.plan_place)
            self._bus.publish(SequenceAdmitted(request_id, index, num_known, num_cached))
        else:
            self._bus.publish(SequenceResumed(request_id, index, num_known - num_cached))


def _started(sequence: Sequence, slot: SeqSlot) -> StartedSequence:
    request = sequence.request
    return StartedSequence(
        slot, request.sampling, request.prompt_ids, sequence.output_ids, request.stop_ids
    )


def _inserted(values: A, place: int, value: int) -> A:
    """Like numpy.insert, which takes five times as long."""
    longer = np.empty(len(values) + 1, values.dtype)
    longer[:place] = values[:place]
    longer[place] = value
    longer[place + 1 :] = values[place:]
    return longer
