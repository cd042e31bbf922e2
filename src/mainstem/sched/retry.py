"""Tries failed steps again, and finds the request that makes them fail.

    clear --a step fails--> in doubt --another fails--> suspect --fails alone--> at fault --> ends
      ^----- gets a token, ------'                         |
      '----- or 32 steps succeeded                         '--- gets a token: clear again

The first failure may be chance: all sequences try again together. A suspect was part of two
failures without a token between them, and is tried alone. A request that fails alone is at fault:
it ends, with all its answers, as soon as another step succeeds or no other request is left to try.
"""

from collections.abc import Callable, Mapping

from mainstem.core.ids import RequestId
from mainstem.core.step import Int32s, Step
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import SeqState, Sequence

SUSPECT_FAULTS = 2  # one failure may have been chance
MAX_DOUBT_STEPS = 32  # successful steps after which a single failure counts as chance


class Retry:
    """Knows which sequences were part of failed steps. While any is in doubt, steps do not
    overlap."""

    def __init__(
        self,
        sequences: Mapping[RequestId, list[Sequence]],
        running: RunningSet,
        end: Callable[[RequestId, str], None],
    ) -> None:
        """`sequences` has the sequences that have not ended; `end` ends a request with an
        error."""
        self._sequences = sequences
        self._queue = queue = running.queue
        self._running = running
        self._end = end
        self._num_faults: dict[Sequence, int] = {}  # steps that failed since its last token
        self._num_good_steps = 0  # successful steps since the last failure
        self._suspects, self._at_fault = queue.suspects, queue.at_fault

    @property
    def is_in_doubt(self) -> bool:
        return bool(self._num_faults)

    @property
    def is_all_at_fault(self) -> bool:
        """Whether every request has failed alone."""
        return self._sequences.keys() <= self._at_fault.keys()

    def part_of(self, step: Step | None) -> list[Sequence]:
        """Return the sequences of a failed step. If the step could not be made, return those that
        it might have had."""
        table, tried, head = self._running.table, self._tried(), self._queue.head()
        if step is None and tried is not None:
            return [tried]
        slots = self._running.slots if step is None else step.seq_slots
        running = [table.sequence(slot) for slot in slots[table.is_alive[slots]].tolist()]
        return running if step is not None or head is None else [*running, head]

    def blame(self, sequences: list[Sequence], fault: str) -> bool:
        """Record that a step failed with these sequences; returns whether one request is to blame.
        Call `line_up` when they wait again."""
        self._num_good_steps = 0
        for sequence in sequences:
            num_faults = self._num_faults[sequence] = self._num_faults.get(sequence, 0) + 1
            if num_faults >= SUSPECT_FAULTS:
                self._suspects.add(sequence)
        if len(sequences) != 1 or sequences[0] not in self._suspects:
            return False
        self._at_fault[sequences[0].request.request_id] = fault
        return True

    def line_up(self) -> None:
        """Move suspects to their place in the queue."""
        self._queue.reorder()

    def must_clear_the_way(self) -> bool:
        """Whether running sequences must wait, because a suspect is tried alone."""
        head = self._queue.head()
        return head is not None and head in self._suspects and self._tried() is None

    def may_join(self, sequence: Sequence) -> bool:
        """Whether a sequence may start now. A suspect is alone in its steps, and so is the sequence
        that must show that steps still succeed."""
        if sequence in self._suspects or self._queue.suspects_last:
            return len(self._running) == 0
        return self._tried() is None

    def _tried(self) -> Sequence | None:
        """The suspect that runs, alone, until it gets a token."""
        running = (each for each in self._suspects if each.state is SeqState.RUNNING)
        return next(running, None)

    def note_good(self, slots: Int32s) -> None:
        """Record that a step succeeded, and that these sequences got past the token where they
        failed. A sequence that failed once is cleared, too, after MAX_DOUBT_STEPS good steps."""
        self._end_at_fault()
        self._num_good_steps += 1
        was_chance = self._num_good_steps >= MAX_DOUBT_STEPS
        for sequence in list(self._num_faults):
            if sequence.slot in slots or (was_chance and sequence not in self._suspects):
                self._clear(sequence)

    def end_if_nobody_else_is_left(self) -> None:
        """End requests at fault if no other request is left to show that steps can succeed."""
        if self._at_fault and self.is_all_at_fault:
            self._end_at_fault()

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._clear(sequence)
        if sequence.request.request_id not in self._sequences:
            self._at_fault.pop(sequence.request.request_id, None)

    def _clear(self, sequence: Sequence) -> None:
        self._num_faults.pop(sequence, None)
        self._suspects.discard(sequence)

    def _end_at_fault(self) -> None:
        if not self._at_fault:
            return
        for request_id, fault in list(self._at_fault.items()):
            self._end(request_id, fault)
        self._at_fault.clear()
        self.line_up()
