"""Which small units no program is given beforehand: a work queue, from which those that end first
claim the next unit. Numpy only.

Programs end when they do: large units ahead of them take longer on one multiprocessor than on
another, memory serves some better, and units are not even. So the last units of every program, and
all of those that come behind large ones, are queued. Claiming the next unit takes time, so programs
that can be given an even share keep it.

Memory is kept busy by a third of all programs, so a queue of long units ends well unless few are
left for its last round. Then some spans are cut once more: who ends first claims a short unit.

Where large units have most of the multiprocessors for most of the time, the others are done with
the small ones by then. They need not be cut for all programs: whole ones, and some short ones for
the end, leave less to be merged. If they are done early, some of those others can have large units,
too: all become a tile shorter, and what is left over goes there.
"""

import math
from typing import NamedTuple

import numpy as np

from mainstem.core.step import Int32s
from mainstem.kernels.attention.cutting import Bools, Cut, Floats, Shape, least_stretch, unit_us
from mainstem.kernels.attention.pacing import EVEN

SOME_ROUNDS = 3  # of units; more are queued in any case, and not cut once more
UNFAIR = 1.2  # who has most, over the mean, if units are assigned
# Some spans are cut once more where there are so many rounds, and units take so long behind large
# ones, or where nothing else would be merged.
TAIL_ROUNDS, TAIL_ROUNDS_BEHIND_LARGE = (1.1, 2.6), (1.4, 2.6)
LONG_BEHIND_LARGE_US, LONG_ENOUGH_TO_MERGE_US = 10.0, 20.0
TAIL = 0.5  # of the spans, if there were one round; less for more of them, by a power
TAIL_POWER, TAIL_POWER_BEHIND_LARGE = -1.5, -2.0
TAIL_PARTS = 3
BESIDE_ROUNDS = 3.0  # of whole units on the multiprocessors without large ones, at least
BESIDE_TIME = 0.95  # of large units, that small ones take there at full speed, at most
BESIDE_TAIL, BESIDE_TAIL_PARTS = 0.125, 4


class _Small(NamedTuple):
    """Small spans."""

    us: Floats  # of a unit of each
    units: Floats
    rounds: float
    are_all: bool


def queue_units(cut: Cut, key_tokens: Int32s, shape: Shape) -> Cut:
    """The cut with what is to be queued of it, some spans cut once more."""
    first, heads = cut.num_large_spans, shape.kv_heads // shape.fold
    parts, row_tiles, are_all = cut.parts[first:], cut.row_tiles[first:], not first
    rounds = float(parts @ row_tiles) * heads / shape.num_programs
    if not len(parts) or (are_all and rounds <= 1.0):
        return cut
    queued = cut._replace(queued_share=shape.tiles.queued_share)
    if rounds > SOME_ROUNDS:
        return queued
    keys = np.maximum(key_tokens[cut.spans].astype(np.float64), 1.0)
    if rounds <= 1.0:
        return _beside_large(queued, keys, shape)
    us = unit_us(np.minimum(cut.stretches, keys)[first:], False, shape)
    small = _Small(us, parts * row_tiles * heads, rounds, are_all)
    if are_all and _is_fair(small, shape):
        return cut
    tail = first + _tail(small, cut).nonzero()[0]
    if not len(tail):
        return queued
    stretches = cut.stretches.copy()
    stretches[tail] = _shorter(keys[tail], TAIL_PARTS, least_stretch(shape))
    return _cut_once_more(queued, stretches, keys, shape)


def _cut_once_more(cut: Cut, stretches: Floats, keys: Floats, shape: Shape) -> Cut:
    """Cut anew, unless there would be too many Partials."""
    parts = np.ceil(keys / stretches)
    if shape.max_partials is not None and parts @ cut.rows > shape.max_partials * shape.group:
        return cut
    return cut._replace(stretches=stretches, parts=parts)


def _beside_large(cut: Cut, keys: Floats, shape: Shape) -> Cut:
    """Whole small units for programs that begin at once, if those can do all of them while large
    ones run.
    """
    first = cut.num_large_spans
    shorter = _a_tile_shorter(cut, keys, shape)
    for large in (cut,) if shorter is None else (shorter, cut):
        if not _are_done_beside(large, keys, shape):
            continue
        stretches = large.stretches.copy()
        stretches[first:] = keys[first:]
        tail = first + _every(BESIDE_TAIL, len(keys) - first).nonzero()[0]
        stretches[tail] = _shorter(keys[tail], BESIDE_TAIL_PARTS, least_stretch(shape))
        whole = _cut_once_more(large, stretches, keys, shape)
        if whole is not large:
            return whole._replace(late_programs_claim=False)
    return cut


def _a_tile_shorter(cut: Cut, keys: Floats, shape: Shape) -> Cut | None:
    """Large units a tile shorter, and what is left over on some more multiprocessors, so many of it
    on each that they end no later. None if those that there are do not suffice, or if some have
    several units.
    """
    large, heads = slice(cut.num_large_spans), shape.kv_heads
    if float(cut.parts[large] @ cut.row_tiles[large]) * heads > cut.num_large:
        return None
    tile, stretches = max(shape.tiles.large_k, shape.page_size), cut.stretches.copy()
    stretches[large] = np.maximum(stretches[large] - tile, tile)
    shorter = cut._replace(stretches=stretches, parts=np.ceil(keys / stretches))
    more = (shorter.parts - cut.parts)[large]
    left = float(unit_us(_left(shorter, keys)[large], True, shape).max())
    longest = float(unit_us(stretches[large], True, shape).max())
    units = float(more @ cut.row_tiles[large]) * heads
    num_large = cut.num_large + math.ceil(units / (longest // left))
    if more.max() > 1.0 or num_large >= shape.num_large_programs:
        return None
    return shorter._replace(num_large=num_large)


def _left(cut: Cut, keys: Floats) -> Floats:
    """Keys of each span's last stretch."""
    left: Floats = keys - (cut.parts - 1.0) * cut.stretches
    return left


def _are_done_beside(cut: Cut, keys: Floats, shape: Shape) -> bool:
    """Whether programs that begin at once can do all small units, in some rounds of whole ones,
    while large ones run.
    """
    first = cut.num_large_spans
    early = shape.num_programs * (1.0 - cut.num_large / shape.num_large_programs)
    units = float(cut.row_tiles[first:].sum()) * (shape.kv_heads // shape.fold)
    if units < BESIDE_ROUNDS * early or early < 1.0:
        return False
    last = unit_us(_left(cut, keys)[:first], True, shape)
    us = (cut.parts[:first] - 1.0) * unit_us(cut.stretches[:first], True, shape) + last
    large_us = float(us @ cut.row_tiles[:first]) * shape.kv_heads / cut.num_large
    small_us = float(unit_us(keys[first:], False, shape).max()) * units / early
    return small_us <= BESIDE_TIME * large_us


def _every(share: float, count: int) -> Bools:
    """So many of some, evenly spread."""
    steps = np.floor(np.arange(count + 1) * share)
    is_taken: Bools = steps[1:] > steps[:-1]
    return is_taken


def _is_fair(small: _Small, shape: Shape) -> bool:
    """Whether a few rounds of units, the longest first, leave nobody with much more than others."""
    rounds, programs = math.ceil(small.rounds), shape.num_programs
    us = small.us.repeat(small.units.astype(np.int64))
    us = np.concatenate((np.zeros(rounds * programs - len(us)), np.sort(us)))
    first, *others = us[::-1].reshape(rounds, programs)
    for other in others:
        first = np.sort(first) + other
    return bool(first.max() <= UNFAIR * first.mean())


def _tail(small: _Small, cut: Cut) -> Bools:
    """Which small spans to cut once more, evenly spread over those that are whole."""
    if not small.are_all:
        (least, most), power = TAIL_ROUNDS_BEHIND_LARGE, TAIL_POWER_BEHIND_LARGE
        long_us = LONG_BEHIND_LARGE_US
    else:
        (least, most), power = TAIL_ROUNDS, TAIL_POWER
        long_us = 0.0 if (cut.parts > 1).any() else LONG_ENOUGH_TO_MERGE_US
    mean = float(small.us.sum()) / len(small.us)
    is_even = small.us.max() <= EVEN * mean
    if not (least <= small.rounds <= most and is_even and mean >= long_us):
        return np.zeros(len(small.us), np.bool_)
    share: float = TAIL * small.rounds**power
    is_tail: Bools = _every(share, len(small.us)) & (cut.parts[cut.num_large_spans :] == 1)
    return is_tail


def _shorter(keys: Floats, parts: int, least: int) -> Floats:
    """Stretches of spans in so many parts, or the least ones if those are at most one more."""
    stretches: Floats = np.ceil(keys / (parts * least)) * least
    stretches[keys <= (parts + 1) * least] = least
    return stretches
