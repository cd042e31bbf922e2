"""How fast a job should start requests whose answers are equally long.

Every step costs a fixed time (reading the weights) beside what its tokens cost, so the best order
of starts is the one that needs the fewest steps. Sequences that start together end together: where
memory holds 800 of 1,000 requests, the other 200 wait for the end of the first 800 and the job
takes two lengths of an answer. With starts apart, the old are about to go while the young are
still small, and all 1,000 run side by side:

    started   |                      ............   as many as a step holds, until all run
              |            .........'
              |   .........'    a few in each step
              +----------------------------------> steps

The schedule is made from its end. A request that starts j steps before the last one ends when
those after it have grown for `output - 1, output - 2, ...` steps; what they all hold then must fit,
and it is best to let as many as possible start as late as possible. Without a limit on a step's
tokens this gives, where the whole job overlaps, (prompt + output) ln(count (prompt + output) /
room) steps from the first start to the last.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

ROUNDS = 3  # decodes take room in steps, and who decodes follows from the schedule
LEAST_PROMPT_SHARE = 1 / 8  # of a step's tokens, whatever decodes


@dataclass(frozen=True, slots=True)
class EqualRequests:
    """Requests of a job that will all be answered with as many tokens."""

    count: int
    prompt_tokens: float  # of each on average: its own, and its part of what it shares
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine has for a job."""

    room_tokens: int  # of K and V
    page_tokens: int
    step_tokens: int


class Pace:
    """Tells how many requests may start before each step.

    It only holds back, and only where memory is what a job waits for; whether a request that may
    start does so is up to the engine.
    """

    def __init__(self, requests: EqualRequests, limits: Limits) -> None:
        self._left: list[float] = []  # [place] not started before that step, from the last one back
        self._is_full: list[bool] = []  # [place] a step holds no more than start there
        held = requests.prompt_tokens + requests.output_tokens + limits.page_tokens
        if held <= limits.room_tokens < requests.count * held:
            starts, self._is_full = latest_starts(requests, limits)
            self._left = list(accumulate(starts))
        self._place = len(self._left)

    def allowance(self, num_left: int) -> int:
        """How many of the `num_left` requests that have not started may start in the next step."""
        # a step in which less started than might have is tried again
        behind = bisect_left(self._left, num_left - 0.5)
        self._place = min(max(self._place - 1, behind), len(self._left) - 1)
        if self._place <= 0 or self._is_full[self._place]:
            return num_left
        return max(0, num_left - round(self._left[self._place - 1]))


def latest_starts(requests: EqualRequests, limits: Limits) -> tuple[list[float], list[bool]]:
    """How many start in each step, from the last step with a start back to the first; and where
    it is a step's tokens that allow no more.
    """
    decoding: list[float] = []
    for _ in range(ROUNDS):
        starts, is_full = _latest_starts(requests, limits, decoding)
        decoding = _decoding(starts, requests.output_tokens)
    return starts, is_full


def _latest_starts(
    requests: EqualRequests, limits: Limits, decoding: list[float]
) -> tuple[list[float], list[bool]]:
    output = requests.output_tokens
    most_held = requests.prompt_tokens + output + limits.page_tokens
    starts: list[float] = []
    is_full: list[bool] = []
    held = 0.0  # by younger sequences when those that start here end
    num_younger = 0.0
    left = float(requests.count)
    while left > 1e-6:
        place = len(starts)
        in_step = limits.step_tokens - (decoding[min(place, len(decoding) - 1)] if decoding else 0)
        in_step = max(in_step, LEAST_PROMPT_SHARE * limits.step_tokens) / requests.prompt_tokens
        in_memory = max((limits.room_tokens - held) / most_held, 0.0)
        count = min(in_step, in_memory, left)
        is_full.append(in_step <= in_memory)
        starts.append(count)
        left -= count
        num_younger += count
        held += count * most_held - num_younger  # one step back, all are a token shorter
        if place >= output:  # had not started yet
            gone = starts[place - output]
            num_younger -= gone
            held -= gone * (most_held - output - 1)
    return starts, is_full


def _decoding(starts: list[float], output: int) -> list[float]:
    """[place] sequences that started before that step and have not ended."""
    before = [0.0, *accumulate(reversed(starts))]
    last = len(starts)
    return [before[last - 1 - at] - before[max(0, last - 1 - at - output)] for at in range(last)]
