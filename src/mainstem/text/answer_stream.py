"""The text of one answer as its tokens arrive.

ids --Detokenizer--> text --StopChecker--> text that is safe to send
"""

from collections.abc import Sequence

from mainstem.core.request import SamplingParams
from mainstem.text.stop_strings import StopChecker
from mainstem.text.tokenizer import Tokenizer


class Detokenizer:
    """Makes the text of an answer as its tokens arrive. It never splits a character.

    All pieces together, with that of `finish`, equal `decode` of all ids. With `context`, the
    prompt's ids, the first word keeps the space that a sentencepiece decoder would strip at a
    text's start.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._skipped: frozenset[int] = (
            tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        )
        shown = [token_id for token_id in context[-64:] if token_id not in self._skipped]
        self._decoder = tokenizer.incremental_decoder(shown)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain: often the token's own text, sometimes
        none, sometimes more."""
        return "" if token_id in self._skipped else self._decoder.push(token_id)

    def finish(self) -> str:
        """Return what was held back; incomplete characters become U+FFFD."""
        return self._decoder.finish()


class TextStream:
    """Turns the tokens of one answer into text that is safe to send, until `stop` is set."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, params.skip_special_tokens, shown_ids
        )
        self._checker: StopChecker | None = None
        if params.stop_strings:
            self._checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._num_unchecked = params.min_tokens  # tokens left before stop strings are checked

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the answer; tokens pushed after it change nothing."""
        return None if self._checker is None else self._checker.found

    def push(self, token_id: int) -> str:
        """Add the next token; returns the text that has become certain."""
        text = self._detokenizer.push(token_id)
        if self._checker is None:
            return text
        if self._num_unchecked:
            self._num_unchecked -= 1
            return text
        return self._checker.push(text)

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens will come."""
        text = self._detokenizer.finish()
        if self._checker is None:
            return text
        text = self._checker.push(text)
        return text if self._checker.found is not None else text + self._checker.finish()
