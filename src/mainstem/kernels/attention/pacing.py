"""How long a step would take, by a model of the card.

Large units run first, on some multiprocessors. Small units begin at once on all others, and a
little after the large ones on these. While both kinds run, they compete for memory:

    some multiprocessors | large units | late | small units |
    all others           | small units                      |

Times of units are at full speed, with memory to themselves. docs/log/kernels.md says how the
constants were found.
"""

import math
from typing import NamedTuple

from mainstem.kernels.attention.tuning import Pace, Rules


class Work(NamedTuple):
    """All units of one kind."""

    units: float
    us: float  # of all units, one after the other
    longest_us: float
    last_us: float  # end of the last unit, if there were no other kind
    keys: float  # x KV heads, read from memory
    rows: float  # x heads to be merged, at most


class Card(NamedTuple):
    """What runs units: a multiprocessor has `per_sm` programs of small units, or one of large."""

    programs: int
    per_sm: int
    pace: Pace
    rules: Rules


def step_us(large: Work, small: Work, sms: int, card: Card) -> float:
    """When all is merged, up to a constant, if large units run on `sms` multiprocessors."""
    programs, per_sm, pace, rules = card
    large_units, large_us, _, last_us, large_keys, large_rows = large
    merge_us = pace.merge_us * (large_rows + small.rows)
    if not large_units:
        return _small_end(small, card) + merge_us if small.units else merge_us
    early, reads = programs - per_sm * sms, pace.reads
    large_us /= sms
    large_wish = large_keys / large_us  # keys a microsecond
    if not small.units:
        return last_us * max(large_wish / reads, 1.0) + merge_us + pace.launch_us
    small_wish = min(early, small.units) * (small.keys / small.us)
    lack = max((large_wish + small_wish) / reads, 1.0)
    if not small_wish:
        slower, beside = lack, 1.0
    else:  # large units prefetch further ahead, so they are delayed less
        slower = 1.0 + pace.yields * (lack - 1.0)
        left = (reads - large_wish / slower) / small_wish
        beside = min(max(left, rules.least_speed / lack), 1.0)
    small_end = _late_end(small, large_us * slower, early, beside, card)
    return max(last_us * slower, small_end) + merge_us + pace.launch_us


def least_us(large: Work, small: Work, card: Card) -> float:
    """A lower bound of `step_us` that is quick to compute."""
    merge_us = card.pace.merge_us * (large.rows + small.rows)
    return large.last_us + merge_us + (card.pace.launch_us if large.units else 0.0)


def _small_end(small: Work, card: Card) -> float:
    """When the last small unit ends, if there are no large ones."""
    busy, wish = min(card.programs, small.units), small.keys / small.us
    speed = min(card.pace.reads / (busy * wish), 1.0)
    return max(small.us / busy / speed, small.last_us / math.sqrt(speed))


def _late_end(small: Work, large_us: float, early: int, beside: float, card: Card) -> float:
    """When the last small unit ends, if large ones end at `large_us`. `early` programs begin at
    once and run at the speed `beside` until then.

    This runs for every way to cut a step, so it uses `if`, which is faster than `min` and `max`. Of
    several long units it considers one.
    """
    units, us, longest_us, _, keys, _ = small
    programs, _, pace, rules = card
    late, late_us, reads = programs - early, pace.late_us, pace.reads
    wish, size = keys / us, us / units
    done = beside * large_us  # by a program that began at once
    wished = (units if units < programs else programs) * wish
    speed = reads / wished if reads < wished else 1.0
    # As if units could be divided, among all programs or among those that begin at once.
    left_us = us - early * done
    rest = left_us / programs if left_us > 0.0 else 0.0
    level = large_us + late_us * late / programs + rest / speed
    if early:
        own_us = us / early
        if own_us <= done:
            own_end = own_us / beside
        else:
            wished = (units if units < early else early) * wish
            own_us -= done
            own_end = large_us + (own_us / (reads / wished) if reads < wished else own_us)
        level = own_end if own_end < level else level
    # Whole units, at a speed between that of all units together and that of the last one.
    mean_speed = math.sqrt(speed)
    late_begin = large_us + late_us
    if longest_us > rules.even * size:
        longest_begin = 0.0 if early else late_begin
        return max(level + rules.uneven * longest_us, longest_begin + longest_us / mean_speed)
    if not early:
        return max(late_begin + math.ceil(units / late) * size / mean_speed, level)
    # The late programs take some units each, the early ones the rest.
    late_rest = rest - late_us * speed
    some = int(late_rest / size) if late_rest > 0.0 else 0
    best = math.inf
    for each in range(some, some + 3):
        late_end = late_begin + each * size / mean_speed if each else 0.0
        own_us = math.ceil((units - late * each) / early) * size
        own_end = own_us / beside if own_us <= done else large_us + (own_us - done) / mean_speed
        if late_end >= own_end:  # with more units it would only end later
            best = late_end if late_end < best else best
            break
        best = own_end
    return best if best > level else level
