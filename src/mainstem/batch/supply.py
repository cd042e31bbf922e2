"""Flow control of a job: when its next request is submitted to the engine.

Submitting a prompt hashes its pages. If all prompts of a job were hashed first, the device would be
idle at the start, so a few at a time are hashed while it computes. Waiting work is measured in
tokens to compute, like steps.
"""

from collections import deque

LOOK_AHEAD = 64  # at least this many sequences wait, so that lower tiers can load their pages


class Supply:
    """Decides whether the engine gets another request before its next step.

    Before the first step one step's worth of tokens waits, from then on two.
    """

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens` is the maximum number of tokens in a step."""
        self._step_tokens = step_tokens
        self._waiting: deque[int] = deque()  # tokens to compute, for each sequence that waits
        self._waiting_tokens = 0
        self._num_steps = 0

    def begin_step(self) -> None:
        """Call this before a step is filled; `has_room` then answers for that step."""
        self._num_steps += 1

    def has_room(self, num_waiting: int) -> bool:
        """Whether to submit another request while `num_waiting` sequences wait."""
        while len(self._waiting) > num_waiting:  # the sequences submitted first have started
            self._waiting_tokens -= self._waiting.popleft()
        if self._num_steps <= 1:
            return self._waiting_tokens < self._step_tokens
        return self._waiting_tokens < 2 * self._step_tokens or num_waiting < LOOK_AHEAD

    def note(self, new_tokens: int, num_answers: int = 1) -> None:
        """Count a submitted request with `new_tokens` to compute."""
        for tokens in (new_tokens, *[1] * (num_answers - 1)):  # all answers share the prompt
            self._waiting.append(tokens)
            self._waiting_tokens += tokens
