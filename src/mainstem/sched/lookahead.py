"""Predicts the lengths of answers, and which pages a planned job needs again."""

import numpy as np

from mainstem.core.step import Int32s
from mainstem.sched.sequence import Sequence

UNSEEN = 256  # tokens expected at first; a request's limit is often far above the real length


class OutputLengths:
    """The mean length of about the last `memory` answers; UNSEEN before the first answer.

    A sequence that starts again is expected to reach at least twice its length so far.
    """

    def __init__(self, memory: int = 256) -> None:
        self._memory = memory
        self._count = 0
        self._mean = 0.0

    def observe(self, num_output: int) -> None:
        self._count = min(self._count + 1, self._memory)
        self._mean += (num_output - self._mean) / self._count

    def expect(self, sequence: Sequence) -> int:
        """Expected output tokens of a sequence that is about to start, including those it already
        has."""
        likely = sequence.expected_output
        if likely is None:
            likely = round(self._mean) if self._count else UNSEEN
        produced = len(sequence.output_ids)
        return min(sequence.max_output, max(likely, 2 * produced, 1))


class PlannedOrder:
    """The announced order of a known workload: what each prompt shares with the next.

    Prompts start in this order. If `last` is the last that has started, later prompts can still use
    some leading tokens of prompt i: the least number that two neighbours from i to `last` + 1 have
    in common.
    """

    def __init__(self) -> None:
        self._shared_with_next: Int32s = np.empty(64, np.int32)
        self._length = 0
        self._last_started = -1

    def announce(self, shared_with_next: Int32s) -> int:
        """Add prompts at the end; returns the place of the first."""
        first, self._length = self._length, self._length + len(shared_with_next)
        if self._length > len(self._shared_with_next):
            grown = np.empty(2 * self._length, np.int32)
            grown[:first] = self._shared_with_next[:first]
            self._shared_with_next = grown
        self._shared_with_next[first : self._length] = shared_with_next
        return first

    def start(self, plan_place: int) -> None:
        """Record that all answers to the prompt at `plan_place` have started."""
        self._last_started = max(self._last_started, plan_place)

    def tokens_wanted(self, plan_place: int) -> int | None:
        """Return how many leading tokens of the prompt at `plan_place` are shared by prompts that
        have not started. None: all tokens, because other answers to this prompt have not
        started."""
        between = self._shared_with_next[plan_place : self._last_started + 1]
        return int(between.min()) if len(between) else None

    def __len__(self) -> int:
        return self._length
