"""Which small units are not shared out beforehand, but taken by who ends first. Numpy only.

Programs end when they do: large units ahead of them take longer on one multiprocessor than on
another, memory serves some better, and units are not even. So the last units of every program, and
all of those that come behind large ones, are a pool. Asking for the next unit takes time, so
programs that can be given an even share keep it.

Memory is kept busy by a third of all programs, so a pool of long units ends well unless few are
left for its last round. Then some spans are cut once more: who ends first takes a short unit.
"""

from dataclasses import replace
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

FEW_ROUNDS = 3  # of units; more are pooled in any case
UNEVEN = 1.2  # who has most, over the mean, if units are shared out
# Some spans are cut once more where there are so many rounds, and units take so long behind large
# ones, or where nothing else would be merged.
ROUNDS, ROUNDS_BEHIND_LARGE = (1.1, 2.6), (1.4, 2.6)
LONG_BEHIND_LARGE_US, LONG_ENOUGH_TO_MERGE_US = 10.0, 20.0
TAIL = 0.45  # of the spans, if there were one round; less for more of them
TAIL_PARTS = 3


class _Small(NamedTuple):
    """Small spans."""

    spans: Int64s  # which they are
    us: Floats  # of a unit of each
    units: Int64s
    are_all: bool


def pool(cut: Cut, keys: Int64s, shape: Shape) -> Cut:
    """The cut with what is to be pooled of it, some spans cut once more."""
    spans = np.flatnonzero(~cut.is_large)
    units = (cut.parts * cut.row_tiles)[spans] * (shape.kv_heads // shape.fold)
    us = unit_us(np.minimum(cut.stretches, keys)[spans], False, shape)
    small = _Small(spans, us, units, len(spans) == len(keys))
    if not len(spans) or (small.are_all and _are_even(small, shape)):
        return cut
    cut = replace(cut, pooled=shape.tiles.pooled)
    tail = _tail(small, cut, shape)
    stretches = cut.stretches.copy()
    stretches[tail] = _shorter(keys[tail], least_stretch(shape))
    parts = np.maximum(ceil_div(keys, stretches), 1)
    if shape.max_partials is not None and parts @ cut.queries > shape.max_partials:
        return cut
    return replace(cut, stretches=stretches, parts=parts)


def _are_even(small: _Small, shape: Shape) -> bool:
    """Whether a few rounds of units, the longest first, leave nobody with much more than others."""
    count, programs = int(small.units.sum()), shape.num_programs
    rounds = -(-count // programs)
    if rounds <= 1 or rounds > FEW_ROUNDS:
        return rounds <= 1
    us = np.zeros(rounds * programs)
    us[:count] = np.repeat(small.us, small.units)
    first, *others = np.sort(us)[::-1].reshape(rounds, programs)
    for other in others:
        first = np.sort(first) + other
    return bool(first.max() <= UNEVEN * first.mean())


def _tail(small: _Small, cut: Cut, shape: Shape) -> Int64s:
    """Spans to cut once more, evenly spread over those that are whole."""
    rounds = float(small.units.sum()) / shape.num_programs
    if not small.are_all:
        (least, most), long_us = ROUNDS_BEHIND_LARGE, LONG_BEHIND_LARGE_US
    else:
        least, most = ROUNDS
        long_us = 0.0 if (cut.parts > 1).any() else LONG_ENOUGH_TO_MERGE_US
    is_even = small.us.max() <= EVEN * small.us.mean()
    if not (least <= rounds <= most and is_even and small.us.mean() >= long_us):
        return small.spans[:0]
    steps = np.floor(np.arange(len(small.spans) + 1) * (TAIL * rounds**-1.5))
    is_tail: Bools = (np.diff(steps) > 0) & (cut.parts[small.spans] == 1)
    return small.spans[is_tail]


def _shorter(keys: Int64s, least: int) -> Int64s:
    """Stretches of a third of a span, or the least ones if those are no more than four."""
    third = ceil_div(keys, TAIL_PARTS * least) * least
    return np.where(keys <= (TAIL_PARTS + 1) * least, least, third)
