"""Spans -> units: how spans are cut, by an estimate of the step's time. Numpy only.

A unit is a tile of rows over a stretch of keys, of one KV head if it is large. 64 sequences that
share 2,048 keys, with 4 query heads for each of 8 KV heads, have 2 tiles of 128 rows. Cut into 4
stretches of 512 keys, they are 2 x 4 x 8 = 64 units, for half of an H200's 132 multiprocessors.

Large spans are cut for one unit on each of some number of multiprocessors, small ones for one unit
on each program. All ways are estimated together, and the one that would end first is taken.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.attention.shape import Floats, Kind, Shape

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Shares of the multiprocessors that large units are cut for; most models have 8 KV heads. The last
# two mean several units on each.
LARGE_ON = np.array([16, 32, 48, 64, 80, 96, 112, 120, 132, 264, 528]) / 132
# Without large units, small ones on each program. Fewer than one leave room for short spans.
SMALL_ON, ONE = np.array([1.0, 0.9, 0.8, 2.0]), np.ones(1)
ROUNDING = 0.97  # shares are smaller, or rounding could cut a span into one unit less
EQUAL = 1.001  # of ways that are nearly equal, large units on most multiprocessors
TINY = 1e-9  # instead of zero, to divide by


class Sorted(NamedTuple):
    """The spans of a step, large ones first. Floats, since numpy is slower where floats meet
    integers.
    """

    spans: Int64s  # indices
    num_large: int
    keys: Floats
    seen: Floats  # keys that a row sees on average: of a prompt's own keys, half
    rows: Floats
    row_tiles: Floats


class Work(NamedTuple):
    """Units of one kind, in each of several ways to cut: [ways], or [1] if all have the same."""

    stretches: Floats  # [ways, spans] or [1, spans]: keys of a unit
    units: Floats
    us: Floats  # of all units, one after the other, with memory to themselves
    longest_us: Floats
    rows: Floats  # x heads to be merged, at most
    keys: float  # x KV heads, read from memory

    def last_us(self, places: Floats | float) -> Floats:
        """When the last unit ends on some number of places."""
        rounds = np.ceil(self.units / places) * (self.us / np.maximum(self.units, 1.0))
        return np.maximum(rounds, self.longest_us)


NOTHING = Work(np.empty((1, 0)), *(np.zeros(1) for _ in range(4)), keys=0.0)


class Cut(NamedTuple):
    of: Sorted
    stretches: Floats  # [spans] keys of a unit
    parts: Floats  # [spans] number of stretches
    sms: int  # multiprocessors, or programs, that get large units


class Ways(NamedTuple):
    """Ways to cut a step in which the same spans are large."""

    of: Sorted
    large: Work
    small: Work
    sms: Floats  # [ways] multiprocessors that get large units
    us: Floats  # [ways] estimated
    rows: Floats  # [ways] or [1]: x heads to be merged, at most

    def cut(self, way: int) -> Cut:
        both = self.large.stretches, self.small.stretches
        stretches = np.concatenate([rows[way % len(rows)] for rows in both])
        return _cut(self.of, stretches, int(self.sms[way]))


def cut_spans(spans: Spans, shape: Shape) -> Cut:
    """Of the ways with few enough Partials the fastest; if there is none, one with the fewest."""
    if shape.fixed_stretch is not None or not shape.can_cut or not len(spans.query_rows):
        return _cut_at_once(spans, shape)
    choices = ways_to_cut(spans, shape)
    most = np.inf
    if shape.max_partials is not None:
        fewest = min(float(ways.rows.min()) for ways in choices)
        most = max(float(shape.max_partials * shape.group * shape.kv_heads), fewest)
    us = [np.where(ways.rows <= most, ways.us, np.inf) for ways in choices]
    best = min(range(len(us)), key=lambda i: float(us[i].min()))
    return choices[best].cut(int((us[best] <= EQUAL * us[best].min()).argmax()))


def _cut_at_once(spans: Spans, shape: Shape) -> Cut:
    """Nothing to choose: stretches are fixed, and all units large, or no span is cut."""
    columns, slots = _columns(spans, shape.group), shape.large.slots
    if shape.fixed_stretch is None:
        of = _sort(columns, columns[2] > shape.small_rows, shape)
        return _cut(of, of.keys, slots)
    of = _sort(columns, np.ones(len(spans), np.bool_), shape)
    return _cut(of, np.full(len(spans), float(shape.fixed_stretch)), slots)


def _cut(of: Sorted, stretches: Floats, sms: int) -> Cut:
    return Cut(of, stretches, np.ceil(of.keys / stretches), sms)


def ways_to_cut(spans: Spans, shape: Shape) -> list[Ways]:
    """All that are compared; some may leave too many Partials."""
    columns = _columns(spans, shape.group)
    return [_ways(_sort(columns, large, shape), shape) for large in _choices(columns, shape)]


def _columns(spans: Spans, group: int) -> Floats:
    """[3, spans]: keys, seen keys and rows."""
    columns = np.empty((3, len(spans)))
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    columns[0] = np.maximum(spans.key_tokens, 1)
    columns[1] = columns[0] - spans.is_causal * (queries >> 1)
    columns[2] = queries * group
    return columns


def _choices(columns: Floats, shape: Shape) -> list[Bools]:
    """Which spans are large: all that may be; only those that must be; or none, if their rows as
    several small tiles cost less than a launch.
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


def _ways(of: Sorted, shape: Shape) -> Ways:
    slots, heads = shape.large.slots, shape.kv_heads
    if not of.num_large:
        small = _work(of, slice(None), shape.small, shape.small.slots * SMALL_ON, heads)
        sms = np.full(len(small.us), float(slots))
        return Ways(of, NOTHING, small, sms, _small_us(small, shape), small.rows)
    places = _large_places(slots)
    large = _work(of, slice(of.num_large), shape.large, places, heads)
    small = _work(of, slice(of.num_large, None), shape.small, shape.small.slots * ONE, heads)
    sms = np.minimum(np.minimum(places, slots), large.units)
    return Ways(of, large, small, sms, _step_us(large, small, sms, shape), large.rows + small.rows)


def _work(of: Sorted, part: slice, kind: Kind, places: Floats, kv_heads: int) -> Work:
    """Spans of one kind, cut as if there were one unit for each of `places` [ways] and all had
    equally many keys. Each span is cut into equal parts. One way if none cuts a span.
    """
    keys, seen, rows, row_tiles = (column[part] for column in of[2:])
    shares = np.maximum(ROUNDING * kind.units * float(seen @ row_tiles) / places, 1.0)
    parts: Floats = np.ones((1, 1))
    if seen.max(initial=0.0) >= 2.0 * shares.min():
        parts = np.maximum(np.floor(seen / shares[:, None]), 1.0)
    stretches: Floats = np.ceil(keys / (parts * kind.stretch)) * kind.stretch
    parts, share, copies = np.ceil(keys / stretches), seen / keys, row_tiles * kind.units
    us = whole = kind.unit_us(np.minimum(stretches, keys) * share)
    if parts.max(initial=0.0) > 1.0:
        last = (keys - (parts - 1.0) * stretches) * share
        us = (parts - 1.0) * whole + kind.unit_us(last)
    return Work(
        stretches,
        units=parts @ copies,
        us=us @ copies,
        longest_us=whole.max(axis=1, initial=0.0),
        rows=parts @ rows * kv_heads,
        keys=float(seen.sum()) * kv_heads,
    )


@cache
def _large_places(slots: int) -> Floats:
    places: Floats = np.unique(np.maximum(np.rint(slots * LARGE_ON), 1.0))[::-1]
    return places


def _small_us(small: Work, shape: Shape) -> Floats:
    """When all is merged, in a step without large units, up to a constant."""
    pace, programs = shape.tiles.pace, float(shape.num_programs)
    busy = np.minimum(programs, small.units)
    speed = np.minimum(pace.reads / (busy * (small.keys / small.us)), 1.0)
    end = np.maximum(small.us / busy / speed, small.last_us(programs) / np.sqrt(speed))
    return end + pace.merge_us * small.rows


def _step_us(large: Work, small: Work, sms: Floats, shape: Shape) -> Floats:
    """When all is merged, up to a constant. Large units run first, on some multiprocessors. Small
    units begin at once on all others, and a little after the large ones on these. While both run,
    they compete for memory:

        some multiprocessors | large units | late | small units |
        all others           | small units                      |
    """
    pace, programs = shape.tiles.pace, float(shape.num_programs)
    early = programs - programs / shape.large.slots * sms
    large_us = large.us / sms
    # Keys a microsecond, if memory were as fast as they wish.
    large_wish, wish = large.keys / large_us, small.keys / np.maximum(small.us, TINY)
    small_wish = np.minimum(early, small.units) * wish
    lack = np.maximum((large_wish + small_wish) / pace.reads, 1.0)
    # Large units prefetch further ahead, so they are delayed less.
    slower = np.where(small_wish > 0.0, 1.0 + pace.yields * (lack - 1.0), lack)
    left = (pace.reads - large_wish / slower) / np.maximum(small_wish, TINY)
    beside = np.minimum(np.maximum(left, pace.least_speed / lack), 1.0)
    large_us = large_us * slower
    done = beside * large_us  # by a program that began at once
    wished = np.maximum(np.minimum(small.units, programs) * wish, TINY)
    rest = np.maximum(small.us - early * done, 0.0) / programs
    late_us = pace.late_us * (1.0 - early / programs)
    end = large_us + late_us + rest / np.minimum(pace.reads / wished, 1.0)
    # Or all units on the programs that begin at once.
    own_us = small.us / np.maximum(early, TINY)
    alone = np.minimum(pace.reads / np.maximum(small_wish, TINY), 1.0)
    own_end = np.where(own_us <= done, own_us / beside, large_us + (own_us - done) / alone)
    end = np.minimum(end, own_end) + pace.apart * small.longest_us
    end = np.maximum(end, np.where(early > 0.0, 0.0, large_us) + small.longest_us)
    merge_us = pace.merge_us * (large.rows + small.rows)
    return np.maximum(large.last_us(sms) * slower, end) + merge_us + pace.launch_us
