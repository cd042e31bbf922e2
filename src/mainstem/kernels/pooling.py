"""Which small units are not shared out beforehand, but taken by who ends first. Numpy only.

Programs end when they do: large units ahead of them take longer on one multiprocessor than on
another, memory serves some better, and units are not even. So the last units of every program, and
all of those that come behind large ones, are a pool. Asking for the next unit takes time, so
programs that can be given an even share keep it.

Memory is kept busy by a third of all programs, so a pool of long units ends well unless few are
left for its last round. Then some spans are cut once more: who ends first takes a short unit.
"""

import math
from typing import NamedTuple

import numpy as np

from mainstem.kernels.cutting import (
    Bools,
    Cut,
    Floats,
    Int64s,
    Shape,
    ceil_div,
    least_stretch,
    unit_us,
)
from mainstem.kernels.pacing import EVEN

SOME_ROUNDS = 3  # of units; more are pooled in any case, and not cut once more
UNFAIR = 1.2  # who has most, over the mean, if units are shared out
# Some spans are cut once more where there are so many rounds, and units take so long behind large
# ones, or where nothing else would be merged.
TAIL_ROUNDS, TAIL_ROUNDS_BEHIND_LARGE = (1.1, 2.6), (1.4, 2.6)
LONG_BEHIND_LARGE_US, LONG_ENOUGH_TO_MERGE_US = 10.0, 20.0
TAIL = 0.5  # of the spans, if there were one round; less for more of them, by a power
TAIL_POWER, TAIL_POWER_BEHIND_LARGE = -1.5, -2.0
TAIL_PARTS = 3


class _Small(NamedTuple):
    """Small spans."""

    spans: Int64s  # which they are
    us: Floats  # of a unit of each
    units: Int64s
    rounds: float
    are_all: bool


def pool(cut: Cut, keys: Int64s, shape: Shape) -> Cut:
    """The cut with what is to be pooled of it, some spans cut once more."""
    spans = (~cut.is_large).nonzero()[0]
    units = (cut.parts * cut.row_tiles)[spans] * (shape.kv_heads // shape.fold)
    rounds, are_all = float(units.sum()) / shape.num_programs, len(spans) == len(keys)
    if not len(spans) or (are_all and rounds <= 1.0):
        return cut
    pooled = cut._replace(pooled=shape.tiles.pooled)
    if not 1.0 < rounds <= SOME_ROUNDS:
        return pooled
    us = unit_us(np.minimum(cut.stretches, keys)[spans], False, shape)
    small = _Small(spans, us, units, rounds, are_all)
    if are_all and _is_fair(small, shape):
        return cut
    tail = _tail(small, cut)
    if not len(tail):
        return pooled
    stretches = cut.stretches.copy()
    stretches[tail] = _shorter(keys[tail], least_stretch(shape))
    parts = np.maximum(ceil_div(keys, stretches), 1)
    if shape.max_partials is not None and parts @ cut.queries > shape.max_partials:
        return pooled
    return pooled._replace(stretches=stretches, parts=parts)


def _is_fair(small: _Small, shape: Shape) -> bool:
    """Whether a few rounds of units, the longest first, leave nobody with much more than others."""
    rounds, programs = math.ceil(small.rounds), shape.num_programs
    us = small.us.repeat(small.units)
    us = np.concatenate((np.zeros(rounds * programs - len(us)), np.sort(us)))
    first, *others = us[::-1].reshape(rounds, programs)
    for other in others:
        first = np.sort(first) + other
    return bool(first.max() <= UNFAIR * first.mean())


def _tail(small: _Small, cut: Cut) -> Int64s:
    """Spans to cut once more, evenly spread over those that are whole."""
    if not small.are_all:
        (least, most), power = TAIL_ROUNDS_BEHIND_LARGE, TAIL_POWER_BEHIND_LARGE
        long_us = LONG_BEHIND_LARGE_US
    else:
        (least, most), power = TAIL_ROUNDS, TAIL_POWER
        long_us = 0.0 if (cut.parts > 1).any() else LONG_ENOUGH_TO_MERGE_US
    mean = float(small.us.sum()) / len(small.us)
    is_even = small.us.max() <= EVEN * mean
    if not (least <= small.rounds <= most and is_even and mean >= long_us):
        return small.spans[:0]
    steps = np.floor(np.arange(len(small.spans) + 1) * (TAIL * small.rounds**power))
    is_tail: Bools = (steps[1:] > steps[:-1]) & (cut.parts[small.spans] == 1)
    return small.spans[is_tail]


def _shorter(keys: Int64s, least: int) -> Int64s:
    """Stretches of a third of a span, or the least ones if those are no more than four."""
    third = ceil_div(keys, TAIL_PARTS * least) * least
    return np.where(keys <= (TAIL_PARTS + 1) * least, least, third)
