"""PagePool stays consistent under any order of take, share and give_back."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mainstem.core.errors import OutOfPages
from mainstem.kv.pool import PagePool


def test_take_is_all_or_nothing() -> None:
    pool = PagePool(4)
    pool.take(3)
    with pytest.raises(OutOfPages):
        pool.take(2)
    assert pool.num_free == 1


def test_giving_back_too_often_is_a_bug() -> None:
    pool = PagePool(4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.give_back(pages)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="free page"):
        PagePool(4).share(np.array([0], np.int32))


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8)
        self.loans: list[list[int]] = []

    @rule(count=st.integers(0, 10))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(OutOfPages):
                self.pool.take(count)
        else:
            self.loans.append(self.pool.take(count).tolist())

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.loans:
            loan = data.draw(st.sampled_from(self.loans))
            self.pool.share(np.array(loan, np.int32))
            self.loans.append(list(loan))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.loans:
            loan = self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1)))
            self.pool.give_back(np.array(loan, np.int32))

    @invariant()
    def pool_is_whole(self) -> None:
        self.pool.check()
        held = {page for loan in self.loans for page in loan}
        assert self.pool.num_free == 8 - len(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
