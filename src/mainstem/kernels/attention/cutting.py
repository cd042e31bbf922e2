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
from mainstem.kernels.attention.shape import Shape

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Shares of the multiprocessors that large units are cut for; most models have 8 KV heads. The last
# two mean several units on each.
LARGE_ON = np.array([16, 32, 48, 64, 80, 96, 112, 120, 132, 264, 528]) / 132
# Without large units, small ones on each program. Fewer than one leave room for short spans.
SMALL_ON = np.array([1.0, 0.9, 0.8, 2.0])
ROUNDING = 0.97  # shares are smaller, or rounding could cut a span into one unit less
EQUAL = 1.001  # of ways that are nearly equal, large units on most multiprocessors
TINY = 1e-9  # instead of zero, to divide by


class Cut(NamedTuple):
    """Per span, large ones first. Floats, since numpy is slower where floats meet integers."""

    spans: Int64s  # indices of the spans
    num_large: int  # spans
    rows: Floats
    stretches: Floats  # keys of a unit
    parts: Floats  # number of stretches
    row_tiles: Floats
    sms: int  # multiprocessors, or programs, that get large units


class Work(NamedTuple):
    """Units of one kind, in each of several ways to cut: [ways], or [1] if all have the same."""

    units: Floats
    us: Floats  # of all units, one after the other, with memory to themselves
    longest_us: Floats
    rows: Floats  # x heads to be merged, at most
    keys: float  # x KV heads, read from memory

    def last_us(self, places: Floats | float) -> Floats:
        """When the last unit ends on some number of places."""
        rounds = np.ceil(self.units / places) * (self.us / np.maximum(self.units, 1.0))
        return np.maximum(rounds, self.longest_us)


class Kind(NamedTuple):
    """Spans of one kind."""

    keys: Floats
    seen: Floats  # keys that a row sees on average: of a prompt's own keys, half
    rows: Floats
    row_tiles: Floats
    is_large: bool

    def stretches(self, places: Floats, shape: Shape) -> Floats:
        """[ways, spans]: keys of a unit, if there were one unit for each of `places` [ways] and all
        had equally many. Each span is cut into equal parts. One way if none cuts a span.
        """
        tile, units = shape.stretch_tile(self.is_large), shape.units(self.is_large)
        shares = np.maximum(ROUNDING * units * float(self.seen @ self.row_tiles) / places, 1.0)
        parts: Floats = np.ones((1, 1))
        if self.seen.max(initial=0.0) >= 2.0 * shares.min():
            parts = np.maximum(np.floor(self.seen / shares[:, None]), 1.0)
        tiles: Floats = np.ceil(self.keys / (parts * tile))
        return tiles * tile

    def work(self, stretches: Floats, shape: Shape) -> Work:
        parts, share = np.ceil(self.keys / stretches), self.seen / self.keys
        copies = self.row_tiles * shape.units(self.is_large)
        us = whole = unit_us(np.minimum(stretches, self.keys) * share, self.is_large, shape)
        if parts.max(initial=0.0) > 1.0:
            last = (self.keys - (parts - 1.0) * stretches) * share
            us = (parts - 1.0) * whole + unit_us(last, self.is_large, shape)
        return Work(
            units=parts @ copies,
            us=us @ copies,
            longest_us=whole.max(axis=1, initial=0.0),
            rows=parts @ self.rows * shape.kv_heads,
            keys=float(self.seen.sum()) * shape.kv_heads,
        )


def unit_us(keys: Floats, is_large: bool, shape: Shape) -> Floats:
    """How long units of `keys` take, with memory to themselves."""
    pace, tiles = shape.tiles.pace, shape.tiles
    step = tiles.large_k if is_large else tiles.small_k // shape.fold
    per_key = pace.large_key_us if is_large else pace.small_key_us * shape.fold
    us: Floats = np.ceil(keys / step)
    us *= step * per_key
    us += pace.large_us if is_large else pace.small_us
    return us


class Kinds(NamedTuple):
    """The spans of a step by kind."""

    spans: Int64s  # indices, large ones first
    large: Kind
    small: Kind

    def cut(self, large_stretches: Floats, small_stretches: Floats, sms: float) -> Cut:
        keys, _, rows, row_tiles = map(
            np.concatenate, zip(self.large[:4], self.small[:4], strict=True)
        )
        stretches = np.concatenate((large_stretches, small_stretches))
        parts = np.ceil(keys / stretches)
        return Cut(self.spans, len(self.large.keys), rows, stretches, parts, row_tiles, int(sms))


class Ways(NamedTuple):
    """Ways to cut a step in which the same spans are large."""

    kinds: Kinds
    large: Floats  # [ways, large spans]: stretches; one row if all ways have the same
    small: Floats
    sms: Floats  # [ways] multiprocessors that get large units
    us: Floats  # [ways] estimated
    rows: Floats  # [ways] or [1]: x heads to be merged, at most

    def cut(self, way: int) -> Cut:
        large, small = (rows[way % len(rows)] for rows in (self.large, self.small))
        return self.kinds.cut(large, small, self.sms[way])


def cut_spans(spans: Spans, shape: Shape) -> Cut:
    """Of the ways with few enough Partials the fastest; if there is none, one with the fewest."""
    if shape.fixed_stretch is not None or not shape.can_cut or not len(spans.query_rows):
        return _cut_at_once(_all_large(spans, shape), shape)
    choices = ways_to_cut(spans, shape)
    most = np.inf
    if shape.max_partials is not None:
        fewest = min(float(ways.rows.min()) for ways in choices)
        most = max(float(shape.max_partials * shape.group * shape.kv_heads), fewest)
    us = [np.where(ways.rows <= most, ways.us, np.inf) for ways in choices]
    best = min(range(len(us)), key=lambda i: float(us[i].min()))
    return choices[best].cut(int((us[best] <= EQUAL * us[best].min()).argmax()))


def _cut_at_once(every: Kind, shape: Shape) -> Cut:
    """Nothing to choose: stretches are fixed, or no span is cut."""
    sms = shape.num_large_programs
    if shape.fixed_stretch is None:
        kinds = _by_kind(every, every.rows > shape.small_rows, shape)
        return kinds.cut(kinds.large.keys, kinds.small.keys, sms)
    kinds = _by_kind(every, np.ones(len(every.keys), np.bool_), shape)
    return kinds.cut(np.full(len(every.keys), float(shape.fixed_stretch)), np.empty(0), sms)


def ways_to_cut(spans: Spans, shape: Shape) -> list[Ways]:
    """All that are compared; some may leave too many Partials."""
    every = _all_large(spans, shape)
    return [_ways(_by_kind(every, large, shape), shape) for large in _choices(every, shape)]


def _all_large(spans: Spans, shape: Shape) -> Kind:
    keys = np.maximum(spans.key_tokens, 1).astype(np.float64)
    queries = spans.query_starts[1:] - spans.query_starts[:-1]
    seen = keys - spans.is_causal * (queries >> 1)
    rows = queries.astype(np.float64) * shape.group
    return Kind(keys, seen, rows, np.ceil(rows / shape.tiles.large_q), True)


def _choices(every: Kind, shape: Shape) -> list[Bools]:
    """Which spans are large: all that may be; only those that must be; or none, if their rows as
    several small tiles cost less than a launch.
    """
    may_be = every.rows > shape.small_rows
    if not shape.tiles.is_split or not may_be.any():
        return [may_be]
    must_be, choices = every.rows > shape.most_small_rows, [may_be]
    if np.count_nonzero(must_be) < np.count_nonzero(may_be):
        choices.append(must_be)
    units = np.ceil(every.rows[must_be] / shape.most_small_rows) * shape.units(False)
    us = float(unit_us(every.keys[must_be], False, shape) @ units) / shape.num_programs
    if 0.0 < us < shape.tiles.pace.launch_us:
        choices.append(np.zeros(len(every.rows), np.bool_))
    return choices


def _by_kind(every: Kind, is_large: Bools, shape: Shape) -> Kinds:
    count = int(np.count_nonzero(is_large))
    order = (~is_large).argsort(kind="stable")
    large = Kind._make((*(column[order[:count]] for column in every[:4]), True))
    keys, seen, rows, _ = (column[order[count:]] for column in every[:4])
    small_tiles = np.ceil(rows / shape.most_small_rows)
    return Kinds(order, large, Kind(keys, seen, rows, small_tiles, False))


def _ways(kinds: Kinds, shape: Shape) -> Ways:
    programs, slots = float(shape.num_programs), shape.num_large_programs
    if not len(kinds.large.keys):
        small = kinds.small.stretches(programs * SMALL_ON, shape)
        work = kinds.small.work(small, shape)
        us, sms = _small_us(work, shape), np.full(len(small), float(slots))
        return Ways(kinds, np.empty((1, 0)), small, sms, us, work.rows)
    places = _large_places(slots)
    large = kinds.large.stretches(places, shape)
    small = kinds.small.stretches(np.array([programs]), shape)
    large_work, small_work = kinds.large.work(large, shape), kinds.small.work(small, shape)
    sms = np.minimum(np.minimum(places, slots), large_work.units)
    us = _step_us(large_work, small_work, sms, shape)
    return Ways(kinds, large, small, sms, us, large_work.rows + small_work.rows)


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
    early = programs - programs / shape.num_large_programs * sms
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
