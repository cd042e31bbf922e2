"""A step's spans, cut into units for the span attention kernel. Host side, numpy only, once per
step.

The plan is one int32 array, so that it travels in one copy:

    header  | HEADER_INTS ints, the H_ places below
    shares  | [programs + 1] first large unit, [programs + 1] first small unit
    large   | [pieces, 8] PIECE_ columns; a piece is a unit of every KV head
    small   | [pieces, 8]
    entries | [2, entries] token, slot of its first Partial in this span or -1 where it has only one
    merges  | [3, merges] token, first slot, number of Partials
    pages   | page ids of all spans
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.tuning import Tiles

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Places in the header; `span.py` reads them by number.
H_SMALL, H_LARGE, H_ENTRIES, H_NUM_ENTRIES, H_PAGES, H_MERGES, H_NUM_MERGES, H_MOST_PARTS = range(8)
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

CANDIDATES = (1.5, 1.04, 0.9, 0.75, 0.52, 0.34, 0.26, 0.17)  # unit size over a program's fair share
SMALL_FIXED = 130.0  # time of a unit beside its keys, in keys of a small unit
LARGE_FIXED = 400.0
STRETCH_KEYS = 64  # stretches of small spans are multiples of it
SMALL_TILE_KEYS = 64  # keys x heads in a step of a small unit
LEAST_ROWS = 16  # what a matrix instruction takes
MOST_SMALL_ROWS = 32
UNEVEN = 0.5  # of a small unit, by which programs with large ones end apart


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cutting depends on beside the spans."""

    group: int  # query heads per KV head
    kv_heads: int
    page_size: int
    num_programs: int
    tiles: Tiles
    fixed_stretch: int | None = None  # deterministic: cut at multiples of so many keys

    @property
    def fold(self) -> int:
        """KV heads of a small unit: as many as make a tile of 64 keys x heads from a page."""
        fold = 1
        while (
            fold * 2 * self.page_size <= SMALL_TILE_KEYS
            and self.kv_heads % (fold * 2) == 0
            and fold * 2 * self.group <= MOST_SMALL_ROWS
        ):
            fold *= 2
        return fold

    @property
    def small_q(self) -> int:
        """Rows of the small tile: those of one token in all heads of a unit, as a power of two."""
        rows = LEAST_ROWS
        while rows < min(self.group * self.fold, MOST_SMALL_ROWS):
            rows *= 2
        return rows


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan as the kernel reads it; `num_slots` Partials must fit the buffers."""

    ints: Int32s
    num_pieces: int
    num_slots: int


def _ceil_div(a: Int64s, b: Int64s | int) -> Int64s:
    return -(-a // b)


def _key_weight(row_tiles: Int64s, is_large: Bools, shape: Shape) -> Floats:
    """Time per key of a unit: bound by reads where the rows are few, by arithmetic where many share
    them.
    """
    large = np.maximum(shape.tiles.large_weight, 1.0 / np.maximum(row_tiles, 1))
    return np.where(is_large, large, float(shape.fold))


class _Load:
    """How many units of each kind there are, and their cost."""

    def __init__(self, units: Int64s, cost: Floats, is_large: Bools) -> None:
        large, small = np.where(is_large, units, 0), np.where(is_large, 0, units)
        self.num_large, self.num_small = int(large.sum()), int(small.sum())
        self.large, self.small = float((large * cost).sum()), float((small * cost).sum())

    def seconds_with(self, other: "_Load", longest: float, programs: int) -> float:
        """When the last program ends, in the unit of the costs. Units are whole: some have one
        more.
        """
        large, small = self.large + other.large, self.small + other.small
        num_large = self.num_large + other.num_large
        num_small = self.num_small + other.num_small
        time = (large + small) / programs
        if num_large:
            time = max(time, -(-num_large // programs) * large / num_large)
            return time + (UNEVEN * small / num_small if num_small else 0.0)
        time = max(time, -(-num_small // programs) * small / num_small)
        return max(time, longest)


def _choose_stretches(keys: Int64s, row_tiles: Int64s, is_large: Bools, shape: Shape) -> Int64s:
    """Keys per unit of each span: short enough that all programs end together, no shorter."""
    tiles, programs = shape.tiles, shape.num_programs
    weight = _key_weight(row_tiles, is_large, shape)
    fixed = np.where(is_large, LARGE_FIXED, SMALL_FIXED)
    copies = row_tiles * np.where(is_large, shape.kv_heads, shape.kv_heads // shape.fold)
    share = float((keys * weight * copies).sum()) / programs
    stretches = np.maximum(keys, 1)
    # Spans that no candidate would cut are counted once.
    cost = keys * weight + fixed
    is_whole = keys * weight <= share * CANDIDATES[-1]
    cut = np.flatnonzero(~is_whole)
    if share <= 0 or not len(cut):
        return stretches
    whole = _Load(np.where(is_whole, copies, 0), cost, is_large)
    k, w, f, c, large = keys[cut], weight[cut], fixed[cut], copies[cut], is_large[cut]
    t = np.where(large, tiles.large_k, STRETCH_KEYS)
    best, best_time = k, np.inf
    for candidate in CANDIDATES:
        parts = _ceil_div(k, np.maximum(share * candidate / w, t).astype(np.int64))
        stretch = _ceil_div(_ceil_div(k, parts), t) * t
        parts = _ceil_div(k, stretch)
        # The last stretch may be short; its units still cost their fixed part.
        load = _Load(parts * c, k * w / parts + f, large)
        longest = float((np.minimum(stretch, k) * w + f).max())
        time = load.seconds_with(whole, longest, programs)
        if time < best_time:
            best, best_time = stretch, time
    stretches[cut] = best
    return stretches


def _share_out(shares: Int32s, large: tuple[Floats, int], small: tuple[Floats, int]) -> None:
    """Give each program neighbouring units of both kinds, so that all have the same to do.

    A kind is the cost of one unit of each piece, and how many units every piece has.
    """
    programs = len(shares) // 2 - 1
    shares[:] = 0
    load = np.zeros(programs)
    cost, units = large
    if len(cost):
        ends = np.cumsum(cost) * units
        first, before = _nearest_unit(cost, units, ends, np.linspace(0.0, ends[-1], programs + 1))
        shares[: programs + 1] = first
        load = np.diff(before)
    cost, units = small
    if len(cost):
        ends = np.cumsum(cost) * units
        room = np.maximum((load.sum() + ends[-1]) / programs - load, 0.0)
        where = np.concatenate(([0.0], np.cumsum(room) * (ends[-1] / room.sum())))
        where[-1] = ends[-1]
        shares[programs + 1 :], _ = _nearest_unit(cost, units, ends, where)


def _nearest_unit(cost: Floats, units: int, ends: Floats, where: Floats) -> tuple[Int64s, Floats]:
    """The units nearest to some places on the line of all costs, and what lies before them."""
    piece = np.minimum(np.searchsorted(ends, where, side="right"), len(cost) - 1)
    begin = ends[piece] - cost[piece] * units
    unit = np.clip(np.rint((where - begin) / cost[piece]), 0, units)
    return (piece * units + unit).astype(np.int64), begin + unit * cost[piece]


def _cut(spans: Spans, shape: Shape) -> tuple[Int64s, Int64s, Bools]:
    """Keys per stretch, number of stretches, and whether its units are large, of each span."""
    keys = spans.key_tokens.astype(np.int64)
    rows = np.diff(spans.query_starts).astype(np.int64) * shape.group
    if shape.fixed_stretch is not None:
        stretches = np.full(len(keys), shape.fixed_stretch, np.int64)
        is_large = np.ones(len(keys), np.bool_)
    else:
        is_large = rows > shape.small_q // shape.fold
        tile_q = np.where(is_large, shape.tiles.large_q, shape.small_q)
        stretches = _choose_stretches(keys, _ceil_div(rows, tile_q), is_large, shape)
    return stretches, np.maximum(_ceil_div(keys, stretches), 1), is_large


def schedule(spans: Spans, shape: Shape) -> Schedule:
    """Cut the spans into units, share them out and place every row's Partials."""
    tiles = shape.tiles
    stretches, parts, is_large = _cut(spans, shape)
    keys = spans.key_tokens.astype(np.int64)
    queries = np.diff(spans.query_starts).astype(np.int64)
    rows = queries * shape.group
    tile_q = np.where(is_large, tiles.large_q, shape.small_q)
    row_tiles = _ceil_div(rows, tile_q)

    # Pieces, large ones first, span by span: all row tiles of a stretch are neighbours and share
    # its reads.
    counts = parts * row_tiles
    by_kind = np.argsort(~is_large, kind="stable")
    span = np.repeat(by_kind, counts[by_kind])
    num_large = int(counts[is_large].sum())
    num_pieces = len(span)
    ends = np.cumsum(counts[by_kind])
    within = np.arange(num_pieces) - np.repeat(ends - counts[by_kind], counts[by_kind])
    stretch = within // row_tiles[span]
    row_begin = (within - stretch * row_tiles[span]) * tile_q[span]
    row_end = np.minimum(row_begin + tile_q[span], rows[span])
    limit = np.where(spans.is_causal, keys - queries, NO_LIMIT)[span]
    key_begin = stretch * stretches[span]
    key_end = np.minimum(key_begin + stretches[span], keys[span])
    key_end = np.minimum(key_end, limit + (row_end - 1) // shape.group + 1)
    num_keys = np.maximum(key_end - key_begin, 1)

    # Entries: a token in a span. Its Partials get neighbouring slots, in the order of the spans.
    tokens = spans.query_rows
    entry_parts = np.repeat(parts, queries)
    num_tokens = int(tokens.max()) + 1 if len(tokens) else 0
    token_parts = np.bincount(tokens, weights=entry_parts, minlength=num_tokens).astype(np.int64)
    is_split = token_parts > 1
    is_part = is_split[tokens]
    by_token = np.argsort(tokens, kind="stable")
    slots_wanted = np.where(is_part, entry_parts, 0)[by_token]
    slot_ends = np.cumsum(slots_wanted)
    slots = np.empty(len(tokens), np.int64)
    slots[by_token] = slot_ends - slots_wanted
    merges = np.flatnonzero(is_split)
    merge_parts = token_parts[merges]

    large_at = HEADER_INTS + 2 * shape.num_programs + 2
    small_at = large_at + num_large * PIECE_FIELDS
    entries_at = large_at + num_pieces * PIECE_FIELDS
    merges_at = entries_at + 2 * len(tokens)
    pages_at = merges_at + 3 * len(merges)
    # One page id more than there are: the kernel fetches one ahead.
    ints = np.empty(pages_at + len(spans.page_ids) + 1, np.int32)
    ints[:HEADER_INTS] = 0
    ints[: H_MOST_PARTS + 1] = (
        small_at, large_at, entries_at, len(tokens), pages_at, merges_at, len(merges),
        merge_parts.max() if len(merges) else 0,
    )  # fmt: skip
    large_steps = _ceil_div(num_keys[:num_large], tiles.large_k) * tiles.large_k
    small_steps = _ceil_div(num_keys[num_large:], shape.page_size) * shape.page_size
    weight = _key_weight(row_tiles, is_large, shape)[span]
    _share_out(
        ints[HEADER_INTS:large_at],
        (large_steps * weight[:num_large] + LARGE_FIXED, shape.kv_heads),
        (small_steps * weight[num_large:] + SMALL_FIXED, shape.kv_heads // shape.fold),
    )
    pieces = ints[large_at:entries_at].reshape(num_pieces, PIECE_FIELDS)
    pieces[:, PIECE_ENTRY] = spans.query_starts[span]
    pieces[:, PIECE_ROW_BEGIN] = row_begin
    pieces[:, PIECE_ROW_END] = row_end
    pieces[:, PIECE_PAGE] = spans.page_starts[span]
    pieces[:, PIECE_KEY_BEGIN] = key_begin
    pieces[:, PIECE_KEY_END] = key_end
    pieces[:, PIECE_LIMIT] = limit
    pieces[:, PIECE_STRETCH] = stretch
    entries = ints[entries_at:merges_at].reshape(2, len(tokens))
    entries[0] = tokens
    entries[1] = np.where(is_part, slots, -1)
    merge_rows = ints[merges_at:pages_at].reshape(3, len(merges))
    merge_rows[0] = merges
    merge_rows[1] = np.cumsum(merge_parts) - merge_parts
    merge_rows[2] = merge_parts
    ints[pages_at:-1] = spans.page_ids
    ints[-1] = 0
    return Schedule(ints, num_pieces, int(slot_ends[-1]) if len(slot_ends) else 0)
