"""How sequences wait, are preempted and end, and how all start again after a failed step."""

from dataclasses import replace

import numpy as np

from mainstem.core.events import EventBus, SequenceFinished, SequencePreempted, StepFailed
from mainstem.core.ids import RequestId, SeqSlot
from mainstem.core.request import FinishReason
from mainstem.core.step import Bools, Int32s, Step
from mainstem.sched.important import Weighing
from mainstem.sched.intake import Intake
from mainstem.sched.outputs import OutputMaker
from mainstem.sched.retry import Retry
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import SeqState, Sequence
from mainstem.sched.starting import OutputLengths

_End = tuple[SeqSlot, FinishReason, str | None]  # the slot that ends, how, and the error


class Endings:
    """Knows all sequences that have not ended, and takes them from state to state."""

    def __init__(
        self,
        running: RunningSet,
        intake: Intake,
        lengths: OutputLengths,
        outputs: OutputMaker,
        bus: EventBus,
    ) -> None:
        self.sequences: dict[RequestId, list[Sequence]] = {}
        self.retry = Retry(self.sequences, running, self._end_with_fault)
        self._running = running
        self._table = running.table
        self._store = running.store
        self._queue = running.queue
        self._intake = intake
        self._lengths = lengths
        self._outputs = outputs
        self._bus = bus

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence, and announce its pages to the store."""
        self._queue.push(sequence)
        self._expect(sequence)

    def preempt(self, slot: SeqSlot) -> None:
        """Take a sequence's pages. It starts again later, from the pages that are still cached."""
        sequence, num_pages = self._table.sequence(slot), int(self._table.num_pages[slot])
        self.start_again(slot)
        self._publish_preempted(sequence, num_pages)

    def start_again(self, slot: SeqSlot) -> None:
        """Put a running sequence back into its place in the queue."""
        sequence = self._table.sequence(slot)
        sequence.save(self._table.output_ids(slot))
        self._running.leave(slot)
        self._wait_again(sequence)

    def end(self, sequence: Sequence, reason: FinishReason, fault: str | None = None) -> None:
        """End a sequence wherever it is."""
        if sequence.state is SeqState.RUNNING:
            assert sequence.slot is not None
            self.finish(sequence.slot, reason, fault)
        elif sequence.state is SeqState.WAITING:
            if sequence.weighing is None:
                self._outputs.deliver_waiting(sequence, reason, fault)
            self._close(sequence, reason, len(sequence.output_ids))
            self._queue.forget(sequence)
            self._store.dismiss(sequence.queue_place)

    def complete(self, slots: Int32s) -> tuple[Bools, list[_End]]:
        """Return which of these slots end with the token that was just read back, and how."""
        table = self._table
        at = slots.astype(np.intp)  # numpy's index type
        is_stop = table.is_stop(slots, table.last_token.take(at))
        num_known = table.total.take(at) - table.pending.take(at)
        is_full = num_known >= table.max_total.take(at)
        is_done = is_stop | is_full
        ends: list[_End] = []
        for row in is_done.nonzero()[0].tolist():
            reason = FinishReason.STOP if is_stop[row] else FinishReason.LENGTH
            ends.append((SeqSlot(int(slots[row])), reason, None))
        for row in (table.has_mask.take(at) & ~is_done).nonzero()[0].tolist():
            slot = SeqSlot(int(slots[row]))
            if (fault := table.form_fault(slot)) is not None:
                is_done[row] = True
                ends.append((slot, FinishReason.ERROR, fault))
        return is_done, ends

    def finish(self, slot: SeqSlot, reason: FinishReason, fault: str | None = None) -> None:
        """End a running sequence: deliver its tokens, and free its slot as soon as no step uses
        it."""
        self._deliver_end(slot, reason, fault)
        self._running.leave(slot)

    def recover(self) -> None:
        """After a failed or interrupted step: forget what it may have written to pages.

        Every sequence goes back to the queue with the tokens that were read back, and the device's
        cache is emptied; the next step tries again. A commit that had begun is completed: the
        tokens it read are delivered, and sequences that end with them end. All slots and pages are
        freed together, not one by one, since the interrupt may have come while some were being
        given back.
        """
        table, outputs = self._table, self._outputs
        self._running.in_flight = None
        with self._store.distrust():
            ran = self._in_state(SeqState.RUNNING)
            # a sequence without a slot was about to wait: its tokens are saved already
            slots = np.array([s.slot for s in ran if s.slot is not None], np.int32)
            table.total[slots] -= table.pending[slots]
            table.pending[slots] = 0
            for slot in slots.tolist():  # the logprobs of a token that was not read back
                sequence = table.sequence(slot)
                del sequence.logprobs[table.num_read_back(slot) - sequence.num_delivered :]
            is_done, ends = self.complete(slots)
            for end in ends:
                self._deliver_end(*end)
            for slot in slots[~is_done].tolist():
                sequence = table.sequence(slot)
                is_behind = sequence.num_delivered < table.num_read_back(slot)
                if table.is_streaming[slot] and is_behind:
                    outputs.deliver(slot, None)
                sequence.save(table.output_ids(slot))
            preempted = [
                (s, 0 if s.slot is None else int(table.num_pages[s.slot]))
                for s in self._in_state(SeqState.RUNNING)
            ]
            self._running.clear()
            self._store.reclaim()
            self._queue.refill(self._in_state(SeqState.WAITING))
            for sequence, num_pages in preempted:
                self._wait_again(sequence)
                self._publish_preempted(sequence, num_pages)

    def rename(self, earlier: tuple[str, ...]) -> None:
        """After the store was renamed: sequences that ran with the weights named `earlier` go on
        without names, and those that wait get new ones."""
        self._running.forget_names()
        for answers in self.sequences.values():
            for sequence in answers:
                if sequence.num_cached_tokens is not None:
                    sequence.earlier_weights += earlier
                if sequence.truncated is not None:
                    # kept pages of the conversation are those of the old weights
                    sequence.truncated = replace(sequence.truncated, origins=None)
                is_new = sequence.num_cached_tokens is None and sequence.truncated is None
                if is_new and sequence.chain is not None:
                    request = sequence.request
                    ids, salt, public = request.prompt_ids, request.salt, request.public_tokens
                    sequence.chain = self._store.chain(ids, salt, public)
                else:
                    sequence.chain = None
                sequence.history = None
        waiting = self._in_state(SeqState.WAITING)
        for sequence in waiting:
            self._store.dismiss(sequence.queue_place)
            self._expect(sequence)
        self._queue.refill(waiting)

    def fail(self, step: Step | None, fault: str) -> bool:
        """Recover from a step that failed, or could not be made (None), and look for the cause (see
        Retry). Returns whether one request is to blame."""
        blamed = self.retry.part_of(step)
        is_certain = self.retry.blame(blamed, fault)
        self.recover()
        self.retry.line_up()
        self._bus.publish(StepFailed(fault, len(blamed)))
        return is_certain

    def _deliver_end(self, slot: SeqSlot, reason: FinishReason, fault: str | None) -> None:
        """Deliver what a running sequence has not delivered yet; it is done then."""
        sequence, num_output = self._table.sequence(slot), len(self._table.output_ids(slot))
        if sequence.weighing is None:
            self._outputs.deliver(slot, reason, fault)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._lengths.observe(num_output)
        self._close(sequence, reason, num_output)

    def _close(self, sequence: Sequence, reason: FinishReason, num_output: int) -> None:
        sequence.state = SeqState.DONE
        request_id = sequence.request.request_id
        answers = self.sequences[request_id]
        answers.remove(sequence)
        if not answers:
            del self.sequences[request_id]
            self._outputs.note_last(request_id)
        self.retry.forget(sequence)
        if sequence.weighing is None:
            self._bus.publish(SequenceFinished(request_id, sequence.index, reason, num_output))
        elif answers and reason is FinishReason.LENGTH:
            self._settle(sequence.weighing, answers)

    def _settle(self, weighing: Weighing, answers: list[Sequence]) -> None:
        """A reader has weighed the pages: let the answers that wait for it start. (If it failed or
        was stopped, the caller ends them as well.)"""
        self._intake.settle(weighing, answers)
        for answer in answers:
            self._expect(answer)
        self._queue.unpark([weighing])

    def _end_with_fault(self, request_id: RequestId, fault: str) -> None:
        for sequence in list(self.sequences.get(request_id, ())):
            self.end(sequence, FinishReason.ERROR, fault)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.state, sequence.is_light = SeqState.WAITING, False
        if sequence.history is not None:
            sequence.history.wait_again()
        self.wait(sequence)

    def _publish_preempted(self, sequence: Sequence, num_pages: int) -> None:
        request_id = sequence.request.request_id
        self._bus.publish(SequencePreempted(request_id, sequence.index, num_pages))

    def _expect(self, sequence: Sequence) -> None:
        if sequence.chain is not None:
            self._store.expect(sequence.queue_place, sequence.chain)

    def _in_state(self, state: SeqState) -> list[Sequence]:
        answers = [sequence for answers in self.sequences.values() for sequence in answers]
        return [sequence for sequence in answers if sequence.state is state]
