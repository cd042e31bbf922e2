"""Units are assigned as a whole, each once, whatever load the programs already have."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem.kernels.attention.assign import assign_units, large_slots
from mainstem.kernels.attention.shape import Shape
from mainstem.kernels.attention.tuning import HOPPER_SPLIT, INTERPRETER, Pace, Tiles

pytestmark = pytest.mark.torch

NONE = np.empty(0)


def shape_of(programs: int, queued_share: float = 0.25, tiles: Tiles = HOPPER_SPLIT) -> Shape:
    """A shape with one unit per piece of each kind; on Hopper, with two programs per
    multiprocessor."""
    tiles = replace(tiles, queued_share=queued_share, pace=Pace())
    return Shape(1, 1, 16, num_programs=programs, tiles=tiles)


@given(
    st.integers(1, 20),
    st.lists(st.floats(1, 1e6), max_size=60),
    st.lists(st.floats(1, 1e6), max_size=60),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.25, 0.9]),
)
def test_every_unit_has_one_program_or_is_queued(
    pairs: int,
    large: list[float],
    small: list[float],
    is_even: bool,
    is_split: bool,
    taken: float,
    queued_share: float,
) -> None:
    if is_even and small:
        small = [small[0]] * len(small)
    pace = Pace(late_us=5.0, beside=0.5)
    tiles = replace(HOPPER_SPLIT, is_split=is_split, queued_share=queued_share, pace=pace)
    shape = Shape(4, 8, 16, num_programs=2 * pairs, tiles=tiles)
    sms = max(int(taken * shape.large.slots), 1)
    shares = assign_units(np.array(large), np.array(small), sms, shape)
    busy = np.diff(shares[0].ends).nonzero()[0]
    assert len(busy) <= sms
    assert (busy < shape.large.slots).all()
    counts = 8 * len(large), shape.small.units * len(small)
    for (order, ends, queued), count in zip(shares, counts, strict=True):
        assert ends[0] == 0
        assert ends[-1] == len(order)
        assert queued_share or not len(queued)
        assert (np.diff(ends) >= 0).all()
        assert sorted([*order, *queued]) == list(range(count))


@given(st.lists(st.floats(1, 100), min_size=1, max_size=80))
def test_no_load_exceeds_the_mean_by_more_than_one_unit(us: list[float]) -> None:
    """Longest-processing-time-first: no program ends later than the mean plus the longest unit."""
    shares, _ = assign_units(np.array(us), NONE, 8, shape_of(8, 0.0, INTERPRETER))
    loads = [
        sum(us[unit] for unit in shares.order[b:e])
        for b, e in zip(shares.ends, shares.ends[1:], strict=False)
    ]
    assert max(loads) <= sum(us) / 8 + max(us) + 1e-6


def test_the_queue_has_the_shortest_units_in_descending_order() -> None:
    us = np.array([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    _, small = assign_units(NONE, us, 2, shape_of(4))
    assert np.diff(small.ends).tolist() == [1, 1, 1, 1]
    assert sorted(small.order.tolist()) == [0, 1, 2, 3]
    assert small.queued.tolist() == [4, 5, 6, 7]


def test_one_unit_per_program_is_not_queued() -> None:
    _, small = assign_units(NONE, np.full(4, 9.0), 2, shape_of(4))
    assert small.ends.tolist() == [0, 1, 2, 3, 4]


def test_programs_that_begin_late_take_units_from_the_queue_only() -> None:
    _, small = assign_units(np.array([100.0]), np.full(16, 10.0), 1, shape_of(4))
    kept = np.diff(small.ends).tolist()
    assert kept[2:] == [0, 0], "the programs on the multiprocessor with large units"
    assert 0 < kept[1] <= kept[0] < 8


def test_all_units_are_queued_if_all_programs_begin_late() -> None:
    _, small = assign_units(np.array([50.0, 60.0]), np.full(16, 10.0), 2, shape_of(4))
    assert not small.ends.any()
    assert small.queued.tolist() == list(range(16))


def test_without_a_queue_late_programs_get_fewer_units() -> None:
    _, small = assign_units(np.array([50.0]), np.full(20, 10.0), 1, shape_of(4, 0.0))
    assert small.ends[-1] == 20
    assert np.diff(small.ends).tolist() == [7, 7, 3, 3]


def test_a_program_without_large_units_begins_at_once() -> None:
    _, small = assign_units(np.array([100.0]), np.full(16, 10.0), 2, shape_of(4))
    kept = np.diff(small.ends).tolist()
    assert kept[2:] == [0, 0]
    assert kept[0] >= kept[1] > 0


def test_equal_large_units_are_assigned_in_turn() -> None:
    shape = replace(shape_of(8, 0.0, INTERPRETER), kv_heads=4)
    large, _ = assign_units(np.full(3, 10.0), NONE, 5, shape)  # on programs 0, 2, 4, 6 and 1
    assert np.diff(large.ends).tolist() == [3, 2, 3, 0, 2, 0, 2, 0]
    assert large.order.tolist() == [0, 5, 10, 4, 9, 1, 6, 11, 2, 7, 3, 8]


def test_slots_without_large_units_are_pairs_if_most_slots_have_large_units() -> None:
    assert large_slots(6, 8, True).tolist() == [7, 6, 5, 4, 3, 2]
    assert large_slots(8, 12, True).tolist() == [11, 10, 9, 8, 5, 4, 3, 2], (
        "slots 0 and 1, 6 and 7 have none"
    )
    assert large_slots(9, 12, True).tolist() == [11, 10, 9, 8, 7, 5, 4, 3, 2]
    assert large_slots(8, 8, True).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert large_slots(4, 8, True).tolist() == [0, 2, 4, 6], "each next to a free slot"
    assert large_slots(6, 8, False).tolist() == [0, 2, 4, 6, 1, 3], "with one kernel for both kinds"
