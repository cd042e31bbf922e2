"""Where messages begin in the token ids of a chat: states of recurrent layers are kept there.

    <start> system ... <end> <start> user ... <end> <start> assistant
                             ^                      ^
Templates put a special token before each message, or before each message of some roles. Which one
it is, is found by rendering two conversations. Nothing in a message's text becomes such a token
(text/control_tokens.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from mainstem.core.errors import InvalidRequest
from mainstem.core.request import Request
from mainstem.text.tokenizer import Tokenizer

LAST_MESSAGES = 2  # whose beginnings are kept: an answer is asked for again, or an edited question


class MessageStarts:
    """Finds the ends of the system prompt and of earlier turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def mark(self, request: Request) -> Request:
        """The request with the boundaries of its messages, unless its caller named some."""
        if request.boundaries or (start := self._start) is None:
            return request
        starts = np.flatnonzero(request.prompt_ids == start).tolist()
        if starts and starts[0] < starts[-1]:
            # the first message is at the very beginning, perhaps after a token for the beginning
            starts = sorted({*starts[1:2], *starts[-LAST_MESSAGES:]})
        return replace(request, boundaries=tuple(starts)) if starts else request

    @cached_property
    def _start(self) -> int | None:
        """The special token that begins messages; None: the template has none."""
        if not self._tokenizer.has_chat_template:
            return None
        ask: dict[str, object] = {"role": "user", "content": "a"}
        tell: dict[str, object] = {"role": "assistant", "content": "a"}
        try:
            few = self._encode([ask])
            more = self._encode([ask, tell, ask])
        except InvalidRequest:  # a template for other conversations
            return None
        before, after = Counter(few), Counter(more)
        special = self._tokenizer.special_ids
        found = (each for each in more if each in special and after[each] > before[each])
        return next(found, None)

    def _encode(self, messages: Sequence[dict[str, object]]) -> list[int]:
        return self._tokenizer.encode_chat(messages, add_generation_prompt=False)
