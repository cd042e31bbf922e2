"""Logprobs of the tokens in a page, kept beside it: cached K and V do not tell them again.

They follow from the tokens up to there, which are what a page is named by; so whoever finds the
page may have them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s

# of one token: its own, and those of the likeliest at its place
_RECORD = np.dtype(
    [("logprob", "f4"), ("rank", "i4"), ("top_logprob", "f4"), ("top_id", "i4"), ("id", "i4")]
)
MAX_TOP = 1  # more alternatives are not kept


class PageLogprobs:
    """By device page: 20 bytes a token from the first time that any are kept."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_known = np.zeros(num_pages, np.int32)  # of the page's tokens the first ones
        self._page_size = page_size
        self._records: NDArray[np.void] | None = None

    def forget(self, pages: Int32s) -> None:
        """Pages are about to hold something else."""
        self._num_known[pages] = 0

    def keep(self, pages: Int32s, found: Sequence[TokenLogprobs | None]) -> None:
        """`found`: of the tokens in these pages, in order, with one alternative or more; None: of
        the first token of a prompt, which nothing predicts."""
        if self._records is None:
            self._records = np.zeros((len(self._num_known), self._page_size), _RECORD)
        rows = [(0.0, 0, 0.0, 0, 0) if each is None else _row(each) for each in found]
        records = np.array(rows, _RECORD)
        for place, page in enumerate(pages.tolist()):
            part = records[place * self._page_size :][: self._page_size]
            self._records[page, : len(part)] = part
            self._num_known[page] = len(part)

    def num_known(self, pages: Int32s) -> Int32s:
        """By page, how many of its tokens, the first ones, have their logprobs here."""
        return self._num_known[pages]

    def read(self, page: int, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
        """Those of the first tokens, with up to MAX_TOP alternatives each."""
        if not num_tokens:
            return []
        assert self._records is not None
        return [
            TokenLogprobs(token_id, logprob, rank, (top_id,)[:num_top], (top_logprob,)[:num_top])
            for logprob, rank, top_logprob, top_id, token_id in self._records[
                page, :num_tokens
            ].tolist()
        ]


def _row(found: TokenLogprobs) -> tuple[float, int, float, int, int]:
    return found.logprob, found.rank, found.top_logprobs[0], found.top_ids[0], found.token_id
