"""How many tokens go into a step, and who gets them: decodes first, but never all."""

import numpy as np

from mainstem.core.step import Int32s, Int64s

DEFAULT_CHUNK_TOKENS = 512
SMALLEST_CHUNK_TOKENS = 64


class StepSize:
    """The token budget of a step; smaller where the device could not hold a full one."""

    def __init__(self, chunk_tokens: int | None, max_step_tokens: int | None) -> None:
        """`max_step_tokens` is what the runner's buffers hold; None: any number."""
        self._chunk_tokens = chunk_tokens or DEFAULT_CHUNK_TOKENS
        self._is_bounded = max_step_tokens is not None
        if max_step_tokens is not None:
            self._chunk_tokens = min(self._chunk_tokens, max_step_tokens)

    @property
    def _prompt_part(self) -> int:
        """Tokens that decodes always leave to prompts."""
        return max(self._chunk_tokens // 8, 1)

    def prompt_tokens(self, num_decodes: int) -> int:
        """What prompts may have beside so many decodes."""
        return max(self._chunk_tokens - num_decodes, self._prompt_part)

    def choose(self, decodes: Int32s, last_step: Int64s) -> Int32s:
        """The slots that decode in this step: all of them, or where the runner takes so many tokens
        only, those that waited longest, by each slot's `last_step`."""
        most = max(self._chunk_tokens - self._prompt_part, 1)
        if not self._is_bounded or len(decodes) <= most:
            return decodes
        oldest = np.argsort(last_step[decodes], kind="stable")[:most]
        return decodes[np.sort(oldest)]

    def shrink(self) -> bool:
        """Make steps half as large from here on; False when they are as small as they get."""
        if not self._is_bounded or self._chunk_tokens <= SMALLEST_CHUNK_TOKENS:
            return False
        self._chunk_tokens = max(self._chunk_tokens // 2, SMALLEST_CHUNK_TOKENS)
        return True
