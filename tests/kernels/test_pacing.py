"""The model behind the choice of a cut: what must hold whatever its constants are."""

import pytest

pytest.importorskip("torch")

from mainstem.kernels.attention.pacing import Card, Work, least_us, step_us
from mainstem.kernels.attention.tuning import HOPPER_SPLIT

pytestmark = pytest.mark.torch

CARD = Card(programs=264, per_sm=2, pace=HOPPER_SPLIT.pace, rules=HOPPER_SPLIT.rules)
NOTHING = Work(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def large(units: int, unit_us: float = 30.0, sms: int = 132) -> Work:
    rounds = -(-units // min(units, sms))
    return Work(units, units * unit_us, unit_us, rounds * unit_us, units * 2000.0, 0.0)


def small(units: int, steps: int = 16) -> Work:
    pace = CARD.pace
    unit_us = pace.small_us + steps * 64 * pace.small_key_us
    rounds = -(-units // CARD.programs)
    return Work(units, units * unit_us, unit_us, rounds * unit_us, units * steps * 64.0, 0.0)


def test_nothing_takes_no_time() -> None:
    assert step_us(NOTHING, NOTHING, 132, CARD) == 0.0


def test_many_small_units_are_as_fast_as_the_memory() -> None:
    work = small(264 * 20)
    us = step_us(NOTHING, work, 132, CARD)
    assert us == pytest.approx(work.keys / CARD.pace.reads, rel=0.02)


def test_a_few_small_units_do_not_lack_memory() -> None:
    work = small(20)
    assert step_us(NOTHING, work, 132, CARD) == pytest.approx(work.longest_us)


def test_large_units_alone_take_their_rounds() -> None:
    assert step_us(large(264), NOTHING, 132, CARD) == pytest.approx(60.0, rel=0.1)
    assert step_us(large(265), NOTHING, 132, CARD) == pytest.approx(90.0, rel=0.1)


@pytest.mark.parametrize("units", [100, 264, 1000, 4000])
@pytest.mark.parametrize("sms", [8, 64, 131, 132])
def test_both_take_longer_than_either(units: int, sms: int) -> None:
    both = step_us(large(sms, sms=sms), small(units), sms, CARD)
    assert both >= step_us(NOTHING, small(units), sms, CARD) - 1e-9
    assert both >= step_us(large(sms, sms=sms), NOTHING, sms, CARD) - 1e-9


def test_both_take_less_than_one_after_the_other() -> None:
    """64 multiprocessors have large units, so 136 programs of small ones begin at once."""
    apart = step_us(large(64, sms=64), NOTHING, 64, CARD) + step_us(NOTHING, small(2000), 64, CARD)
    assert step_us(large(64, sms=64), small(2000), 64, CARD) < 0.95 * apart


def test_a_long_small_unit_begins_at_once_if_some_multiprocessor_has_no_large_ones() -> None:
    """One of 264 units takes 100 us: after large ones of 30 us on all multiprocessors, or beside
    them on all but two.
    """
    uneven = small(264, steps=4)._replace(longest_us=100.0)
    behind = step_us(large(132), uneven, 132, CARD)
    beside = step_us(large(130, sms=130), uneven, 130, CARD)
    assert behind > beside + 30.0


def test_partials_cost() -> None:
    more = small(264)._replace(rows=1e5)
    assert step_us(NOTHING, more, 132, CARD) > step_us(NOTHING, small(264), 132, CARD)


@pytest.mark.parametrize("units", [0, 100, 1000])
@pytest.mark.parametrize("sms", [8, 64, 132])
def test_no_step_takes_less_than_the_least(units: int, sms: int) -> None:
    few = small(units)._replace(rows=1e4) if units else NOTHING
    for work in (NOTHING, large(sms, sms=sms), large(500, sms=sms)):
        assert 0.0 <= least_us(work, few, CARD) <= step_us(work, few, sms, CARD)
