"""Decides by the number of pages whether a sequence may start now."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mainstem.core.step import Float32s, Int32s

A = TypeVar("A", Int32s, Float32s)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The pages that running sequences are expected to take and to give back. Sequences are in the
    order in which they are expected to end."""

    remaining: Int32s  # [running] output tokens to come
    own_pages: Float32s  # [running] pages that its end frees; a shared page counts in part

    @classmethod
    def of(cls, remaining: Int32s, own_pages: Float32s) -> "Outlook":
        """The outlook of sequences given in any order."""
        order = np.argsort(remaining)
        return cls(remaining[order], own_pages[order])

    def joined_by(self, new_pages: int, expected: int) -> "Outlook":
        """The outlook with one more sequence, which takes `new_pages` now and produces `expected`
        tokens."""
        place = int(self.remaining.searchsorted(np.int32(expected)))
        return Outlook(
            _inserted(self.remaining, place, expected),
            _inserted(self.own_pages, place, new_pages),
        )

    def peak_need(self, page_size: int) -> float:
        """Return the maximum number of additional pages that these sequences will hold at once."""
        given_back = self.own_pages.cumsum(dtype=np.float64)
        given_back -= self.own_pages
        alive = np.arange(len(given_back), 0, -1)
        alive *= self.remaining // page_size + 1  # each sequence may be about to begin a page
        return float((alive - given_back).max())


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets a sequence start if, by the outlook, the running ones will not run out of pages.

    Every running sequence grows by a token a step and gives its own pages back when it ends. Just
    before sequence k of n (from 0) ends, all running sequences have grown by the same number of
    tokens, and the sequences before it have ended:

        need_k = (n - k) * remaining_k / page_size  -  own pages of those that ended

    The largest need_k must be available now (memory-centric token batching, BatchLLM 4.3.3; the
    forecast replaces its fixed M_threshold).
    """

    page_size: int

    def may_start(self, new_pages: int, expected: int, available: int, outlook: Outlook) -> bool:
        """Whether a sequence may start that takes `new_pages` now and is expected to produce
        `expected` tokens."""
        if len(outlook.remaining) == 0:
            return new_pages <= available  # nothing else runs: the forecast is not needed
        then = outlook.joined_by(new_pages, expected)
        return new_pages + then.peak_need(self.page_size) <= available


def _inserted(values: A, place: int, value: int) -> A:
    """Like numpy.insert, which takes five times as long."""
    longer = np.empty(len(values) + 1, values.dtype)
    longer[:place] = values[:place]
    longer[place] = value
    longer[place + 1 :] = values[place:]
    return longer
