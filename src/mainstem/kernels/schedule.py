"""A step's spans, cut into units for the span attention kernel. Host side, numpy only, once per
step.

The plan is one int32 array, so that it travels in one copy:

    header  | HEADER_INTS ints, the H_ places below
    shares  | [programs, 24] SHARE_ columns: a program's part of the orders, and what its first
            | units are, so that it need not look them up one after the other
    orders  | [large units], [small units]: piece * (units of a piece) + (which of them); at the end
            | of the small ones those of the pool, which programs take as they come free
    large   | [pieces, 8] PIECE_ columns; a piece is a unit of every KV head
    small   | [pieces, 8]
    entries | [2, entries] token, slot of its first Partial in this span or -1 where it has only one
    merges  | [3, merges] token, first slot, number of Partials
    pages   | page ids of all spans
"""

from dataclasses import dataclass
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
H_LARGE_ORDER, H_SMALL_ORDER, H_POOL, H_NUM_POOLED = 8, 9, 10, 11
HEADER_INTS = 16

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

# Columns of a program's share.
SHARE_LARGE = 0  # places in the order of large units, [begin, end)
SHARE_SMALL = 2  # the same of small ones
SHARE_LARGE_HEAD = 4  # KV head of its first large unit, and of its first small one
SHARE_SMALL_HEAD = 5
SHARE_SMALL_PAGE = 6  # first page id of its first small unit
SHARE_SMALL_NEXT = 7  # its second small unit
SHARE_LARGE_PIECE = 8  # the piece of its first large unit, and of its first small one
SHARE_SMALL_PIECE = 16
SHARE_FIELDS = 24

KEPT_KEYS = 16  # more in a span than when its units were shared out do not matter


class Launches(NamedTuple):
    """Kernels that a step needs, beside that of small units, which all do."""

    large: bool  # where large units have one of their own
    merge: bool


ALL_LAUNCHES = Launches(large=True, merge=True)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan as the kernel reads it; `num_slots` Partials must fit the buffers."""

    ints: Int32s
    num_pieces: int
    num_slots: int
    launches: Launches
    frame: "Frame"


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Large ones first, span by span: all row tiles of a stretch are neighbours and share its
    reads.
    """

    table: Int32s  # [pieces, PIECE_FIELDS]
    span: Int64s  # [pieces] which it is of
    ends: Int64s  # [pieces] of their stretches, where the span has as many keys
    num_large: int

    def tell_keys(self, table: Int32s, spans: Spans, shape: Shape) -> None:
        """Fill in the columns that change with the keys."""
        queries = np.diff(spans.query_starts)
        limit = np.where(spans.is_causal, spans.key_tokens - queries, NO_LIMIT)[self.span]
        seen_by_last = limit + (table[:, PIECE_ROW_END] - 1) // shape.group + 1
        key_end = np.minimum(self.ends, spans.key_tokens[self.span])
        table[:, PIECE_PAGE] = spans.page_starts[self.span]
        table[:, PIECE_KEY_END] = np.minimum(key_end, seen_by_last)
        table[:, PIECE_LIMIT] = limit


@dataclass(frozen=True, slots=True)
class _Partials:
    """Neighbouring slots for what is left of a token, in the order of the spans."""

    entries: Int32s  # [2, entries] token, first slot in this span or -1
    merges: Int32s  # [3, merges] token, first slot, number of Partials
    num_slots: int


def _pieces(spans: Spans, cut: Cut, shape: Shape) -> _Pieces:
    counts = cut.parts * cut.row_tiles
    by_kind = np.argsort(~cut.is_large, kind="stable")
    span = np.repeat(by_kind, counts[by_kind])
    ends = np.cumsum(counts[by_kind])
    within = np.arange(len(span)) - np.repeat(ends - counts[by_kind], counts[by_kind])
    stretch = within // cut.row_tiles[span]
    row_begin = (within - stretch * cut.row_tiles[span]) * cut.tile_rows[span]
    key_begin = stretch * cut.stretches[span]
    table = np.empty((len(span), PIECE_FIELDS), np.int32)
    table[:, PIECE_ENTRY] = spans.query_starts[span]
    table[:, PIECE_ROW_BEGIN] = row_begin
    table[:, PIECE_ROW_END] = np.minimum(
        row_begin + cut.tile_rows[span], cut.queries[span] * shape.group
    )
    table[:, PIECE_KEY_BEGIN] = key_begin
    table[:, PIECE_STRETCH] = stretch
    num_large = int(counts[cut.is_large].sum())
    key_ends = key_begin + cut.stretches[span]
    if shape.fixed_stretch is None:  # the last stretch has what the span grows by, too
        key_ends[stretch == cut.parts[span] - 1] = NO_LIMIT
    pieces = _Pieces(table, span, key_ends, num_large)
    pieces.tell_keys(table, spans, shape)
    return pieces


def _costs(pieces: _Pieces, shape: Shape) -> tuple[Floats, Floats]:
    """Microseconds of one unit of each large piece, and of each small one."""
    num_keys = pieces.table[:, PIECE_KEY_END] - pieces.table[:, PIECE_KEY_BEGIN]
    large, small = num_keys[: pieces.num_large], num_keys[pieces.num_large :]
    return unit_us(large, True, shape), unit_us(small, False, shape)


def _place_partials(tokens: Int32s, cut: Cut) -> _Partials:
    entry_parts = np.repeat(cut.parts, cut.queries)
    num_tokens = int(tokens.max()) + 1 if len(tokens) else 0
    token_parts = np.bincount(tokens, weights=entry_parts, minlength=num_tokens).astype(np.int64)
    is_split = _split_tokens(tokens, cut.queries, token_parts > 1)
    is_part = is_split[tokens]
    by_token = np.argsort(tokens, kind="stable")
    slots_wanted = np.where(is_part, entry_parts, 0)[by_token]
    slot_ends = np.cumsum(slots_wanted)
    entries = np.empty((2, len(tokens)), np.int32)
    entries[0] = tokens
    entries[1, by_token] = slot_ends - slots_wanted
    entries[1, ~is_part] = -1
    split = np.flatnonzero(is_split)
    counts = token_parts[split]
    merges = np.empty((3, len(split)), np.int32)
    merges[0] = split
    merges[1] = np.cumsum(counts) - counts
    merges[2] = counts
    return _Partials(entries, merges, int(slot_ends[-1]) if len(slot_ends) else 0)


def _split_tokens(tokens: Int32s, queries: Int64s, is_split: Bools) -> Bools:
    """Which tokens leave Partials: those of several, and whoever shares a span with one of them,
    since a unit's rows are all whole or all Partials.
    """
    is_part = is_split[tokens]
    if is_part.all() or not is_part.any():
        return is_split
    span = np.repeat(np.arange(len(queries)), queries)
    has_part = np.bincount(span, weights=is_part, minlength=len(queries)) > 0
    is_split[tokens[has_part[span]]] = True
    return is_split


@dataclass(frozen=True, slots=True)
class _First:
    """First units of the programs that have some of a kind."""

    programs: Int64s
    pieces: Int64s
    columns: slice  # of the shares, for what the piece is


def _share_table(
    shares: Int32s, orders: tuple[Int64s, Int64s], pieces: _Pieces, shape: Shape
) -> tuple[Int32s, tuple[_First, _First]]:
    """Columns of the shares that do not change with the keys; who has no unit of a kind gets zeros
    for it.
    """
    table = np.zeros((shape.num_programs, SHARE_FIELDS), np.int32)
    ends = shares.reshape(2, -1)
    firsts = []
    for order, bounds, units, first_piece, at, head, piece in (
        (orders[0], ends[0], shape.kv_heads, 0, SHARE_LARGE, SHARE_LARGE_HEAD, SHARE_LARGE_PIECE),
        (
            orders[1], ends[1], shape.kv_heads // shape.fold, pieces.num_large,
            SHARE_SMALL, SHARE_SMALL_HEAD, SHARE_SMALL_PIECE,
        ),
    ):  # fmt: skip
        table[:, at], table[:, at + 1] = bounds[:-1], bounds[1:]
        busy = np.flatnonzero(bounds[:-1] < bounds[1:])
        first = order[bounds[busy]]
        table[busy, head] = first % units
        if at == SHARE_SMALL:
            table[busy, head] *= shape.fold
            second = np.minimum(bounds[busy] + 1, bounds[busy + 1] - 1)
            table[busy, SHARE_SMALL_NEXT] = order[second]
        columns = slice(piece, piece + PIECE_FIELDS)
        firsts.append(_First(busy, first_piece + first // units, columns))
    return table, (firsts[0], firsts[1])


@dataclass(frozen=True, slots=True)
class Frame:
    """What of a plan holds for the next steps, too, if all of their spans are those of the step it
    was made for with a few keys more.
    """

    shape: Shape
    structure: tuple[Int32s, Int32s, Bools]  # of the spans: query starts, query rows, is causal
    keys: Int32s
    most_keys: Int64s  # of each span, up to which it need not be cut anew
    pieces: _Pieces
    firsts: tuple[_First, _First]
    head: Int32s  # the plan up to the page ids
    num_slots: int
    launches: Launches

    def holds_for(self, spans: Spans) -> bool:
        if not all(map(np.array_equal, _structure(spans), self.structure)):
            return False
        keys = spans.key_tokens
        return bool(((self.keys <= keys) & (keys <= self.most_keys)).all())

    def plan(self, spans: Spans) -> Schedule:
        """The plan of a step for which the frame holds."""
        shape, head = self.shape, self.head
        large_at, entries_at, pages_at = head[H_LARGE], head[H_ENTRIES], head[H_PAGES]
        # One page id more than there are: the kernel fetches one ahead.
        ints = np.empty(pages_at + len(spans.page_ids) + 1, np.int32)
        ints[:pages_at] = head
        ints[pages_at:-1] = spans.page_ids
        ints[-1] = 0
        pieces = ints[large_at:entries_at].reshape(-1, PIECE_FIELDS)
        self.pieces.tell_keys(pieces, spans, shape)
        table = ints[HEADER_INTS : head[H_LARGE_ORDER]].reshape(shape.num_programs, SHARE_FIELDS)
        for first in self.firsts:
            table[first.programs, first.columns] = pieces[first.pieces]
        first_page = table[:, SHARE_SMALL_PIECE + PIECE_PAGE] + (
            table[:, SHARE_SMALL_PIECE + PIECE_KEY_BEGIN] // shape.page_size
        )
        table[:, SHARE_SMALL_PAGE] = ints[pages_at + first_page]
        return Schedule(ints, len(pieces), self.num_slots, self.launches, self)


def _structure(spans: Spans) -> tuple[Int32s, Int32s, Bools]:
    return spans.query_starts, spans.query_rows, spans.is_causal


def schedule(spans: Spans, shape: Shape, pick: Pick = first_to_end) -> Schedule:
    """Cut the spans into units, share them out and place every row's Partials."""
    return _frame(spans, shape, pick).plan(spans)


def _frame(spans: Spans, shape: Shape, pick: Pick) -> Frame:
    cut = cut_spans(spans, shape, pick)
    if shape.tiles.pooled and shape.can_cut and shape.fixed_stretch is None:
        cut = pool(cut, spans.key_tokens.astype(np.int64), shape)
    pieces = _pieces(spans, cut, shape)
    partials = _place_partials(spans.query_rows, cut)
    shares = np.empty(2 * shape.num_programs + 2, np.int32)
    large_costs, small_costs = _costs(pieces, shape)
    large_order, small_order = share_out(
        shares,
        (large_costs, shape.kv_heads),
        (small_costs, shape.kv_heads // shape.fold),
        Seats(cut.num_large, shape.num_large_programs, shape.tiles.pace),
        cut.pooled,
    )
    num_pooled = len(small_order) - int(shares[-1])
    large_order_at = HEADER_INTS + shape.num_programs * SHARE_FIELDS
    small_order_at = large_order_at + len(large_order)
    large_at = small_order_at + len(small_order)
    small_at = large_at + pieces.num_large * PIECE_FIELDS
    entries_at = large_at + pieces.table.size
    merges_at = entries_at + partials.entries.size
    pages_at = merges_at + partials.merges.size
    head = np.empty(pages_at, np.int32)
    head[:HEADER_INTS] = 0
    head[: H_NUM_POOLED + 1] = (
        small_at, large_at, entries_at, partials.entries.shape[1], pages_at,
        merges_at, partials.merges.shape[1], partials.merges[2].max(initial=0),
        large_order_at, small_order_at, large_at - num_pooled, num_pooled,
    )  # fmt: skip
    table, firsts = _share_table(shares, (large_order, small_order), pieces, shape)
    head[HEADER_INTS:large_order_at] = table.ravel()
    head[large_order_at:small_order_at] = large_order
    head[small_order_at:large_at] = small_order
    head[large_at:entries_at] = pieces.table.ravel()
    head[entries_at:merges_at] = partials.entries.ravel()
    head[merges_at:pages_at] = partials.merges.ravel()
    launches = Launches(large=len(large_order) > 0, merge=partials.num_slots > 0)
    query_starts, query_rows, is_causal = _structure(spans)
    most_keys = spans.key_tokens.astype(np.int64) + KEPT_KEYS
    if shape.fixed_stretch is not None:
        most_keys = np.minimum(most_keys, cut.parts * cut.stretches)
    return Frame(
        shape=shape,
        structure=(query_starts.copy(), query_rows.copy(), is_causal.copy()),
        keys=spans.key_tokens.copy(),
        most_keys=most_keys,
        pieces=pieces,
        firsts=firsts,
        head=head,
        num_slots=partials.num_slots,
        launches=launches,
    )
