"""The forecast of memory use that admission relies on."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mainstem.core.step import Int32s
from mainstem.sched.starting import Outlook


def test_a_forecast_counts_pages_that_other_sequences_will_return() -> None:
    """Each of two sequences frees 20 pages at its end. If one ends early, the other uses them."""
    own = np.array([20, 20], np.float32)
    first_ends = np.array([10, 160], np.int32)
    # both begin a page; then the first returns 20 pages
    assert Outlook.of(first_ends, own, 16).peak_need() == 2
    assert Outlook.of(np.array([160, 160], np.int32), own, 16).peak_need() == 22


@settings(deadline=None)
@given(
    hnp.arrays(np.int32, 12, elements=st.integers(0, 40)),
    hnp.arrays(np.int32, 12, elements=st.integers(0, 3)),
    hnp.arrays(np.int32, 12, elements=st.integers(0, 9)),
)
def test_a_forecast_is_never_too_low_and_at_most_a_page_per_sequence_too_high(
    remaining: Int32s, free_tokens: Int32s, own: Int32s
) -> None:
    """The exact need, step by step: all grow by a token, and those that end return their pages."""
    needs = []
    for now in np.unique(remaining):
        is_alive = remaining >= now
        begun = -(-(now - free_tokens[is_alive]) // 4)  # tokens that do not fit in the last page
        needs.append(np.maximum(begun, 0).sum() - own[~is_alive].sum())
    forecast = Outlook.of(remaining, own.astype(np.float32), 4).peak_need()
    one_by_one = Outlook.of(remaining[:1], own[:1].astype(np.float32), 4)
    for tokens, pages in zip(remaining[1:].tolist(), own[1:].tolist(), strict=True):
        one_by_one = one_by_one.joined_by(pages, tokens)
    assert one_by_one.peak_need() == forecast
    assert max(needs) <= forecast <= max(needs) + len(remaining)
