"""Units are shared out whole: every one once, whatever the programs have to do already."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from mainstem.kernels.dealing import Seats, _fill, share_out
from mainstem.kernels.tuning import Pace

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
)
def test_every_unit_has_one_program(
    programs: int,
    large: list[float],
    small: list[float],
    is_even: bool,
    is_split: bool,
    taken: float,
) -> None:
    if is_even and small:
        small = [small[0]] * len(small)
    shares = np.empty(2 * programs + 2, np.int32)
    num_large = programs // 2 if is_split and programs % 2 == 0 else programs
    seats = Seats(max(int(taken * num_large), 1), num_large, Pace(late_us=5.0, beside=0.5))
    orders = share_out(shares, (np.array(large), 8), (np.array(small), 2), seats)
    assert (shares[num_large : programs + 1] == 8 * len(large)).all()
    assert np.count_nonzero(np.diff(shares[: num_large + 1])) <= seats.taken
    for order, bounds, count in zip(
        orders, shares.reshape(2, -1), (8 * len(large), 2 * len(small)), strict=True
    ):
        assert bounds[0] == 0
        assert bounds[-1] == count
        assert (np.diff(bounds) >= 0).all()
        assert sorted(order.tolist()) == list(range(count))
