"""Work done ahead: one item, and no more, while the caller is busy."""

from collections.abc import Iterator
from threading import Event

import pytest

from mainstem.batch.ahead import Ahead


def never() -> bool:
    return False


def taken(ahead: Ahead[int]) -> list[int]:
    found = []
    while (item := ahead.wait(never)) is not None:
        found.append(item)
    return found


def test_all_items_come_in_order() -> None:
    ahead = Ahead(range(5))
    assert taken(ahead) == [0, 1, 2, 3, 4]
    assert ahead.is_ended
    assert ahead.fault is None
    assert ahead.poll() is None


def test_only_one_item_is_made_ahead() -> None:
    made: list[int] = []
    is_made = Event()

    def items() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            if number == 2:
                is_made.set()
            yield number

    ahead = Ahead(items())
    assert ahead.wait(never) == 0
    assert ahead.wait(never) == 1
    assert is_made.wait(60.0), "the third item is made while the caller has two"
    assert len(made) == 3
    ahead.close()


def test_items_before_a_fault_are_delivered() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("lost")

    ahead = Ahead(items())
    assert taken(ahead) == [1]
    with pytest.raises(OSError, match="lost"):
        raise ahead.fault or AssertionError


def test_waiting_can_be_stopped() -> None:
    blocked = Event()

    def items() -> Iterator[int]:
        blocked.wait(60.0)
        yield 1

    ahead = Ahead(items())
    assert ahead.poll() is None
    assert ahead.wait(lambda: True) is None
    assert not ahead.is_ended
    ahead.close()
    blocked.set()
