"""Row slots are lent out of the slots of states, and go back to them."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mainstem.kv.keys import Naming
from mainstem.kv.rows import RowSlots
from mainstem.kv.states import StatePlace, StateStore


class RowsMachine(RuleBasedStateMachine):
    """Any order of use keeps row slots and states apart."""

    @initialize(num_states=st.integers(1, 5), per_state=st.integers(1, 4))
    def start(self, num_states: int, per_state: int) -> None:
        self.states = StateStore(num_states)
        self.rows = RowSlots(self.states, per_state, 16)
        self.per_state = per_state
        self.own: list[int] = []
        self.lent: list[int] = []
        self.num_kept = 0

    @rule()
    def take_state(self) -> None:
        has_room = self.states.has_room()
        slot = self.states.take()
        assert has_room == (slot is not None)
        if slot is not None:
            self.own.append(slot)

    @precondition(lambda self: self.own)
    @rule()
    def keep_state(self) -> None:
        self.num_kept += 1
        chain = Naming(b"model", 4).chain(np.full(9, self.num_kept, np.int32), b"", 0)
        self.states.keep(StatePlace.of(chain, 8), self.own.pop())

    @rule()
    def take_rows(self) -> None:
        has_room = self.rows.has_free or self.states.has_room()
        slot = self.rows.take()
        assert has_room == (slot is not None)
        if slot is not None:
            assert slot not in self.lent, "a row slot was lent twice"
            self.lent.append(slot)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_rows_back(self, data: st.DataObject) -> None:
        self.rows.give_back(self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1))))

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "rows"):
            self.states.check()
            self.rows.check()
            of_rows = {slot // self.per_state for slot in self.lent}
            assert self.states.num_owned == len(self.own) + len(of_rows)
            assert not of_rows & set(self.own), "rows are in a state"


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_the_fullest_state_slot_is_filled_first() -> None:
    """So that the others become empty and hold states again."""
    states = StateStore(2)
    rows = RowSlots(states, 3, 16)
    taken = [rows.take() for _ in range(6)]
    assert not states.has_room()
    for slot in taken[:2] + taken[3:4]:
        assert slot is not None
        rows.give_back(slot)
    assert rows.take() in taken[3:4]
    assert taken[2] is not None
    rows.give_back(taken[2])
    assert states.has_room()
