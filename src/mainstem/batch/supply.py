"""When a job hands its next request to the engine: a little ahead of need.

Submitting a prompt hashes its pages. All of a job at once would keep the device idle at the start;
a few at a time are hashed while it computes. What a step takes is counted in tokens to compute, so
that is what is kept waiting.
"""

from collections import deque

LOOK_AHEAD = 64  # sequences kept waiting at least: who waits is loaded from lower tiers


class Supply:
    """Decides, request by request, whether the engine should have another one before its next step.

    Requests wait for one step's tokens before the first step, for two steps' from then on.
    """

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens`: what a step takes at most."""
        self._step_tokens = step_tokens
        self._waiting: deque[int] = deque()  # tokens to compute of those submitted last
        self._waiting_tokens = 0
        self._num_steps = 0

    def begin_step(self) -> None:
        """A step comes; what `has_room` says is about it."""
        self._num_steps += 1

    def has_room(self, num_waiting: int) -> bool:
        """Whether to submit another, with so many sequences waiting."""
        while len(self._waiting) > num_waiting:  # the first submitted have started
            self._waiting_tokens -= self._waiting.popleft()
        if self._num_steps <= 1:
            return self._waiting_tokens < self._step_tokens
        return self._waiting_tokens < 2 * self._step_tokens or num_waiting < LOOK_AHEAD

    def note(self, new_tokens: int, num_answers: int = 1) -> None:
        """A request was submitted that has so many tokens to compute."""
        for tokens in (new_tokens, *[1] * (num_answers - 1)):  # its prompt is computed once
            self._waiting.append(tokens)
            self._waiting_tokens += tokens
