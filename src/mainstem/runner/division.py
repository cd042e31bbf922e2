"""Divides the memory for K and V between pages and their windowed parts (kv/parts.py).

A sequence of L tokens takes L tokens of pages, but windowed parts only for its last window, for
what it fills next, and for windows that are kept for later requests. Both pools are divided for
sequences of the same expected length, so that they run out at the same time:

    bytes = parts for one chunk + sequences x (pages of L tokens + parts of a window and a share)

Needs neither weights nor torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mainstem.core.config import CacheConfig
from mainstem.kernels.memory.record_size import SCALE_BYTES
from mainstem.kv.parts import SPARE_PARTS, span_of
from mainstem.models.spec import AttentionSpec, ModelSpec
from mainstem.runner.kv_form import ROUNDED_BYTES

EXPECTED_TOKENS = 8192  # at most, unless the config says so
# tokens of windowed parts that each sequence has for kept windows and chunks: a quarter of the
# window, but at least these
LEAST_SHARE = 256
# If full pages are rounded, open pages take this part of the memory at most, unless the config says
# what to expect: of a sequence's length, or of the number of sequences
OPEN_SHARE, SET_OPEN_SHARE = 32, 4
LEAST_OPEN, MOST_OPEN = 8, 1024  # sequences that have open pages, if memory and max_seqs allow


@dataclass(frozen=True, slots=True)
class KvCosts:
    """The bytes of K and V of a token, and of the scales of a page if pages are rounded."""

    bytes_per_token: int  # in all layers
    windowed_bytes: int = 0  # of these, in the windowed parts of pages
    window: int | None = None  # None: pages have one part
    scale_bytes: int = 0  # of a page, in all layers
    windowed_scale_bytes: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, element_bytes: int) -> "KvCosts":
        """Numbers of one byte have scales."""
        scale_bytes = SCALE_BYTES if element_bytes == ROUNDED_BYTES else 0
        num_bytes = spec.kv_elements_per_token * element_bytes
        whole = cls(num_bytes, scale_bytes=_num_halves(spec, spec.kept) * scale_bytes)
        if spec.recurrences or spec.part_window is None:  # states leave little to be divided
            return whole
        return replace(
            whole,
            windowed_bytes=spec.windowed_kv_elements * element_bytes,
            window=spec.part_window,
            windowed_scale_bytes=_num_halves(spec, spec.windowed) * scale_bytes,
        )

    def page_bytes(self, page_size: int) -> int:
        """A page with all its parts."""
        return self.bytes_per_token * page_size + self.scale_bytes

    def part_bytes(self, page_size: int) -> int:
        """The windowed part of a page."""
        return self.windowed_bytes * page_size + self.windowed_scale_bytes


@dataclass(frozen=True, slots=True)
class Division:
    """How many pages there are, and how many windowed parts."""

    num_pages: int
    page_bytes: int  # of a page without its windowed part, if that has a pool of its own
    num_parts: int = 0  # RunnerFacts.num_parts
    part_bytes: int = 0
    window: int | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of both pools."""
        num_places = self.num_parts + 1 if self.num_parts else 0
        return self.num_pages * self.page_bytes + num_places * self.part_bytes


def divide(
    costs: KvCosts, cache: CacheConfig, free_bytes: int, context: int, chunk_tokens: int
) -> Division:
    """Divide `free_bytes`, or the memory of `cache.kv_tokens`. At least a sequence alone has room
    for its window and a whole chunk. Pages are not divided if the model's layers are alike, or if
    there would be a windowed part for each page."""
    whole_bytes = costs.page_bytes(cache.page_size)
    whole = Division(cache.num_pages(free_bytes, whole_bytes), whole_bytes)
    window = costs.window
    if window is None:
        return whole
    part_bytes = costs.part_bytes(cache.page_size)
    page_bytes = whole_bytes - part_bytes
    span = span_of(window, cache.page_size)
    least = span + SPARE_PARTS + _pages(chunk_tokens, cache.page_size)
    pages_each = _pages(min(context, cache.expected_tokens or EXPECTED_TOKENS), cache.page_size)
    share = _pages(max(window // 4, LEAST_SHARE), cache.page_size)
    parts_each = min(span + 2 + share, pages_each)
    if cache.kv_tokens is not None:
        num_pages = whole.num_pages
        num_parts = least + -(-num_pages * parts_each // pages_each)
    else:
        free_bytes -= (least + 1) * part_bytes
        each_bytes = pages_each * page_bytes + parts_each * part_bytes
        num_pages = free_bytes * pages_each // each_bytes
        num_parts = least + free_bytes * parts_each // each_bytes
    if num_parts >= num_pages:
        return whole
    return Division(num_pages, page_bytes, num_parts, part_bytes, window)


def open_pages(
    memory: Division, cache: CacheConfig, context: int, max_seqs: int | None, open_bytes: int
) -> int:
    """How many sequences have open pages, of `open_bytes` each: as many as fit into `memory`,
    which has none yet, if each has `cache.expected_tokens`; otherwise the share above."""
    if cache.expected_tokens is None:
        share = OPEN_SHARE if max_seqs is None else SET_OPEN_SHARE
        num_fit = memory.num_bytes // (share * open_bytes)
    else:
        pages_each = _pages(min(context, cache.expected_tokens), cache.page_size)
        seq_bytes = memory.num_bytes * pages_each // memory.num_pages + open_bytes
        num_fit = memory.num_bytes // seq_bytes
    return min(max(num_fit, LEAST_OPEN), max_seqs or MOST_OPEN, memory.num_pages)


def _num_halves(spec: ModelSpec, layers: Iterable[AttentionSpec]) -> int:
    """KV heads of these layers, for K and for V: each has a scale in every page."""
    return sum(2 * spec.kv_shape(attention).heads for attention in layers)


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
