"""How much of a job is done, in prompt tokens, counting rows that are half done.

Rows differ in length by orders of magnitude, and hundreds run at once: counted in finished rows, a
job seems to stand still until the first of them end, and its first estimate is off by as many.
"""

from dataclasses import dataclass

from mainstem.batch.windows import Window
from mainstem.core.metrics import Counters

UNLIMITED_TOKENS = 512  # what an answer without max_tokens counts as, until some are finished


@dataclass(slots=True)
class Work:
    """Prompt tokens of a job, as often as they have answers: read, finished and under way."""

    counters: Counters
    rows_read: int = 0
    rows_done: int = 0  # by earlier runs too
    tokens_read: int = 0
    progress: float | None = None  # of the input's bytes
    _limits: int = 0  # most output tokens of all rows read
    _num_answers: int = 0  # that the rows read want
    _finished: int = 0  # prompt tokens of rows that are written
    _finished_alone: int = 0  # of these, what went through the engine: copies did not

    def add_window(self, window: Window) -> None:
        """Rows that were read; what an earlier run has done counts as rows alone."""
        self.rows_read = window.num_rows_read
        self.rows_done += window.num_skipped
        self.progress = window.progress
        for row, tokens in zip(window.rows, window.prompts.num_tokens.tolist(), strict=True):
            sampling = row.call.sampling
            self.tokens_read += tokens * sampling.n
            self._limits += (sampling.max_tokens or UNLIMITED_TOKENS) * sampling.n
            self._num_answers += sampling.n

    def finish(self, prompt_tokens: int, num_answers: int, is_copy: bool = False) -> None:
        """A row was written."""
        self.rows_done += 1
        self._finished += prompt_tokens * num_answers
        if not is_copy:
            self._finished_alone += prompt_tokens * num_answers

    @property
    def tokens(self) -> int:
        """Prompt tokens that are done with, those of running rows by what they have generated."""
        counters = self.counters
        prompts = max(0, counters.prompt_tokens - self._finished_alone)  # of running rows
        if not prompts or not self._num_answers:
            return self._finished
        num_running = max(1, round(prompts * self._num_answers / max(1, self.tokens_read)))
        num_firsts = counters.sequences_finished + num_running  # tokens that come with a prompt
        generated = max(0, counters.decoded_tokens + num_firsts - counters.generated_tokens)
        whole = prompts + max(generated, num_running * self._answer_tokens)
        credit = prompts * (prompts + generated) / whole
        return min(self.tokens_read, self._finished + int(credit))

    @property
    def total_tokens(self) -> int | None:
        """Of the whole input, guessed from its bytes until all is read; None: nobody knows."""
        return round(self.tokens_read / self.progress) if self.progress else None

    @property
    def total_rows(self) -> int | None:
        """Likewise of rows."""
        return round(self.rows_read / self.progress) if self.progress else None

    @property
    def _answer_tokens(self) -> float:
        """Tokens that an answer has in the mean."""
        counters = self.counters
        if counters.sequences_finished:
            return counters.generated_tokens / counters.sequences_finished
        return self._limits / self._num_answers
