"""Units -> programs: longest-processing-time-first, so that all programs end together. In numpy.

In practice programs end at different times: large units delay some, and memory is faster for some
multiprocessors. So the shortest small units are not assigned but queued. A program that has ended
its share claims the next queued unit. An example with four programs and queued_share 0.25:

    small units of 8, 7, 6, 5, 4, 3, 2 and 1 us: 36 us, of which at most 27 are assigned
    programs    8 | 7 | 6 | 5     queue  4 3 2 1

Programs that begin after large units have no share; they only claim.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.kernels.attention.shape import Floats, Shape

Int64s = NDArray[np.int64]

LEAST_PLAYERS = 16  # at least 1/16 of the programs get a unit in a round, since rounds take time


class Shares(NamedTuple):
    """The units of one kind, by program. The number of a unit is piece * (units of a piece) + (its
    place in the piece)."""

    order: Int64s  # program p has order[ends[p] : ends[p + 1]]
    ends: Int64s  # [programs + 1]
    queued: Int64s


def assign_units(large: Floats, small: Floats, sms: int, shape: Shape) -> tuple[Shares, Shares]:
    """Assign large units to at most `sms` slots (multiprocessors, or programs if one kernel
    computes both kinds), and small units to programs. `large` and `small` have for each piece the
    microseconds of one of its units.
    """
    order, us = _longest_first(large, shape.large.units)
    slots = large_slots(min(sms, len(order)), shape.large.slots, shape.tiles.is_split)
    load = np.zeros(len(slots))
    of_large = _shares(order, _turns(us, slots, load), shape)
    before = _before_small(slots, load, shape)
    order, us = _longest_first(small, shape.small.units)
    free, kept = _spread(shape.num_programs), len(order)
    if shape.tiles.queued_share and kept:
        free = free[before[free] == 0.0]
        # The time at which all programs would end if units could be divided. `before` must be
        # sorted. It is sorted for split tiles, and only these have a queue.
        end_us = ((before.cumsum() + us.sum()) / np.arange(1, len(before) + 1)).min()
        own_us = (1.0 - shape.tiles.queued_share) * end_us * len(free)
        kept = max(int(us.cumsum().searchsorted(own_us)), min(len(free), kept))
    return of_large, _shares(order, _turns(us[:kept], free, before[free]), shape)


def _longest_first(us: Floats, units: int) -> tuple[Int64s, Floats]:
    """All units, the longest first, and the time of each."""
    if not np.count_nonzero(us[1:] != us[:-1]):
        return np.arange(len(us) * units), us.repeat(units)
    by_us = (-us).argsort(kind="stable")
    order: Int64s = (by_us[:, None] * units + np.arange(units)).ravel()
    return order, us[by_us].repeat(units)


def _turns(us: Floats, slots: Int64s, load: Floats) -> Int64s:
    """Return the slot of each unit, and add its time to `load`. In each round the longest units
    left go to the least loaded slots. A slot skips the round if its load already exceeds that of
    the least loaded slot with its new unit, unless too few would be left (`LEAST_PLAYERS`).
    """
    if len(us) and us[0] == us[-1] and not load.any():  # equal units: slots simply take turns
        rounds, more = divmod(len(us), len(load))
        load += us[0] * rounds
        load[:more] += us[0]
        return slots[None].repeat(rounds + 1, axis=0).ravel()[: len(us)]
    turns, done, least = np.empty(len(us), np.int64), 0, len(load) // LEAST_PLAYERS
    while done < len(us):
        by_load = load.argsort(kind="stable")
        levels = load[by_load]
        players = int(levels.searchsorted(levels[0] + us[done], side="right"))
        round_us = us[done : done + max(players, least)]
        by_load = by_load[: len(round_us)]
        turns[done : done + len(by_load)] = slots[by_load]
        load[by_load] += round_us
        done += len(by_load)
    return turns


def _shares(order: Int64s, program: Int64s, shape: Shape) -> Shares:
    """`program` has the program of each unit of `order`, except the last ones: they are queued."""
    ends = np.zeros(shape.num_programs + 1, np.int64)
    ends[1:] = np.bincount(program, minlength=shape.num_programs).cumsum()
    by_program = program.astype(np.int16).argsort(kind="stable")  # 16 bits: a radix sort
    return Shares(order[by_program], ends, order[len(program) :])


def _before_small(slots: Int64s, load: Floats, shape: Shape) -> Floats:
    """How long each program waits for large units before its first small unit: the time times the
    speed that small units have meanwhile (`Pace.beside`). `slots` have the large units, `load` is
    their time.

    Where a large unit takes a whole multiprocessor, programs of small units start as large units
    end; the first programs start on multiprocessors without large units.
    """
    pace, before = shape.tiles.pace, np.zeros(shape.num_programs)
    load = pace.beside * (load + pace.late_us)
    if shape.tiles.is_split:
        late = np.sort(load).repeat(shape.tiles.programs_per_sm)
        before[len(before) - len(late) :] = late
    else:
        before[slots] = load
    return before


@cache
def large_slots(taken: int, count: int, is_split: bool) -> Int64s:
    """Which of `count` slots get large units. Neighbouring multiprocessors share a path to memory,
    on which small units slow down large ones. If more than half of the slots get large units, the
    others are chosen as pairs of neighbours, so that small units share paths with each other and
    with few large units. The pairs are far apart, since each part of the card has its own path.
    """
    if not is_split or 2 * taken <= count:
        return _spread(count)[:taken]
    pairs = (count - taken + 1) // 2
    first = np.arange(pairs) * count // max(pairs, 1) // 2 * 2
    free = np.stack((first, first + 1), axis=1).ravel()[: count - taken]
    return np.setdiff1d(np.arange(count), free)[::-1]


@cache
def _spread(count: int) -> Int64s:
    """Even numbers, then odd ones: neighbours share a multiprocessor, or a path to memory."""
    return np.concatenate((np.arange(0, count, 2), np.arange(1, count, 2)))
