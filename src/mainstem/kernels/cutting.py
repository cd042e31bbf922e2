"""How spans are cut into units for the span attention kernel, and what a unit costs. Numpy only.

Of some cuts the one is taken that would end first (`pacing.py`): of large spans for one unit on
each of some number of multiprocessors, of small ones for one or two on each program. Spans of a few
tokens may be of either kind; without large ones, a launch is saved.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.pacing import Card, Work, least_us, step_us
from mainstem.kernels.tuning import Tiles

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Multiprocessors that large units are cut for, of all there are; most models have 8 KV heads. The
# last two are for several units on each.
LARGE_ON = np.array([16, 32, 48, 64, 80, 96, 112, 120, 132, 264, 528]) / 132
# Shares of a little less: else a span of whole shares would be cut into one unit less by rounding.
ROUNDING = 0.97
# Large units that end late cost more than such that begin on more multiprocessors than needed.
INDIFFERENT = 1.015
ROUNDS = 4  # of large units on a multiprocessor that are looked at one by one
# Units of small spans on each program, where there are no large ones. A little less than one leaves
# room for spans that cannot be cut.
SMALL_ON = np.array([1.0, 0.9, 0.8, 2.0])
FINER = 4  # so many times shorter are stretches of spans of several tokens that fill up gaps
STRETCH_KEYS = 32  # stretches of small spans are multiples of it, of pages and of a step's keys
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
    max_partials: int | None = None  # cuts with more are left out, where there is another

    # KV heads of a small unit: as many as make a tile of 64 keys x heads from a page.
    fold: int = field(init=False)
    # Rows of the small tile: those of one token in all heads of a unit, as a power of two, unless
    # the tiles have a number of their own.
    small_q: int = field(init=False)

    @property
    def small_rows(self) -> int:
        """Rows of each KV head up to which a span is small in any case: one token's, and more where
        the least tile has room for them.
        """
        return min(max(self.group, LEAST_ROWS // self.fold), self.most_small_rows)

    @property
    def most_small_rows(self) -> int:
        """Rows that a small unit has of each of its KV heads, at most."""
        return self.small_q // self.fold

    @property
    def num_large_programs(self) -> int:
        """Those that large units are shared out to: programs, or multiprocessors where large units
        take them whole.
        """
        tiles = self.tiles
        return self.num_programs // (tiles.programs_per_sm if tiles.is_split else 1)

    def __post_init__(self) -> None:
        if self.tiles.is_split and self.num_programs % self.tiles.programs_per_sm:
            raise ValueError(
                f"num_programs must be a multiple of {self.tiles.programs_per_sm}, "
                f"got {self.num_programs}"
            )
        most_rows = self.tiles.small_q or MOST_SMALL_ROWS
        fold = 1
        while (
            fold * 2 * self.page_size <= SMALL_TILE_KEYS
            and self.kv_heads % (fold * 2) == 0
            and fold * 2 * self.group <= most_rows
        ):
            fold *= 2
        small_q = self.tiles.small_q or LEAST_ROWS
        while small_q < min(self.group * fold, MOST_SMALL_ROWS):
            small_q *= 2
        object.__setattr__(self, "fold", fold)
        object.__setattr__(self, "small_q", small_q)


class Cut(NamedTuple):
    """Per span."""

    queries: Int64s
    stretches: Int64s  # keys of a unit
    parts: Int64s  # stretches
    is_large: Bools
    row_tiles: Int64s
    tile_rows: Int64s
    num_large: int  # programs that get large units
    pooled: float = 0.0  # of small units (`pooling.py`)


class _Way(NamedTuple):
    """One way to cut the spans of a kind."""

    stretches: Floats | Int64s
    work: Work


NOTHING = _Way(np.empty(0), Work(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


class Option(NamedTuple):
    """One way to cut a step."""

    is_large: Bools  # of each span
    large: _Way
    small: _Way
    sms: int  # that get large units

    @property
    def rows(self) -> float:
        """What is left to be merged, at most."""
        return self.large.work.rows + self.small.work.rows

    def stretches(self) -> Int64s:
        """Keys per unit of each span."""
        stretches = np.empty(len(self.is_large), np.int64)
        stretches[self.is_large] = self.large.stretches
        stretches[~self.is_large] = self.small.stretches
        return stretches


Pick = Callable[[list[Option], Shape], Option]


def first_to_end(options: list[Option], shape: Shape) -> Option:
    """The best one of those with few enough Partials or, if there are none, with the fewest."""
    if shape.max_partials is not None:
        most = float(shape.max_partials * shape.group * shape.kv_heads)
        most = max(most, min(option.rows for option in options))
        options = [option for option in options if option.rows <= most]
    card = Card(
        shape.num_programs, shape.num_programs // shape.num_large_programs, shape.tiles.pace
    )
    us: list[float] = []
    best = math.inf
    for option in options:
        large, small = option.large.work, option.small.work
        is_late = least_us(large, small, card) > INDIFFERENT * best  # so it need not be computed
        us.append(math.inf if is_late else step_us(large, small, option.sms, card))
        best = min(best, us[-1])
    return next(o for o, took in zip(options, us, strict=True) if took <= INDIFFERENT * best)


def ceil_div(a: Int64s, b: Int64s | int) -> Int64s:
    return -(-a // b)


def cut_spans(spans: Spans, shape: Shape, pick: Pick = first_to_end) -> Cut:
    """Keys per stretch, number of stretches, and tiles of rows, of each span."""
    keys = np.maximum(spans.key_tokens, 1).astype(np.int64)
    queries = (spans.query_starts[1:] - spans.query_starts[:-1]).astype(np.int64)
    rows = queries * shape.group
    num_large = shape.num_large_programs
    if shape.fixed_stretch is not None:
        is_large = np.ones(len(keys), np.bool_)
        stretches = np.full(len(keys), shape.fixed_stretch, np.int64)
    elif shape.can_cut and len(keys):
        seen = np.maximum(keys - spans.is_causal * (queries >> 1), 1)
        columns = _Columns(keys, seen, queries, rows)
        options = [
            option
            for is_large in _kinds(rows, keys, shape)
            for option in _options(columns, is_large, shape)
        ]
        option = pick(options, shape)
        is_large, num_large, stretches = option.is_large, option.sms, option.stretches()
    else:
        is_large, stretches = rows > shape.small_rows, keys
    tile_rows = np.where(is_large, shape.tiles.large_q, shape.most_small_rows)
    parts, row_tiles = ceil_div(keys, stretches), ceil_div(rows, tile_rows)
    return Cut(queries, stretches, parts, is_large, row_tiles, tile_rows, num_large)


def _kinds(rows: Int64s, keys: Int64s, shape: Shape) -> list[Bools]:
    """Which spans may be large: as many as can be, those that must be, or none, where their rows,
    in several tiles, would cost less than a launch.
    """
    kinds = [rows > shape.small_rows]
    num_large = np.count_nonzero(kinds[0])
    if not shape.tiles.is_split or not num_large:
        return kinds
    is_long = rows > shape.most_small_rows
    num_long = np.count_nonzero(is_long)
    if num_long < num_large:
        kinds.append(is_long)
    if num_long:
        units = ceil_div(rows[is_long], shape.most_small_rows) * (shape.kv_heads // shape.fold)
        us = float(unit_us(keys[is_long], False, shape) @ units) / shape.num_programs
        if us < shape.tiles.pace.launch_us:
            kinds.append(np.zeros(len(rows), np.bool_))
    return kinds


def unit_us(keys: Floats | Int64s, is_large: bool, shape: Shape) -> Floats:
    """How long units of so many keys take, if they need not share the memory."""
    pace, tiles = shape.tiles.pace, shape.tiles
    step = tiles.large_k if is_large else SMALL_TILE_KEYS // shape.fold
    per_key = pace.large_key_us if is_large else pace.small_key_us * shape.fold
    steps = np.maximum(np.ceil(keys / step), 1.0)
    return steps * (step * per_key) + (pace.large_us if is_large else pace.small_us)


def least_stretch(shape: Shape) -> int:
    """Stretches of small spans are multiples of so many keys."""
    return max(SMALL_TILE_KEYS // shape.fold, shape.page_size, STRETCH_KEYS)


class _Columns(NamedTuple):
    """Of each span."""

    keys: Int64s
    seen: Int64s  # keys, by a row in the mean: half of them of a prompt's own
    queries: Int64s
    rows: Int64s


class _Parts(NamedTuple):
    """What spans are cut into: rows are ways to do it, one for each or for all."""

    stretches: Floats | Int64s  # [ways, spans] keys of a unit
    sizes: Floats  # [ways, spans] microseconds of a unit
    units: Floats | Int64s  # [ways, spans]
    queries: Floats | np.int64  # [ways] x their parts


class _Spans(NamedTuple):
    """Those of one kind."""

    keys: Int64s
    seen: Int64s
    queries: Int64s
    copies: Int64s  # units of a stretch: tiles of rows x KV heads
    is_large: bool

    def cut(
        self, shares: Floats, shape: Shape, places: Floats | None, finer: Int64s | int = 1
    ) -> list[_Way]:
        """Some ways: so many units, if all could be of one length, or fewer, and of some spans
        `finer` times as many. `places`, of each way, run one each at a time, if no other kind is in
        the way.
        """
        if not len(self.keys):
            return [NOTHING] * len(shares)
        stretches, sizes, units, queries = self._parts(shares, shape, finer)
        numbers = np.empty((5, len(shares)))
        numbers[0] = units.sum(axis=1)
        numbers[1] = (sizes * units).sum(axis=1)
        numbers[2] = numbers[3] = sizes.max(axis=1)
        if places is not None:
            numbers[3] = _last_end(sizes, units, numbers[:3], places)
        numbers[4] = queries * float(shape.group * shape.kv_heads)
        keys = float(self.seen.sum()) * shape.kv_heads
        last_way = len(stretches) - 1
        return [
            _Way(stretches[min(i, last_way)], Work(count, us, longest, last, keys, rows))
            for i, (count, us, longest, last, rows) in enumerate(numbers.T.tolist())
        ]

    def _parts(self, shares: Floats, shape: Shape, finer: Int64s | int) -> _Parts:
        target = np.maximum(ROUNDING * float(self.seen @ self.copies) / shares, 1.0)
        wished = self.seen * finer
        if wished.max() < 2.0 * target.min():  # nobody is long enough to be cut: one way for all
            sizes = unit_us(self.seen, self.is_large, shape)
            return _Parts(self.keys[None], sizes[None], self.copies[None], self.queries.sum())
        tile = max(shape.tiles.large_k, shape.page_size) if self.is_large else least_stretch(shape)
        parts = np.maximum(np.floor(wished / target[:, None]), 1.0)
        stretches = np.ceil(self.keys / (parts * tile)) * tile
        parts = np.ceil(self.keys / stretches)
        sizes = unit_us(self.seen / parts, self.is_large, shape)
        return _Parts(stretches, sizes, parts * self.copies, parts @ self.queries)


def _last_end(sizes: Floats, units: Floats | Int64s, numbers: Floats, places: Floats) -> Floats:
    """When the last unit ends, for each number of places, if the longest always goes to the
    emptiest; rows are ways to cut, one for each of them or for all. Numbers: how many units, how
    long they take together, and the longest.
    """
    count, us, longest = numbers
    last: Floats
    if (sizes == sizes[:, :1]).all():
        last = np.ceil(count / places) * longest
        return last
    last = us / places
    order = (-sizes).argsort(axis=1)
    rows = np.arange(len(sizes))[:, None]
    sizes, ends = sizes[rows, order], units[rows, order].cumsum(axis=1)
    rounds = np.arange(ROUNDS)
    for i, seats in enumerate(places.tolist()):
        # Somebody gets a unit of each round, and those before are no shorter than the last one.
        row = min(i, len(sizes) - 1)
        first = ends[row].searchsorted(rounds * seats, side="right")
        first = first[first < sizes.shape[1]]
        last[i] = (sizes[row, first] * (rounds[: len(first)] + 1)).max(initial=last[i])
    return last


@cache
def _large_shares(sms: int) -> Floats:
    return np.unique(np.maximum(np.rint(sms * LARGE_ON), 1.0))[::-1]


def _of_kind(columns: _Columns, wanted: Bools, is_large: bool, shape: Shape) -> _Spans:
    tile_rows = shape.tiles.large_q if is_large else shape.most_small_rows
    heads = shape.kv_heads if is_large else shape.kv_heads // shape.fold
    keys, seen, queries, rows = (column[wanted] for column in columns)
    return _Spans(keys, seen, queries, ceil_div(rows, tile_rows) * heads, is_large)


def _options(columns: _Columns, is_large: Bools, shape: Shape) -> list[Option]:
    """Ways to cut large spans, with those to cut small ones that may suit them. Among equals the
    first is best: that with large units on most multiprocessors.
    """
    small = _of_kind(columns, ~is_large, False, shape)
    programs, sms = shape.num_programs, shape.num_large_programs
    if len(small.keys) == len(is_large):
        return [Option(is_large, NOTHING, way, sms) for way in _small_ways(small, shape)]
    large = _of_kind(columns, is_large, True, shape)
    each = small.cut(np.array([programs], np.float64), shape, None)[0]
    shares = _large_shares(sms)
    found: dict[tuple[float, int], Option] = {}
    ways = large.cut(shares, shape, np.minimum(shares, sms))
    for way, share in zip(ways, shares.tolist(), strict=True):
        used = int(min(share, sms, way.work.units))
        found.setdefault((way.work.units, used), Option(is_large, way, each, used))
    options = list(found.values())
    if each.work.units > small.copies.sum():  # cut, and could be cut less: for who begins at once
        early = programs - programs // sms * np.array([option.sms for option in options])
        fewer = small.cut(np.maximum(early, 1.0), shape, None)
        options += [o._replace(small=way) for o, way in zip(options, fewer, strict=True)]
    return options


def _small_ways(small: _Spans, shape: Shape) -> list[_Way]:
    """Ways to cut small spans, where there are no others; of equal ones the first."""
    programs = np.full(len(SMALL_ON), float(shape.num_programs))
    ways = small.cut(SMALL_ON * programs, shape, programs)
    is_shared = small.queries > 1
    if is_shared.any() and not is_shared.all():
        finer = np.where(is_shared, FINER, 1)
        ways += small.cut(programs[:1], shape, programs[:1], finer)
    found: dict[Work, _Way] = {}
    for way in ways:
        found.setdefault(way.work, way)
    return list(found.values())
