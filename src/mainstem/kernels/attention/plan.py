"""A step's spans, cut into units for the span attention kernel. Host side, numpy only, once per
step. `layout.py` describes the plan.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.attention import layout
from mainstem.kernels.attention.assign import SmSlots, assign_units
from mainstem.kernels.attention.cutting import Cut, Shape, cut_spans, unit_us
from mainstem.kernels.attention.work_queue import queue_units

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_LIMIT = 1 << 30  # PIECE_FIRST_LIMIT of a plain span
NO_PIECE = np.zeros((1, layout.PIECE_INTS), np.int32)
NO_UNIT = np.zeros(1, np.int64)
NO_PAGE = np.zeros(1, np.int32)  # after the page ids: the kernel fetches one ahead
NO_FIRST_KEYS = np.empty(0, np.int32)
KEPT_KEYS = 16  # a plan holds until a span has more than this many new keys


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


class _Bounds(NamedTuple):
    """Where pieces begin and end in their spans."""

    pages: Int32s  # [pieces] pages of the span before the piece
    ends: Int32s  # [pieces] end of the stretch; the last one includes keys that the span grows by
    hidden: Int32s  # [pieces] keys at the end of the span that no row of the piece sees


class _Pieces(NamedTuple):
    """Large ones first, span by span: all row tiles of a stretch are neighbours and share its
    reads.
    """

    table: Int32s  # [pieces, PIECE_INTS]
    num_large: int
    span: Int64s | slice  # [pieces] index of the span
    bounds: _Bounds | None  # None: all spans are whole

    def tell_keys(self, table: Int32s, spans: Spans) -> None:
        """Fill in the columns that change with the keys."""
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        limits = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)
        key_end, page = spans.key_tokens[self.span], spans.page_starts[self.span]
        table[:, layout.PIECE_PAGES_AT] = page
        page_ids = spans.page_ids
        if spans.page_starts[len(spans) - 1] == len(page_ids):  # the last span has no pages
            page_ids = np.concatenate((page_ids, NO_PAGE))
        if self.bounds is not None:
            key_end = np.minimum(key_end - self.bounds.hidden, self.bounds.ends)
            page += self.bounds.pages
        table[:, layout.PIECE_FIRST_PAGE] = page_ids[
            page.astype(np.int64)
        ]  # numpy's own index type takes half the time
        table[:, layout.PIECE_KEY_END] = key_end
        table[:, layout.PIECE_FIRST_LIMIT] = limits[self.span]


class _Partials(NamedTuple):
    """Neighbouring slots for the Partials of a token, in the order of the spans."""

    entries: Int32s  # [PLAIN_ENTRY_ROWS, entries]
    merges: Int32s  # [MERGE_ROWS, merges]
    num_slots: int


def _pieces(spans: Spans, cut: Cut, shape: Shape) -> _Pieces:
    num_pieces = cut.parts * cut.row_tiles
    span, rows, num_large = cut.spans, cut.rows, cut.num_large_spans
    is_cut = np.count_nonzero(num_pieces == 1.0) < len(num_pieces)  # else each span is a piece
    if is_cut:
        counts = num_pieces.astype(np.int64)
        place = np.arange(len(counts)).repeat(counts)
        span, rows = place if isinstance(span, slice) else span[place], rows[place]
        num_large = int(counts[:num_large].sum())
    table = np.zeros((len(rows), layout.PIECE_INTS), np.int32)
    starts = spans.query_starts.astype(np.int64)
    entries = starts[span]
    table[:, layout.PIECE_ENTRY] = entries
    table[:, layout.PIECE_ROW_END] = rows
    table[:, layout.PIECE_FIRST_TOKEN] = spans.query_rows[entries]
    has_gaps = _have_gaps(spans.query_rows, starts)
    if has_gaps is not None:
        table[has_gaps[span], layout.PIECE_FIRST_TOKEN] = -1
    bounds = None
    if is_cut:
        bounds = _tell_apart(table, place, counts, spans.is_causal[span], cut, shape)
    pieces = _Pieces(table, num_large, span, bounds)
    pieces.tell_keys(table, spans)
    return pieces


def _tell_apart(
    table: Int32s, place: Int64s, counts: Int64s, is_causal: Bools, cut: Cut, shape: Shape
) -> _Bounds:
    """Fill in which rows and keys of its span each piece has; `place` is the span's index in the
    cut.
    """
    tile_rows = np.full(len(counts), float(shape.most_small_rows))
    tile_rows[: cut.num_large_spans] = shape.tiles.large_q
    first, parts, row_tiles, keys, tile_rows, rows = (
        column[place]
        for column in (
            _starts(counts), cut.parts, cut.row_tiles, cut.stretches, tile_rows, cut.rows
        )
    )  # fmt: skip
    within = np.arange(len(place)) - first
    stretch = np.floor(within / row_tiles)
    key_begin, row_begin = stretch * keys, (within - stretch * row_tiles) * tile_rows
    row_end = np.minimum(row_begin + tile_rows, rows)
    table[:, layout.PIECE_ROW_BEGIN] = row_begin
    table[:, layout.PIECE_ROW_END] = row_end
    table[:, layout.PIECE_KEY_BEGIN] = key_begin
    table[:, layout.PIECE_STRETCH] = stretch
    in_later_tiles = np.floor((rows - row_end) / shape.group)
    return _Bounds(
        pages=(key_begin / shape.page_size).astype(np.int32),
        ends=np.where(stretch + 1.0 < parts, key_begin + keys, NO_LIMIT).astype(np.int32),
        hidden=(in_later_tiles * is_causal).astype(np.int32),
    )


def _have_gaps(rows: Int32s, starts: Int64s) -> Bools | None:
    """Which spans' tokens are not all neighbours; None if all are."""
    is_gap = np.zeros(len(rows) + 1, np.bool_)  # between a token and the one before
    is_gap[1:-1] = rows[1:] - rows[:-1] != 1
    is_gap[starts] = False
    gaps = is_gap.nonzero()[0]
    if not len(gaps):
        return None
    have_gaps = np.zeros(len(starts) - 1, np.bool_)
    have_gaps[starts.searchsorted(gaps, side="right") - 1] = True
    return have_gaps


def _costs(pieces: _Pieces, shape: Shape) -> tuple[Floats, Floats]:
    """Microseconds of one unit of each large piece, and of each small one."""
    num_keys = pieces.table[:, layout.PIECE_KEY_END] - pieces.table[:, layout.PIECE_KEY_BEGIN]
    keys = np.maximum(num_keys, 1).astype(np.float64)
    large, small = keys[: pieces.num_large], keys[pieces.num_large :]
    return unit_us(large, True, shape), unit_us(small, False, shape)


def _place_partials(spans: Spans, cut: Cut) -> _Partials:
    tokens = spans.query_rows.astype(np.int64)
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    entry_parts = None  # one each, as in most steps of many sequences
    if np.count_nonzero(cut.parts > 1.0):
        parts = np.empty(len(queries))
        parts[cut.spans] = cut.parts
        entry_parts = parts.repeat(queries)
    token_parts = np.bincount(tokens, weights=entry_parts)
    is_split = token_parts > 1
    num_split = np.count_nonzero(is_split)
    entries = np.empty((layout.PLAIN_ENTRY_ROWS, len(tokens)), np.int32)
    entries[layout.ENTRY_TOKEN] = spans.query_rows
    if not num_split:
        entries[layout.ENTRY_SLOT] = -1
        return _Partials(entries, np.empty((layout.MERGE_ROWS, 0), np.int32), 0)
    by_token = tokens.argsort(kind="stable")
    if num_split == len(is_split):
        split = np.arange(num_split)
    else:
        entries[layout.ENTRY_SLOT] = -1
        is_split = _split_tokens(tokens, queries, is_split)
        by_token = by_token[is_split[tokens[by_token]]]
        split = is_split.nonzero()[0]
        token_parts = token_parts[split]
    if entry_parts is None:
        entries[layout.ENTRY_SLOT][by_token] = np.arange(len(by_token), dtype=np.int32)
    else:
        entries[layout.ENTRY_SLOT][by_token] = _starts(entry_parts[by_token].astype(np.int64))
    counts = token_parts.astype(np.int64, copy=False)
    merges = np.empty((layout.MERGE_ROWS, len(split)), np.int32)
    merges[layout.MERGE_TOKEN] = split
    merges[layout.MERGE_SLOT] = slots = _starts(counts)
    merges[layout.MERGE_PARTIALS] = counts
    return _Partials(entries, merges, int(slots[-1] + counts[-1]))


def _starts(counts: Int64s) -> Int64s:
    """Where each group begins, if groups lie one after the other."""
    return counts.cumsum() - counts


def _split_tokens(tokens: Int64s, queries: Int32s, is_split: Bools) -> Bools:
    """Which tokens leave Partials: those in several units, and tokens that share a span with one of
    them, since a unit's rows are all whole or all Partials.
    """
    is_part = is_split[tokens]
    span = np.arange(len(queries)).repeat(queries)
    has_part = np.bincount(span, weights=is_part, minlength=len(queries)) > 0
    is_split[tokens[has_part[span]]] = True
    return is_split


class _Units(NamedTuple):
    """Units that are stored in full."""

    first_piece: int  # of their kind
    pieces: Int64s  # counted from first_piece
    heads: Int64s

    def told(self, pieces: Int32s) -> Int32s:
        units = pieces[self.first_piece :].take(self.pieces, axis=0)
        units[:, layout.PIECE_KV_HEAD] = self.heads
        return units


class _First(NamedTuple):
    """First units of the programs that have some of a kind."""

    programs: Int64s
    units: _Units
    columns: slice  # of the shares


def _share_table(
    ends: Int32s, orders: tuple[Int64s, Int64s], pieces: _Pieces, shape: Shape
) -> tuple[Int32s, list[_First]]:
    """Shares without their first units, and the first units. A program without units of a kind has
    zeros for it.
    """
    programs = shape.num_programs
    table, firsts = np.zeros((programs, layout.SHARE_INTS), np.int32), []
    for order, ends_of, units, first_piece, (begin_at, end_at), unit_at in (
        (
            orders[0], ends[: programs + 1], shape.kv_heads, 0,
            (layout.SHARE_LARGE_BEGIN, layout.SHARE_LARGE_END), layout.SHARE_FIRST_LARGE,
        ),
        (
            orders[1], ends[programs + 1 :], shape.kv_heads // shape.fold, pieces.num_large,
            (layout.SHARE_SMALL_BEGIN, layout.SHARE_SMALL_END), layout.SHARE_FIRST_SMALL,
        ),
    ):  # fmt: skip
        busy = (ends_of[:-1] < ends_of[1:]).nonzero()[0]
        if not len(busy):
            continue
        table[:, begin_at], table[:, end_at] = ends_of[:-1], ends_of[1:]
        begin = ends_of[busy]
        if unit_at == layout.SHARE_FIRST_SMALL:
            second = order[np.minimum(begin + 1, ends_of[busy + 1] - 1)]
            table[busy, layout.SHARE_SECOND_SMALL] = second
        columns = slice(unit_at, unit_at + layout.PIECE_INTS)
        firsts.append(_First(busy, _units(order[begin], units, first_piece, shape), columns))
    return table, firsts


def _units(order: Int64s, units: int, first_piece: int, shape: Shape) -> _Units:
    """Units of an order in full; each piece has `units` of them."""
    pieces = order // units
    return _Units(first_piece, pieces, (order - pieces * units) * (shape.kv_heads // units))


class ReusablePlan(NamedTuple):
    """The part of a plan that holds for later steps as well, if their spans are the same but for a
    few more keys, or for fewer where a window has moved past a page.
    """

    structure: tuple[bytes, bytes, bytes]  # of the spans: query starts, query rows, is causal
    least_keys: Int32s  # of each span: fewest keys for which the plan holds ...
    most_keys: Int32s | Int64s  # ... and most
    header: Int32s
    shares: Int32s
    firsts: list[_First]
    queued: _Units
    orders: tuple[Int64s, Int64s]
    pieces: _Pieces
    partials: _Partials
    has_windows: bool

    def holds_for(self, spans: Spans) -> bool:
        if _structure(spans) != self.structure:
            return False
        keys = spans.key_tokens
        return bool(((self.least_keys <= keys) & (keys <= self.most_keys)).all())

    def plan(self, spans: Spans) -> KernelPlan:
        """The plan of a step for which this one holds."""
        pieces, shares = self.pieces.table.copy(), self.shares.copy()
        self.pieces.tell_keys(pieces, spans)
        return self.assemble(pieces, shares, spans)

    def assemble(self, pieces: Int32s, shares: Int32s, spans: Spans) -> KernelPlan:
        """The plan with these pieces; fills in the first units of the shares."""
        _tell_first(shares, self.firsts, pieces)
        # A program reads the next unit before it knows whether there is one.
        queue = self.queued.told(pieces) if len(self.queued.pieces) else NO_PIECE
        large_order, small_order = self.orders
        page_ids, first_keys = spans.page_ids, _first_keys(spans, self.has_windows)
        parts = (
            self.header, shares, queue, large_order,
            small_order if len(small_order) else NO_UNIT,
            pieces, self.partials.entries, first_keys, self.partials.merges, page_ids, NO_PAGE,
        )  # fmt: skip
        num_slots = self.partials.num_slots
        return KernelPlan(
            parts,
            num_ints=int(self.header[layout.HEADER_PAGE_IDS]) + len(page_ids) + len(NO_PAGE),
            num_pieces=len(pieces),
            num_slots=num_slots,
            launches=Launches(large=self.pieces.num_large > 0, merge=num_slots > 0),
            reusable=self,
        )


def _tell_first(shares: Int32s, firsts: list[_First], pieces: Int32s) -> None:
    """Fill in the programs' first units."""
    for programs, units, columns in firsts:
        shares[programs, columns] = units.told(pieces)


def _structure(spans: Spans) -> tuple[bytes, bytes, bytes]:
    return spans.query_starts.tobytes(), spans.query_rows.tobytes(), spans.is_causal.tobytes()


def _first_keys(spans: Spans, has_windows: bool) -> Int32s:
    """The row of entries that only plans with windows have."""
    if not has_windows:
        return NO_FIRST_KEYS
    if spans.first_keys is None:
        return np.zeros(len(spans.query_rows), np.int32)
    return spans.first_keys


def make_plan(spans: Spans, shape: Shape) -> KernelPlan:
    """Cut the spans into units, assign them to programs and place every row's Partials."""
    return plan_cut(spans, cut_spans(spans, shape), shape)


def plan_cut(spans: Spans, cut: Cut, shape: Shape) -> KernelPlan:
    """The plan of spans that are cut."""
    if shape.tiles.queued_share and shape.can_cut and shape.fixed_stretch is None:
        cut = queue_units(cut, spans.key_tokens, shape)
    pieces = _pieces(spans, cut, shape)
    partials = _place_partials(spans, cut)
    ends = np.empty(2 * shape.num_programs + 2, np.int32)
    large_costs, small_costs = _costs(pieces, shape)
    units = shape.kv_heads // shape.fold
    large_order, order = assign_units(
        ends,
        (large_costs, shape.kv_heads),
        (small_costs, units),
        SmSlots(cut.num_large, shape.num_large_programs, shape.tiles.pace, shape.tiles.rules),
        cut.queued_share,
    )
    orders, queued = (large_order, order[: ends[-1]]), order[ends[-1] :]
    shares, firsts = _share_table(ends, orders, pieces, shape)
    least_keys = spans.key_tokens.copy()
    if shape.has_windows:
        least_keys = _least_keys(spans, cut, shape)
    most_keys: Int32s | Int64s = spans.key_tokens + KEPT_KEYS
    if shape.fixed_stretch is not None:
        # All spans are large, so they are in order.
        most_keys = np.minimum(most_keys, cut.parts * cut.stretches)
    header = _header(orders, len(queued), pieces, partials, shape)
    header[layout.HEADER_NUM_CLAIMERS] = _num_claimers(shares, cut)
    reusable = ReusablePlan(
        structure=_structure(spans),
        least_keys=least_keys,
        most_keys=most_keys,
        header=header,
        shares=shares,
        firsts=firsts,
        queued=_units(queued, units, pieces.num_large, shape),
        orders=orders,
        pieces=pieces,
        partials=partials,
        has_windows=shape.has_windows,
    )
    return reusable.assemble(pieces.table, shares, spans)


def _least_keys(spans: Spans, cut: Cut, shape: Shape) -> Int32s:
    """Fewest keys for which a plan holds. Plain spans may lose a page as long as their last stretch
    keeps a key.
    """
    needed = np.empty(len(spans), np.int32)
    needed[cut.spans] = (cut.parts - 1.0) * cut.stretches + 1.0
    least = np.maximum(spans.key_tokens - shape.page_size, needed)
    return np.where(spans.is_causal, spans.key_tokens, least)


def _num_claimers(shares: Int32s, cut: Cut) -> int:
    """Programs that claim units of the queue: all, or those that have small units of their own."""
    if cut.late_programs_claim:
        return len(shares)
    begins, ends = shares[:, layout.SHARE_SMALL_BEGIN], shares[:, layout.SHARE_SMALL_END]
    return int(np.count_nonzero(begins < ends)) or len(shares)


def _header(
    orders: tuple[Int64s, Int64s],
    num_queued: int,
    pieces: _Pieces,
    partials: _Partials,
    shape: Shape,
) -> Int32s:
    """Offsets in the plan. An empty queue, or order of small units, still takes one place."""
    queue_at = layout.HEADER_INTS + layout.SHARE_INTS * shape.num_programs
    large_order_at = queue_at + layout.PIECE_INTS * max(num_queued, 1)
    small_order_at = large_order_at + len(orders[0])
    large_at = small_order_at + max(len(orders[1]), 1)
    small_at = large_at + pieces.num_large * layout.PIECE_INTS
    entries_at = large_at + pieces.table.size
    merges_at = entries_at + partials.entries.size
    if shape.has_windows:
        merges_at += partials.entries.shape[1]
    header = np.zeros(layout.HEADER_INTS, np.int32)
    header[layout.HEADER_SMALL_PIECES] = small_at
    header[layout.HEADER_LARGE_PIECES] = large_at
    header[layout.HEADER_ENTRIES] = entries_at
    header[layout.HEADER_NUM_ENTRIES] = partials.entries.shape[1]
    header[layout.HEADER_PAGE_IDS] = merges_at + partials.merges.size
    header[layout.HEADER_MERGES] = merges_at
    header[layout.HEADER_NUM_MERGES] = partials.merges.shape[1]
    header[layout.HEADER_MOST_PARTIALS] = partials.merges[layout.MERGE_PARTIALS].max(initial=0)
    header[layout.HEADER_LARGE_ORDER] = large_order_at
    header[layout.HEADER_SMALL_ORDER] = small_order_at
    header[layout.HEADER_QUEUE] = queue_at
    header[layout.HEADER_NUM_QUEUED] = num_queued
    return header
