"""Units are assigned whole: every one once, whatever the programs have to do already."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from mainstem.kernels.attention.assign import SmSlots, _fill, assign_units
from mainstem.kernels.attention.tuning import Pace

LOADS = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(LOADS, st.floats(1, 1e5), st.integers(0, 400))
def test_equal_units_fill_what_is_open(loads: list[float], size: float, count: int) -> None:
    room = _fill(np.array(loads), size, count)
    assert (room >= 0).all()
    assert int(room.sum()) == count


@given(
    st.integers(2, 40),
    st.lists(st.floats(1, 1e6), max_size=60),
    st.lists(st.floats(1, 1e6), max_size=60),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.25, 0.9]),
)
def test_every_unit_has_one_program(
    programs: int,
    large: list[float],
    small: list[float],
    is_even: bool,
    is_split: bool,
    taken: float,
    queued_share: float,
) -> None:
    if is_even and small:
        small = [small[0]] * len(small)
    shares = np.empty(2 * programs + 2, np.int32)
    num_large = programs // 2 if is_split and programs % 2 == 0 else programs
    slots = SmSlots(max(int(taken * num_large), 1), num_large, Pace(late_us=5.0, beside=0.5))
    orders = assign_units(shares, (np.array(large), 8), (np.array(small), 2), slots, queued_share)
    assert (shares[num_large : programs + 1] == 8 * len(large)).all()
    assert np.count_nonzero(np.diff(shares[: num_large + 1])) <= slots.taken
    for order, bounds, count in zip(
        orders, shares.reshape(2, -1), (8 * len(large), 2 * len(small)), strict=True
    ):
        assert bounds[0] == 0
        assert bounds[-1] == count or (queued_share and bounds[-1] < count)
        assert (np.diff(bounds) >= 0).all()
        assert sorted(order.tolist()) == list(range(count))


def test_the_queue_has_the_last_units_of_each_the_longest_first() -> None:
    shares = np.empty(2 * 4 + 2, np.int32)
    cost = np.array([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    slots = SmSlots(2, 2, Pace())
    _, order = assign_units(shares, (np.empty(0), 1), (cost, 1), slots, 0.5)
    ends = shares[5:]
    assert np.diff(ends).tolist() == [1, 1, 1, 1]
    assert sorted(order[:4].tolist()) == [0, 1, 2, 3]
    assert order[4:].tolist() == [4, 5, 6, 7]


def test_a_late_program_keeps_a_unit_that_is_longer_than_its_delay() -> None:
    shares = np.empty(2 * 4 + 2, np.int32)
    slots = SmSlots(2, 2, Pace())  # both multiprocessors, of two programs each
    large = np.array([50.0, 50.0])
    _, order = assign_units(shares, (large, 1), (np.array([400.0, 9.0, 8.0, 7.0]), 1), slots, 0.25)
    assert shares[5:].tolist()[-1] == 1
    assert order.tolist() == [0, 1, 2, 3]
    _, order = assign_units(shares, (large, 1), (np.array([40.0, 9.0, 8.0, 7.0]), 1), slots, 0.25)
    assert not shares[5:].any()
    assert order.tolist() == [0, 1, 2, 3]


def test_equal_units_are_queued_after_large_ones_only() -> None:
    shares = np.empty(2 * 4 + 2, np.int32)
    slots = SmSlots(1, 2, Pace())
    assign_units(shares, (np.array([100.0]), 1), (np.full(16, 10.0), 1), slots, 0.25)
    kept = np.diff(shares[5:]).tolist()
    assert kept[2:] == [0, 0], "programs of the multiprocessor that is taken"
    assert 0 < kept[0] == kept[1] < 8


def test_no_program_keeps_units_if_all_begin_late() -> None:
    shares = np.empty(2 * 4 + 2, np.int32)
    large = np.array([50.0, 60.0])
    _, order = assign_units(shares, (large, 1), (np.full(16, 10.0), 1), SmSlots(2, 2, Pace()), 0.25)
    assert not shares[5:].any()
    assert order.tolist() == list(range(16))


def test_a_program_without_large_units_begins_at_once() -> None:
    shares = np.empty(2 * 4 + 2, np.int32)
    small = np.full(16, 10.0)
    assign_units(shares, (np.array([100.0]), 1), (small, 1), SmSlots(2, 2, Pace()), 0.25)
    kept = np.diff(shares[5:]).tolist()
    assert kept[2:] == [0, 0]
    assert kept[0] == kept[1] > 0


def test_equal_large_units_are_assigned_in_turn() -> None:
    shares = np.empty(2 * 8 + 2, np.int32)
    slots = SmSlots(5, 8, Pace())  # 0, 2, 4, 6 and 1
    order, _ = assign_units(shares, (np.full(3, 10.0), 4), (np.empty(0), 1), slots)
    assert np.diff(shares[:9]).tolist() == [3, 2, 3, 0, 2, 0, 2, 0]
    assert order.tolist() == [0, 5, 10, 4, 9, 1, 6, 11, 2, 7, 3, 8]


def test_large_units_take_neighbours_where_most_are_taken() -> None:
    pace = Pace()
    assert SmSlots(6, 8, pace).of_large(16).tolist() == [7, 6, 5, 4, 3, 2]
    assert SmSlots(8, 12, pace).of_large(24).tolist() == [11, 10, 9, 8, 5, 4, 3, 2], "pairs apart"
    assert SmSlots(9, 12, pace).of_large(24).tolist() == [11, 10, 9, 8, 7, 5, 4, 3, 2]
    assert SmSlots(8, 8, pace).of_large(16).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert SmSlots(4, 8, pace).of_large(16).tolist() == [0, 2, 4, 6], "each beside a free one"
    assert SmSlots(6, 8, pace).of_large(8).tolist() == [0, 2, 4, 6, 1, 3], (
        "one kernel for both kinds"
    )


def test_short_units_among_nearly_equal_ones_are_claimed_last() -> None:
    shares = np.empty(2 * 4 + 2, np.int32)
    cost = np.array([10.0, 9.5, 10.0, 9.5, 10.0, 9.5, 10.0, 9.5])
    slots = SmSlots(1, 2, Pace())
    _, order = assign_units(shares, (np.array([50.0]), 1), (cost, 1), slots, 0.25)
    assert cost[order].tolist() == sorted(cost, reverse=True)


def test_a_few_short_units_go_to_programs_without_units() -> None:
    large = np.array([50.0] * 14 + [8.0] * 2), 8
    shares = np.empty(2 * 264 + 2, np.int32)
    order, _ = assign_units(shares, large, (np.empty(0), 1), SmSlots(115, 132, Pace()))
    counts = np.diff(shares[:133])
    assert sorted(counts[counts > 0].tolist()) == [1] * 112 + [5, 5, 6]
    has_several = np.repeat(counts > 1, counts)
    assert (order[has_several] // 8 >= 14).all()
