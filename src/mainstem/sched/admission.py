"""May this sequence start now? Pages and tokens decide; requests are not counted."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Float32s, Int32s


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the running sequences will still want and give back, as far as can be told."""

    remaining: Int32s  # [running] output tokens to come
    own_pages: Float32s  # [running] pages that come back when it ends; of shared ones its part

    def joined_by(self, new_pages: int, expected: int) -> "Outlook":
        """With one more sequence that takes `new_pages` now and produces `expected` tokens."""
        return Outlook(
            np.append(self.remaining, np.int32(expected)),
            np.append(self.own_pages, np.float32(new_pages)),
        )


@dataclass(frozen=True, slots=True)
class Admission:
    """Starts a sequence if, by the outlook, memory will last until the next one ends, and so on.

    Every running sequence grows by a token a step and gives its own pages back when it ends. Just
    before the k-th ends, the others have grown as long as it has and those before it are gone:

        need_k = (n - k) * remaining_k / page_size  -  own pages of those that ended

    The largest need_k must be available now (memory-centric token batching, BatchLLM 3.4; the
    forecast replaces its fixed M_threshold).
    """

    page_size: int

    def may_start(self, new_pages: int, expected: int, available: int, outlook: Outlook) -> bool:
        """A candidate takes `new_pages` now and is expected to produce `expected` tokens."""
        if len(outlook.remaining) == 0:
            return new_pages <= available  # alone it may always try
        then = outlook.joined_by(new_pages, expected)
        return new_pages + peak_need(then.remaining, then.own_pages, self.page_size) <= available


def peak_need(remaining: Int32s, own_pages: Float32s, page_size: int) -> float:
    """Most pages beyond today's that sequences will hold at once."""
    order = np.argsort(remaining)
    ends: NDArray[np.int64] = remaining[order].astype(np.int64)
    given_back = np.cumsum(own_pages[order], dtype=np.float64) - own_pages[order]
    alive = np.arange(len(ends), 0, -1)
    grown = alive * (ends // page_size + 1)  # each may be about to begin a page
    return float((grown - given_back).max())
