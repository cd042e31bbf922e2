"""Which sequences leave so that a step can be made: they are preempted, or start again."""

from mainstem.core.errors import OutOfPages, OutOfStates
from mainstem.core.ids import SeqSlot
from mainstem.core.step import Int32s
from mainstem.sched.ending import Endings
from mainstem.sched.loading import Loader
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import SeqState
from mainstem.sched.step_size import StepSize


class RoomMaker:
    """Finds room for the decodes of a step."""

    def __init__(
        self, running: RunningSet, endings: Endings, loader: Loader, size: StepSize
    ) -> None:
        self._running = running
        self._endings = endings
        self._loader = loader
        self._size = size
        self._store = running.store

    def decodes(self) -> Int32s | None:
        """Return the slots that decode, each with a page for its token, and with a state slot if it
        folds its rows. None: the step in flight must commit first."""
        return self._grow_decodes() if self._make_way() and self._leave_gaps() else None

    def _make_way(self) -> bool:
        """Preempt running sequences if a suspect must be tried alone. False: no step can be made
        before the step in flight has ended, because steps do not overlap while a sequence is in
        doubt."""
        retry = self._endings.retry
        retry.end_if_nobody_else_is_left()
        if not retry.is_in_doubt:
            return True
        if not self._running.is_settled:
            return False
        if retry.must_clear_the_way():
            for slot in self._running.slots.tolist():
                self._endings.preempt(SeqSlot(slot))
        return True

    def _leave_gaps(self) -> bool:
        """Let sequences that have computed the page of a gap start again, to load what follows it.
        False: the step in flight may be computing such a page."""
        ends, table = self._loader.gap_ends, self._running.table
        for sequence in [each for each in ends if each.state is not SeqState.RUNNING]:
            del ends[sequence]
        slots = [(sequence.slot, end) for sequence, end in ends.items()]
        past = [slot for slot, end in slots if slot is not None and table.computed[slot] >= end]
        if past and not self._running.is_settled:
            return False
        for slot in past:
            del ends[table.sequence(slot)]
            self._endings.start_again(slot)
        return True

    def _grow_decodes(self) -> Int32s | None:
        """The slots that decode. Preempts if there are too few pages or state slots. None: there
        are too few, and a step is in flight, which must commit first."""
        table, page_size = self._running.table, self._running.page_size
        while True:
            running = self._running.slots
            ready = table.computed.take(running) >= table.prefill_end.take(running)
            ready &= table.total.take(running) < table.max_total.take(running)
            ready &= ~(table.is_sync.take(running) & (table.pending.take(running) > 0))
            decodes = self._size.choose(running[ready], table.last_step)
            try:
                decodes = self._running.plan_folds(decodes)
                num_places = table.num_pages.take(decodes) * page_size
                full = decodes[table.computed.take(decodes) >= num_places]
                if len(full):
                    self._running.add_pages(full)
                return decodes
            except (OutOfPages, OutOfStates):
                if not self._running.is_settled:
                    return None
                self._endings.preempt(self._running.victim())

    def free_parts(self) -> None:
        """No sequence can run. If that is because running ones lack windowed parts of pages, and
        no step or copy will give any back, preempt one."""
        is_stuck = len(self._running) > 0 and self._running.is_settled
        if is_stuck and self._store.parts is not None and not self._store.num_copies:
            self._endings.preempt(self._running.victim())
