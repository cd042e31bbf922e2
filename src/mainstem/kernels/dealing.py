"""Who computes which unit: units of both kinds, shared out so that all programs end together.
Numpy only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.kernels.pacing import EVEN
from mainstem.kernels.tuning import Pace

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

FEW_ROUNDS = 4  # of units, up to which it matters who gets a short one
LEAST_PLAYERS = 16  # at least one in so many programs gets a unit in a round: rounds take time
Kind = tuple[Floats, int]  # cost of one unit of each piece, and how many units every piece has


@dataclass(frozen=True, slots=True)
class Seats:
    """Who may get large units: some of those who can run one at a time."""

    taken: int
    count: int  # programs, or multiprocessors where large units take them whole
    pace: Pace

    def open_for_small(self, load: Floats, programs: int) -> Floats:
        """What programs of small units have to do before, in time of small units.

        Where large units take multiprocessors whole, programs of small ones come in as these end:
        the first ones where there are none.
        """
        load = np.where(load > 0, self.pace.beside * (load + self.pace.late_us), 0.0)
        if self.count < programs:
            load = np.repeat(np.sort(load), programs // self.count)
        return load


def share_out(
    shares: Int32s, large: Kind, small: Kind, seats: Seats, pooled: float = 0.0
) -> tuple[Int64s, Int64s]:
    """Give each program units of both kinds, so that all end together.

    Returns the order of the units; program p has those from shares[p] to shares[p + 1], small ones
    likewise. At the end of the small ones are those of the pool, `pooled` of the time of each
    program and all of those that begin late: who ends first takes the next of them.
    """
    shares[:] = 0
    ends, small_ends = shares.reshape(2, -1)
    load = np.zeros(seats.count)
    large_order = _deal(*large, ends[: seats.count + 1], load, _spread(seats.count)[: seats.taken])
    ends[seats.count + 1 :] = len(large_order)
    load = seats.open_for_small(load, len(ends) - 1)
    cost, units = small
    count = len(cost) * units
    if not _are_even(cost, count, load):
        before = load.copy()
        order = _deal(cost, units, small_ends, load, _spread(len(load)))
        if pooled:
            order = _pool(order, cost[order // units], small_ends, before, 1.0 - pooled)
        return large_order, order
    # Equal units fill up what the large ones leave open; neighbours share page ids.
    counts = _fill(load, float(cost.mean()), count)
    if pooled:
        kept = np.maximum(np.floor(counts * (1.0 - pooled)), np.minimum(counts, 1.0))
        counts = np.where(load > 0, 0.0, kept)
    np.cumsum(counts, out=small_ends[1:])
    return large_order, np.arange(count)


def _pool(order: Int64s, cost: Floats, shares: Int32s, before: Floats, kept: float) -> Int64s:
    """Put the last units of every program at the end of the order, the longest first.

    Who begins at once keeps `kept` of its time and its first unit. Who begins late keeps the first
    one only if that takes longer than what is `before`: two of those must not meet on a
    multiprocessor.
    """
    counts = np.diff(shares)
    program = np.repeat(np.arange(len(counts)), counts)
    ends = np.concatenate((np.zeros(1), np.cumsum(cost)))
    begin, end = ends[shares[:-1]][program], ends[shares[1:]][program]
    is_first = np.arange(len(order)) == shares[program]
    is_early = before[program] == 0
    is_kept = (ends[1:] - begin <= kept * (end - begin)) & is_early
    is_kept |= is_first & (is_early | (cost > before[program]))
    shares[1:] = np.cumsum(np.bincount(program[is_kept], minlength=len(counts)))
    pool = np.flatnonzero(~is_kept)
    pool = pool[np.argsort(-cost[pool], kind="stable")]
    return order[np.concatenate((np.flatnonzero(is_kept), pool))]


def _are_even(cost: Floats, count: int, load: Floats) -> bool:
    """Whether small units may be given out in their order, whatever they cost. Of a few rounds by
    themselves all must be alike: a program with two long ones would end last.
    """
    if not count:
        return False
    is_few = len(load) < count < FEW_ROUNDS * len(load) and not load.any()
    return bool(cost.max() < EVEN * (cost.min() if is_few else cost.mean()))


def _deal(cost: Floats, units: int, shares: Int32s, load: Floats, seats: Int64s) -> Int64s:
    """Give out units to some programs, the longest first; adds to their load."""
    programs = len(load)
    if not len(cost):
        return np.empty(0, np.int64)
    by_cost = np.argsort(-cost, kind="stable")
    costs = np.repeat(cost[by_cost], units)
    order = (by_cost[:, None] * units + np.arange(units)).ravel()
    program = seats[_turns(costs, load[seats])]
    load += np.bincount(program, weights=costs, minlength=programs)
    np.cumsum(np.bincount(program, minlength=programs), out=shares[1:])
    return order[np.argsort(program, kind="stable")]


def _turns(costs: Floats, load: Floats) -> Int64s:
    """Who gets which unit: in rounds, the longest of what is left to the emptiest. Who has more
    than the emptiest will have sits out.

    Among equally empty ones, the first: where a round does not reach all, it is they who get more.
    """
    load = load.copy()
    program = np.empty(len(costs), np.int64)
    done = 0
    while done < len(costs):
        seats = np.argsort(load, kind="stable")
        levels = load[seats]
        players = int(np.searchsorted(levels, levels[0] + costs[done], side="right"))
        round_costs = costs[done : done + max(players, len(load) // LEAST_PLAYERS)]
        seats = seats[: len(round_costs)]
        program[done : done + len(seats)] = seats
        load[seats] += round_costs
        done += len(seats)
    return program


def _spread(programs: int) -> Int64s:
    """Programs in an order that visits every second one first: neighbours share an SM."""
    return np.concatenate((np.arange(0, programs, 2), np.arange(1, programs, 2)))


def _fill(load: Floats, size: float, count: int) -> Floats:
    """How many of `count` equal units each program takes, so that the fullest is least full."""
    # The level to which the emptiest k fill up, for every k; it holds where the next is fuller.
    emptiest = np.sort(load)
    levels = (np.cumsum(emptiest) + size * count) / np.arange(1, len(load) + 1)
    level = float(levels[np.argmax(levels <= np.append(emptiest[1:], np.inf))])
    room = np.maximum((level - load) // size, 0.0)
    missing = count - int(room.sum())
    while missing > 0:
        taking = np.argsort(load + room * size, kind="stable")[:missing]
        room[taking] += 1.0
        missing -= len(taking)
    while missing < 0:  # by rounding; only who has some can give one back
        giving = np.flatnonzero(room)
        fullest = giving[np.argsort(-load[giving] - room[giving] * size, kind="stable")[:-missing]]
        room[fullest] -= 1.0
        missing += len(fullest)
    return room
