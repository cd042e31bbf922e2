"""How spans are cut into units for the span attention kernel, and what a unit costs. Numpy only.

Several cuts are compared, and the one that would end first is taken (`pacing.py`). Large spans are
cut for one unit on each of some number of multiprocessors, small ones for one or two units on each
program. Spans of a few tokens may be of either kind; a step without large units saves a launch.
"""

import math
from collections.abc import Sequence
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

ROUNDS = np.arange(4.0)  # rounds of large units that are looked at one by one
STRETCH_KEYS = 32  # stretches of small spans are multiples of this, of pages and of a step's keys
LEAST_ROWS = LEAST_KEYS = 16  # what a matrix instruction takes
MOST_SMALL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cut depends on besides the spans."""

    group: int  # query heads per KV head
    kv_heads: int
    page_size: int
    num_programs: int
    tiles: Tiles
    fixed_stretch: int | None = None  # deterministic: cut at multiples of this
    can_cut: bool = True  # False: no span is cut, which leaves the fewest Partials
    max_partials: int | None = None  # cuts with more are left out, if there is another cut
    has_windows: bool = False  # plans say from which key on each query sees

    # KV heads of a small unit: as many as fit in a tile of `small_k` keys x heads, with the keys of
    # a page, or with the fewest keys that a matrix instruction takes.
    fold: int = field(init=False)
    # Parts of a KV head's keys in a small tile that have a softmax each, if the tile has more rows
    # than one token needs (Hopper).
    splits: int = field(init=False)
    # Rows of the small tile: `tiles.small_q`, or those of one token in all heads of a unit, rounded
    # up to a power of two.
    small_q: int = field(init=False)
    # Most rows of a small unit, of each of its KV heads.
    most_small_rows: int = field(init=False)
    # Rows of each KV head up to which a span is always small: one token's, or more if the least
    # tile has room for them.
    small_rows: int = field(init=False)
    # Slots that large units are assigned to: programs, or multiprocessors if a large unit takes a
    # whole one.
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
    """Per span, large ones first. Floats, since numpy is slower where floats meet integers."""

    spans: Int64s | slice  # indices of the spans
    num_large_spans: int
    rows: Floats
    stretches: Floats  # keys of a unit
    parts: Floats  # number of stretches
    row_tiles: Floats
    num_large: int  # programs that get large units
    queued_share: float = 0.0  # of small units (`work_queue.py`)
    late_programs_claim: bool = True  # whether programs without a share claim queued units


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

    def cut(self) -> "Cut":
        stretches = np.concatenate((self.large.stretches, self.small.stretches))
        return self.kinds.cut(stretches, self.sms)


def pick_fastest(options: list[Option], shape: Shape) -> Option:
    """The fastest with few enough Partials; if there is none, the one with the fewest."""
    if shape.max_partials is not None:
        most = float(shape.max_partials * shape.group * shape.kv_heads)
        most = max(most, min(option.rows for option in options))
        options = [option for option in options if option.rows <= most]
    if len(options) == 1:
        return options[0]
    rules, per_sm = shape.tiles.rules, shape.num_programs // shape.num_large_programs
    card = Card(shape.num_programs, per_sm, shape.tiles.pace, rules)
    found: list[tuple[float, Option]] = []
    best = math.inf
    for option in options:
        large, small = option.large.work, option.small.work
        if least_us(large, small, card) <= rules.indifferent * best:  # else it cannot be taken
            us = step_us(large, small, option.sms, card)
            found.append((us, option))
            best = min(best, us)
    return next(option for us, option in found if us <= rules.indifferent * best)


def cut_spans(spans: Spans, shape: Shape) -> Cut:
    """Keys per stretch, number of stretches, and tiles of rows, of each span."""
    if shape.fixed_stretch is not None:
        columns = _columns(spans, shape)
        kinds = _by_kind(columns, np.ones(len(spans), np.bool_), shape)
        stretches = np.full(len(spans), float(shape.fixed_stretch))
        return kinds.cut(stretches, shape.num_large_programs)
    if not shape.can_cut or not len(spans):
        columns = _columns(spans, shape)
        kinds = _by_kind(columns, columns.rows > shape.small_rows, shape)
        return kinds.cut(kinds.columns.keys, shape.num_large_programs)
    return pick_fastest(ways_to_cut(spans, shape), shape).cut()


def ways_to_cut(spans: Spans, shape: Shape) -> list[Option]:
    """All that are compared; some may leave too many Partials."""
    columns = _columns(spans, shape)
    return [
        option
        for is_large in _kinds(columns, shape)
        for option in _options(_by_kind(columns, is_large, shape), shape)
    ]


class _Columns(NamedTuple):
    """Of the spans."""

    keys: Floats
    seen: Floats  # keys that a row sees on average: of a prompt's own keys, half
    rows: Floats


def _columns(spans: Spans, shape: Shape) -> _Columns:
    keys = np.maximum(spans.key_tokens, 1).astype(np.float64)
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    seen = keys - spans.is_causal * (queries >> 1)
    return _Columns(keys, seen, queries.astype(np.float64) * shape.group)


def _kinds(columns: _Columns, shape: Shape) -> list[Bools]:
    """Ways to choose the large spans: all that may be large; only those that must be; or none, if
    their rows as several small tiles cost less than a launch.
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
    """Whether long spans, as small units on all programs, cost less than a launch."""
    pace, programs, keys = shape.tiles.pace, shape.num_programs, columns.keys[is_long]
    if float(keys.sum()) * shape.kv_heads * pace.small_key_us / programs > pace.launch_us:
        return False  # even if each were one tile
    units = np.ceil(columns.rows[is_long] / shape.most_small_rows) * (shape.kv_heads // shape.fold)
    return float(unit_us(keys, False, shape) @ units) / programs < pace.launch_us


def unit_us(keys: Floats, is_large: bool, shape: Shape) -> Floats:
    """How long units of `keys` (at least 1) take, with memory to themselves."""
    pace, tiles = shape.tiles.pace, shape.tiles
    step = tiles.large_k if is_large else tiles.small_k // shape.fold
    per_key = pace.large_key_us if is_large else pace.small_key_us * shape.fold
    us: Floats = np.ceil(keys / step)
    us *= step * per_key
    us += pace.large_us if is_large else pace.small_us
    return us


def least_stretch(shape: Shape) -> int:
    """Stretches of small spans are multiples of this number of keys."""
    return max(shape.tiles.small_k // shape.fold, shape.page_size, STRETCH_KEYS)


class _Spans(NamedTuple):
    """Spans of one kind."""

    keys: Floats
    seen: Floats
    rows: Floats
    copies: Floats  # units of a stretch: tiles of rows x KV heads
    is_large: bool
    longest: int  # index of the span that sees most keys
    num_seen: float  # keys that all of them see
    num_rows: float
    num_copies: float

    def cut(
        self,
        shares: Sequence[float],
        shape: Shape,
        places: Sequence[float] | None = None,
        finer: Floats | None = None,
    ) -> list[_Way]:
        """One way for each of `shares`: that number of units if all had one length, in practice
        fewer. Spans are cut `finer` times as often. `places`: how many units of each way run at a
        time, without the other kind.
        """
        if not len(self.keys):
            return [NOTHING] * len(shares)
        work = shape.tiles.rules.rounding * float(self.seen @ self.copies)
        wished, most = self.seen, self.seen.item(self.longest)
        if finer is not None:
            wished = wished * finer
            most = float(wished.max())
        if most < 2.0 * max(work / max(shares), 1.0):  # no span is long enough to be cut
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
        """Ways with stretches of one length for all spans, and a rest of each span. A few rests
        fill a multiprocessor, so all are used, whatever the number and lengths of spans. For each
        number of places, the way that would end first.
        """
        over_share = shape.tiles.rules.over_share
        tile, count = max(shape.tiles.large_k, shape.page_size), len(over_share)
        each = float(self.seen @ self.copies) / np.array(places).repeat(count)
        stretches = np.ceil(each * np.tile(over_share, len(places)) / tile)[:, None] * tile
        parts = np.ceil(self.keys / stretches)
        share = self.seen / self.keys  # of a stretch's keys that rows see on average
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
        """One way for each of `shares`, all without a cut."""
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
    """When the last unit ends, for each number of places, if units are assigned longest first.
    Rows are ways to cut: one for each number of places, or one for all. All units together take
    `us`.
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
    """A lower bound: some place has a unit of each round up to the last, and none of its units is
    shorter than the last one. Spans are sorted by the size of their units; `ends` counts units.
    """
    spans = ends.searchsorted(ROUNDS * places, side="right").tolist()
    rounds = (sizes.item(span) * i for i, span in enumerate(spans, 1) if span < len(sizes))
    return max(rounds, default=0.0)


@cache
def _large_shares(sms: int, large_on: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Numbers of units that large spans are cut for, and how many units run at a time."""
    shares = np.unique(np.maximum(np.rint(sms * np.array(large_on)), 1.0))[::-1]
    return shares.tolist(), np.minimum(shares, sms).tolist()


class _Kinds(NamedTuple):
    """Spans by kind."""

    spans: Int64s | slice  # their indices, large ones first
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
    if np.count_nonzero(is_large[:count]) < count:  # else large ones come first already
        spans = (~is_large).argsort(kind="stable")
        columns = _Columns(*(column[spans] for column in columns))
    row_tiles = columns.rows / shape.most_small_rows
    row_tiles[:count] = columns.rows[:count] / shape.tiles.large_q
    return _Kinds(spans, columns, np.ceil(row_tiles), count)


def _options(kinds: _Kinds, shape: Shape) -> list[Option]:
    """Ways to cut large spans, each with ways to cut small ones that may suit it. Among equals the
    first is best: large units on most multiprocessors.
    """
    large, small = kinds.large(shape), kinds.small(shape)
    programs, sms, rules = shape.num_programs, shape.num_large_programs, shape.tiles.rules
    if not len(large.keys):
        return [Option(kinds, NOTHING, way, sms) for way in _small_ways(small, shape)]
    each = small.cut([float(programs)], shape)[0]
    shares, places = _large_shares(sms, rules.large_on)
    found: dict[tuple[float, float, float], _Way] = {}
    ways = list(zip(large.cut(shares, shape, places), places, strict=True))
    works = [way.work for way, _ in ways]
    least_us = min(work.us for work in works) / sms
    if shape.tiles.is_split and min(work.last_us for work in works) > rules.uneven_parts * least_us:
        on = [max(float(round(sms * share)), 1.0) for share in rules.rests_on]
        ways += zip(large.cut_with_rests(on, shape), on, strict=True)
    for way, count in ways:
        units = way.work.units
        found.setdefault((units, way.work.longest_us, min(count, units)), way)
    options = [Option(kinds, way, each, int(used)) for (_, _, used), way in found.items()]
    if each.work.units > small.num_copies:  # try fewer cuts, for programs that begin at once
        early = [programs - programs // sms * option.sms for option in options]
        fewer = small.cut([max(count, 1.0) for count in early], shape)
        options += [o._replace(small=way) for o, way in zip(options, fewer, strict=True)]
    return options


def _small_ways(small: _Spans, shape: Shape) -> list[_Way]:
    """Ways to cut small spans in a step without large ones; of equal ways the first."""
    small_on = shape.tiles.rules.small_on
    places = [float(shape.num_programs)] * len(small_on)
    ways = small.cut([on * shape.num_programs for on in small_on], shape, places)
    is_shared = small.rows > shape.group
    if 0 < np.count_nonzero(is_shared) < len(is_shared):
        finer = np.where(is_shared, shape.tiles.rules.finer, 1.0)
        ways += small.cut(places[:1], shape, places[:1], finer)
    found: dict[Work, _Way] = {}
    for way in ways:
        found.setdefault(way.work, way)
    return list(found.values())
