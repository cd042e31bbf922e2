"""Assigned units -> the arrays that kernels read (`layout.py`). Host side, numpy only, once a step.

    plan = make_plan(spans, shape)    # cut (`cutting.py`), assign (`assign.py`), write down
    plan.write(ints)                  # one int32 array, which travels in one copy
    if plan.reusable.holds_for(later):
        plan = plan.reusable.plan(later)

Decodes of the next step have one key more, so most of the plan still holds.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mainstem.core.step import Int32s, Spans
from mainstem.kernels.attention import layout
from mainstem.kernels.attention.assign import Shares, assign_units
from mainstem.kernels.attention.cutting import Cut, Int64s, cut_spans, unit_us
from mainstem.kernels.attention.shape import Shape

NO_LIMIT = 1 << 30  # PIECE_FIRST_LIMIT of a plain span
NO_PIECE = np.zeros((1, layout.PIECE_INTS), np.int32)
NO_UNIT = np.zeros(1, np.int64)
NO_PAGE = np.zeros(1, np.int32)  # after the page ids: the kernel fetches one ahead
FIRST_LARGE = slice(layout.SHARE_FIRST_LARGE, layout.SHARE_FIRST_LARGE + layout.PIECE_INTS)
FIRST_SMALL = slice(layout.SHARE_FIRST_SMALL, layout.SHARE_FIRST_SMALL + layout.PIECE_INTS)
KEPT_KEYS = 16  # a plan holds until a span has more than this many new keys
STARTS = [  # of the parts after header and shares, as the header has them
    layout.HEADER_QUEUE, layout.HEADER_LARGE_ORDER, layout.HEADER_SMALL_ORDER,
    layout.HEADER_LARGE_PIECES, layout.HEADER_SMALL_PIECES, layout.HEADER_ENTRIES,
    layout.HEADER_MERGES, layout.HEADER_PAGE_IDS,
]  # fmt: skip


class Launches(NamedTuple):
    """Kernels that a step needs besides that of small units, which every step needs."""

    large: bool  # where large units have a kernel of their own
    merge: bool


ALL_LAUNCHES = Launches(large=True, merge=True)


class KernelPlan(NamedTuple):
    """The plan, as parts that `write` concatenates; the page ids are the step's own array, not a
    copy. `num_ints` and `num_slots` Partials must fit the buffers.
    """

    parts: tuple[Int32s | Int64s, ...]
    num_ints: int
    num_pieces: int
    num_slots: int
    launches: Launches
    reusable: "ReusablePlan"

    @property
    def ints(self) -> Int32s:
        ints = np.empty(self.num_ints, np.int32)
        self.write(ints)
        return ints

    def write(self, ints: Int32s) -> None:
        """Concatenate the parts into `ints`."""
        np.concatenate(self.parts, axis=None, out=ints, casting="same_kind")


class _Pieces(NamedTuple):
    """Large ones first, span by span: all row tiles of a stretch are neighbours and share its
    reads.
    """

    table: Int32s  # [pieces, PIECE_INTS]
    num_large: int
    span: Int64s  # [pieces] index of the span
    is_cut: bool  # else each span is a piece
    pages: Int32s  # [pieces] pages of the span before the piece
    ends: Int32s  # [pieces] end of the stretch; the last one includes keys that the span grows by
    hidden: Int32s  # [pieces] keys at the end of the span that no row of the piece sees

    def tell_keys(self, table: Int32s, spans: Spans) -> None:
        """Fill in the columns that change with the keys."""
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        limits = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)
        page_ids, page = spans.page_ids, spans.page_starts[self.span]
        if spans.page_starts[len(spans) - 1] == len(page_ids):  # the last span has no pages
            page_ids = np.concatenate((page_ids, NO_PAGE))
        key_end = spans.key_tokens[self.span]
        table[:, layout.PIECE_PAGES_AT] = page
        if self.is_cut:
            page += self.pages
            key_end = np.minimum(key_end - self.hidden, self.ends)
        table[:, layout.PIECE_FIRST_PAGE] = page_ids[page.astype(np.int64)]  # numpy's index type
        table[:, layout.PIECE_KEY_END] = key_end
        table[:, layout.PIECE_FIRST_LIMIT] = limits[self.span]


def _pieces(spans: Spans, cut: Cut, shape: Shape) -> _Pieces:
    counts = (cut.parts * cut.row_tiles).astype(np.int64)
    num_large = int(counts[: cut.num_large].sum())
    span, rows, keys, parts = cut.spans, cut.rows, cut.stretches, cut.parts
    stretch = row_tile = np.zeros(1)
    is_cut = bool((counts != 1).any())
    if is_cut:
        place = np.arange(len(counts)).repeat(counts)
        span, rows, keys, parts = span[place], rows[place], keys[place], parts[place]
        within, row_tiles = np.arange(len(place)) - _starts(counts)[place], cut.row_tiles[place]
        stretch = np.floor(within / row_tiles)
        row_tile = within - stretch * row_tiles
    tile_rows = np.full(len(span), float(shape.most_small_rows))
    tile_rows[:num_large] = shape.tiles.large_q
    key_begin, row_begin = stretch * keys, row_tile * tile_rows
    row_end = np.minimum(row_begin + tile_rows, rows)
    starts = spans.query_starts.astype(np.int64)
    table = np.zeros((len(span), layout.PIECE_INTS), np.int32)
    table[:, layout.PIECE_ENTRY] = entries = starts[span]
    table[:, layout.PIECE_ROW_BEGIN] = row_begin
    table[:, layout.PIECE_ROW_END] = row_end
    table[:, layout.PIECE_KEY_BEGIN] = key_begin
    table[:, layout.PIECE_STRETCH] = stretch
    table[:, layout.PIECE_FIRST_TOKEN] = spans.query_rows[entries]
    gaps = _spans_with_gaps(spans.query_rows, starts)
    if len(gaps):
        table[np.isin(span, gaps), layout.PIECE_FIRST_TOKEN] = -1
    pieces = _Pieces(
        table,
        num_large,
        span,
        is_cut,
        pages=(key_begin / shape.page_size).astype(np.int32),
        ends=np.where(stretch + 1.0 < parts, key_begin + keys, NO_LIMIT).astype(np.int32),
        hidden=(np.floor((rows - row_end) / shape.group) * spans.is_causal[span]).astype(np.int32),
    )
    pieces.tell_keys(table, spans)
    return pieces


def _spans_with_gaps(rows: Int32s, starts: Int64s) -> Int64s:
    """Spans whose tokens are not all neighbours."""
    is_gap = np.zeros(len(rows) + 1, np.bool_)  # between a token and the one before
    is_gap[1:-1] = rows[1:] - rows[:-1] != 1
    is_gap[starts] = False
    return starts.searchsorted(is_gap.nonzero()[0], side="right") - 1


class _Partials(NamedTuple):
    """Neighbouring slots for the Partials of a token, in the order of the spans."""

    entries: Int32s  # [PLAIN_ENTRY_ROWS, entries]
    merges: Int32s  # [MERGE_ROWS, merges]
    num_slots: int


def _place_partials(spans: Spans, cut: Cut) -> _Partials:
    """Tokens in several units leave Partials, and so do tokens that share a span with one of them,
    since a unit's rows are all whole or all Partials.
    """
    tokens, parts = spans.query_rows.astype(np.int64), np.empty(len(spans), np.int64)
    parts[cut.spans] = cut.parts
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    span = np.arange(len(spans)).repeat(queries)
    entry_parts = parts[span]
    token_parts = np.bincount(tokens, weights=entry_parts).astype(np.int64)
    entries = np.full((layout.PLAIN_ENTRY_ROWS, len(tokens)), -1, np.int32)
    entries[layout.ENTRY_TOKEN] = spans.query_rows
    is_split = token_parts > 1
    if not np.count_nonzero(is_split):
        return _Partials(entries, np.empty((layout.MERGE_ROWS, 0), np.int32), 0)
    if np.count_nonzero(is_split) < len(is_split):
        has_split = np.bincount(span, weights=is_split[tokens], minlength=len(spans)) > 0
        is_split[tokens[has_split[span]]] = True
    split, by_token = is_split.nonzero()[0], tokens.argsort(kind="stable")
    by_token = by_token[is_split[tokens[by_token]]]
    entries[layout.ENTRY_SLOT][by_token] = _starts(entry_parts[by_token])
    merges = np.empty((layout.MERGE_ROWS, len(split)), np.int32)
    merges[layout.MERGE_TOKEN] = split
    merges[layout.MERGE_PARTIALS] = counts = token_parts[split]
    merges[layout.MERGE_SLOT] = _starts(counts)
    return _Partials(entries, merges, int(counts.sum()))


def _starts(counts: Int64s) -> Int64s:
    """Where each group begins, if groups lie one after the other."""
    return counts.cumsum() - counts


class _Units(NamedTuple):
    """Units that are stored in full, not as a number: first ones of programs, large and small, then
    queued ones.
    """

    pieces: Int64s
    heads: Int64s
    of_large: Int64s  # programs whose first large units these are
    of_small: Int64s

    def told(self, pieces: Int32s, shares: Int32s) -> Int32s:
        """Fill in the first units; returns the queued ones."""
        units = pieces.take(self.pieces, axis=0)
        units[:, layout.PIECE_KV_HEAD] = self.heads
        num_large, num_first = len(self.of_large), len(self.of_large) + len(self.of_small)
        shares[self.of_large, FIRST_LARGE] = units[:num_large]
        shares[self.of_small, FIRST_SMALL] = units[num_large:num_first]
        return units[num_first:]


def _share_table(of: tuple[Shares, Shares], num_large: int, shape: Shape) -> tuple[Int32s, _Units]:
    """Shares of both kinds without their first units, and the units that are stored in full."""
    large, small = of
    table = np.zeros((shape.num_programs, layout.SHARE_INTS), np.int32)
    table[:, layout.SHARE_LARGE_BEGIN] = large.ends[:-1]
    table[:, layout.SHARE_LARGE_END] = large.ends[1:]
    table[:, layout.SHARE_SMALL_BEGIN] = begin = small.ends[:-1]
    table[:, layout.SHARE_SMALL_END] = end = small.ends[1:]
    of_large, of_small = (np.diff(shares.ends).nonzero()[0] for shares in of)
    second = np.minimum(begin + 1, end - 1)[of_small]
    table[of_small, layout.SHARE_SECOND_SMALL] = small.order[second]
    first, units = large.order[large.ends[of_large]], shape.units(False)
    others = np.concatenate((small.order[begin[of_small]], small.queued))
    pieces, other_pieces = first // shape.kv_heads, others // units
    heads = first - pieces * shape.kv_heads, (others - other_pieces * units) * shape.fold
    pieces = np.concatenate((pieces, other_pieces + num_large))
    return table, _Units(pieces, np.concatenate(heads), of_large, of_small)


class ReusablePlan(NamedTuple):
    """The part of a plan that holds for later steps as well, if their spans are the same but for a
    few more keys, or for fewer where a window has moved past a page.
    """

    structure: tuple[bytes, bytes, bytes]  # of the spans: query starts, query rows, is causal
    least_keys: Int32s  # of each span: fewest keys for which the plan holds ...
    most_keys: Int32s | Int64s  # ... and most
    shares: Int32s
    units: _Units
    large: Shares
    small: Shares
    pieces: _Pieces
    partials: _Partials
    has_windows: bool

    @property
    def num_units(self) -> tuple[int, int]:
        """Large and small ones."""
        return len(self.large.order), len(self.small.order) + len(self.small.queued)

    def holds_for(self, spans: Spans) -> bool:
        if _structure(spans) != self.structure:
            return False
        keys = spans.key_tokens
        return bool(((self.least_keys <= keys) & (keys <= self.most_keys)).all())

    def plan(self, spans: Spans) -> KernelPlan:
        """The plan of a step for which this one holds."""
        pieces = self.pieces.table.copy()
        self.pieces.tell_keys(pieces, spans)
        return self.assemble(pieces, spans)

    def assemble(self, pieces: Int32s, spans: Spans) -> KernelPlan:
        """The plan with these pieces. The order of its parts is that of `layout.py`."""
        shares, num_large, partials = self.shares.copy(), self.pieces.num_large, self.partials
        queue, small_order = self.units.told(pieces, shares), self.small.order
        first_keys = spans.first_keys  # a row of the entries that only plans with windows have
        if first_keys is None:
            first_keys = np.zeros(len(spans.query_rows) * self.has_windows, np.int32)
        header = np.zeros(layout.HEADER_INTS, np.int32)
        # A program reads the next unit before it knows whether there is one.
        parts = (
            header, shares, queue if len(queue) else NO_PIECE, self.large.order,
            small_order if len(small_order) else NO_UNIT, pieces[:num_large], pieces[num_large:],
            partials.entries, first_keys, partials.merges, spans.page_ids, NO_PAGE,
        )  # fmt: skip
        ends = list(accumulate(part.size for part in parts))
        header[STARTS] = ends[1:7] + ends[8:10]  # first keys lie after the entries, without a field
        header[layout.HEADER_NUM_ENTRIES] = partials.entries.shape[1]
        header[layout.HEADER_NUM_MERGES] = partials.merges.shape[1]
        header[layout.HEADER_MOST_PARTIALS] = partials.merges[layout.MERGE_PARTIALS].max(initial=0)
        header[layout.HEADER_NUM_QUEUED] = len(queue)
        launches = Launches(large=num_large > 0, merge=partials.num_slots > 0)
        return KernelPlan(parts, ends[-1], len(pieces), partials.num_slots, launches, self)


def _structure(spans: Spans) -> tuple[bytes, bytes, bytes]:
    return spans.query_starts.tobytes(), spans.query_rows.tobytes(), spans.is_causal.tobytes()


def make_plan(spans: Spans, shape: Shape) -> KernelPlan:
    """Cut the spans into units, assign them to programs and place every row's Partials."""
    return plan_cut(spans, cut_spans(spans, shape), shape)


def plan_cut(spans: Spans, cut: Cut, shape: Shape) -> KernelPlan:
    """The plan of spans that are cut."""
    pieces = _pieces(spans, cut, shape)
    num_keys = pieces.table[:, layout.PIECE_KEY_END] - pieces.table[:, layout.PIECE_KEY_BEGIN]
    keys, num_large = np.maximum(num_keys, 1).astype(np.float64), pieces.num_large
    large_us, small_us = (
        unit_us(keys[:num_large], True, shape),
        unit_us(keys[num_large:], False, shape),
    )
    of = assign_units(large_us, small_us, cut.sms, shape)
    shares, units = _share_table(of, num_large, shape)
    reusable = ReusablePlan(
        _structure(spans), *_kept_keys(spans, cut, shape), shares, units, *of, pieces,
        _place_partials(spans, cut), shape.has_windows,
    )  # fmt: skip
    return reusable.assemble(pieces.table, spans)


def _kept_keys(spans: Spans, cut: Cut, shape: Shape) -> tuple[Int32s, Int32s | Int64s]:
    """Fewest and most keys of each span for which a plan holds. With windows, plain spans may lose
    a page as long as their last stretch keeps a key.
    """
    least, most = spans.key_tokens.copy(), spans.key_tokens + KEPT_KEYS
    if shape.has_windows:
        needed = np.empty(len(spans), np.int32)
        needed[cut.spans] = (cut.parts - 1.0) * cut.stretches + 1.0
        fewer = np.maximum(spans.key_tokens - shape.page_size, needed)
        least = np.where(spans.is_causal, least, fewer)
    if shape.fixed_stretch is not None:  # all spans are large, so they are in order
        most = np.minimum(most, cut.parts * cut.stretches)
    return least, most
