"""The work queue: small units that no program is assigned. A program that has finished its share
claims the next one. Numpy only.

Programs do not end together: large units before them take longer on some multiprocessors, memory is
faster for some, and units differ. So the last units of every program are queued, and all units of
programs that begin after large units. Claiming a unit takes time, so programs whose shares are even
keep them.

A third of all programs keeps memory busy, so a queue of long units ends well unless few are left
for its last round. Then some spans are cut once more, and the last units claimed are short.

If large units hold most multiprocessors most of the time, the other multiprocessors can finish all
small units meanwhile. Small spans are then not cut for all programs: whole spans, and some short
units for the end, leave less to merge. If there is time left over, large units become a tile
shorter, and their rests go to some of the other multiprocessors.
"""

import math
from typing import NamedTuple

import numpy as np

from mainstem.core.step import Int32s
from mainstem.kernels.attention.cutting import Bools, Cut, Floats, Shape, least_stretch, unit_us
from mainstem.kernels.attention.tuning import Rules


class _Small(NamedTuple):
    """Small spans."""

    us: Floats  # of a unit of each
    units: Floats
    rounds: float
    are_all: bool


def queue_units(cut: Cut, key_tokens: Int32s, shape: Shape) -> Cut:
    """The cut with its queued share set, and some spans cut once more."""
    first, heads, rules = cut.num_large_spans, shape.kv_heads // shape.fold, shape.tiles.rules
    parts, row_tiles, are_all = cut.parts[first:], cut.row_tiles[first:], not first
    rounds = float(parts @ row_tiles) * heads / shape.num_programs
    if not len(parts) or (are_all and rounds <= 1.0):
        return cut
    queued = cut._replace(queued_share=shape.tiles.queued_share)
    if rounds > rules.queued_rounds:
        return queued
    keys = np.maximum(key_tokens[cut.spans].astype(np.float64), 1.0)
    if rounds <= 1.0:
        return _beside_large(queued, keys, shape)
    us = unit_us(np.minimum(cut.stretches, keys)[first:], False, shape)
    small = _Small(us, parts * row_tiles * heads, rounds, are_all)
    if are_all and _is_fair(small, shape):
        return cut
    tail = first + _tail(small, cut, rules).nonzero()[0]
    if not len(tail):
        return queued
    stretches = cut.stretches.copy()
    stretches[tail] = _shorter(keys[tail], rules.tail_parts, least_stretch(shape))
    return _cut_once_more(queued, stretches, keys, shape)


def _cut_once_more(cut: Cut, stretches: Floats, keys: Floats, shape: Shape) -> Cut:
    """Cut anew, unless there would be too many Partials."""
    parts = np.ceil(keys / stretches)
    if shape.max_partials is not None and parts @ cut.rows > shape.max_partials * shape.group:
        return cut
    return cut._replace(stretches=stretches, parts=parts)


def _beside_large(cut: Cut, keys: Floats, shape: Shape) -> Cut:
    """Whole small units for programs that begin at once, if these programs can finish all small
    units while large ones run.
    """
    first, rules = cut.num_large_spans, shape.tiles.rules
    shorter = _a_tile_shorter(cut, keys, shape)
    for large in (cut,) if shorter is None else (shorter, cut):
        if not _are_done_beside(large, keys, shape):
            continue
        stretches = large.stretches.copy()
        stretches[first:] = keys[first:]
        tail = first + _every(rules.beside_tail, len(keys) - first).nonzero()[0]
        stretches[tail] = _shorter(keys[tail], rules.beside_tail_parts, least_stretch(shape))
        whole = _cut_once_more(large, stretches, keys, shape)
        if whole is not large:
            return whole._replace(late_programs_claim=False)
    return cut


def _a_tile_shorter(cut: Cut, keys: Floats, shape: Shape) -> Cut | None:
    """Large units a tile shorter, with their rests on more multiprocessors. Each of these gets as
    many rests as end no later than the large units. None if there are too few multiprocessors, or
    if some have several units already.
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
    """Whether programs that begin at once can finish all small units, uncut, while large ones run;
    false for fewer rounds than `beside_rounds`.
    """
    first, rules = cut.num_large_spans, shape.tiles.rules
    early = shape.num_programs * (1.0 - cut.num_large / shape.num_large_programs)
    units = float(cut.row_tiles[first:].sum()) * (shape.kv_heads // shape.fold)
    if units < rules.beside_rounds * early or early < 1.0:
        return False
    last = unit_us(_left(cut, keys)[:first], True, shape)
    us = (cut.parts[:first] - 1.0) * unit_us(cut.stretches[:first], True, shape) + last
    large_us = float(us @ cut.row_tiles[:first]) * shape.kv_heads / cut.num_large
    small_us = float(unit_us(keys[first:], False, shape).max()) * units / early
    return small_us <= rules.beside_time * large_us


def _every(share: float, count: int) -> Bools:
    """A share of `count` items, evenly spread."""
    steps = np.floor(np.arange(count + 1) * share)
    is_taken: Bools = steps[1:] > steps[:-1]
    return is_taken


def _is_fair(small: _Small, shape: Shape) -> bool:
    """Whether a few rounds of units, the longest first, give all programs nearly equal loads."""
    rounds, programs = math.ceil(small.rounds), shape.num_programs
    us = small.us.repeat(small.units.astype(np.int64))
    us = np.concatenate((np.zeros(rounds * programs - len(us)), np.sort(us)))
    first, *others = us[::-1].reshape(rounds, programs)
    for other in others:
        first = np.sort(first) + other
    return bool(first.max() <= shape.tiles.rules.unfair * first.mean())


def _tail(small: _Small, cut: Cut, rules: Rules) -> Bools:
    """Which small spans to cut once more: evenly spread, uncut ones only."""
    if not small.are_all:
        (least, most), power = rules.late_tail_rounds, rules.late_tail_power
        long_us = rules.late_tail_us
    else:
        (least, most), power = rules.tail_rounds, rules.tail_power
        long_us = 0.0 if (cut.parts > 1).any() else rules.tail_us
    mean = float(small.us.sum()) / len(small.us)
    is_even = small.us.max() <= rules.even * mean
    if not (least <= small.rounds <= most and is_even and mean >= long_us):
        return np.zeros(len(small.us), np.bool_)
    share: float = rules.tail * small.rounds**power
    is_tail: Bools = _every(share, len(small.us)) & (cut.parts[cut.num_large_spans :] == 1)
    return is_tail


def _shorter(keys: Floats, parts: int, least: int) -> Floats:
    """Stretches that cut spans into `parts`; the least stretch if that makes at most one more."""
    stretches: Floats = np.ceil(keys / (parts * least)) * least
    stretches[keys <= (parts + 1) * least] = least
    return stretches
