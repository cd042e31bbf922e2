"""The text of one answer as its tokens arrive.

ids --Detokenizer--> text --StopChecker--> text that is safe to send
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.core.request import SamplingParams
from mainstem.text.stop_strings import StopChecker
from mainstem.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of an answer as its tokens arrive; never splits a character.

    The pieces joined equal `decode` of all ids (after `finish`). With `context`, the prompt's ids,
    the first word keeps the space that a sentencepiece decoder would strip at a text's start.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._skipped: frozenset[int] = (
            tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        shown = [token_id for token_id in context[-64:] if token_id not in self._skipped]
        self._decoder = tokenizer.incremental_decoder(shown)

    @property
    def is_holding(self) -> bool:
        """Whether a character has begun and not ended."""
        return self._decoder.is_holding

    def push(self, token_id: int) -> str:
        """The text that has become certain; often the token's own, sometimes none or more."""
        return "" if token_id in self._skipped else self._decoder.push(token_id)

    def finish(self) -> str:
        """What was held back: incomplete characters become U+FFFD."""
        return self._decoder.finish()


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of an answer."""

    text: str
    num_tokens: int  # tokens, from the answer's first, that all text so far covers
    stop: str | None  # the stop string that ended the answer


class TextStream:
    """The text of one answer: tokens in, pieces that are safe to send out.

    `num_tokens` counts tokens whose text has been returned; when a stop string ends the answer it
    counts those with at least one character in the text. Tokens pushed after that change nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._token_starts: deque[int] = deque()  # of tokens not covered yet, in characters
        self._num_pushed = 0
        self._num_chars = 0  # that came out of the detokeniser
        self._num_returned = 0
        self._num_tokens = 0

    def push(self, token_id: int) -> Piece:
        """Add the next token. Stop strings are not looked for in the first min_tokens tokens."""
        if self._checker.found is not None:
            return Piece("", self._num_tokens, self._checker.found)
        self._num_pushed += 1
        self._token_starts.append(self._num_chars)
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        if self._num_pushed > self._min_tokens:
            text = self._checker.push(text)
        return self._piece(text)

    def finish(self) -> Piece:
        """The rest, when no more tokens will come."""
        if self._checker.found is not None:
            return Piece("", self._num_tokens, self._checker.found)
        text = self._detokenizer.finish()
        self._num_chars += len(text)
        text = self._checker.push(text)
        if self._checker.found is None:
            text += self._checker.finish()
            self._token_starts.clear()
            self._num_tokens = self._num_pushed
        return self._piece(text)

    def _piece(self, text: str) -> Piece:
        self._num_returned += len(text)
        stop = self._checker.found
        while self._token_starts and self._is_covered(stop):
            self._token_starts.popleft()
            self._num_tokens += 1
        return Piece(text, self._num_tokens, stop)

    def _is_covered(self, stop: str | None) -> bool:
        """Whether the text returned covers the oldest token that was not covered so far."""
        start = self._token_starts[0]
        if stop is not None:
            return start < self._num_returned
        if start == self._num_chars and self._detokenizer.is_holding:
            return False  # its character is still incomplete
        # a token ends where the next one starts; the newest ends where the text ends
        end = self._token_starts[1] if len(self._token_starts) > 1 else self._num_chars
        return end <= self._num_returned
