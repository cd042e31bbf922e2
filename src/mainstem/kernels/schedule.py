"""A step's spans, cut into units for the span attention kernel. Host side, numpy only, once per
step.

The plan is one int32 array, so that it travels in one copy:

    header  | HEADER_INTS ints, the H_ places below
    shares  | [programs, 24] SHARE_ columns: a program's part of the orders, and what its first
            | units are, so that it need not look them up one after the other
    orders  | [large units], [small units]: piece * (units of a piece) + (which of them)
    large   | [pieces, 8] PIECE_ columns; a piece is a unit of every KV head
    small   | [pieces, 8]
    entries | [2, entries] token, slot of its first Partial in this span or -1 where it has only one
    merges  | [3, merges] token, first slot, number of Partials
    pages   | page ids of all spans
"""

from dataclasses import dataclass, field

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
H_LARGE_ORDER, H_SMALL_ORDER = 8, 9
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

CANDIDATES = (1.5, 1.04, 0.9, 0.75, 0.52, 0.34, 0.26, 0.17)  # unit size over a program's fair share
SMALL_FIXED = 90.0  # time of a unit beside its keys, in keys of a small unit
LARGE_FIXED = 500.0
STRETCH_KEYS = 64  # stretches of small spans are multiples of it
SMALL_TILE_KEYS = 64  # keys x heads in a step of a small unit
LEAST_ROWS = 16  # what a matrix instruction takes
MOST_SMALL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cutting depends on beside the spans."""

    group: int  # query heads per KV head
    kv_heads: int
    page_size: int
    num_programs: int
    tiles: Tiles
    fixed_stretch: int | None = None  # deterministic: cut at multiples of so many keys
    can_cut: bool = True  # otherwise no span is cut: the fewest Partials there can be

    # KV heads of a small unit: as many as make a tile of 64 keys x heads from a page.
    fold: int = field(init=False)
    # Rows of the small tile: those of one token in all heads of a unit, as a power of two.
    small_q: int = field(init=False)

    def __post_init__(self) -> None:
        fold = 1
        while (
            fold * 2 * self.page_size <= SMALL_TILE_KEYS
            and self.kv_heads % (fold * 2) == 0
            and fold * 2 * self.group <= MOST_SMALL_ROWS
        ):
            fold *= 2
        small_q = LEAST_ROWS
        while small_q < min(self.group * fold, MOST_SMALL_ROWS):
            small_q *= 2
        object.__setattr__(self, "fold", fold)
        object.__setattr__(self, "small_q", small_q)


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


def _choose_stretches(keys: Int64s, row_tiles: Int64s, is_large: Bools, shape: Shape) -> Int64s:
    """Keys per unit of each span: short enough that all programs end together, no shorter."""
    tiles, programs = shape.tiles, shape.num_programs
    work = keys * _key_weight(row_tiles, is_large, shape)  # of a span's units, one head each
    copies = row_tiles * np.where(is_large, shape.kv_heads, shape.kv_heads // shape.fold)
    share = float(work @ copies) / programs
    stretches = np.maximum(keys, 1)
    is_cut = work > share * CANDIDATES[-1]
    if not is_cut.any():
        return stretches
    # All candidates at once: rows are candidates, columns are the spans that one of them would cut.
    targets = share * np.array(CANDIDATES)[:, None]
    units, cost, longest, chosen = [], [], np.zeros(len(targets)), []
    for kind, fixed, tile in (
        (is_large, LARGE_FIXED, max(tiles.large_k, shape.page_size)),
        (~is_large, SMALL_FIXED, STRETCH_KEYS),
    ):
        cut, whole = np.flatnonzero(kind & is_cut), kind & ~is_cut
        if not len(cut):
            units.append(np.full(len(targets), int(copies[whole].sum())))
            cost.append(float(work[kind] @ copies[kind]) + fixed * units[-1])
            continue
        parts = np.maximum(work[cut] // targets, 1.0).astype(np.int64)
        stretch = _ceil_div(_ceil_div(keys[cut], parts), tile) * tile
        parts = _ceil_div(keys[cut], stretch)
        units.append(parts @ copies[cut] + int(copies[whole].sum()))
        cost.append(float(work[kind] @ copies[kind]) + fixed * units[-1])
        longest = np.maximum(longest, (work[cut] / parts).max(axis=1) + fixed)
        chosen.append((cut, stretch))
    ends = [
        _end_of_last((int(u0), int(u1)), (float(c0), float(c1)), float(long), programs)
        for u0, u1, c0, c1, long in zip(*units, *cost, longest, strict=True)
    ]
    best = int(np.argmin(ends))
    for cut, stretch in chosen:
        stretches[cut] = stretch[best]
    return stretches


def _end_of_last(
    units: tuple[int, int], cost: tuple[float, float], longest: float, programs: int
) -> float:
    """When the last program ends, in the unit of the costs; [large, small] units of mean size.

    Large units go round, small ones fill up what they leave. Small units alone that differ in
    length end up unevenly, by half of the longest.
    """
    large_size = cost[0] / units[0] if units[0] else 0.0
    small_size = cost[1] / units[1] if units[1] else 0.0
    rounds, more = divmod(units[0], programs)
    low, high = rounds * large_size, (rounds + 1) * large_size
    end = high if more else low
    if units[1]:
        mean = (cost[0] + cost[1]) / programs
        best = np.inf
        for load in (low, high):
            level = load + small_size * max(int((mean - load) / small_size), 1)
            while level < best:
                room = (programs - more) * int((level - low) / small_size + 1e-6)
                room += more * max(int((level - high) / small_size + 1e-6), 0)
                if room >= units[1]:
                    best = level
                level += small_size
        end = max(end, best)
    is_uneven = not units[0] and longest > 1.2 * small_size
    return max(end, longest) + (longest / 2 if is_uneven else 0.0)


def _share_out(
    shares: Int32s, large: tuple[Floats, int], small: tuple[Floats, int]
) -> tuple[Int64s, Int64s]:
    """Give each program units of both kinds, so that all have the same to do.

    A kind is the cost of one unit of each piece, and how many units every piece has. Returns the
    order of the units; program p has those from shares[p] to shares[p + 1], small ones likewise.
    """
    programs = len(shares) // 2 - 1
    shares[:] = 0
    load = np.zeros(programs)
    large_order = _deal(*large, shares[: programs + 1], load)
    cost, units = small
    count = len(cost) * units
    is_even = count and cost.max() < 1.2 * cost.mean()
    if not is_even:
        return large_order, _deal(cost, units, shares[programs + 1 :], load)
    # Equal units fill up what the large ones leave open; neighbours share page ids.
    np.cumsum(_fill(load, float(cost.mean()), count), out=shares[programs + 2 :])
    return large_order, np.arange(count)


def _deal(cost: Floats, units: int, shares: Int32s, load: Floats) -> Int64s:
    """Deal units like cards, the longest first, there and back; adds to the programs' load."""
    programs = len(load)
    if not len(cost):
        return np.empty(0, np.int64)
    by_cost = np.argsort(-cost, kind="stable")
    order = (by_cost[:, None] * units + np.arange(units)).ravel()
    turn, place = np.divmod(np.arange(len(order)), programs)
    program = np.where(turn % 2, programs - 1 - place, place)
    # The emptiest come first where a round does not reach all, so spread them over the card.
    program = _spread(programs)[program]
    load += np.bincount(program, weights=np.repeat(cost[by_cost], units), minlength=programs)
    np.cumsum(np.bincount(program, minlength=programs), out=shares[1:])
    return order[np.argsort(program, kind="stable")]


def _spread(programs: int) -> Int64s:
    """Programs in an order that visits every second one first: neighbours share an SM."""
    return np.concatenate((np.arange(0, programs, 2), np.arange(1, programs, 2)))


def _fill(load: Floats, size: float, count: int) -> Floats:
    """How many of `count` equal units each program takes, so that the fullest is least full."""
    level = np.inf
    for _ in range(2):  # programs that are fuller than the mean already take no part in it
        is_open = load < level
        level = float(load[is_open].sum() + size * count) / int(is_open.sum())
    room = np.maximum((level - load) // size, 0.0)
    missing = count - int(room.sum())
    while missing > 0:
        emptiest = np.argsort(load + room * size, kind="stable")[:missing]
        room[emptiest] += 1.0
        missing -= len(emptiest)
    if missing < 0:
        fullest = np.argsort(np.where(room > 0, -load - room * size, 0.0), kind="stable")[:-missing]
        room[fullest] -= 1.0
    return room


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
        stretches = np.maximum(keys, 1)
        if shape.can_cut:
            stretches = _choose_stretches(keys, _ceil_div(rows, tile_q), is_large, shape)
    return stretches, np.maximum(_ceil_div(keys, stretches), 1), is_large


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


def _tell_shares(
    table: Int32s,
    shares: Int32s,
    orders: tuple[Int64s, Int64s],
    pieces: Int32s,
    num_large: int,
    shape: Shape,
) -> None:
    """Fill in the shares but for SHARE_SMALL_PAGE; who has no unit of a kind gets zeros for it."""
    table[:] = 0
    ends = shares.reshape(2, -1)
    for order, bounds, units, first_piece, at, head, piece in (
        (orders[0], ends[0], shape.kv_heads, 0, SHARE_LARGE, SHARE_LARGE_HEAD, SHARE_LARGE_PIECE),
        (
            orders[1], ends[1], shape.kv_heads // shape.fold, num_large,
            SHARE_SMALL, SHARE_SMALL_HEAD, SHARE_SMALL_PIECE,
        ),
    ):  # fmt: skip
        table[:, at], table[:, at + 1] = bounds[:-1], bounds[1:]
        busy = np.flatnonzero(bounds[:-1] < bounds[1:])
        first = order[bounds[busy]]
        table[busy, head] = first % units
        table[busy, piece : piece + PIECE_FIELDS] = pieces[first_piece + first // units]
        if at == SHARE_SMALL:
            table[busy, head] *= shape.fold
            second = np.minimum(bounds[busy] + 1, bounds[busy + 1] - 1)
            table[busy, SHARE_SMALL_NEXT] = order[second]


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
    is_split = _split_tokens(tokens, queries, token_parts > 1)
    is_part = is_split[tokens]
    by_token = np.argsort(tokens, kind="stable")
    slots_wanted = np.where(is_part, entry_parts, 0)[by_token]
    slot_ends = np.cumsum(slots_wanted)
    slots = np.empty(len(tokens), np.int64)
    slots[by_token] = slot_ends - slots_wanted
    merges = np.flatnonzero(is_split)
    merge_parts = token_parts[merges]

    large_steps = _ceil_div(num_keys[:num_large], tiles.large_k) * tiles.large_k
    small_steps = _ceil_div(num_keys[num_large:], shape.page_size) * shape.page_size
    weight = _key_weight(row_tiles, is_large, shape)[span]
    shares = np.empty(2 * shape.num_programs + 2, np.int32)
    large_order, small_order = _share_out(
        shares,
        (large_steps * weight[:num_large] + LARGE_FIXED, shape.kv_heads),
        (small_steps * weight[num_large:] + SMALL_FIXED, shape.kv_heads // shape.fold),
    )
    large_order_at = HEADER_INTS + shape.num_programs * SHARE_FIELDS
    small_order_at = large_order_at + len(large_order)
    large_at = small_order_at + len(small_order)
    small_at = large_at + num_large * PIECE_FIELDS
    entries_at = large_at + num_pieces * PIECE_FIELDS
    merges_at = entries_at + 2 * len(tokens)
    pages_at = merges_at + 3 * len(merges)
    # One page id more than there are: the kernel fetches one ahead.
    ints = np.empty(pages_at + len(spans.page_ids) + 1, np.int32)
    ints[:HEADER_INTS] = 0
    ints[: H_SMALL_ORDER + 1] = (
        small_at, large_at, entries_at, len(tokens), pages_at, merges_at, len(merges),
        merge_parts.max() if len(merges) else 0, large_order_at, small_order_at,
    )  # fmt: skip
    ints[large_order_at:small_order_at] = large_order
    ints[small_order_at:large_at] = small_order
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
    table = ints[HEADER_INTS:large_order_at].reshape(shape.num_programs, SHARE_FIELDS)
    _tell_shares(table, shares, (large_order, small_order), pieces, num_large, shape)
    first_page = table[:, SHARE_SMALL_PIECE + PIECE_PAGE] + (
        table[:, SHARE_SMALL_PIECE + PIECE_KEY_BEGIN] // shape.page_size
    )
    table[:, SHARE_SMALL_PAGE] = ints[pages_at + first_page]
    return Schedule(ints, num_pieces, int(slot_ends[-1]) if len(slot_ends) else 0)
