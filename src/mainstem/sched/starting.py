"""Continues prompts in progress, and starts sequences from the queue.

queue's head --> looked up --> READY or MISS --> may_start --> pages, slot, first chunk
                     |                              | no: it stays; no other overtakes it
                     '--> LOADING, or to be loaded: parked until its page is there
"""

import numpy as np

from mainstem.core.events import EventBus, PagesMoved, SequenceAdmitted, SequenceResumed
from mainstem.core.ids import SeqSlot
from mainstem.core.step import Int32s, StartedSequence
from mainstem.kv.store import Lookup, Match
from mainstem.sched.admission import Admission
from mainstem.sched.batching import Chunk, PageCopy, PageMove
from mainstem.sched.loading import Candidate, Loader
from mainstem.sched.lookahead import OutputLengths, PlannedOrder
from mainstem.sched.origins import NOTHING_MOVABLE, MovablePages
from mainstem.sched.prompt_work import PromptWork
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import Sequence


class Starter:
    """Fills the prompt part of a step."""

    def __init__(  # the parts of a scheduler that decide
        self,
        running: RunningSet,
        queue: WaitingQueue,
        lengths: OutputLengths,
        order: PlannedOrder,
        loader: Loader,
        bus: EventBus,
        max_seqs: int | None,
    ) -> None:
        """`max_seqs` is the maximum number of sequences that run at once; None: as many as fit into
        memory."""
        self._max_seqs = max_seqs
        self._running = running
        self._queue = queue
        self._lengths = lengths
        self._order = order
        self._loader = loader
        self._bus = bus
        self._store = running.store
        self._page_size = running.page_size
        self._admission = Admission(running.page_size)

    def fill(self, work: PromptWork) -> None:
        """Add prompt chunks within the budget, by priority; at the same priority, sequences that
        have started come before new ones."""
        for sequence in self._running.unfinished():
            self._start_waiting(work, before=sequence.request.priority)
            if work.budget <= 0:
                break
            assert sequence.slot is not None
            work.add(self._next_chunk(sequence.slot, work.budget))
        self._start_waiting(work, before=None)

    def _start_waiting(self, work: PromptWork, before: int | None) -> None:
        """Start sequences from the queue, or only those more urgent than `before`."""
        while work.has_room and (sequence := self._queue.head()) is not None:
            if before is not None and sequence.request.priority >= before:
                return
            if len(self._running) == self._max_seqs or not self._may_join(sequence):
                return
            slot = self._try_start(sequence, work)
            if slot is None:
                if sequence is self._queue.head():
                    return  # there is no room, and no other sequence may overtake it
                work.num_parked_pages += sequence.num_named_pages
                continue
            self._announce(sequence, int(self._running.table.computed[slot]))
            if sequence.request.sampling.edits_logits:
                work.started.append(_started(sequence, slot))
            work.add(self._next_chunk(slot, work.budget))

    def _may_join(self, sequence: Sequence) -> bool:
        """Whether a sequence may be in the step. A suspect is alone in its steps, and so is the
        sequence that must show that steps still succeed."""
        if sequence.is_suspect or self._queue.suspects_last:
            return len(self._running) == 0
        return self._running.suspect is None

    def _try_start(self, sequence: Sequence, work: PromptWork) -> SeqSlot | None:
        """Give the queue's head its pages and a slot, or park it, or leave it where it is."""
        found = self._loader.look_up(sequence)
        if found.match.outcome is Lookup.LOADING:
            assert found.match.awaited is not None
            self._queue.park(self._queue.pop(), found.match.awaited)
            return None
        # lease before counting, since leased pages cannot be evicted
        self._store.lease(found.match.pages)
        try:
            return self._start_leased(found, work)
        except Exception:
            self._queue.push(sequence)  # it may have left the queue, and `fail` must find it there
            raise

    def _start_leased(self, found: Candidate, work: PromptWork) -> SeqSlot | None:
        """Do the rest of `_try_start`, after the cached pages are leased."""
        tokens_ahead = self._loader.tokens_ahead()
        if not self._may_start(found, work) or self._loader.must_wait(found, tokens_ahead):
            self._store.release(found.match.pages)
            return None
        awaited = self._loader.awaited_answer(found) or self._loader.load(found, tokens_ahead)
        movable = NOTHING_MOVABLE
        if awaited is None and found.sequence.origins is not None:
            wanted = found.pages_to_find(self._page_size)
            movable = found.sequence.origins.find(self._store, wanted, work.filled_pages)
            awaited = movable.awaited
        if awaited is not None:
            self._store.release(found.match.pages)
            self._queue.park(self._queue.pop(), awaited)
            return None
        return self._start(found, movable, work)

    def _may_start(self, found: Candidate, work: PromptWork) -> bool:
        if work.outlook is None:
            work.outlook = self._running.outlook()
        # pinned pages are not used, unless nothing could run otherwise
        store = self._store
        available = store.num_available() if len(self._running) else store.num_takeable()
        num_new, to_come = self._demand(found)
        return self._admission.may_start(num_new, to_come, available, work.outlook)

    def _demand(self, found: Candidate) -> tuple[int, int]:
        """Return the pages that a sequence takes at once, and the output tokens that it will
        probably produce."""
        num_new = -(-found.num_known // self._page_size) - len(found.match.pages)
        return num_new, self._lengths.expect(found.sequence) - len(found.sequence.output_ids)

    def _start(self, found: Candidate, movable: MovablePages, work: PromptWork) -> SeqSlot:
        """Take pages for the queue's head, and let this step fill those that can be filled by
        copying."""
        store, sequence, cached = self._store, found.sequence, found.match.pages
        num_new, to_come = self._demand(found)
        assert work.outlook is not None
        work.outlook = work.outlook.joined_by(num_new, to_come)
        num_moved = movable.lease(store, num_new)
        has_similar = not len(movable.pages) and self._lease_similar(found.match, num_new)
        fresh = store.take(num_new)
        self._queue.pop()
        num_cached = (len(cached) + num_moved) * self._page_size
        if has_similar:
            assert found.match.similar_page is not None
            similar_tokens = found.match.similar_tokens
            work.copies.append(PageCopy(found.match.similar_page, int(fresh[0]), similar_tokens))
            num_cached += similar_tokens
        if found.chain is not None:
            store.reserve(found.chain, len(cached), fresh[: len(found.chain.keys) - len(cached)])
            if sequence.has_named_tail and len(fresh):
                store.reserve_tail(found.chain, int(fresh[-1]))
        if num_moved:
            self._move(sequence, movable, fresh[:num_moved], work)
        work.loads += [loads for loads in (found.match.loads, movable.loads) if loads is not None]
        store.dismiss(sequence.queue_place)
        expected = self._lengths.expect(sequence)
        slot = self._running.enter(sequence, np.concatenate([cached, fresh]), num_cached, expected)
        if found.logprobs:
            sequence.begin_prompt_logprobs(found.logprobs)
        if sequence.is_collecting and found.chain is not None:
            self._loader.note_collector(sequence, found.chain)
        return slot

    def _lease_similar(self, match: Match, num_new: int) -> bool:
        """Lease the page to copy from; the lease ends after the step. False if there is no such
        page, or if it must be evicted to get `num_new` pages."""
        if match.similar_page is None:
            return False
        page = np.array([match.similar_page], np.int32)
        self._store.lease(page)
        if self._store.num_takeable() < num_new:
            self._store.release(page)
            return False
        return True

    def _move(
        self, sequence: Sequence, movable: MovablePages, fresh: Int32s, work: PromptWork
    ) -> None:
        """Let this step fill `fresh` with pages kept through a truncation."""
        moved = zip(movable.pages.tolist(), fresh.tolist(), movable.distances, strict=False)
        work.moves += [PageMove(*each) for each in moved]
        self._queue.unpark(self._store.commit(fresh))
        self._bus.publish(PagesMoved(sequence.request.request_id, len(fresh)))

    def _next_chunk(self, slot: SeqSlot, budget: int) -> Chunk:
        """Return the next tokens to compute. Pages that they fill can already be read in this
        step."""
        table, page_size = self._running.table, self._page_size
        num_before = int(table.computed[slot])
        length = min(budget, int(table.prefill_end[slot]) - num_before)
        end = num_before + length
        token_ids = table.tokens(slot, num_before, end)  # includes output tokens after a preemption
        filled = table.page_table[slot, num_before // page_size : end // page_size]
        self._queue.unpark(self._store.commit(filled))
        is_prompt_end = end == table.prompt_len[slot]
        if end % page_size and is_prompt_end and table.sequence(slot).has_named_tail:
            self._store.commit_tail(int(table.page_table[slot, end // page_size]))
        return Chunk(slot, num_before, token_ids)

    def _announce(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.weighing is not None:
            sequence.weighing.restart()
            return
        request_id, index = sequence.request.request_id, sequence.index
        num_known = len(sequence.request.prompt_ids) + len(sequence.output_ids)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            is_last = index == sequence.request.sampling.n - 1
            if is_last and sequence.request.plan_place is not None:
                self._order.start(sequence.request.plan_place)
            self._bus.publish(SequenceAdmitted(request_id, index, num_known, num_cached))
        else:
            self._bus.publish(SequenceResumed(request_id, index, num_known - num_cached))


def _started(sequence: Sequence, slot: SeqSlot) -> StartedSequence:
    request = sequence.request
    return StartedSequence(
        slot, request.sampling, request.prompt_ids, sequence.output_ids, request.stop_ids
    )
