"""The pages of a trace as arrays, and a page cache that is fast enough for hundreds of replicas."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from mainstem.core.step import Int64s
from mainstem_simulate.trace_records import Trace, TraceFormat, TraceRequest

# smaller pages are joined; of each prompt, half a joined page on average is then not cached
LEAST_PAGE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PagedTrace:
    """A trace whose pages are numbered from 0; small pages are joined, up to LEAST_PAGE_TOKENS."""

    page_tokens: int
    num_pages: int  # distinct pages
    requests: list[TraceRequest]
    kept: list[Int64s]  # for each request: pages that stay cached afterwards
    prompts: list[Int64s]  # for each request: whole pages of the prompt
    names: list[list[int]]  # `prompts` as lists, for the router
    has_sessions: bool  # whether the trace has session ids; the router does not get guessed ones

    @classmethod
    def of(cls, trace: Trace) -> "PagedTrace":
        """Convert a trace. A key identifies its whole prefix, so every n-th key is enough."""
        step = max(1, LEAST_PAGE_TOKENS // trace.page_tokens)
        chains = [np.array(r.kept[step - 1 :: step], np.int64) for r in trace.requests]
        known, numbers = np.unique(np.concatenate(chains), return_inverse=True)
        kept = np.split(numbers, np.cumsum([len(chain) for chain in chains])[:-1])
        prompts = [
            pages[: len(request.keys) // step]
            for pages, request in zip(kept, trace.requests, strict=True)
        ]
        names = [pages.tolist() for pages in prompts]
        return cls(
            page_tokens=trace.page_tokens * step,
            num_pages=len(known),
            requests=trace.requests,
            kept=kept,
            prompts=prompts,
            names=names,
            has_sessions=trace.format is not TraceFormat.MOONCAKE,
        )


class ReplicaPages:
    """An LRU cache of `capacity` pages; the tail of a chain is evicted before its head."""

    def __init__(self, capacity: int, num_pages: int) -> None:
        self.capacity = capacity
        self._is_here = np.zeros(num_pages, dtype=np.bool_)
        self._last_use = np.zeros(num_pages, dtype=np.int32)
        self._uses: deque[tuple[int, Int64s]] = deque()  # oldest first
        self._num_uses = 0
        self._num_here = 0

    def num_leading(self, pages: Int64s) -> int:
        """How many leading pages of a chain are cached."""
        is_here = self._is_here[pages]
        first = int(is_here.argmin()) if len(pages) else 0
        return first if len(pages) and not is_here[first] else len(pages)

    def use(self, pages: Int64s) -> None:
        """Cache a chain, and evict the least recently used pages."""
        if not self.capacity or not len(pages):
            return
        self._num_uses += 1
        self._num_here += len(pages) - int(np.count_nonzero(self._is_here[pages]))
        self._is_here[pages] = True
        self._last_use[pages] = self._num_uses
        self._uses.append((self._num_uses, pages))
        while self._num_here > self.capacity:
            self._drop_oldest(self._num_here - self.capacity)

    def _drop_oldest(self, most: int) -> None:
        """Evict pages of the oldest use that were not used since, the last pages first."""
        number, pages = self._uses[0]
        left = pages[self._is_here[pages] & (self._last_use[pages] == number)]
        if len(left) <= most:
            self._uses.popleft()
        dropped = left[-most:]
        self._is_here[dropped] = False
        self._num_here -= len(dropped)

    def check(self) -> None:
        """Raise if pages are counted wrong."""
        assert self._num_here == int(np.count_nonzero(self._is_here)) <= self.capacity
