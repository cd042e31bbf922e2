"""Decides how many tokens go into a step: decodes first, but prompts always get a part."""

import numpy as np

from mainstem.core.config import DEFAULT_CHUNK_TOKENS
from mainstem.core.step import Int32s, Int64s
from mainstem.sched.step_times import StepTimes

SMALLEST_CHUNK_TOKENS = 64
SMALLEST_PART_TOKENS = 32  # however slow the device is: prompts must advance
GRAIN_TOKENS = 16  # prompts are cut at multiples of it, so that steps have few sizes
UNKNOWN_PART_TOKENS = 64  # while nothing is known about the device
GROW_STEPS = 256  # successful steps before larger ones are tried again
MAX_GROW_STEPS = 1 << 16  # limit of this number, which doubles each time larger steps do not fit


class StepSize:
    """The token budget of a step. It shrinks after a step that did not fit the device, and grows
    back slowly, since another process may have used the memory for a while."""

    def __init__(
        self, chunk_tokens: int | None, max_step_tokens: int | None, step_s: float | None = None
    ) -> None:
        """`max_step_tokens` is the size of the runner's buffers; None: no limit. `step_s` is the
        time that a step with prompts may take while sequences decode; None: any."""
        self.tokens = chunk_tokens or DEFAULT_CHUNK_TOKENS  # the present budget
        self._is_bounded = max_step_tokens is not None
        if max_step_tokens is not None:
            self.tokens = min(self.tokens, max_step_tokens)
        self._full_tokens = self.tokens
        self._grow_steps = GROW_STEPS
        self._has_grown = False  # since steps last shrank
        self._num_good = 0  # successful steps since the size last changed
        self._step_s = step_s
        self._times: StepTimes | None = None  # None: no prompt was measured yet

    @property
    def is_full(self) -> bool:
        """Whether the budget is as large as configured."""
        return self.tokens == self._full_tokens

    @property
    def _prompt_part(self) -> int:
        """Tokens that decodes always leave to prompts."""
        return max(self.tokens // 8, 1)

    def prompt_tokens(self, num_decodes: int, *, is_awaited: bool = False) -> int:
        """Tokens for prompts in a step with `num_decodes` decodes. `is_awaited`: a sequence decodes
        in this step or in the next one, so this one may not take long."""
        tokens = max(self.tokens - num_decodes, self._prompt_part)
        return min(tokens, self._timely_tokens()) if is_awaited else tokens

    def _timely_tokens(self) -> int:
        """Tokens for prompts in a step that takes no longer than allowed, if the device is as fast
        as it was; at least SMALLEST_PART_TOKENS."""
        if self._step_s is None:
            return self.tokens
        if self._times is None:
            return UNKNOWN_PART_TOKENS
        left_s = max(self._step_s - self._times.floor_s, 0.0)
        token_s = self._times.token_s
        if self.tokens * token_s <= left_s:
            return self.tokens
        return max(int(left_s / token_s) // GRAIN_TOKENS * GRAIN_TOKENS, SMALLEST_PART_TOKENS)

    def note_time(self, prompt_tokens: int, device_s: float) -> None:
        """Record how long a step took that waited for nothing."""
        if self._times is not None:
            self._times.observe(prompt_tokens, device_s)
        elif prompt_tokens:
            self._times = StepTimes.of_first(prompt_tokens, device_s)

    def choose(self, decodes: Int32s, last_step: Int64s) -> Int32s:
        """Return the slots that decode in this step: all of them or, if the runner takes fewer
        tokens, those that have waited longest (the smallest `last_step`)."""
        most = max(self.tokens - self._prompt_part, 1)
        if not self._is_bounded or len(decodes) <= most:
            return decodes
        oldest = np.argsort(last_step[decodes], kind="stable")[:most]
        return decodes[np.sort(oldest)]

    def shrink(self) -> bool:
        """Halve the size of steps from now on; False: they cannot be smaller."""
        if not self._is_bounded or self.tokens <= SMALLEST_CHUNK_TOKENS:
            return False
        if self._has_grown:  # steps grew too early
            self._grow_steps = min(2 * self._grow_steps, MAX_GROW_STEPS)
            self._has_grown = False
        self.tokens = max(self.tokens // 2, SMALLEST_CHUNK_TOKENS)
        self._num_good = 0
        return True

    def note_good(self) -> bool:
        """Record that a step succeeded. Returns True if steps are larger from now on."""
        if self.is_full:
            return False
        self._num_good += 1
        if self._num_good < self._grow_steps:
            return False
        self.tokens = min(2 * self.tokens, self._full_tokens)
        self._has_grown = True
        self._num_good = 0
        return True
