"""A step's spans, cut into units for the span attention kernel. Host side, numpy only, once per
step.

The plan is one int32 array, so that it travels in one copy:

    header  | HEADER_INTS ints, the H_ places below
    shares  | [programs, 32] SHARE_ columns: a program's part of the orders, and what its first
            | units are, so that it need not look them up one after the other
    pool    | [units, 12] PIECE_ columns: small ones that programs take as they come free
    orders  | [large units], [small units]: piece * (units of a piece) + (which of them)
    large   | [pieces, 12] PIECE_ columns; a piece is a unit of every KV head
    small   | [pieces, 12]
    entries | [2, entries] token, slot of its first Partial in this span or -1 where it has only one
    merges  | [3, merges] token, first slot, number of Partials
    pages   | page ids of all spans
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.attention.assign import Seats, share_out
from mainstem.kernels.attention.cutting import Cut, Pick, Shape, cut_spans, first_to_end, unit_us
from mainstem.kernels.attention.work_queue import pool

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Places in the header; kernels (`span.py`, `hopper_*.py`, `parts.py`) read them, and shares, by
# number.
H_SMALL, H_LARGE, H_ENTRIES, H_NUM_ENTRIES, H_PAGES, H_MERGES, H_NUM_MERGES, H_MOST_PARTS = range(8)
H_LARGE_ORDER, H_SMALL_ORDER, H_POOL, H_NUM_POOLED, H_NUM_DRAWERS = 8, 9, 10, 11, 12
HEADER_INTS = 32

# Columns of a piece.
PIECE_ENTRY = 0  # first entry of the span
PIECE_ROW_BEGIN = 1  # packed rows of the span, [begin, end)
PIECE_ROW_END = 2
PIECE_PAGE = 3  # where the span's page ids begin
PIECE_KEY_BEGIN = 4  # keys of the span, [begin, end)
PIECE_KEY_END = 5
PIECE_LIMIT = 6  # query j sees keys up to and including limit + j
PIECE_STRETCH = 7  # which stretch of the span this is
PIECE_TOKEN = 8  # the span's first token, or -1: not all that follow are neighbours
PIECE_PAGE_ID = 9  # of its first key
PIECE_HEAD = 10  # first KV head, where a unit of the piece stands by itself
PIECE_FIELDS = 12
NO_LIMIT = 1 << 30  # PIECE_LIMIT of a plain span

# Columns of a program's share, which is a line of the card's memory.
SHARE_LARGE = 0  # places in the order of large units, [begin, end)
SHARE_SMALL = 2  # the same of small ones
SHARE_SMALL_NEXT = 5  # its second small unit
SHARE_LARGE_UNIT = 8  # its first large unit, and its first small one: PIECE_ columns
SHARE_SMALL_UNIT = 20
SHARE_FIELDS = 32

NO_PIECE = np.zeros((1, PIECE_FIELDS), np.int32)
NO_UNIT = np.zeros(1, np.int64)
NO_PAGE = np.zeros(1, np.int32)  # after the page ids: the kernel fetches one ahead
KEPT_KEYS = 16  # more in a span than when its units were shared out do not matter


class Launches(NamedTuple):
    """Kernels that a step needs, beside that of small units, which all do."""

    large: bool  # where large units have one of their own
    merge: bool


ALL_LAUNCHES = Launches(large=True, merge=True)


class Schedule(NamedTuple):
    """The plan, as parts that the kernel reads one after the other; the page ids among them are the
    step's own. `num_ints` and `num_slots` Partials must fit the buffers.
    """

    parts: tuple[Int32s | Int64s, ...]
    num_ints: int
    num_pieces: int
    num_slots: int
    launches: Launches
    frame: "Frame"

    @property
    def ints(self) -> Int32s:
        ints = np.empty(self.num_ints, np.int32)
        self.write(ints)
        return ints

    def write(self, ints: Int32s) -> None:
        """Put the parts together there."""
        np.concatenate(self.parts, axis=None, out=ints, casting="same_kind")


class _Bounds(NamedTuple):
    """Up to where pieces go."""

    pages: Int32s  # [pieces] of the span, ahead of theirs
    ends: Int32s  # [pieces] of their stretches; the last one has what the span grows by, too
    hidden: Int32s  # [pieces] last keys of the span, which none of their rows sees


class _Pieces(NamedTuple):
    """Large ones first, span by span: all row tiles of a stretch are neighbours and share its
    reads.
    """

    table: Int32s  # [pieces, PIECE_FIELDS]
    num_large: int
    span: Int64s | slice  # [pieces] which it is of
    bounds: _Bounds | None  # None: all spans are whole

    def tell_keys(self, table: Int32s, spans: Spans) -> None:
        """Fill in the columns that change with the keys."""
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        limits = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)
        key_end, page = spans.key_tokens[self.span], spans.page_starts[self.span]
        table[:, PIECE_PAGE] = page
        page_ids = spans.page_ids
        if spans.page_starts[len(spans) - 1] == len(page_ids):  # the last span has no pages
            page_ids = np.concatenate((page_ids, NO_PAGE))
        if self.bounds is not None:
            key_end = np.minimum(key_end - self.bounds.hidden, self.bounds.ends)
            page += self.bounds.pages
        table[:, PIECE_PAGE_ID] = page_ids[page.astype(np.int64)]  # numpy's own: sooner by half
        table[:, PIECE_KEY_END] = key_end
        table[:, PIECE_LIMIT] = limits[self.span]


class _Partials(NamedTuple):
    """Neighbouring slots for what is left of a token, in the order of the spans."""

    entries: Int32s  # [2, entries] token, first slot in this span or -1
    merges: Int32s  # [3, merges] token, first slot, number of Partials
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
    table = np.zeros((len(rows), PIECE_FIELDS), np.int32)
    starts = spans.query_starts.astype(np.int64)
    entries = starts[span]
    table[:, PIECE_ENTRY] = entries
    table[:, PIECE_ROW_END] = rows
    table[:, PIECE_TOKEN] = spans.query_rows[entries]
    has_gaps = _have_gaps(spans.query_rows, starts)
    if has_gaps is not None:
        table[has_gaps[span], PIECE_TOKEN] = -1
    bounds = None
    if is_cut:
        bounds = _tell_apart(table, place, counts, spans.is_causal[span], cut, shape)
    pieces = _Pieces(table, num_large, span, bounds)
    pieces.tell_keys(table, spans)
    return pieces


def _tell_apart(
    table: Int32s, place: Int64s, counts: Int64s, is_causal: Bools, cut: Cut, shape: Shape
) -> _Bounds:
    """Fill in which rows and keys of its span each piece has; `place` is that span's in the cut."""
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
    table[:, PIECE_ROW_BEGIN] = row_begin
    table[:, PIECE_ROW_END] = row_end
    table[:, PIECE_KEY_BEGIN] = key_begin
    table[:, PIECE_STRETCH] = stretch
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
    num_keys = pieces.table[:, PIECE_KEY_END] - pieces.table[:, PIECE_KEY_BEGIN]
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
    entries = np.empty((2, len(tokens)), np.int32)
    entries[0] = spans.query_rows
    if not num_split:
        entries[1] = -1
        return _Partials(entries, np.empty((3, 0), np.int32), 0)
    by_token = tokens.argsort(kind="stable")
    if num_split == len(is_split):
        split = np.arange(num_split)
    else:
        entries[1] = -1
        is_split = _split_tokens(tokens, queries, is_split)
        by_token = by_token[is_split[tokens[by_token]]]
        split = is_split.nonzero()[0]
        token_parts = token_parts[split]
    if entry_parts is None:
        entries[1][by_token] = np.arange(len(by_token), dtype=np.int32)
    else:
        entries[1][by_token] = _starts(entry_parts[by_token].astype(np.int64))
    counts = token_parts.astype(np.int64, copy=False)
    merges = np.empty((3, len(split)), np.int32)
    merges[0], merges[1], merges[2] = split, _starts(counts), counts
    return _Partials(entries, merges, int(merges[1, -1] + merges[2, -1]))


def _starts(counts: Int64s) -> Int64s:
    """Where each begins, if they lie one after the other."""
    return counts.cumsum() - counts


def _split_tokens(tokens: Int64s, queries: Int32s, is_split: Bools) -> Bools:
    """Which tokens leave Partials: those of several, and whoever shares a span with one of them,
    since a unit's rows are all whole or all Partials.
    """
    is_part = is_split[tokens]
    span = np.arange(len(queries)).repeat(queries)
    has_part = np.bincount(span, weights=is_part, minlength=len(queries)) > 0
    is_split[tokens[has_part[span]]] = True
    return is_split


class _Units(NamedTuple):
    """Units that stand by themselves."""

    first_piece: int  # of their kind
    pieces: Int64s  # after it
    heads: Int64s

    def told(self, pieces: Int32s) -> Int32s:
        units = pieces[self.first_piece :].take(self.pieces, axis=0)
        units[:, PIECE_HEAD] = self.heads
        return units


class _First(NamedTuple):
    """First units of the programs that have some of a kind."""

    programs: Int64s
    units: _Units
    columns: slice  # of the shares


def _share_table(
    ends: Int32s, orders: tuple[Int64s, Int64s], pieces: _Pieces, shape: Shape
) -> tuple[Int32s, list[_First]]:
    """Shares, but for first units, and these; who has no unit of a kind gets zeros for it."""
    programs = shape.num_programs
    table, firsts = np.zeros((programs, SHARE_FIELDS), np.int32), []
    for order, ends_of, units, first_piece, at, unit_at in (
        (orders[0], ends[: programs + 1], shape.kv_heads, 0, SHARE_LARGE, SHARE_LARGE_UNIT),
        (
            orders[1], ends[programs + 1 :], shape.kv_heads // shape.fold, pieces.num_large,
            SHARE_SMALL, SHARE_SMALL_UNIT,
        ),
    ):  # fmt: skip
        busy = (ends_of[:-1] < ends_of[1:]).nonzero()[0]
        if not len(busy):
            continue
        table[:, at], table[:, at + 1] = ends_of[:-1], ends_of[1:]
        begin = ends_of[busy]
        if at == SHARE_SMALL:
            table[busy, SHARE_SMALL_NEXT] = order[np.minimum(begin + 1, ends_of[busy + 1] - 1)]
        columns = slice(unit_at, unit_at + PIECE_FIELDS)
        firsts.append(_First(busy, _units(order[begin], units, first_piece, shape), columns))
    return table, firsts


def _units(order: Int64s, units: int, first_piece: int, shape: Shape) -> _Units:
    """Some of an order of pieces with so many units each."""
    pieces = order // units
    return _Units(first_piece, pieces, (order - pieces * units) * (shape.kv_heads // units))


class Frame(NamedTuple):
    """What of a plan holds for the next steps, too, if all of their spans are those of the step it
    was made for with a few keys more.
    """

    structure: tuple[bytes, bytes, bytes]  # of the spans: query starts, query rows, is causal
    keys: Int32s
    most_keys: Int32s | Int64s  # of each span, up to which it need not be cut anew
    header: Int32s
    shares: Int32s
    firsts: list[_First]
    pooled: _Units
    orders: tuple[Int64s, Int64s]
    pieces: _Pieces
    partials: _Partials

    def holds_for(self, spans: Spans) -> bool:
        if _structure(spans) != self.structure:
            return False
        keys = spans.key_tokens
        return bool(((self.keys <= keys) & (keys <= self.most_keys)).all())

    def plan(self, spans: Spans) -> Schedule:
        """The plan of a step for which the frame holds."""
        pieces, shares = self.pieces.table.copy(), self.shares.copy()
        self.pieces.tell_keys(pieces, spans)
        return self.schedule_of(pieces, shares, spans.page_ids)

    def schedule_of(self, pieces: Int32s, shares: Int32s, page_ids: Int32s) -> Schedule:
        """The plan with these pieces; shares are told which of them are the first."""
        _tell_first(shares, self.firsts, pieces)
        # A program looks at what would come next before it knows that there is none.
        pool_table = self.pooled.told(pieces) if len(self.pooled.pieces) else NO_PIECE
        large_order, small_order = self.orders
        parts = (
            self.header, shares, pool_table, large_order,
            small_order if len(small_order) else NO_UNIT,
            pieces, self.partials.entries, self.partials.merges, page_ids, NO_PAGE,
        )  # fmt: skip
        num_slots = self.partials.num_slots
        return Schedule(
            parts,
            num_ints=int(self.header[H_PAGES]) + len(page_ids) + len(NO_PAGE),
            num_pieces=len(pieces),
            num_slots=num_slots,
            launches=Launches(large=self.pieces.num_large > 0, merge=num_slots > 0),
            frame=self,
        )


def _tell_first(shares: Int32s, firsts: list[_First], pieces: Int32s) -> None:
    """Fill in what programs begin with."""
    for programs, units, columns in firsts:
        shares[programs, columns] = units.told(pieces)


def _structure(spans: Spans) -> tuple[bytes, bytes, bytes]:
    return spans.query_starts.tobytes(), spans.query_rows.tobytes(), spans.is_causal.tobytes()


def schedule(spans: Spans, shape: Shape, pick: Pick = first_to_end) -> Schedule:
    """Cut the spans into units, share them out and place every row's Partials."""
    cut = cut_spans(spans, shape, pick)
    if shape.tiles.pooled and shape.can_cut and shape.fixed_stretch is None:
        cut = pool(cut, spans.key_tokens, shape)
    pieces = _pieces(spans, cut, shape)
    partials = _place_partials(spans, cut)
    ends = np.empty(2 * shape.num_programs + 2, np.int32)
    large_costs, small_costs = _costs(pieces, shape)
    units = shape.kv_heads // shape.fold
    large_order, order = share_out(
        ends,
        (large_costs, shape.kv_heads),
        (small_costs, units),
        Seats(cut.num_large, shape.num_large_programs, shape.tiles.pace),
        cut.pooled,
    )
    orders, pooled = (large_order, order[: ends[-1]]), order[ends[-1] :]
    shares, firsts = _share_table(ends, orders, pieces, shape)
    most_keys: Int32s | Int64s = spans.key_tokens + KEPT_KEYS
    if shape.fixed_stretch is not None:
        # All spans are large, so they are in order.
        most_keys = np.minimum(most_keys, cut.parts * cut.stretches)
    header = _header(orders, len(pooled), pieces, partials, shape)
    header[H_NUM_DRAWERS] = _num_drawers(shares, cut)
    frame = Frame(
        structure=_structure(spans),
        keys=spans.key_tokens.copy(),
        most_keys=most_keys,
        header=header,
        shares=shares,
        firsts=firsts,
        pooled=_units(pooled, units, pieces.num_large, shape),
        orders=orders,
        pieces=pieces,
        partials=partials,
    )
    return frame.schedule_of(pieces.table, shares, spans.page_ids)


def _num_drawers(shares: Int32s, cut: Cut) -> int:
    """Programs that draw from the pool: all, or those that have small units of their own."""
    if cut.late_draw:
        return len(shares)
    return int(np.count_nonzero(shares[:, SHARE_SMALL] < shares[:, SHARE_SMALL + 1])) or len(shares)


def _header(
    orders: tuple[Int64s, Int64s],
    num_pooled: int,
    pieces: _Pieces,
    partials: _Partials,
    shape: Shape,
) -> Int32s:
    """Where everything is in the plan; an empty pool, or order of small units, has one place."""
    pool_at = HEADER_INTS + SHARE_FIELDS * shape.num_programs
    large_order_at = pool_at + PIECE_FIELDS * max(num_pooled, 1)
    small_order_at = large_order_at + len(orders[0])
    large_at = small_order_at + max(len(orders[1]), 1)
    small_at = large_at + pieces.num_large * PIECE_FIELDS
    entries_at = large_at + pieces.table.size
    merges_at = entries_at + partials.entries.size
    header = np.zeros(HEADER_INTS, np.int32)
    header[:H_NUM_DRAWERS] = (
        small_at, large_at, entries_at, partials.entries.shape[1],
        merges_at + partials.merges.size, merges_at, partials.merges.shape[1],
        partials.merges[2].max(initial=0), large_order_at, small_order_at, pool_at, num_pooled,
    )  # fmt: skip
    return header
