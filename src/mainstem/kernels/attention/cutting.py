"""Spans -> units: how spans are cut, by an estimate of the step's time. In numpy.

A unit is a tile of rows over a stretch of keys. A large unit has one KV head. 64 sequences that
share 2,048 keys, with 4 query heads for each of 8 KV heads, have 2 tiles of 128 rows. Cut into 4
stretches of 512 keys, they are 2 x 4 x 8 = 64 units, for half of an H200's 132 multiprocessors.

Small spans are cut so that each program gets about one unit. Large spans are cut for one or more
units on each of some multiprocessors: several numbers are tried (`LARGE_ON`), their times are
estimated together, and the fastest way is taken.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.attention.shape import Floats, Shape, UnitKind

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

# How many units large spans are cut into, about, and for how many of an H200's multiprocessors.
# Most are multiples of 8, like the KV heads of most models.
LARGE_ON = (
    (528, 132), (264, 132), (198, 112), (132, 132), (120, 120), (112, 112), (96, 96), (80, 80),
    (64, 64), (48, 48), (32, 32), (16, 16),
)  # fmt: skip
LARGE_OF = 132
# Small units per program in a step without large ones. With 0.9 or 0.8, some programs are left for
# short spans; with the last, no span is cut.
SMALL_ON = (1.0, 0.9, 0.8, 2.0, 1e-9)
ROUNDING = 0.97  # times the keys of a unit: otherwise rounding could give one unit fewer
# Times the estimate of the longest large unit. Fitted to the cuts of 97 steps: steps whose units
# differ in length would otherwise take longer than estimated (docs/log/kernels.md).
LONGEST = 1.1
EQUAL = 1.001  # within 0.1 %, prefer the way with large units on more multiprocessors
TINY = 1e-9  # instead of zero, to divide by
NO_STRETCHES: Floats = np.empty(0)


class Sorted(NamedTuple):
    """The spans of a step, large ones first. All columns are floats, since numpy is slower if
    types are mixed.
    """

    spans: Int64s  # indices
    num_large: int
    keys: Floats
    seen: Floats  # keys that a row sees on average: half of a prompt's own keys
    rows: Floats
    row_tiles: Floats


class Work(NamedTuple):
    """Units of one kind, in one way to cut."""

    units: float
    us: float  # of all units, one after the other, if no other unit used the memory
    longest_us: float
    rows: float  # rows x heads to be merged, at most
    keys: float  # keys x KV heads, read from memory

    def last_us(self, places: float) -> float:
        """When the last unit ends if `places` units run at once."""
        rounds = math.ceil(self.units / places) * (self.us / max(self.units, 1.0))
        return max(rounds, self.longest_us)


class SpanCut(NamedTuple):
    of: Sorted
    stretches: Floats  # [spans] keys of a unit
    parts: Floats  # [spans] number of stretches
    sms: int  # multiprocessors, or programs, that get large units


class Way(NamedTuple):
    """One way to cut a step."""

    of: Sorted
    large: Floats  # stretches of large spans
    small: Floats
    sms: float  # multiprocessors that get large units
    us: float  # estimated
    rows: float  # rows x heads to be merged, at most

    def cut(self) -> SpanCut:
        return _cut(self.of, np.concatenate((self.large, self.small)), int(self.sms))


def cut_spans(spans: Spans, shape: Shape) -> SpanCut:
    """The fastest way that leaves few enough Partials; if none does, one that leaves the fewest."""
    if shape.fixed_stretch is not None or not shape.can_cut or not len(spans.query_rows):
        return _cut_at_once(spans, shape)
    ways = ways_to_cut(spans, shape)
    if shape.max_partials is not None:
        most = float(shape.max_partials * shape.group * shape.kv_heads)
        most = max(most, min(way.rows for way in ways))
        ways = [way for way in ways if way.rows <= most]
    best = min(ways, key=lambda way: way.us)
    return next(way for way in ways if way.of is best.of and way.us <= EQUAL * best.us).cut()


def _cut_at_once(spans: Spans, shape: Shape) -> SpanCut:
    """The cut if there is no choice: stretches are fixed and all units large, or no span is cut."""
    columns, slots = _columns(spans, shape.group), shape.large.slots
    if shape.fixed_stretch is None:
        of = _sort(columns, columns[2] > shape.small_rows, shape)
        return _cut(of, of.keys, slots)
    of = _sort(columns, np.ones(len(spans), np.bool_), shape)
    return _cut(of, np.full(len(spans), float(shape.fixed_stretch)), slots)


def _cut(of: Sorted, stretches: Floats, sms: int) -> SpanCut:
    return SpanCut(of, stretches, np.ceil(of.keys / stretches), sms)


def ways_to_cut(spans: Spans, shape: Shape) -> list[Way]:
    """All ways that are compared; some may leave too many Partials."""
    columns = _columns(spans, shape.group)
    choices = (_sort(columns, is_large, shape) for is_large in _choices(columns, shape))
    is_shared = len(spans.query_rows) > int(spans.query_rows.max(initial=-1)) + 1
    return [way for of in choices for way in _ways(of, shape, is_shared=is_shared)]


def _columns(spans: Spans, group: int) -> Floats:
    """[3, spans]: keys, seen keys and rows."""
    columns = np.empty((3, len(spans)))
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    columns[:2] = np.maximum(spans.key_tokens, 1)
    if np.count_nonzero(spans.is_causal):
        columns[1] -= spans.is_causal * (queries >> 1)
    columns[2] = queries * group
    return columns


def _choices(columns: Floats, shape: Shape) -> list[Bools]:
    """The choices of which spans are large: all with more than `small_rows` rows; only those with
    more rows than a small tile; or none, if computing these in several small tiles costs less than
    launching the kernel for large units.
    """
    keys, _, rows = columns
    may_be, small = rows > shape.small_rows, shape.small
    if not shape.tiles.is_split or not np.count_nonzero(may_be):
        return [may_be]
    must_be, choices = rows > small.rows, [may_be]
    if np.count_nonzero(must_be) < np.count_nonzero(may_be):
        choices.append(must_be)
    units = np.ceil(rows[must_be] / small.rows) * small.units
    us = float(small.unit_us(keys[must_be]) @ units) / small.slots
    if 0.0 < us < shape.tiles.pace.launch_us:
        choices.append(np.zeros(len(rows), np.bool_))
    return choices


def _sort(columns: Floats, is_large: Bools, shape: Shape) -> Sorted:
    spans, num_large = (~is_large).argsort(kind="stable"), int(np.count_nonzero(is_large))
    keys, seen, rows = columns.take(spans, axis=1)
    tile_rows = np.full(len(spans), float(shape.small.rows))
    tile_rows[:num_large] = shape.large.rows
    return Sorted(spans, num_large, keys, seen, rows, np.ceil(rows / tile_rows))


def _ways(of: Sorted, shape: Shape, *, is_shared: bool) -> list[Way]:
    """The ways to cut for one choice of large spans. Beside large spans, small ones are cut in one
    way only. `is_shared`: some token is in several spans."""
    slots, own = float(shape.large.slots), slice(of.num_large, None)
    if not of.num_large:
        places = [float(shape.num_programs) * share for share in SMALL_ON]
        ways, whole = [], float(of.row_tiles.sum()) * shape.small.units
        for stretches, work in _works(of, own, shape.small, places, shape):
            has_merge = is_shared or work.units > whole  # otherwise each token has one unit
            merged = work if has_merge else work._replace(rows=0.0)
            us = _small_us(merged, shape)
            ways.append(Way(of, NO_STRETCHES, stretches, slots, us, merged.rows))
        return ways
    [(small, small_work)] = _works(of, own, shape.small, [float(shape.num_programs)], shape)
    places, multiprocessors = _large_on(shape.large.slots)
    large = _works(of, slice(of.num_large), shape.large, places, shape)
    ways = []
    for i, most in enumerate(multiprocessors):
        stretches, work = large[i % len(large)]
        sms, rows = min(most, work.units), work.rows + small_work.rows
        us = _step_us(work, small_work, sms, shape)
        ways.append(Way(of, stretches, small, sms, us, rows))
    return ways


def _works(
    of: Sorted, part: slice, kind: UnitKind, places: list[float], shape: Shape
) -> list[tuple[Floats, Work]]:
    """Stretches of one kind of span, and the units that they give, for each number of places. Spans
    are cut into equal parts, as if each place had one unit and all units the same number of keys.
    If no span is cut, there is one entry for all places.
    """
    keys, seen, rows, row_tiles = (column[part] for column in of[2:])
    all_keys = ROUNDING * kind.units * float(seen @ row_tiles)
    shares = [max(all_keys / count, 1.0) for count in places]
    copies, share, heads = row_tiles * kind.units, seen / keys, shape.kv_heads
    num_read = float(seen.sum()) * heads
    if seen.max(initial=0.0) < 2.0 * min(shares):
        us = kind.unit_us(keys * share)
        units, all_us, longest_us = copies.sum(), us @ copies, us.max(initial=0.0)
        work = Work(*map(float, (units, all_us, longest_us, rows.sum() * heads, num_read)))
        return [(np.ceil(keys / kind.stretch) * kind.stretch, work)]
    parts = np.maximum(np.floor(seen / np.array(shares)[:, None]), 1.0)
    stretches = np.ceil(keys / (parts * kind.stretch)) * kind.stretch
    parts = np.ceil(keys / stretches)
    whole = kind.unit_us(np.minimum(stretches, keys) * share)
    last = kind.unit_us((keys - (parts - 1.0) * stretches) * share)
    us, longest_us = ((parts - 1.0) * whole + last) @ copies, whole.max(axis=1)
    columns = parts @ copies, us, longest_us, parts @ rows * heads, np.full(len(parts), num_read)
    works = map(Work._make, zip(*(column.tolist() for column in columns), strict=True))
    return list(zip(stretches, works, strict=True))


@cache
def _large_on(slots: int) -> tuple[list[float], list[float]]:
    """`LARGE_ON` for a card of `slots` multiprocessors: units, and multiprocessors."""
    pairs = [tuple(max(float(round(slots * n / LARGE_OF)), 1.0) for n in pair) for pair in LARGE_ON]
    units, multiprocessors = zip(*dict.fromkeys(pairs), strict=True)
    return list(units), list(multiprocessors)


def _small_us(small: Work, shape: Shape) -> float:
    """Estimate when everything is merged, in a step without large units. What is the same for all
    ways is left out."""
    pace, programs = shape.tiles.pace, float(shape.num_programs)
    busy = min(programs, small.units)
    speed = min(pace.reads / (busy * (small.keys / small.us)), 1.0)
    end = max(small.us / busy / speed, small.last_us(programs) / math.sqrt(speed))
    return end + _merge_us(small.rows, shape)


def _merge_us(rows: float, shape: Shape) -> float:
    """The merge is launched only if there are Partials."""
    return shape.tiles.pace.merge_us * rows + (shape.tiles.pace.launch_us if rows else 0.0)


def _step_us(large: Work, small: Work, sms: float, shape: Shape) -> float:
    """Estimate when everything is merged; what is the same for all ways is left out. Large units
    run first, on some multiprocessors. Small units begin at once on all others; where large units
    ran, small units begin a little after them. While both kinds run, they compete for memory:

        some multiprocessors | large units | late | small units |
        all others           | small units                      |
    """
    pace, programs = shape.tiles.pace, float(shape.num_programs)
    early = programs - programs / shape.large.slots * sms
    large_us = large.us / sms
    # Keys per microsecond that each kind would read if memory had no limit.
    large_wish, wish = large.keys / large_us, small.keys / max(small.us, TINY)
    small_wish = min(early, small.units) * wish
    lack = max((large_wish + small_wish) / pace.reads, 1.0)
    # Large units prefetch further ahead, so they are delayed less.
    slower = 1.0 + pace.yields * (lack - 1.0) if small_wish > 0.0 else lack
    left = (pace.reads - large_wish / slower) / max(small_wish, TINY)
    beside = min(max(left, pace.least_speed / lack), 1.0)
    large_us *= slower
    done = beside * large_us  # small units' us that an early program has done when large ones end
    wished = max(min(small.units, programs) * wish, TINY)
    rest = max(small.us - early * done, 0.0) / programs
    late_us = pace.late_us * (1.0 - early / programs)
    end = large_us + late_us + rest / min(pace.reads / wished, 1.0)
    # The alternative: programs that begin at once take all small units.
    own_us = small.us / max(early, TINY)
    alone = min(pace.reads / max(small_wish, TINY), 1.0)
    own_end = own_us / beside if own_us <= done else large_us + (own_us - done) / alone
    end = min(end, own_end) + pace.apart * small.longest_us
    end = max(end, (0.0 if early > 0.0 else large_us) + small.longest_us)
    merge_us = _merge_us(large.rows + small.rows, shape)
    last = max(large.last_us(sms), LONGEST * large.longest_us)
    return max(last * slower, end) + merge_us + pace.launch_us
