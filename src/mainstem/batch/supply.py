"""Flow control of a job: when its next request goes to the engine.

Submitting a prompt hashes its pages. Hashing all of a job first would keep the device idle at the
start; a few prompts at a time are hashed while it computes. Steps are measured in tokens to
compute, so the amount of waiting work is, too.
"""

from collections import deque

LOOK_AHEAD = 64  # at least this many sequences wait, since lower tiers load while they do


class Supply:
    """Decides whether the engine gets another request before its next step.

    Before the first step one step's worth of tokens waits, from then on two.
    """

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens`: the most tokens of a step."""
        self._step_tokens = step_tokens
        self._waiting: deque[int] = deque()  # tokens to compute of those submitted last
        self._waiting_tokens = 0
        self._num_steps = 0

    def begin_step(self) -> None:
        """The next step is about to be filled; `has_room` is about it."""
        self._num_steps += 1

    def has_room(self, num_waiting: int) -> bool:
        """Whether to submit another request while `num_waiting` sequences wait."""
        while len(self._waiting) > num_waiting:  # the first submitted have started
            self._waiting_tokens -= self._waiting.popleft()
        if self._num_steps <= 1:
            return self._waiting_tokens < self._step_tokens
        return self._waiting_tokens < 2 * self._step_tokens or num_waiting < LOOK_AHEAD

    def note(self, new_tokens: int, num_answers: int = 1) -> None:
        """A request with `new_tokens` to compute was submitted."""
        for tokens in (new_tokens, *[1] * (num_answers - 1)):  # its prompt is computed once
            self._waiting.append(tokens)
            self._waiting_tokens += tokens
