"""How spans are cut into units for the span attention kernel, and what a unit costs. Numpy only.

Of some cuts the one is taken that would end first (`pacing.py`): of large spans for one unit on
each of some number of multiprocessors, of small ones for one or two on each program. Spans of a few
tokens may be of either kind; without large ones, a launch is saved.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.attention.pacing import Card, Work, least_us, step_us
from mainstem.kernels.attention.tuning import Tiles

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Multiprocessors that large units are cut for, of all there are; most models have 8 KV heads. The
# last two are for several units on each.
LARGE_ON = np.array([16, 32, 48, 64, 80, 96, 112, 120, 132, 264, 528]) / 132
# Shares of a little less: else a span of whole shares would be cut into one unit less by rounding.
ROUNDING = 0.97
# Where equal parts of large spans would end so much later than equal shares of all, they are also
# cut into stretches of one length, and a rest each, for some numbers of multiprocessors; stretches
# are so much longer than a share.
UNEVEN_PARTS = 1.08
RESTS_ON = np.array([64, 80, 96, 112, 132]) / 132
OVER_SHARE = np.array([1.02, 1.06, 1.12, 1.2, 1.3])
# Large units that end late cost more than such that begin on more multiprocessors than needed.
INDIFFERENT = 1.015
ROUNDS = np.arange(4.0)  # of large units on a multiprocessor that are looked at one by one
# Units of small spans on each program, where there are no large ones. A little less than one leaves
# room for spans that cannot be cut.
SMALL_ON = (1.0, 0.9, 0.8, 2.0)
FINER = 4.0  # so many times shorter are stretches of spans of several tokens that fill up gaps
STRETCH_KEYS = 32  # stretches of small spans are multiples of it, of pages and of a step's keys
LEAST_ROWS = LEAST_KEYS = 16  # what a matrix instruction takes
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
    has_windows: bool = False  # plans say from which key on each query sees

    # KV heads of a small unit: as many as make a tile of `small_k` keys x heads from a page, or
    # from the fewest keys that a matrix instruction takes.
    fold: int = field(init=False)
    # Parts of a KV head's keys in a small tile that are attended to apart, where the tile has more
    # rows than one token needs (Hopper).
    splits: int = field(init=False)
    # Rows of the small tile: those of one token in all heads of a unit, as a power of two, unless
    # the tiles have a number of their own.
    small_q: int = field(init=False)
    # Rows that a small unit has of each of its KV heads, at most.
    most_small_rows: int = field(init=False)
    # Rows of each KV head up to which a span is small in any case: one token's, and more where the
    # least tile has room for them.
    small_rows: int = field(init=False)
    # Those that large units are shared out to: programs, or multiprocessors where large units take
    # them whole.
    num_large_programs: int = field(init=False)

    def __post_init__(self) -> None:
        if self.tiles.is_split and self.num_programs % self.tiles.programs_per_sm:
            raise ValueError(
                f"num_programs must be a multiple of {self.tiles.programs_per_sm}, "
                f"got {self.num_programs}"
            )
        most_rows = self.tiles.small_q or MOST_SMALL_ROWS
        least_keys = LEAST_KEYS if self.tiles.divides_pages else self.page_size
        fold = 1
        while (
            fold * 2 * least_keys <= self.tiles.small_k
            and self.kv_heads % (fold * 2) == 0
            and fold * 2 * self.group <= most_rows
        ):
            fold *= 2
        small_q = self.tiles.small_q or LEAST_ROWS
        while small_q < min(self.group * fold, MOST_SMALL_ROWS):
            small_q *= 2
        splits = 1
        while self.tiles.is_split and small_q // (2 * fold * splits) >= max(self.group, LEAST_ROWS):
            splits *= 2
        most_small_rows = small_q // (fold * splits)
        per_sm = self.tiles.programs_per_sm if self.tiles.is_split else 1
        for name, value in (
            ("fold", fold),
            ("splits", splits),
            ("small_q", small_q),
            ("most_small_rows", most_small_rows),
            ("small_rows", min(max(self.group, LEAST_ROWS // fold), most_small_rows)),
            ("num_large_programs", self.num_programs // per_sm),
        ):
            object.__setattr__(self, name, value)


class Cut(NamedTuple):
    """Per span, large ones first. Floats, since numpy takes longer where they meet integers."""

    spans: Int64s | slice  # which they are
    num_large_spans: int
    rows: Floats
    stretches: Floats  # keys of a unit
    parts: Floats  # stretches
    row_tiles: Floats
    num_large: int  # programs that get large units
    queued_share: float = 0.0  # of small units (`work_queue.py`)
    late_programs_claim: bool = True  # units of the queue: those without a share


class _Way(NamedTuple):
    """One way to cut the spans of a kind."""

    stretches: Floats
    work: Work


NOTHING = _Way(np.empty(0), Work(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


class Option(NamedTuple):
    """One way to cut a step."""

    kinds: "_Kinds"
    large: _Way
    small: _Way
    sms: int  # that get large units

    @property
    def rows(self) -> float:
        """What is left to be merged, at most."""
        return self.large.work.rows + self.small.work.rows


Pick = Callable[[list[Option], Shape], Option]


def pick_fastest(options: list[Option], shape: Shape) -> Option:
    """The best one of those with few enough Partials or, if there are none, with the fewest."""
    if shape.max_partials is not None:
        most = float(shape.max_partials * shape.group * shape.kv_heads)
        most = max(most, min(option.rows for option in options))
        options = [option for option in options if option.rows <= most]
    if len(options) == 1:
        return options[0]
    card = Card(
        shape.num_programs, shape.num_programs // shape.num_large_programs, shape.tiles.pace
    )
    found: list[tuple[float, Option]] = []
    best = math.inf
    for option in options:
        large, small = option.large.work, option.small.work
        if least_us(large, small, card) <= INDIFFERENT * best:  # else it need not be computed
            us = step_us(large, small, option.sms, card)
            found.append((us, option))
            best = min(best, us)
    return next(option for us, option in found if us <= INDIFFERENT * best)


def cut_spans(spans: Spans, shape: Shape, pick: Pick = pick_fastest) -> Cut:
    """Keys per stretch, number of stretches, and tiles of rows, of each span."""
    keys = np.maximum(spans.key_tokens, 1).astype(np.float64)
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    seen = keys - spans.is_causal * (queries >> 1)
    columns = _Columns(keys, seen, queries.astype(np.float64) * shape.group)
    if shape.fixed_stretch is not None:
        kinds = _by_kind(columns, np.ones(len(keys), np.bool_), shape)
        stretches = np.full(len(keys), float(shape.fixed_stretch))
        return kinds.cut(stretches, shape.num_large_programs)
    if not shape.can_cut or not len(keys):
        kinds = _by_kind(columns, columns.rows > shape.small_rows, shape)
        return kinds.cut(kinds.columns.keys, shape.num_large_programs)
    options = [
        option
        for is_large in _kinds(columns, shape)
        for option in _options(_by_kind(columns, is_large, shape), shape)
    ]
    kinds, large, small, sms = pick(options, shape)
    return kinds.cut(np.concatenate((large.stretches, small.stretches)), sms)


class _Columns(NamedTuple):
    """Of the spans."""

    keys: Floats
    seen: Floats  # keys, by a row in the mean: half of them of a prompt's own
    rows: Floats


def _kinds(columns: _Columns, shape: Shape) -> list[Bools]:
    """Which spans may be large: as many as can be, those that must be, or none, where their rows,
    in several tiles, would cost less than a launch.
    """
    rows = columns.rows
    kinds = [rows > shape.small_rows]
    num_large = np.count_nonzero(kinds[0])
    if not shape.tiles.is_split or not num_large:
        return kinds
    is_long = rows > shape.most_small_rows
    num_long = np.count_nonzero(is_long)
    if num_long < num_large:
        kinds.append(is_long)
    if num_long and _cost_less_than_launch(columns, is_long, shape):
        kinds.append(np.zeros(len(rows), np.bool_))
    return kinds


def _cost_less_than_launch(columns: _Columns, is_long: Bools, shape: Shape) -> bool:
    """Whether long spans do as small ones, on all programs."""
    pace, programs, keys = shape.tiles.pace, shape.num_programs, columns.keys[is_long]
    if float(keys.sum()) * shape.kv_heads * pace.small_key_us / programs > pace.launch_us:
        return False  # even if each were one tile
    units = np.ceil(columns.rows[is_long] / shape.most_small_rows) * (shape.kv_heads // shape.fold)
    return float(unit_us(keys, False, shape) @ units) / programs < pace.launch_us


def unit_us(keys: Floats, is_large: bool, shape: Shape) -> Floats:
    """How long units of so many keys, one at least, take, if they need not share the memory."""
    pace, tiles = shape.tiles.pace, shape.tiles
    step = tiles.large_k if is_large else tiles.small_k // shape.fold
    per_key = pace.large_key_us if is_large else pace.small_key_us * shape.fold
    us: Floats = np.ceil(keys / step)
    us *= step * per_key
    us += pace.large_us if is_large else pace.small_us
    return us


def least_stretch(shape: Shape) -> int:
    """Stretches of small spans are multiples of so many keys."""
    return max(shape.tiles.small_k // shape.fold, shape.page_size, STRETCH_KEYS)


class _Spans(NamedTuple):
    """Those of one kind."""

    keys: Floats
    seen: Floats
    rows: Floats
    copies: Floats  # units of a stretch: tiles of rows x KV heads
    is_large: bool
    longest: int  # which of them sees most keys
    num_seen: float  # of all of them
    num_rows: float
    num_copies: float

    def cut(
        self,
        shares: Sequence[float],
        shape: Shape,
        places: Sequence[float] | None = None,
        finer: Floats | None = None,
    ) -> list[_Way]:
        """Some ways: so many units, if all could be of one length, or fewer, and of some spans
        `finer` times as many. `places`, of each way, run one each at a time, if no other kind is in
        the way.
        """
        if not len(self.keys):
            return [NOTHING] * len(shares)
        work = ROUNDING * float(self.seen @ self.copies)
        wished, most = self.seen, self.seen.item(self.longest)
        if finer is not None:
            wished = wished * finer
            most = float(wished.max())
        if most < 2.0 * max(work / max(shares), 1.0):  # nobody is long enough to be cut
            return self._whole(shares, shape, places)
        targets = np.maximum(work / np.array(shares), 1.0)
        tile = max(shape.tiles.large_k, shape.page_size) if self.is_large else least_stretch(shape)
        parts = np.maximum(np.floor(wished / targets[:, None]), 1.0)
        stretches = np.ceil(self.keys / (parts * tile)) * tile
        parts = np.ceil(self.keys / stretches)
        sizes, units = unit_us(self.seen / parts, self.is_large, shape), parts * self.copies
        us, counts = (sizes * units).sum(axis=1).tolist(), units.sum(axis=1).tolist()
        longest = sizes.max(axis=1).tolist()
        if places is None:
            last = longest
        elif (sizes == sizes[:, :1]).all():
            last = [
                math.ceil(count / each) * size
                for count, each, size in zip(counts, places, longest, strict=True)
            ]
        else:
            last = _last_end(sizes, units, us, places)
        keys = [self.num_seen * shape.kv_heads] * len(shares)
        rows = (parts @ self.rows * shape.kv_heads).tolist()
        works = map(Work, counts, us, longest, last, keys, rows)
        return [_Way(*way) for way in zip(stretches, works, strict=True)]

    def cut_with_rests(self, places: Sequence[float], shape: Shape) -> list[_Way]:
        """Some ways: stretches of one length for all spans, and what is left of each. A few rests
        fill a multiprocessor, so all are used, whatever number and length spans have. One way for
        each number of places: that which would end first.
        """
        tile, count = max(shape.tiles.large_k, shape.page_size), len(OVER_SHARE)
        each = float(self.seen @ self.copies) / np.array(places).repeat(count)
        stretches = np.ceil(each * np.tile(OVER_SHARE, len(places)) / tile)[:, None] * tile
        parts = np.ceil(self.keys / stretches)
        share = self.seen / self.keys  # of a stretch's keys, that rows see in the mean
        rests = unit_us((self.keys - (parts - 1.0) * stretches) * share, True, shape)
        whole = unit_us(stretches * share, True, shape) * (parts > 1.0)
        sizes = np.concatenate((whole, rests), axis=1)
        units = np.concatenate(
            ((parts - 1.0) * self.copies, np.broadcast_to(self.copies, parts.shape)), axis=1
        )
        us = (sizes * units).sum(axis=1)
        last = np.array(_last_end(sizes, units, us.tolist(), np.repeat(places, count).tolist()))
        taken = last.reshape(len(places), count).argmin(axis=1) + np.arange(len(places)) * count
        keys = self.num_seen * shape.kv_heads
        return [
            _Way(
                np.broadcast_to(stretches[i], self.keys.shape),
                Work(
                    float(units[i].sum()), us.item(i), float(sizes[i].max()), last.item(i), keys,
                    float(parts[i] @ self.rows) * shape.kv_heads,
                ),
            )
            for i in taken.tolist()
        ]  # fmt: skip

    def _whole(
        self, shares: Sequence[float], shape: Shape, places: Sequence[float] | None
    ) -> list[_Way]:
        """As many ways, all of uncut spans."""
        sizes = unit_us(self.seen, self.is_large, shape)
        units, longest = self.num_copies, sizes.item(self.longest)
        us = float((sizes * self.copies).sum())
        if places is None:
            last = [longest] * len(shares)
        elif not np.count_nonzero(sizes < longest):
            last = [math.ceil(units / count) * longest for count in places]
        else:
            last = _last_end(sizes[None], self.copies[None], [us] * len(places), places)
        keys, rows = self.num_seen * shape.kv_heads, self.num_rows * shape.kv_heads
        return [_Way(self.keys, Work(units, us, longest, end, keys, rows)) for end in last]


def _last_end(
    sizes: Floats, units: Floats, us: list[float], places: Sequence[float]
) -> list[float]:
    """When the last unit ends, for each number of places, if the longest always goes to the
    emptiest; rows are ways to cut, one for each of them or for all. All units together take `us`.
    """
    order = (-sizes).argsort(axis=1)
    sizes = np.take_along_axis(sizes, order, axis=1)
    ends = np.take_along_axis(units, order, axis=1).cumsum(axis=1)
    repeats = len(places) // len(sizes)
    return [
        max(all_us / count, _longest_round(way_sizes, way_ends, count))
        for all_us, count, way_sizes, way_ends in zip(
            us, places, [*sizes] * repeats, [*ends] * repeats, strict=True
        )
    ]


def _longest_round(sizes: Floats, ends: Floats, places: float) -> float:
    """Somebody gets a unit of each round, and those before are no shorter than the last one. Spans
    are sorted by the size of their units, and `ends` is where these end.
    """
    spans = ends.searchsorted(ROUNDS * places, side="right").tolist()
    rounds = (sizes.item(span) * i for i, span in enumerate(spans, 1) if span < len(sizes))
    return max(rounds, default=0.0)


@cache
def _large_shares(sms: int) -> tuple[list[float], list[float]]:
    """What large units are cut for, and how many of them run at a time then."""
    shares = np.unique(np.maximum(np.rint(sms * LARGE_ON), 1.0))[::-1]
    return shares.tolist(), np.minimum(shares, sms).tolist()


class _Kinds(NamedTuple):
    """Spans by kind."""

    spans: Int64s | slice  # which they are, large ones first
    columns: _Columns  # in that order
    row_tiles: Floats
    num_large: int

    def large(self, shape: Shape) -> _Spans:
        return self._some(slice(self.num_large), shape.kv_heads, True)

    def small(self, shape: Shape) -> _Spans:
        return self._some(slice(self.num_large, None), shape.kv_heads // shape.fold, False)

    def _some(self, part: slice, units: int, is_large: bool) -> _Spans:
        keys, seen, rows = self.columns
        keys, seen, rows, copies = keys[part], seen[part], rows[part], self.row_tiles[part] * units
        longest = int(seen.argmax()) if len(seen) else 0
        sums = float(seen.sum()), float(rows.sum()), float(copies.sum())
        return _Spans(keys, seen, rows, copies, is_large, longest, *sums)

    def cut(self, stretches: Floats, num_large: int) -> Cut:
        keys, _, rows = self.columns
        return Cut(
            self.spans,
            self.num_large,
            rows,
            stretches,
            parts=np.ceil(keys / stretches),
            row_tiles=self.row_tiles,
            num_large=num_large,
        )


def _by_kind(columns: _Columns, is_large: Bools, shape: Shape) -> _Kinds:
    count = int(np.count_nonzero(is_large))
    spans: Int64s | slice = slice(len(is_large))
    if np.count_nonzero(is_large[:count]) < count:  # else, as without prompts, these come first
        spans = (~is_large).argsort(kind="stable")
        columns = _Columns(*(column[spans] for column in columns))
    row_tiles = columns.rows / shape.most_small_rows
    row_tiles[:count] = columns.rows[:count] / shape.tiles.large_q
    return _Kinds(spans, columns, np.ceil(row_tiles), count)


def _options(kinds: _Kinds, shape: Shape) -> list[Option]:
    """Ways to cut large spans, with those to cut small ones that may suit them. Among equals the
    first is best: that with large units on most multiprocessors.
    """
    large, small = kinds.large(shape), kinds.small(shape)
    programs, sms = shape.num_programs, shape.num_large_programs
    if not len(large.keys):
        return [Option(kinds, NOTHING, way, sms) for way in _small_ways(small, shape)]
    each = small.cut([float(programs)], shape)[0]
    shares, places = _large_shares(sms)
    found: dict[tuple[float, float, float], _Way] = {}
    ways = list(zip(large.cut(shares, shape, places), places, strict=True))
    works = [way.work for way, _ in ways]
    least_us = min(work.us for work in works) / sms
    if shape.tiles.is_split and min(work.last_us for work in works) > UNEVEN_PARTS * least_us:
        on = [max(float(round(sms * share)), 1.0) for share in RESTS_ON]
        ways += zip(large.cut_with_rests(on, shape), on, strict=True)
    for way, count in ways:
        units = way.work.units
        found.setdefault((units, way.work.longest_us, min(count, units)), way)
    options = [Option(kinds, way, each, int(used)) for (_, _, used), way in found.items()]
    if each.work.units > small.num_copies:  # cut, and could be cut less: for who begins at once
        early = [programs - programs // sms * option.sms for option in options]
        fewer = small.cut([max(count, 1.0) for count in early], shape)
        options += [o._replace(small=way) for o, way in zip(options, fewer, strict=True)]
    return options


def _small_ways(small: _Spans, shape: Shape) -> list[_Way]:
    """Ways to cut small spans, where there are no others; of equal ones the first."""
    places = [float(shape.num_programs)] * len(SMALL_ON)
    ways = small.cut([on * shape.num_programs for on in SMALL_ON], shape, places)
    is_shared = small.rows > shape.group
    if 0 < np.count_nonzero(is_shared) < len(is_shared):
        finer = np.where(is_shared, FINER, 1.0)
        ways += small.cut(places[:1], shape, places[:1], finer)
    found: dict[Work, _Way] = {}
    for way in ways:
        found.setdefault(way.work, way)
    return list(found.values())
