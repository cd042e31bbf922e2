"""Slots for rows: what a sequence keeps of its own tokens while it reads a state that is never
written (sched/rows.py).

The rows of a few sequences have room in the memory of one state, so row slots are lent out of the
slots of states, and go back to them. No memory is set apart for sequences that have forks in common
or for those that have none.

    state slot 0   | a state                               |
    state slot 1   | row slot 2      | row slot 3      |   |
    state slot 2   | row slot 4      | (free)          |   |
"""

from mainstem.kv.states import StateStore


class RowSlots:
    """Lends row slots to sequences.

    Invariant: a state slot that was taken for rows has at least one row slot in use.
    """

    def __init__(self, states: StateStore, per_state: int, num_rows: int) -> None:
        """A state slot holds `per_state` row slots, of `num_rows` tokens each."""
        self.num_rows, self.per_state = num_rows, per_state
        self._states = states
        self._free: dict[int, list[int]] = {}  # of each state slot with rows: its free row slots

    @property
    def has_free(self) -> bool:
        """Whether `take` returns a slot without another state slot."""
        return any(self._free.values())

    def take(self) -> int | None:
        """A row slot, of the fullest state slot that has a free one, so that others become empty.
        None: there is none, and no state slot to make more of."""
        places = [free for free in self._free.values() if free]
        if places:
            return min(places, key=len).pop()
        if (state := self._states.take()) is None:
            return None
        first = state * self.per_state
        self._free[state] = list(range(first + self.per_state - 1, first, -1))
        return first

    def give_back(self, slot: int) -> None:
        """A sequence does not need its rows any more."""
        state = slot // self.per_state
        free = self._free[state]
        free.append(slot)
        if len(free) == self.per_state:
            del self._free[state]
            self._states.give_back(state)

    def clear(self) -> None:
        """No sequence has rows, and all slots of states are free."""
        self._free.clear()

    def check(self) -> None:
        """Raise if a row slot is free twice, or of a state slot that is used otherwise."""
        for state, free in self._free.items():
            assert len(set(free)) == len(free) < self.per_state, "a row slot was lost"
            assert all(slot // self.per_state == state for slot in free), "a foreign row slot"
            assert not self._states.is_kept(state), "rows are in a kept state"
            assert not self._states.is_free(state), "rows are in a free slot"
