"""A step's spans, cut into units for the span attention kernel. Host side, numpy only, once per
step.

The plan is one int32 array, so that it travels in one copy:

    header  | HEADER_INTS ints, the H_ places below
    shares  | [programs, 32] SHARE_ columns: a program's part of the orders, and what its first
            | units are, so that it need not look them up one after the other
    pool    | [units, 12] UNIT_ columns: small ones that programs take as they come free
    orders  | [large units], [small units]: piece * (units of a piece) + (which of them)
    large   | [pieces, 8] PIECE_ columns; a piece is a unit of every KV head
    small   | [pieces, 8]
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
PIECE_FIELDS = 8
NO_LIMIT = 1 << 30  # PIECE_LIMIT of a plain span

# Columns of a unit that need not be looked up; first those of its piece.
UNIT_HEAD = 8  # first KV head
UNIT_PAGE = 9  # first page id; of small ones only
UNIT_TOKEN = 10  # first token of its span, or -1: not all are neighbours
UNIT_FIELDS = 12

# Columns of a program's share, which is a line of the card's memory.
SHARE_LARGE = 0  # places in the order of large units, [begin, end)
SHARE_SMALL = 2  # the same of small ones
SHARE_SMALL_NEXT = 5  # its second small unit
SHARE_LARGE_UNIT = 8  # its first large unit, and its first small one
SHARE_SMALL_UNIT = 20
SHARE_FIELDS = 32

NO_TOKEN = np.full(1, -1, np.int32)
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

    def tell_keys(self, table: Int32s, spans: Spans) -> None:
        """Fill in the columns that change with the keys."""
        queries = spans.query_starts[1:] - spans.query_starts[:-1]
        limits = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)
        key_end = spans.key_tokens[self.span]
        if self.bounds is not None:
            key_end = np.minimum(key_end - self.bounds.hidden, self.bounds.ends)
        table[:, PIECE_PAGE] = spans.page_starts[self.span]
        table[:, PIECE_KEY_END] = key_end
        table[:, PIECE_LIMIT] = limits[self.span]


class _Partials(NamedTuple):
    """Neighbouring slots for what is left of a token, in the order of the spans."""

    entries: Int32s  # [2, entries] token, first slot in this span or -1
    merges: Int32s  # [3, merges] token, first slot, number of Partials
    num_slots: int


def _pieces(spans: Spans, cut: Cut, shape: Shape) -> _Pieces:
    counts = (cut.parts * cut.row_tiles).astype(np.int64)
    span = cut.spans.repeat(counts)
    table = np.zeros((len(span), PIECE_FIELDS), np.int32)
    table[:, PIECE_ENTRY] = spans.query_starts[span]
    table[:, PIECE_ROW_END] = cut.rows.repeat(counts)
    bounds = None
    if len(span) > np.count_nonzero(counts):
        bounds = _tell_apart(table, counts, spans.is_causal[span], cut, shape)
    large = slice(cut.num_large_spans)
    pieces = _Pieces(table, int(cut.parts[large] @ cut.row_tiles[large]), span, bounds)
    pieces.tell_keys(table, spans)
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
        ends=np.where(stretch + 1.0 < parts, key_begin + keys, NO_LIMIT).astype(np.int32),
        hidden=(in_later_tiles * is_causal).astype(np.int32),
    )


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


class _First(NamedTuple):
    """First units of the programs that have some of a kind."""

    programs: Int64s
    pieces: Int64s
    columns: slice  # of the shares, for what the piece is


class _Tables(NamedTuple):
    """What of shares and pool does not change with the keys."""

    shares: Int32s  # [programs, SHARE_FIELDS]; who has no unit of a kind has zeros for it
    pool: Int32s  # [units, UNIT_FIELDS]
    firsts: list[_First]
    pooled: Int64s  # [units] pieces of the pool

    @property
    def num_with_small(self) -> int:
        """Programs that have small units."""
        return int(np.count_nonzero(self.shares[:, SHARE_SMALL] < self.shares[:, SHARE_SMALL + 1]))


def _tables(
    spans: Spans, ends: Int32s, orders: tuple[Int64s, Int64s], pieces: _Pieces, shape: Shape
) -> _Tables:
    """Programs have units of the orders as `share_out` tells; those after the last are the pool."""
    programs, heads = shape.num_programs, shape.kv_heads // shape.fold
    table, firsts = np.zeros((programs, SHARE_FIELDS), np.int32), []
    tokens = _first_tokens(spans)
    for order, ends_of, units, fold, first_piece, at, unit_at in (
        (orders[0], ends[: programs + 1], shape.kv_heads, 1, 0, SHARE_LARGE, SHARE_LARGE_UNIT),
        (
            orders[1], ends[programs + 1 :], heads, shape.fold, pieces.num_large,
            SHARE_SMALL, SHARE_SMALL_UNIT,
        ),
    ):  # fmt: skip
        busy = (ends_of[:-1] < ends_of[1:]).nonzero()[0]
        if not len(busy):
            continue
        table[:, at], table[:, at + 1] = ends_of[:-1], ends_of[1:]
        begin = ends_of[busy]
        first = order[begin]
        piece = first // units
        table[busy, unit_at + UNIT_HEAD] = (first - piece * units) * fold
        piece += first_piece
        table[busy, unit_at + UNIT_TOKEN] = tokens[pieces.span[piece]]
        if at == SHARE_SMALL:
            table[busy, SHARE_SMALL_NEXT] = order[np.minimum(begin + 1, ends_of[busy + 1] - 1)]
        firsts.append(_First(busy, piece, slice(unit_at, unit_at + PIECE_FIELDS)))
    pooled = orders[1][ends[-1] :]
    piece = pooled // heads
    pool_table = np.zeros((len(pooled), UNIT_FIELDS), np.int32)
    pool_table[:, UNIT_HEAD] = (pooled - piece * heads) * shape.fold
    piece += pieces.num_large
    pool_table[:, UNIT_TOKEN] = tokens[pieces.span[piece]]
    return _Tables(table, pool_table, firsts, piece)


def _first_tokens(spans: Spans) -> Int32s:
    """Of each span; -1 where not all that follow are neighbours. Of one without any it is no
    matter.
    """
    rows, starts = np.concatenate((spans.query_rows, NO_TOKEN)), spans.query_starts
    gaps = np.zeros(len(rows), np.int32)  # up to each token of the spans
    np.cumsum(rows[1:] - rows[:-1] != 1, out=gaps[1:])
    has_none = gaps[starts[1:] - 1] == gaps[starts[:-1]]
    return np.where(has_none, rows[starts[:-1]], -1)


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
    pooled: Int64s
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
        ints = np.concatenate((self.head, spans.page_ids, NO_PAGE), dtype=np.int32)
        self.pieces.tell_keys(self._piece_table(ints), spans)
        return self.with_first_units(ints)

    def _piece_table(self, ints: Int32s) -> Int32s:
        return ints[self.head[H_LARGE] : self.head[H_ENTRIES]].reshape(-1, PIECE_FIELDS)

    def with_first_units(self, ints: Int32s) -> Schedule:
        """The plan, after what its programs begin with has been filled in."""
        shape, pieces = self.shape, self._piece_table(ints)
        shares = ints[HEADER_INTS : self.head[H_POOL]].reshape(-1, SHARE_FIELDS)
        for first in self.firsts:
            shares[first.programs, first.columns] = pieces.take(first.pieces, axis=0)
        pool_table = ints[self.head[H_POOL] : self.head[H_LARGE_ORDER]].reshape(-1, UNIT_FIELDS)
        pool_table[:, :PIECE_FIELDS] = pieces.take(self.pooled, axis=0)
        page_ids = ints[self.head[H_PAGES] :]
        for units in (shares[:, SHARE_SMALL_UNIT:], pool_table):
            page = units[:, PIECE_PAGE] + units[:, PIECE_KEY_BEGIN] // shape.page_size
            units[:, UNIT_PAGE] = page_ids[page]
        return Schedule(ints, len(pieces), self.num_slots, self.launches, self)


def _structure(spans: Spans) -> tuple[bytes, bytes, bytes]:
    return spans.query_starts.tobytes(), spans.query_rows.tobytes(), spans.is_causal.tobytes()


def schedule(spans: Spans, shape: Shape, pick: Pick = first_to_end) -> Schedule:
    """Cut the spans into units, share them out and place every row's Partials."""
    cut = cut_spans(spans, shape, pick)
    if shape.tiles.pooled and shape.can_cut and shape.fixed_stretch is None:
        cut = pool(cut, spans.key_tokens, shape)
    pieces = _pieces(spans, cut, shape)
    partials = _place_partials(spans, cut)
    shares = np.empty(2 * shape.num_programs + 2, np.int32)
    large_costs, small_costs = _costs(pieces, shape)
    orders = share_out(
        shares,
        (large_costs, shape.kv_heads),
        (small_costs, shape.kv_heads // shape.fold),
        Seats(cut.num_large, shape.num_large_programs, shape.tiles.pace),
        cut.pooled,
    )
    tables = _tables(spans, shares, orders, pieces, shape)
    most_keys: Int32s | Int64s = spans.key_tokens + KEPT_KEYS
    if shape.fixed_stretch is not None:
        # All spans are large, so they are in order.
        most_keys = np.minimum(most_keys, cut.parts * cut.stretches)
    given = orders[0], orders[1][: shares[-1]]
    num_drawers = (0 if cut.late_draw else tables.num_with_small) or shape.num_programs
    ints = _lay_out(tables, num_drawers, given, pieces, partials, spans.page_ids)
    frame = Frame(
        shape=shape,
        structure=_structure(spans),
        keys=spans.key_tokens.copy(),
        most_keys=most_keys,
        pieces=pieces,
        firsts=tables.firsts,
        pooled=tables.pooled,
        head=ints[: ints[H_PAGES]],
        num_slots=partials.num_slots,
        launches=Launches(large=pieces.num_large > 0, merge=partials.num_slots > 0),
    )
    return frame.with_first_units(ints)


def _lay_out(
    tables: _Tables,
    num_drawers: int,
    orders: tuple[Int64s, Int64s],
    pieces: _Pieces,
    partials: _Partials,
    page_ids: Int32s,
) -> Int32s:
    """The plan, but for what programs begin with."""
    pool_at = HEADER_INTS + tables.shares.size
    large_order_at = pool_at + tables.pool.size
    small_order_at = large_order_at + len(orders[0])
    large_at = small_order_at + len(orders[1])
    small_at = large_at + pieces.num_large * PIECE_FIELDS
    entries_at = large_at + pieces.table.size
    merges_at = entries_at + partials.entries.size
    pages_at = merges_at + partials.merges.size
    header = np.zeros(HEADER_INTS, np.int32)
    header[: H_NUM_DRAWERS + 1] = (
        small_at, large_at, entries_at, partials.entries.shape[1], pages_at,
        merges_at, partials.merges.shape[1], partials.merges[2].max(initial=0),
        large_order_at, small_order_at, pool_at, len(tables.pool), num_drawers,
    )  # fmt: skip
    parts = (
        header,
        tables.shares,
        tables.pool,
        *orders,
        pieces.table,
        partials.entries,
        partials.merges,
    )
    return np.concatenate([*(p.ravel() for p in parts), page_ids, NO_PAGE], dtype=np.int32)
