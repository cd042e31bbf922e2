"""When a job hands its next request to the engine: a little ahead of need, at the pace of a Pace.

Submitting a prompt hashes its pages. All of a job at once would keep the device idle at the start;
a few at a time are hashed while it computes. What a step takes is counted in tokens to compute, so
that is what is kept waiting.
"""

from collections.abc import Sequence

from mainstem.plan.pace import EqualRequests, Limits, Pace

LOOK_AHEAD = 64  # sequences kept waiting at least: who waits is loaded from lower tiers


class Supply:
    """Decides, request by request, whether the engine should have another one before its next step.

    Requests wait for one step's tokens before the first step, for two steps' from then on.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pace: Pace | None = None
        self._allowance: int | None = None  # that may wait before the next step; None: any number
        self._new_before = [0]  # [submitted sequences + 1] tokens to compute of those before
        self._num_steps = 0

    def pace(self, new_tokens: Sequence[int], output_tokens: int | None) -> None:
        """Requests with so many tokens to compute each follow; None: their answers will not all
        have this length, and so end at different times whenever they start."""
        self._pace = None
        if output_tokens is not None and new_tokens:
            mean_tokens = sum(new_tokens) / len(new_tokens)
            requests = EqualRequests(len(new_tokens), mean_tokens, output_tokens)
            self._pace = Pace(requests, self._limits)

    def begin_step(self, num_left: int) -> None:
        """A step comes; `num_left` requests are waiting or still to be submitted."""
        self._num_steps += 1
        self._allowance = None if self._pace is None else self._pace.allowance(num_left)

    def has_room(self, num_waiting: int) -> bool:
        """Whether to submit another, with so many sequences waiting."""
        if self._allowance is not None and num_waiting >= self._allowance:
            return False
        # the last ones submitted are those that wait
        first = max(0, len(self._new_before) - 1 - num_waiting)
        waiting_tokens = self._new_before[-1] - self._new_before[first]
        if self._num_steps <= 1:
            return waiting_tokens < self._limits.step_tokens
        return waiting_tokens < 2 * self._limits.step_tokens or num_waiting < LOOK_AHEAD

    def note(self, new_tokens: int) -> None:
        """A sequence was submitted that has so many tokens to compute."""
        self._new_before.append(self._new_before[-1] + new_tokens)
