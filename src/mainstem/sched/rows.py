"""Sequences that read one state together, and keep rows of their own tokens instead of a state.

    prompt a   |------ 1,200 shared ------|--- own ---|
    prompt b   |------ 1,200 shared ------|-- own --|--- answer ---|
                                          S           rows of b: its tokens since S

S is read by all siblings in every step and written by none, so a step reads it once. b has a row
slot (kv/rows.py) instead of a state slot, and a row takes much less memory than a state. When its
rows are full, it takes a state slot and *folds*: the step that computes the next token writes the
state after that token there. From then on b is a sequence like any other. Slots for folds are kept
free; if more sequences fill their rows at once, some wait for a later step.

A sequence starts with rows if its prompt after the state fits into them, in one chunk; if another
sequence reads the state too, or will; and if no state is wanted inside its own tokens: rows cannot
be shared, and no state is left when the sequence ends. If there is no slot for a state of its own,
it starts with rows in any case.
"""

import numpy as np

from mainstem.core.errors import OutOfStates
from mainstem.core.ids import SeqSlot
from mainstem.core.step import Int32s
from mainstem.kv.rows import RowSlots
from mainstem.kv.states import NO_STATE, StateStore
from mainstem.sched.queue import Candidate
from mainstem.sched.table import NO_ROWS, SeqTable

FOLDS_AT_ONCE = 8  # slots are kept for this part of the folds to come, where folds give slots back


class SequenceRows:
    """The rows of running sequences.

    A sequence with rows holds the state that it reads (`state_read`), and owns none until its fold
    is planned.
    """

    def __init__(self, slots: RowSlots, states: StateStore, table: SeqTable) -> None:
        self._slots = slots
        self._states = states
        self._table = table
        self._to_fold: set[int] = set()  # sequences that may fill their rows, and own no state yet
        self._planned: set[int] = set()  # sequences that fold in the next step that has them

    @property
    def num_kept(self) -> int:
        """How many slots for states are kept free for folds."""
        return self._num_kept(len(self._to_fold))

    def num_kept_besides(self, slot: SeqSlot) -> int:
        """Likewise for other sequences than this one."""
        return self._num_kept(len(self._to_fold) - (int(slot) in self._to_fold))

    def _num_kept(self, num_to_fold: int) -> int:
        """If rows take a whole slot of a state, each fold gives one back, to the next one."""
        gives_back = self._slots.per_state == 1
        return -(-num_to_fold // FOLDS_AT_ONCE) if gives_back else num_to_fold

    def fit(self, found: Candidate, position: int, budget: int) -> bool:
        """Whether a sequence that starts from a state at `position` could keep rows. Its first
        chunk has at most `budget` tokens."""
        most = min(budget, self._slots.num_rows - 1)  # a row for the first decode
        return found.state != NO_STATE and found.num_known - position <= most

    def may_start(self, found: Candidate, position: int, budget: int) -> bool:
        """Whether such a sequence needs no slot for a state, neither now nor later. The one that it
        reads stays where it is: others that fold must do without."""
        sequence = found.sequence
        most = len(sequence.request.prompt_ids) + sequence.max_output
        has_slot = self._slots.has_free and not self._fills(most, position)
        has_slot = has_slot and self._states.has_room(self.num_kept, besides=found.state)
        return has_slot and self.fit(found, position, budget)

    def _fills(self, max_total: int, position: int) -> bool:
        """Whether a sequence may have more tokens than rows; its last token is never computed."""
        return max_total - 1 - position > self._slots.num_rows

    def may_fold(self, slot: SeqSlot) -> bool:
        """Whether there would be a slot for the state of a sequence that starts with rows now."""
        table = self._table
        if not self._fills(int(table.max_total[slot]), int(table.computed[slot])):
            return True
        num_wanted = self._num_kept(len(self._to_fold) + 1) + (not self._slots.has_free)
        return self._states.has_room(num_wanted)

    def start(self, slot: SeqSlot) -> bool:
        """Give a sequence that starts now a row slot. False: there is none."""
        if (rows := self._slots.take()) is None:
            return False
        table, base = self._table, int(self._table.computed[slot])
        table.row_slot[slot], table.row_base[slot] = rows, base
        if self._fills(int(table.max_total[slot]), base):
            self._to_fold.add(int(slot))
        return True

    def has(self, slot: SeqSlot) -> bool:
        return int(self._table.row_slot[slot]) != NO_ROWS

    def plan_folds(self, decodes: Int32s) -> Int32s:
        """Give each of these sequences that fills its rows with its next token a slot for the state
        after it. Returns the sequences that may decode: those that got none wait. Raises
        OutOfStates if none got one."""
        if not self._to_fold:
            return decodes
        table, states = self._table, self._states
        is_full = table.computed[decodes] - table.row_base[decodes] >= self._slots.num_rows - 1
        is_full &= table.row_slot[decodes] != NO_ROWS
        waiting = list[int]()
        folding = decodes[is_full].tolist()
        for slot in folding:
            if slot not in self._to_fold:
                continue
            base = int(table.state_read[slot])
            own = states.take()
            if own is None and states.may_adopt(base):  # it is written in place
                own = states.adopt(base)
            if own is None:
                waiting.append(slot)
                continue
            table.state_own[slot] = own
            self._to_fold.remove(slot)
            self._planned.add(slot)
        if not waiting:
            return decodes
        if len(waiting) == len(folding):
            raise OutOfStates
        return decodes[~np.isin(decodes, waiting)]

    def use(self, slots: Int32s) -> tuple[Int32s, Int32s] | None:
        """The row slots of the sequences of a step, and the number of rows in each. None: no
        sequence has any."""
        rows = self._table.row_slot[slots]
        has_rows = rows != NO_ROWS
        if not has_rows.any():
            return None
        counts: Int32s = (self._table.computed[slots] - self._table.row_base[slots]) * has_rows
        return rows, counts

    def end_folds(self, slots: Int32s) -> None:
        """The step of these sequences is complete: no later one reads the rows that it folds."""
        if self._planned:
            for slot in self._planned.intersection(slots.tolist()):
                self.leave(SeqSlot(slot))

    def leave(self, slot: SeqSlot) -> bool:
        """A sequence does not need its rows any more. Returns whether it had any."""
        rows = int(self._table.row_slot[slot])
        if rows == NO_ROWS:
            return False
        self._table.row_slot[slot] = NO_ROWS
        self._to_fold.discard(int(slot))
        self._planned.discard(int(slot))
        self._slots.give_back(rows)
        return True

    def clear(self) -> None:
        """No sequence runs, and the store has freed all slots or will."""
        self._to_fold.clear()
        self._planned.clear()
