"""Logprobs of the tokens in a page, kept with it: they cannot be computed from cached K and V.

A page's name depends on all tokens up to its end, and so do the logprobs. So every request that
finds the page may read them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Int32s

# logprobs at one token: its own, and that of the likeliest token at its position
_RECORD = np.dtype(
    [("logprob", "f4"), ("rank", "i4"), ("top_logprob", "f4"), ("top_id", "i4"), ("id", "i4")]
)
MAX_TOP = 1  # more alternatives are not kept


class PageLogprobs:
    """Keeps logprobs by device page: 20 bytes a token, allocated when the first logprobs are
    kept."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_known = np.zeros(num_pages, np.int32)  # leading tokens with logprobs, by page
        self._page_size = page_size
        self._records: NDArray[np.void] | None = None

    def forget(self, pages: Int32s) -> None:
        """Drop the logprobs of pages that are about to be reused."""
        self._num_known[pages] = 0

    def keep(self, pages: Int32s, found: Sequence[TokenLogprobs | None]) -> None:
        """Keep the logprobs `found` of the tokens in these pages, in order. Each has at least one
        alternative; None stands for the first token of a prompt, which has no logprob."""
        if self._records is None:
            self._records = np.zeros((len(self._num_known), self._page_size), _RECORD)
        rows = [(0.0, 0, 0.0, 0, 0) if each is None else _row(each) for each in found]
        records = np.array(rows, _RECORD)
        for place, page in enumerate(pages.tolist()):
            part = records[place * self._page_size :][: self._page_size]
            self._records[page, : len(part)] = part
            self._num_known[page] = len(part)

    def num_known(self, pages: Int32s) -> Int32s:
        """For each page, how many of its leading tokens have logprobs here."""
        return self._num_known[pages]

    def read(self, page: int, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
        """Logprobs of the leading tokens, with up to MAX_TOP alternatives each."""
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
