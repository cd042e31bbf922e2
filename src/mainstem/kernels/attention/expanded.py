"""Attention over rounded pages that expands them first, if each is read by many rows.

    rounded pages | fp8 | expand (`memory/expand.py`) | 16 bits | Hopper's kernels

Kernels that read pages in fp8 compute prompts more slowly than Hopper's kernels over 16 bits. A
prompt of 2,000 tokens reads each page by 8,000 rows, so a copy of the page in 16 bits costs little.
Decodes read each page by few rows, and read the fp8 pages themselves. Either way a token sees only
the pages before its own one.

The pages of a step are expanded in each layer, to memory that all layers share.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention.ops import NUM_STAGING, SpanAttention
from mainstem.kernels.attention.plan import ALL_LAUNCHES, Launches
from mainstem.kernels.attention.plan_staging import PlanStaging
from mainstem.kernels.memory.expand import expand_rounded_pages

# Pages are expanded if each key is read by this many rows on average. On an H200 a key of a head
# costs 0.23 ns to expand, and a row takes 0.45 ps longer over pages in fp8.
EXPAND_ROWS = 500.0
NEVER = math.inf
EXPANDED_BYTES = 512 << 20  # of K and V; steps with more pages are not expanded


class _PageList:
    """Page ids for `PlanStaging`."""

    def __init__(self, ids: Int32s) -> None:
        self._ids = ids
        self.num_ints = len(ids)

    def write(self, ints: Int32s) -> None:
        ints[:] = self._ids


class ExpandingAttention:
    """Like a SpanAttention over rounded pages. Each plan decides whether pages are expanded."""

    def __init__(self, direct: SpanAttention, expanded: SpanAttention, memory: Tensor) -> None:
        """`direct` reads rounded pages, `expanded` (with `before_own_page`) 16-bit ones. `memory`
        is for those, of EXPANDED_BYTES or any other size."""
        self._direct, self._expanded = direct, expanded
        self._pages = expanded.pages_in(memory)
        self._group = direct.shape.group
        self._ids = torch.zeros((1, self.num_places), dtype=torch.int32, device=memory.device)
        self._staging = [PlanStaging(memory.device) for _ in range(NUM_STAGING)]
        self._next_staging = 0
        self._num_expanded: int | None = None  # pages that the last plan expands, if it does

    @property
    def num_places(self) -> int:
        """How many pages may be expanded."""
        return self._pages.shape[1]

    @property
    def kinds_of_steps(self) -> tuple[Launches, ...]:
        """Those of steps that expand nothing: graphs hold no others."""
        return self._direct.kinds_of_steps

    @property
    def is_expanding(self) -> bool:
        """Whether the last plan expands pages."""
        return self._num_expanded is not None

    def plan(self, spans: Spans, expand_rows: float = NEVER) -> Launches:
        """See SpanAttention. Pages are expanded if each key is read by `expand_rows` rows on
        average; runs in graphs must not."""
        self._num_expanded = None
        if expand_rows == NEVER:
            return self._direct.plan(spans)
        pages, places = numbered(spans.page_ids)
        least = expand_rows * len(pages) * self._pages.shape[3]
        if len(pages) > self.num_places or rows_x_keys(spans, self._group) < least:
            return self._direct.plan(spans)
        launches = self._expanded.plan(replace(spans, page_ids=places))
        if len(pages):
            self._staging[self._next_staging].send(_PageList(pages), self._ids)
            self._next_staging = (self._next_staging + 1) % NUM_STAGING
        self._num_expanded = len(pages)
        return launches

    def run(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        launches: Launches = ALL_LAUNCHES,
    ) -> Tensor:
        """See SpanAttention."""
        if self._num_expanded is None:
            return self._direct.run(q, k_pages, v_pages, out, lse, scales=scales, launches=launches)
        assert scales is not None
        expand_rounded_pages(
            (k_pages, v_pages), scales, self._ids[0], self._num_expanded, self._pages
        )
        k_pages, v_pages = self._pages
        return self._expanded.run(q, k_pages, v_pages, out, lse, launches=launches)

    def forget_addresses(self) -> None:
        """See SpanAttention. Expanded pages keep theirs."""
        self._direct.forget_addresses()


def numbered(page_ids: Int32s) -> tuple[Int32s, Int32s]:
    """The pages that occur, each once, and for each of `page_ids` its place among them."""
    is_there = np.zeros(int(page_ids.max(initial=-1)) + 1, np.bool_)
    is_there[page_ids] = True
    pages = np.flatnonzero(is_there).astype(np.int32)
    places = np.empty(len(is_there), np.int32)
    places[pages] = np.arange(len(pages), dtype=np.int32)
    return pages, places[page_ids]


def rows_x_keys(spans: Spans, group: int) -> float:
    """How many pairs of a key and a row (of one KV head) that sees it spans have, about."""
    queries = (spans.query_starts[1:] - spans.query_starts[:-1]).astype(np.float64)
    keys = spans.key_tokens - spans.is_causal * (queries / 2.0)
    return float(group * (queries @ keys))
