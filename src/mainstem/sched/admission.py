"""May this sequence start now? Pages and tokens decide; requests are not counted."""

from dataclasses import dataclass

import numpy as np

from mainstem.core.step import Float32s, Int32s


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the running sequences will still want and give back, as far as can be told."""

    remaining: Int32s  # [running] output tokens to come
    own_pages: Float32s  # [running] pages that come back when it ends; of shared ones its part
    free_tokens: Int32s  # [running] that its last page has room for

    def joined_by(self, newcomer: "Newcomer") -> "Outlook":
        """With one more sequence."""
        return Outlook(
            np.append(self.remaining, np.int32(newcomer.expected_tokens)),
            np.append(self.own_pages, np.float32(newcomer.new_pages)),
            np.append(self.free_tokens, np.int32(newcomer.free_tokens)),
        )


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A sequence that wants to start."""

    new_pages: int  # that it takes at once
    free_tokens: int  # that the last of them has room for
    expected_tokens: int  # that it will produce


@dataclass(frozen=True, slots=True)
class Admission:
    """Starts a sequence if, by the outlook, memory will last until the next one ends, and so on.

    Every running sequence grows by a token a step and gives its own pages back when it ends. Just
    before the k-th ends, the others have grown as long as it has and those before it are gone:

        need_k = pages that n - k begin in remaining_k tokens  -  own pages of the k that ended

    The largest need_k must be available now (memory-centric token batching, BatchLLM 3.4; the
    forecast replaces its fixed M_threshold).
    """

    page_size: int

    def may_start(self, newcomer: Newcomer, available: int, outlook: Outlook) -> bool:
        """Whether `available` pages are enough for it beside those that run."""
        if len(outlook.remaining) == 0:
            return newcomer.new_pages <= available  # alone it may always try
        need = peak_need(outlook.joined_by(newcomer), self.page_size)
        return newcomer.new_pages + need <= available


def peak_need(outlook: Outlook, page_size: int) -> float:
    """Most pages beyond today's that sequences will hold at once."""
    order = np.argsort(outlook.remaining)
    own_pages = outlook.own_pages[order]
    given_back = np.cumsum(own_pages, dtype=np.float64) - own_pages
    full_pages, tokens = np.divmod(outlook.remaining[order].astype(np.int64), page_size)
    alive = np.arange(len(order), 0, -1)
    # those whose last page has no room for the tokens beyond full pages begin one more
    is_beyond = outlook.free_tokens[order][:, None] < np.arange(page_size)
    num_beyond = np.cumsum(is_beyond[::-1], axis=0, dtype=np.int32)[::-1]
    begun = num_beyond[np.arange(len(order)), tokens]
    return float((alive * full_pages + begun - given_back).max())
