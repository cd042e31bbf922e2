"""Who computes which unit: units of both kinds, shared out so that all programs end together.
Numpy only.
"""

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_PLAYERS = 16  # at least one in so many programs gets a unit in a round: rounds take time
Kind = tuple[Floats, int]  # cost of one unit of each piece, and how many units every piece has


def share_out(
    shares: Int32s, large: Kind, small: Kind, num_large: int, late: float = 0.0
) -> tuple[Int64s, Int64s]:
    """Give each program units of both kinds, so that all have the same to do; large ones only to
    the first `num_large`.

    Where these are fewer than all, they run ahead on a multiprocessor each, and programs of small
    units begin as these end, so much `late`. Returns the order of the units; program p has those
    from shares[p] to shares[p + 1], small ones likewise.
    """
    shares[:] = 0
    ends, small_ends = shares.reshape(2, -1)
    programs = len(ends) - 1
    load = np.zeros(num_large)
    large_order = _deal(*large, ends[: num_large + 1], load)
    ends[num_large + 1 :] = len(large_order)
    if num_large < programs:
        load = np.sort(np.where(load > 0, load + late, 0.0))
        load = np.repeat(load, programs // num_large)
    cost, units = small
    count = len(cost) * units
    is_even = count and cost.max() < 1.2 * cost.mean()
    if not is_even:
        return large_order, _deal(cost, units, small_ends, load)
    # Equal units fill up what the large ones leave open; neighbours share page ids.
    np.cumsum(_fill(load, float(cost.mean()), count), out=small_ends[1:])
    return large_order, np.arange(count)


def _deal(cost: Floats, units: int, shares: Int32s, load: Floats) -> Int64s:
    """Give out units, the longest first; adds to the programs' load."""
    programs = len(load)
    if not len(cost):
        return np.empty(0, np.int64)
    by_cost = np.argsort(-cost, kind="stable")
    costs = np.repeat(cost[by_cost], units)
    order = (by_cost[:, None] * units + np.arange(units)).ravel()
    program = _turns(costs, load)
    load += np.bincount(program, weights=costs, minlength=programs)
    np.cumsum(np.bincount(program, minlength=programs), out=shares[1:])
    return order[np.argsort(program, kind="stable")]


def _turns(costs: Floats, load: Floats) -> Int64s:
    """Who gets which unit: in rounds, the longest of what is left to the emptiest. Who has more
    than the emptiest will have sits out.

    Equally empty ones are spread over the card, where a round does not reach all.
    """
    load, spread = load.copy(), _spread(len(load))
    program = np.empty(len(costs), np.int64)
    done = 0
    while done < len(costs):
        seats = spread[np.argsort(load[spread], kind="stable")]
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
