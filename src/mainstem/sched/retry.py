"""What follows when a step fails: it is tried again, and whoever makes steps fail is found.

    clear --a step fails--> in doubt --another fails--> suspect --fails alone--> at fault --> ends
      ^----- gets a token, ------'                         |
      '----- or 32 steps ended well                        '--- gets a token: clear again

The first failure may be chance: all try again together. A suspect was part of two failures, with no
token between, and is tried alone. A request that fails alone is at fault: it ends, with all its
answers, as soon as another step ends well or nobody else is left to try.
"""

from collections.abc import Callable, Mapping

from mainstem.core.ids import RequestId
from mainstem.core.step import Int32s, Step
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import Sequence

MAX_DOUBT_STEPS = 32  # steps that end well before one failure counts as chance for all


class Retry:
    """Knows whom steps failed with. While it doubts anybody, steps go one by one."""

    def __init__(
        self,
        sequences: Mapping[RequestId, list[Sequence]],
        queue: WaitingQueue,
        running: RunningSet,
        end: Callable[[RequestId, str], None],
    ) -> None:
        """`sequences` are those that have not ended; `end` ends a request, saying what failed."""
        self._sequences = sequences
        self._queue = queue
        self._running = running
        self._end = end
        self._doubted: set[Sequence] = set()  # steps failed with them since they got a token
        self._num_good_steps = 0  # since one failed
        # requests a step failed with alone, and how: they end when another step ends well
        self._at_fault: dict[RequestId, str] = {}

    @property
    def is_in_doubt(self) -> bool:
        return bool(self._doubted)

    @property
    def is_all_at_fault(self) -> bool:
        """Whether steps failed with each request alone that there is."""
        return self._sequences.keys() <= self._at_fault.keys()

    def part_of(self, step: Step | None) -> list[Sequence]:
        """Whom a step that failed held, or, where the making of one failed, may have held."""
        table, tried, head = self._running.table, self._running.suspect, self._queue.head()
        if step is None and tried is not None:
            return [tried]
        slots = self._running.slots if step is None else step.seq_slots
        running = [table.sequence(slot) for slot in slots[table.is_alive[slots]].tolist()]
        return running if step is not None or head is None else [*running, head]

    def blame(self, sequences: list[Sequence], fault: str) -> bool:
        """A step failed with these; returns whether that is laid to one request. When they wait
        again, `line_up`."""
        self._num_good_steps = 0
        for sequence in sequences:
            sequence.num_faults += 1
            self._doubted.add(sequence)
        if len(sequences) != 1 or not sequences[0].is_suspect:
            return False
        request_id = sequences[0].request.request_id
        self._at_fault[request_id] = fault
        for sequence in self._sequences[request_id]:
            sequence.is_at_fault = True
        return True

    def line_up(self) -> None:
        """Put suspects where they belong in the queue."""
        self._queue.reorder(suspects_last=bool(self._at_fault))

    def must_clear_the_way(self) -> bool:
        """Whether those that run must wait, since a suspect is to be tried alone."""
        head = self._queue.head()
        return head is not None and head.is_suspect and self._running.suspect is None

    def note_good(self, slots: Int32s) -> None:
        """A step ended well, and these sequences got past where steps failed with them. Who only
        failed once and has to wait for long is given the benefit of the doubt."""
        self._end_at_fault()
        self._num_good_steps += 1
        was_chance = self._num_good_steps >= MAX_DOUBT_STEPS
        for sequence in list(self._doubted):
            if sequence.slot in slots or (was_chance and not sequence.is_suspect):
                sequence.num_faults = 0
                self._doubted.discard(sequence)

    def end_if_nobody_else_is_left(self) -> None:
        """End who is at fault where nobody is left to show that a step can end well."""
        if self._at_fault and self.is_all_at_fault:
            self._end_at_fault()

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._doubted.discard(sequence)
        if sequence.request.request_id not in self._sequences:
            self._at_fault.pop(sequence.request.request_id, None)

    def _end_at_fault(self) -> None:
        if not self._at_fault:
            return
        for request_id, fault in list(self._at_fault.items()):
            self._end(request_id, fault)
        self._at_fault.clear()
        self.line_up()
