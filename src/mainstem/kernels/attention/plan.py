"""Assigned units -> the arrays that kernels read (`layout.py`). On the host, in numpy, once a step.

    plan = make_plan(spans, shape)    # cut (`cutting.py`), assign (`assign.py`), write down
    plan.write(ints)                  # one int32 array, which travels in one copy
    if plan.holds_for(later):
        plan = plan.of_step(later)

In the next step each decode has one key more, so most of the plan can be reused.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention import layout
from mainstem.kernels.attention.assign import Shares, assign_units
from mainstem.kernels.attention.cutting import Int64s, SpanCut, cut_spans
from mainstem.kernels.attention.shape import Floats, Shape

NO_LIMIT = 1 << 30  # PIECE_FIRST_LIMIT of a plain span
NO_UNIT = np.zeros(1, np.int64)
NO_PAGE = np.zeros(1, np.int32)  # after the page ids: the kernel fetches one ahead
FIRST_LARGE = slice(layout.SHARE_FIRST_LARGE, layout.SHARE_FIRST_LARGE + layout.PIECE_INTS)
FIRST_SMALL = slice(layout.SHARE_FIRST_SMALL, layout.SHARE_FIRST_SMALL + layout.PIECE_INTS)
STARTS = [  # fields of the header: where each part of `Arrays` after the shares begins
    layout.HEADER_QUEUE, layout.HEADER_LARGE_ORDER, layout.HEADER_SMALL_ORDER,
    layout.HEADER_LARGE_PIECES, layout.HEADER_SMALL_PIECES, layout.HEADER_ENTRIES,
    layout.HEADER_MERGES, layout.HEADER_PAGE_IDS,
]  # fmt: skip
KEPT_KEYS = 16  # a plan can be reused until a span has more new keys than this


class Launches(NamedTuple):
    """Kernels that a step needs besides the kernel for small units, which every step runs."""

    large: bool  # the kernel for large units, if they have their own
    merge: bool


ALL_LAUNCHES = Launches(large=True, merge=True)


class Arrays(NamedTuple):
    """The parts of a plan, as `layout.py` describes them, in their order."""

    header: Int32s
    shares: Int32s
    queue: Int32s
    large_order: Int64s
    small_order: Int64s
    large_pieces: Int32s
    small_pieces: Int32s
    entries: Int32s
    merges: Int32s
    page_ids: Int32s  # the step's own array, not a copy
    no_page: Int32s = NO_PAGE


class Pieces(NamedTuple):
    """The pieces of a step: large ones first, then span by span. All row tiles of a stretch are
    neighbours and share its reads.
    """

    table: Int32s  # [pieces, PIECE_INTS], with zeros in columns that change with the keys
    num_large: int
    keys: Floats  # [pieces]
    span: Int64s  # [pieces] index of the span
    # [3, pieces]: pages of the span before the piece; end of its stretch (none for the last one,
    # since spans grow); keys at the end of the span that no row of the piece sees. None if each
    # span is one piece.
    within: Int32s | None


class StoredUnits(NamedTuple):
    """Units that are stored in full, not as a number: each program's first large unit, each
    program's first small unit, then all queued units.
    """

    pieces: Int64s
    heads: Int64s
    of_large: Int64s  # programs whose first large units these are
    of_small: Int64s


class KernelPlan(NamedTuple):
    """The plan of a step. Later steps can reuse it if their spans differ only in the number of
    keys: a few more, or fewer because a window has moved past a page.
    """

    arrays: Arrays
    num_slots: int  # of Partials
    num_units: tuple[int, int]  # large and small ones
    pieces: Pieces
    stored: StoredUnits
    structure: tuple[bytes, bytes, bytes]  # of the spans: query starts, query rows, is causal
    least_keys: Int32s  # [spans] the fewest keys for which the plan holds
    most_keys: Int32s | Int64s  # [spans] the most keys for which it holds

    @property
    def num_ints(self) -> int:
        return int(self.arrays.header[layout.HEADER_PAGE_IDS]) + len(self.arrays.page_ids) + 1

    @property
    def launches(self) -> Launches:
        return Launches(large=self.pieces.num_large > 0, merge=self.num_slots > 0)

    @property
    def ints(self) -> Int32s:
        ints = np.empty(self.num_ints, np.int32)
        self.write(ints)
        return ints

    def write(self, ints: Int32s) -> None:
        """Concatenate the arrays into `ints`."""
        np.concatenate(self.arrays, axis=None, out=ints, casting="same_kind")

    def holds_for(self, spans: Spans) -> bool:
        keys = spans.key_tokens
        return _structure(spans) == self.structure and not np.count_nonzero(
            (keys < self.least_keys) | (keys > self.most_keys)
        )

    def of_step(self, spans: Spans) -> "KernelPlan":
        """This plan for a later step that can reuse it: only what depends on keys and pages is
        computed again.
        """
        pieces, stored, entries = self.pieces, self.stored, self.arrays.entries
        table, shares = pieces.table.copy(), self.arrays.shares.copy()
        table[:, layout.PIECE_PAGES_AT] = page = spans.page_starts.take(pieces.span)
        key_end = spans.key_tokens.take(pieces.span)
        if pieces.within is not None:
            pages, ends, hidden = pieces.within
            page += pages
            key_end = np.minimum(key_end - hidden, ends)
        page_ids = spans.page_ids
        if spans.page_starts[len(spans) - 1] == len(page_ids):  # the last span has no pages
            page_ids = np.concatenate((page_ids, NO_PAGE))
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        limits = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)
        table[:, layout.PIECE_FIRST_PAGE] = page_ids.take(page)
        table[:, layout.PIECE_KEY_END] = key_end
        table[:, layout.PIECE_FIRST_LIMIT] = limits.take(pieces.span)
        units = table.take(stored.pieces, axis=0)
        units[:, layout.PIECE_KV_HEAD] = stored.heads
        large, first = len(stored.of_large), len(stored.of_large) + len(stored.of_small)
        shares[stored.of_large, FIRST_LARGE] = units[:large]
        shares[stored.of_small, FIRST_SMALL] = units[large:first]
        if len(entries) > layout.ENTRY_FIRST_KEY:
            entries = entries.copy()
            entries[layout.ENTRY_FIRST_KEY] = 0 if spans.first_keys is None else spans.first_keys
        arrays = self.arrays._replace(
            shares=shares,
            queue=units[first:] if len(units) > first else self.arrays.queue,
            large_pieces=table[: pieces.num_large],
            small_pieces=table[pieces.num_large :],
            entries=entries,
            page_ids=spans.page_ids,
        )
        return self._replace(arrays=arrays)


def _structure(spans: Spans) -> tuple[bytes, bytes, bytes]:
    return spans.query_starts.tobytes(), spans.query_rows.tobytes(), spans.is_causal.tobytes()


def make_plan(spans: Spans, shape: Shape) -> KernelPlan:
    """Cut the spans into units, assign them to programs and place every row's Partials."""
    return plan_cut(spans, cut_spans(spans, shape), shape)


def plan_cut(spans: Spans, cut: SpanCut, shape: Shape) -> KernelPlan:
    """The plan for spans that are cut in this way."""
    pieces = _pieces(spans, cut, shape)
    large_us = shape.large.unit_us(pieces.keys[: pieces.num_large])
    small_us = shape.small.unit_us(pieces.keys[pieces.num_large :])
    large, small = assign_units(large_us, small_us, cut.sms, shape)
    shares, stored = _share_table(large, small, pieces.num_large, shape)
    entries, merges = _place_partials(spans, cut, shape)
    header, num_queued = np.zeros(layout.HEADER_INTS, np.int32), len(small.queued)
    # A program reads the next unit before it knows whether there is one.
    queue = np.zeros((max(num_queued, 1), layout.PIECE_INTS), np.int32)
    arrays = Arrays(
        header, shares, queue, large.order, small.order if len(small.order) else NO_UNIT,
        pieces.table[: pieces.num_large], pieces.table[pieces.num_large :], entries, merges,
        spans.page_ids,
    )  # fmt: skip
    header[STARTS] = list(accumulate(part.size for part in arrays))[1 : 1 + len(STARTS)]
    header[layout.HEADER_NUM_ENTRIES] = len(spans.query_rows)
    header[layout.HEADER_NUM_MERGES] = merges.shape[1]
    header[layout.HEADER_MOST_PARTIALS] = merges[layout.MERGE_PARTIALS].max(initial=0)
    header[layout.HEADER_NUM_QUEUED] = num_queued
    plan = KernelPlan(
        arrays, int(merges[layout.MERGE_PARTIALS].sum()),
        (len(large.order), len(small.order) + num_queued), pieces, stored,
        _structure(spans), *_kept_keys(spans, cut, shape),
    )  # fmt: skip
    return plan.of_step(spans)


def _pieces(spans: Spans, cut: SpanCut, shape: Shape) -> Pieces:
    (span, num_large, keys, _, rows, row_tiles), stretches, parts, _ = cut
    counts = (parts * row_tiles).astype(np.int64)
    if not np.count_nonzero(counts != 1):
        return Pieces(_piece_table(spans, span, rows), num_large, keys, span, within=None)
    place, num_large = np.arange(len(counts)).repeat(counts), int(counts[:num_large].sum())
    number = np.arange(len(place)) - _starts(parts * row_tiles)[place]  # within the span
    span, keys, rows, row_tiles = span[place], keys[place], rows[place], row_tiles[place]
    stretches, parts = stretches[place], parts[place]
    stretch = np.floor(number / row_tiles)
    tile_rows = np.full(len(span), float(shape.small.rows))
    tile_rows[:num_large] = shape.large.rows
    key_begin, row_begin = stretch * stretches, (number - stretch * row_tiles) * tile_rows
    key_end, row_end = key_begin + stretches, np.minimum(row_begin + tile_rows, rows)
    table = _piece_table(spans, span, row_end)
    table[:, layout.PIECE_ROW_BEGIN] = row_begin
    table[:, layout.PIECE_KEY_BEGIN] = key_begin
    table[:, layout.PIECE_STRETCH] = stretch
    within = np.empty((3, len(span)), np.int32)
    within[0] = key_begin / shape.page_size
    within[1] = np.where(stretch + 1.0 < parts, key_end, NO_LIMIT)
    within[2] = hidden = np.floor((rows - row_end) / shape.group) * spans.is_causal[span]
    keys = np.maximum(np.minimum(keys - hidden, key_end) - key_begin, 1.0)
    return Pieces(table, num_large, keys, span, within)


def _piece_table(spans: Spans, span: Int64s, row_end: Floats) -> Int32s:
    """The table of pieces, as if each began with the first row and the first key of its span."""
    starts, rows = spans.query_starts.astype(np.int64), spans.query_rows
    table = np.zeros((len(span), layout.PIECE_INTS), np.int32)
    table[:, layout.PIECE_ENTRY] = entries = starts[span]
    table[:, layout.PIECE_ROW_END] = row_end
    table[:, layout.PIECE_FIRST_TOKEN] = rows[entries]
    is_gap = np.zeros(len(rows) + 1, np.bool_)  # between a token and the one before in its span
    is_gap[1:-1] = rows[1:] - rows[:-1] != 1
    is_gap[starts] = False
    if np.count_nonzero(is_gap):
        spans_with_gaps = starts.searchsorted(is_gap.nonzero()[0], side="right") - 1
        table[np.isin(span, spans_with_gaps), layout.PIECE_FIRST_TOKEN] = -1
    return table


def _share_table(
    large: Shares, small: Shares, num_large: int, shape: Shape
) -> tuple[Int32s, StoredUnits]:
    """The table of shares, still without copies of first units, and the units stored in full."""
    table = np.zeros((shape.num_programs, layout.SHARE_INTS), np.int32)
    table[:, layout.SHARE_LARGE_BEGIN] = large_begin = large.ends[:-1]
    table[:, layout.SHARE_LARGE_END] = large.ends[1:]
    table[:, layout.SHARE_SMALL_BEGIN] = begin = small.ends[:-1]
    table[:, layout.SHARE_SMALL_END] = end = small.ends[1:]
    of_large, of_small = (large_begin < large.ends[1:]).nonzero()[0], (begin < end).nonzero()[0]
    second = np.minimum(begin + 1, end - 1)[of_small]
    table[of_small, layout.SHARE_SECOND_SMALL] = small.order[second]
    first, units = large.order[large_begin[of_large]], shape.small.units
    others = np.concatenate((small.order[begin[of_small]], small.queued))
    pieces, other_pieces = first // shape.kv_heads, others // units  # divmod is far slower
    heads = first - pieces * shape.kv_heads, (others - other_pieces * units) * shape.fold
    pieces = np.concatenate((pieces, other_pieces + num_large))
    return table, StoredUnits(pieces, np.concatenate(heads), of_large, of_small)


def _place_partials(spans: Spans, cut: SpanCut, shape: Shape) -> tuple[Int32s, Int32s]:
    """Entries and merges. The Partials of a token have neighbouring slots, in the order of the
    spans.

    Tokens in several units leave Partials, and so do tokens that share a span with one of them,
    since the rows of a unit are either all outputs or all Partials.
    """
    tokens, parts = spans.query_rows.astype(np.int64), np.empty(len(spans))
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    parts[cut.of.spans] = cut.parts
    entry_parts = parts.repeat(queries)
    token_parts = np.bincount(tokens, weights=entry_parts).astype(np.float64, copy=False)
    entries = np.full((layout.PLAIN_ENTRY_ROWS + shape.has_windows, len(tokens)), -1, np.int32)
    entries[layout.ENTRY_TOKEN] = tokens
    is_split = token_parts > 1
    num_split = np.count_nonzero(is_split)
    if 0 < num_split < len(is_split):
        span = np.arange(len(spans)).repeat(queries)
        has_split = np.bincount(span, weights=is_split[tokens], minlength=len(spans)) > 0
        is_split[tokens[has_split[span]]] = True
    split = is_split.nonzero()[0]
    merges = np.empty((layout.MERGE_ROWS, len(split)), np.int32)
    if num_split:
        by_token = tokens.argsort(kind="stable")
        if len(split) < len(is_split):
            by_token = by_token[is_split[tokens[by_token]]]
        entries[layout.ENTRY_SLOT][by_token] = _starts(entry_parts[by_token])
        merges[layout.MERGE_TOKEN] = split
        merges[layout.MERGE_PARTIALS] = counts = token_parts[split]
        merges[layout.MERGE_SLOT] = _starts(counts)
    return entries, merges


def _starts(counts: Floats) -> Floats:
    """Where each group begins, if groups lie one after the other."""
    return counts.cumsum() - counts


def _kept_keys(spans: Spans, cut: SpanCut, shape: Shape) -> tuple[Int32s, Int32s | Int64s]:
    """Fewest and most keys of each span for which a plan holds. With windows, plain spans may lose
    a page as long as their last stretch keeps a key.
    """
    least, most = spans.key_tokens.copy(), spans.key_tokens + KEPT_KEYS
    if shape.has_windows:
        needed = np.empty(len(spans), np.int32)
        needed[cut.of.spans] = (cut.parts - 1.0) * cut.stretches + 1.0
        fewer = np.maximum(spans.key_tokens - shape.page_size, needed)
        least = np.where(spans.is_causal, least, fewer)
    if shape.fixed_stretch is not None:  # all spans are large, so they are in order
        most = np.minimum(most, cut.parts * cut.stretches)
    return least, most
