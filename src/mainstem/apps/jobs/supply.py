"""When a job hands its next request to the engine: a little ahead of need, at the pace of a Pace.

Submitting a prompt hashes its pages. All of a job at once would keep the device idle at the start;
a few at a time are hashed while it computes. What a step takes is counted in tokens to compute, so
that is what is kept waiting.
"""

from collections import deque

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
        self._waiting: deque[int] = deque()  # tokens to compute of those submitted last
        self._waiting_tokens = 0
        self._num_steps = 0

    def follow(self, requests: EqualRequests | None) -> None:
        """From here on these are submitted; None: others, which end at different times whenever
        they start."""
        self._pace = None if requests is None else Pace(requests, self._limits)

    def begin_step(self, num_left: int) -> None:
        """A step comes; `num_left` requests are waiting or still to be submitted."""
        self._num_steps += 1
        self._allowance = None if self._pace is None else self._pace.allowance(num_left)

    def has_room(self, num_waiting: int) -> bool:
        """Whether to submit another, with so many sequences waiting."""
        if self._allowance is not None and num_waiting >= self._allowance:
            return False
        while len(self._waiting) > num_waiting:  # the first submitted have started
            self._waiting_tokens -= self._waiting.popleft()
        if self._num_steps <= 1:
            return self._waiting_tokens < self._limits.step_tokens
        return self._waiting_tokens < 2 * self._limits.step_tokens or num_waiting < LOOK_AHEAD

    def note(self, new_tokens: int, num_answers: int = 1) -> None:
        """A request was submitted that has so many tokens to compute."""
        for tokens in (new_tokens, *[1] * (num_answers - 1)):  # its prompt is computed once
            self._waiting.append(tokens)
            self._waiting_tokens += tokens
