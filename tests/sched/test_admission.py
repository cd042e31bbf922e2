"""The forecast that admission rests on."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mainstem.core.step import Int32s
from mainstem.sched.admission import Outlook, peak_need


def test_a_forecast_admits_what_memory_will_hold() -> None:
    """Two of 40 pages: alone each needs 20 more at its peak, but the first ends before."""
    own = np.array([20, 20], np.float32)

    def need(remaining: list[int], free_tokens: list[int]) -> float:
        free = np.array(free_tokens, np.int32)
        return peak_need(Outlook(np.array(remaining, np.int32), own, free), page_size=16)

    assert need([10, 160], [0, 9]) == 2  # both begin a page; then 20 come back
    assert need([10, 160], [10, 9]) == 1  # the first one's last page has room for all it lacks
    assert need([160, 160], [0, 15]) == 20
    assert need([161, 161], [0, 1]) == 21


@given(
    hnp.arrays(np.int32, 12, elements=st.integers(0, 40)),
    hnp.arrays(np.int32, 12, elements=st.integers(0, 3)),
    hnp.arrays(np.int32, 12, elements=st.integers(0, 9)),
)
def test_a_forecast_is_what_happens(remaining: Int32s, free: Int32s, own: Int32s) -> None:
    """Step by step: everybody grows by a token, and whoever ends gives its pages back."""
    outlook = Outlook(remaining, own.astype(np.float32), free)
    needs = []
    for now in np.unique(remaining):
        is_alive = remaining >= now
        begun = -(-(now - free[is_alive]) // 4)
        needs.append(np.maximum(begun, 0).sum() - own[~is_alive].sum())
    assert peak_need(outlook, page_size=4) == max(needs)
