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
from mainstem.kernels.cutting import Cut, Pick, Shape, cut_spans, first_to_end, unit_us
from mainstem.kernels.dealing import Seats, share_out
from mainstem.kernels.pooling import pool

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

NO_TOKEN = np.full(1, -1, np.int32)
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
    """The plan as the kernel reads it; `num_slots` Partials must fit the buffers."""

    ints: Int32s
    num_pieces: int
    num_slots: int
    launches: Launches
    frame: "Frame"


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
    span: Int64s  # [pieces] which it is of
    bounds: _Bounds | None  # None: all spans are whole

    def tell_keys(self, table: Int32s, spans: Spans, page_ids: Int32s) -> None:
        """Fill in the columns that change with the keys."""
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        limits = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)
        key_end, page = spans.key_tokens[self.span], spans.page_starts[self.span]
        table[:, PIECE_PAGE] = page
        if self.bounds is not None:
            key_end = np.minimum(key_end - self.bounds.hidden, self.bounds.ends)
            page += self.bounds.pages
        table[:, PIECE_PAGE_ID] = page_ids[page]
        table[:, PIECE_KEY_END] = key_end
        table[:, PIECE_LIMIT] = limits[self.span]


class _Partials(NamedTuple):
    """Neighbouring slots for what is left of a token, in the order of the spans."""

    entries: Int32s  # [2, entries] token, first slot in this span or -1
    merges: Int32s  # [3, merges] token, first slot, number of Partials
    num_slots: int


def _pieces(spans: Spans, page_ids: Int32s, cut: Cut, shape: Shape) -> _Pieces:
    counts = (cut.parts * cut.row_tiles).astype(np.int64)
    span = cut.spans.repeat(counts)
    table = np.zeros((len(span), PIECE_FIELDS), np.int32)
    table[:, PIECE_ENTRY] = spans.query_starts[span]
    table[:, PIECE_ROW_END] = cut.rows.repeat(counts)
    table[:, PIECE_TOKEN] = _first_tokens(spans)[span]
    bounds = None
    if len(span) > np.count_nonzero(counts):
        bounds = _tell_apart(table, counts, spans.is_causal[span], cut, shape)
    large = slice(cut.num_large_spans)
    pieces = _Pieces(table, int(cut.parts[large] @ cut.row_tiles[large]), span, bounds)
    pieces.tell_keys(table, spans, page_ids)
    return pieces


def _tell_apart(table: Int32s, counts: Int64s, is_causal: Bools, cut: Cut, shape: Shape) -> _Bounds:
    """Fill in which rows and keys of its span each piece has."""
    tile_rows = np.full(len(counts), float(shape.most_small_rows))
    tile_rows[: cut.num_large_spans] = shape.tiles.large_q
    first, parts, row_tiles, keys, tile_rows, rows = (
        column.repeat(counts)
        for column in (
            _starts(counts), cut.parts, cut.row_tiles, cut.stretches, tile_rows, cut.rows
        )
    )  # fmt: skip
    within = np.arange(len(first)) - first
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


def _first_tokens(spans: Spans) -> Int32s:
    """Of each span; -1 where not all that follow are neighbours. Of one without any it is no
    matter.
    """
    rows, starts = np.concatenate((spans.query_rows, NO_TOKEN)), spans.query_starts
    gaps = np.zeros(len(rows), np.int32)  # up to each token of the spans
    np.cumsum(rows[1:] - rows[:-1] != 1, out=gaps[1:])
    has_none = gaps[starts[1:] - 1] == gaps[starts[:-1]]
    return np.where(has_none, rows[starts[:-1]], -1)


def _costs(pieces: _Pieces, shape: Shape) -> tuple[Floats, Floats]:
    """Microseconds of one unit of each large piece, and of each small one."""
    num_keys = pieces.table[:, PIECE_KEY_END] - pieces.table[:, PIECE_KEY_BEGIN]
    keys = np.maximum(num_keys.astype(np.float64), 1.0)
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
    entries[0] = tokens
    entries[1] = -1
    if not num_split:
        return _Partials(entries, np.empty((3, 0), np.int32), 0)
    by_token = tokens.argsort(kind="stable")
    if num_split < len(is_split):
        is_split = _split_tokens(tokens, queries, is_split)
        by_token = by_token[is_split[tokens[by_token]]]
    slots = np.arange(len(by_token))
    if entry_parts is not None:
        slots = _starts(entry_parts[by_token].astype(np.int64))
    entries[1][by_token] = slots
    split = is_split.nonzero()[0]
    counts = token_parts[split].astype(np.int64)
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

    pieces: Int64s
    heads: Int64s

    def told(self, pieces: Int32s) -> Int32s:
        units = pieces.take(self.pieces, axis=0)
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
    return _Units(first_piece + pieces, (order - pieces * units) * (shape.kv_heads // units))


class Frame(NamedTuple):
    """What of a plan holds for the next steps, too, if all of their spans are those of the step it
    was made for with a few keys more.
    """

    shape: Shape
    structure: tuple[bytes, bytes, bytes]  # of the spans: query starts, query rows, is causal
    keys: Int32s
    most_keys: Int32s | Int64s  # of each span, up to which it need not be cut anew
    pieces: _Pieces
    firsts: list[_First]
    pooled: _Units
    head: Int32s  # the plan that it was made for, up to the page ids
    num_slots: int
    launches: Launches

    def holds_for(self, spans: Spans) -> bool:
        if _structure(spans) != self.structure:
            return False
        keys = spans.key_tokens
        return bool(((self.keys <= keys) & (keys <= self.most_keys)).all())

    def plan(self, spans: Spans) -> Schedule:
        """The plan of a step for which the frame holds."""
        ints, head = np.concatenate((self.head, spans.page_ids, NO_PAGE), dtype=np.int32), self.head
        pieces = ints[head[H_LARGE] : head[H_ENTRIES]].reshape(-1, PIECE_FIELDS)
        self.pieces.tell_keys(pieces, spans, ints[head[H_PAGES] :])
        shares = ints[HEADER_INTS : head[H_POOL]].reshape(-1, SHARE_FIELDS)
        _tell_first(shares, self.firsts, pieces)
        pool_table = self.pooled.told(pieces)
        ints[head[H_POOL] : head[H_POOL] + pool_table.size] = pool_table.ravel()
        return self.schedule_of(ints)

    def schedule_of(self, ints: Int32s) -> Schedule:
        return Schedule(ints, len(self.pieces.table), self.num_slots, self.launches, self)


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
    page_ids = np.concatenate((spans.page_ids, NO_PAGE))
    pieces = _pieces(spans, page_ids, cut, shape)
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
    _tell_first(shares, firsts, pieces.table)
    most_keys: Int32s | Int64s = spans.key_tokens + KEPT_KEYS
    if shape.fixed_stretch is not None:
        # All spans are large, so they are in order.
        most_keys = np.minimum(most_keys, cut.parts * cut.stretches)
    pool_units = _units(pooled, units, pieces.num_large, shape)
    header = np.zeros(HEADER_INTS, np.int32)
    header[H_NUM_DRAWERS] = _num_drawers(shares, cut)
    tables = header, shares, pool_units.told(pieces.table)
    ints = _lay_out(tables, orders, pieces, partials, page_ids)
    frame = Frame(
        shape=shape,
        structure=_structure(spans),
        keys=spans.key_tokens.copy(),
        most_keys=most_keys,
        pieces=pieces,
        firsts=firsts,
        pooled=pool_units,
        head=ints[: ints[H_PAGES]],
        num_slots=partials.num_slots,
        launches=Launches(large=pieces.num_large > 0, merge=partials.num_slots > 0),
    )
    return frame.schedule_of(ints)


def _num_drawers(shares: Int32s, cut: Cut) -> int:
    """Programs that draw from the pool: all, or those that have small units of their own."""
    if cut.late_draw:
        return len(shares)
    return int(np.count_nonzero(shares[:, SHARE_SMALL] < shares[:, SHARE_SMALL + 1])) or len(shares)


def _lay_out(
    tables: tuple[Int32s, Int32s, Int32s],
    orders: tuple[Int64s, Int64s],
    pieces: _Pieces,
    partials: _Partials,
    page_ids: Int32s,
) -> Int32s:
    """The plan; its header, which is the first of the tables, is filled in."""
    header, shares, pool_table = tables
    large_order, small_order = orders
    num_pooled = len(pool_table)
    # A program looks at what would come next before it knows that there is none.
    pool_table = pool_table if num_pooled else NO_PIECE
    small_order = small_order if len(small_order) else NO_UNIT
    pool_at = HEADER_INTS + shares.size
    large_order_at = pool_at + pool_table.size
    small_order_at = large_order_at + len(large_order)
    large_at = small_order_at + len(small_order)
    small_at = large_at + pieces.num_large * PIECE_FIELDS
    entries_at = large_at + pieces.table.size
    merges_at = entries_at + partials.entries.size
    pages_at = merges_at + partials.merges.size
    header[:H_NUM_DRAWERS] = (
        small_at, large_at, entries_at, partials.entries.shape[1], pages_at,
        merges_at, partials.merges.shape[1], partials.merges[2].max(initial=0),
        large_order_at, small_order_at, pool_at, num_pooled,
    )  # fmt: skip
    parts = (
        header, shares, pool_table, large_order, small_order, pieces.table,
        partials.entries, partials.merges, page_ids,
    )  # fmt: skip
    return np.concatenate([part.ravel() for part in parts], dtype=np.int32)
