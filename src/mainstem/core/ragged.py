"""Helpers for lists of lists in flat arrays: where each list begins, and indices within each
list."""

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


def starts_of(counts: Int32s) -> Int32s:
    """Return where each list begins, and the total: exclusive prefix sums, n + 1 entries."""
    starts = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=starts[1:])
    return starts


def ragged_arange(counts: Int32s) -> Int32s:
    """Return 0..c-1 for each count c, one range after the other."""
    starts = starts_of(counts)
    return np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
