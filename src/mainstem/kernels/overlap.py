"""How long a step takes on Hopper, where large and small units run beside each other. Numpy only.

Large units are bound by arithmetic and take multiprocessors whole; small ones are bound by memory,
which fewer of them can fill than there are. So the question is on how many multiprocessors large
units go: all of them soon, and then small ones everywhere, or few of them for long, with small ones
on the others meanwhile. Times are those of `tuning.py`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

SLOWED = 0.6  # how much longer large units take while small ones have all of the memory
STARTED = 200.0  # what the first large unit of a program costs beside what every one does
MOST_ROUNDS = 8  # units one after the other that are looked at, from the fewest possible on


@dataclass(frozen=True, slots=True)
class Costs:
    """Of the units of a kind, in each of some cases."""

    units: Int64s
    total: Floats
    longest: Floats


@dataclass(frozen=True, slots=True)
class Sms:
    """Multiprocessors that take large units whole, and then are several programs of small ones.

    While some are at large units, small ones on the others have the memory to themselves, but for
    what large ones read, and slow these down.
    """

    count: int
    per_sm: int
    headroom: float  # how many times faster than all at once small units go, at most
    reads: float = 1.0  # part of what large units read that comes from memory, not from L2

    def rate(self, busy: Floats, reads: Floats | float) -> Floats:
        """Of a program of small units, while so many multiprocessors are busy with large ones."""
        left = np.maximum(self.count - reads * busy, 1.0)
        return np.minimum(self.headroom, left / np.maximum(self.count - busy, 1.0))

    def spread_large(self, large: Costs, small: Costs) -> tuple[Floats, Int64s]:
        """When the last program ends, and how many should have large units for it: in each of some
        cases.
        """
        programs = self.count * self.per_sm
        units, cost = large.units[:, None], large.total[:, None]
        small_units, small_cost = small.units[:, None], small.total[:, None]
        # Units one after the other on a multiprocessor, and on how many then.
        rounds = np.ceil(np.maximum(units, 1) / self.count) + np.arange(MOST_ROUNDS)
        busy = np.ceil(np.maximum(units, 1) / rounds)
        free = self.per_sm * (self.count - busy)  # programs of small units, meanwhile
        work = np.maximum(rounds * (cost / np.maximum(units, 1)), large.longest[:, None])
        alone_end = np.where(units > 0, STARTED + work, 1e-9)
        rate = self.rate(busy, self.reads * work / alone_end)  # large ones do not read all the time
        slowed = 1.0 + SLOWED * rate * free / programs
        small_end = small_cost / np.maximum(rate * free, 1e-9)  # if large units never end
        large_end = np.minimum(alone_end * slowed, alone_end + small_end * (1.0 - 1.0 / slowed))
        end = large_end + np.maximum(small_cost - rate * free * large_end, 0.0) / programs
        # Small units are whole: the last ones take as long as one does.
        size = small_cost / np.maximum(small_units, 1) + 1e-9
        done = np.floor(rate * large_end / size + 1e-6)
        left = small_units - done * free
        last = large_end + size / self.headroom
        last = np.where(left <= free, np.minimum(last, (done + 1) * size / rate), last)
        end = np.where(left > 0, np.maximum(end, last), end)
        best = np.argmin(end, axis=1)
        case = np.arange(len(best))
        most = np.where(best == 0, self.count, busy[case, best])  # unequal units want all
        return end[case, best], most.astype(np.int64)

    def read_by(self, load: Floats) -> Floats:
        """What a program of small units would have read when each multiprocessor comes to its own,
        the first one first; `load` is what each has of large units.
        """
        load = np.sort(np.where(load > 0, load + STARTED, 0.0))
        rate = self.rate(self.count - np.arange(1.0, self.count), self.reads)
        return np.append(0.0, np.cumsum(np.diff(load) * rate))
