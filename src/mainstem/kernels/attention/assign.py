"""Which program computes which unit: longest-processing-time-first, so that all programs end
together. Numpy only.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mainstem.kernels.attention.tuning import Pace, Rules

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

# At least 1/16 of the programs get a unit in a round, since rounds take time. But a tail unit never
# goes to the busiest program, for at most 64 rounds.
LEAST_PLAYERS, LAST_ROUNDS = 16, 64
NO_UNITS: Int64s = np.empty(0, np.int64)
Kind = tuple[Floats, int]  # cost of one unit of each piece, and how many units every piece has


@dataclass(frozen=True, slots=True)
class SmSlots:
    """Slots that may get large units: `taken` of `count`, each of which runs one at a time."""

    taken: int
    count: int  # programs, or multiprocessors (SMs) where large units take them whole
    pace: Pace
    rules: Rules = field(default_factory=Rules)

    def of_large(self, programs: int) -> Int64s:
        """The slots that are taken. Neighbouring multiprocessors share a path to memory, on which
        small units slow down large ones. If unavoidable, slow down as few as possible.
        """
        if self.count < programs and 2 * self.taken > self.count:
            return _all_but(self.count - self.taken, self.count)
        return _spread(self.count)[: self.taken]

    def load_before_small(self, slots: Int64s, load: Floats, programs: int) -> Floats:
        """How long each program waits for large units before its first small unit, in time of small
        units. `slots` have the large units, `load` is their time.

        Where a large unit takes a whole multiprocessor, programs of small units start as large
        units end; the first programs start on multiprocessors without large units.
        """
        before, load = np.zeros(programs), self.pace.beside * (load + self.pace.late_us)
        if self.count == programs:
            before[slots] = load
        else:
            load.sort()
            each = programs // self.count
            before[programs - each * len(load) :] = load.repeat(each)
        return before


def assign_units(
    shares: Int32s, large: Kind, small: Kind, slots: SmSlots, queued_share: float = 0.0
) -> tuple[Int64s, Int64s]:
    """Give each program units of both kinds, so that all end together.

    Returns the order of the large units and that of the small units. Program p has the large units
    from shares[p] to shares[p + 1]; the second half of shares does the same for small units. The
    small units after the last share form the work queue: `queued_share` of each program's time,
    and all units of programs that begin late. A program that has finished claims the next one.
    """
    shares[:] = 0
    programs = len(shares) // 2 - 1
    ends, small_ends = shares[: programs + 1], shares[programs + 1 :]
    load, large_order = np.zeros(programs), NO_UNITS
    cost, units = large
    if len(cost):
        taken = slots.of_large(programs)[: len(cost) * units]  # the others begin at once
        large_load = np.zeros(len(taken))
        large_order = _assign_longest_first(cost, units, ends[: slots.count + 1], large_load, taken)
        ends[slots.count + 1 :] = len(large_order)
        load = slots.load_before_small(taken, large_load, programs)
    cost, units = small
    count = len(cost) * units
    if not count:
        return large_order, NO_UNITS
    mean = float(cost.sum()) / len(cost)
    least, most = cost.item(cost.argmin()), cost.item(cost.argmax())  # faster than min and max
    # In a few rounds without large units, a program with two long units would end last.
    rules = slots.rules
    is_few = programs < count < rules.few_rounds * programs and not len(large_order)
    if most >= rules.even * (least if is_few else mean):
        spread = _spread(programs)
        order = _assign_longest_first(cost, units, small_ends, load[spread], spread)
        if queued_share:
            order = _queue_last(order, cost[order // units], small_ends, load, 1.0 - queued_share)
        return large_order, order
    # Equal units fill the gaps that large ones leave; neighbours share page ids.
    if not queued_share:
        small_ends[1:] = _fill(load, mean, count).cumsum()
    elif np.count_nonzero(load) < programs:  # programs that begin late keep none
        counts = _fill(load, mean, count)
        counts = np.maximum(np.floor(counts * (1.0 - queued_share)), np.minimum(counts, 1.0))
        counts[load > 0] = 0.0
        small_ends[1:] = counts.cumsum()
    if queued_share and least < most:  # nearly equal: the shortest last
        return large_order, (-cost.repeat(units)).argsort(kind="stable")
    return large_order, np.arange(count)


def _queue_last(order: Int64s, cost: Floats, shares: Int32s, before: Floats, kept: float) -> Int64s:
    """Put the last units of every program at the end of the order, the longest first.

    A program that begins at once keeps its first unit, and `kept` of its time. One that begins late
    keeps its first unit only if that takes longer than the time `before` it: two such units must
    not run on one multiprocessor.
    """
    counts = shares[1:] - shares[:-1]
    ends = np.concatenate((np.zeros(1), cost.cumsum()))
    begin, end = ends[shares[:-1]], ends[shares[1:]]
    most = np.where(before == 0, kept * (end - begin), 0.0)
    is_kept = ends[1:] - begin.repeat(counts) <= most.repeat(counts)
    busy = counts.nonzero()[0]
    first = shares[busy]
    is_kept[first] |= cost[first] > before[busy]
    stay, queued = is_kept.nonzero()[0], (~is_kept).nonzero()[0]
    shares[1:] = stay.searchsorted(shares[1:])
    by_cost = (-cost[queued]).argsort(kind="stable")
    return np.concatenate((order[stay], order[queued[by_cost]]))


def _assign_longest_first(
    cost: Floats, units: int, shares: Int32s, load: Floats, slots: Int64s
) -> Int64s:
    """Assign units to the programs `slots`, the longest first. Returns the order of the units, and
    adds to `load`.
    """
    if not np.count_nonzero(cost != cost[0]) and not np.count_nonzero(load):
        order = np.arange(len(cost) * units)  # round-robin is even
        turns: Int64s = order - order // len(slots) * len(slots)  # takes half the time of %
        load += np.bincount(turns, weights=cost.repeat(units), minlength=len(slots))
    else:
        by_cost = (-cost).argsort(kind="stable")
        order = (by_cost[:, None] * units + np.arange(units)).ravel()
        turns = _turns(cost[by_cost].repeat(units), load)
    program = slots[turns]
    shares[1:] = np.bincount(program, minlength=len(shares) - 1).cumsum()
    return order[program.argsort(kind="stable")]


def _turns(costs: Floats, load: Floats) -> Int64s:
    """The program of each unit. In each round the longest units left go to the least loaded
    programs; a program that has more than the least loaded one will have sits out. Adds to `load`.

    Ties go to the first programs, so these get more if a round does not reach all.
    """
    program = np.empty(len(costs), np.int64)
    done = 0
    while done < len(costs):
        slots = load.argsort(kind="stable")
        levels = load[slots]
        players = int(levels.searchsorted(levels[0] + costs[done], side="right"))
        least = len(load) // LEAST_PLAYERS
        if players < least:
            room = int(levels.searchsorted(levels[-1] - costs[done], side="right"))
            players = max(players, min(least, max(room, (len(costs) - done) // LAST_ROUNDS)))
        round_costs = costs[done : done + players]
        slots = slots[: len(round_costs)]
        program[done : done + len(slots)] = slots
        load[slots] += round_costs
        done += len(slots)
    return program


@cache
def _all_but(free: int, count: int) -> Int64s:
    """All slots but `free` ones, the last first. Free slots are pairs of neighbours. The pairs are
    far apart, since each part of the card has its own path to memory.
    """
    pairs = (free + 1) // 2
    first = np.arange(pairs) * count // pairs // 2 * 2 if pairs else NO_UNITS
    stay_free = np.stack((first, first + 1), axis=1).ravel()[:free]
    return np.setdiff1d(np.arange(count), stay_free)[::-1]


@cache
def _spread(programs: int) -> Int64s:
    """Every second program, then the others: neighbours share a multiprocessor, or its path to
    memory.
    """
    return np.concatenate((np.arange(0, programs, 2), np.arange(1, programs, 2)))


def _fill(load: Floats, size: float, count: int) -> Floats:
    """How many of `count` equal units each program takes, so that the largest load is smallest."""
    if not load.any():
        each, more = divmod(count, len(load))
        room = np.full(len(load), float(each))
        room[:more] += 1.0
        return room
    # For every k, the level to which the k least loaded programs fill up. It is the right one where
    # the next program is above it.
    emptiest = np.sort(load, kind="stable")
    levels = (emptiest.cumsum() + size * count) / np.arange(1, len(load) + 1)
    level = float(levels[np.count_nonzero(levels[:-1] > emptiest[1:])])
    room = np.maximum((level - load) // size, 0.0)
    missing = count - int(room.sum())
    while missing > 0:
        taking = (load + room * size).argsort(kind="stable")[:missing]
        room[taking] += 1.0
        missing -= len(taking)
    while missing < 0:  # by rounding; only programs with units can give one back
        giving = room.nonzero()[0]
        fullest = giving[(-load[giving] - room[giving] * size).argsort(kind="stable")[:-missing]]
        room[fullest] -= 1.0
        missing += len(fullest)
    return room
