"""Measures how much of a job is done, in prompt tokens. Partly finished rows count.

Rows differ in length by orders of magnitude, and hundreds run at once. If only finished rows were
counted, a job would show no progress until the first rows end, and the first estimate of the time
left would be wrong.
"""

from dataclasses import dataclass

from mainstem.batch.windows import Window
from mainstem.core.metrics import Counters

UNLIMITED_TOKENS = 512  # assumed length of an answer without max_tokens, until answers are finished


@dataclass(slots=True)
class JobWork:
    """Prompt tokens of a job that were read, are finished, or are running. A prompt with n answers
    counts n times."""

    counters: Counters
    rows_read: int = 0
    rows_done: int = 0  # including those of earlier runs
    tokens_read: int = 0
    progress: float | None = None  # share of the input's bytes that were read
    _limits: int = 0  # sum of the output limits of all rows read
    _num_answers: int = 0  # of all rows read
    _finished: int = 0  # prompt tokens of rows that are written
    _finished_alone: int = 0  # the same without copies, which did not go through the engine

    def add_window(self, window: Window) -> None:
        """Add rows that were read; rows of earlier runs are counted, but not their tokens."""
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
        """Prompt tokens done. Running rows count in part: by the share of their tokens (prompt and
        expected output) that exists so far."""
        counters = self.counters
        prompts = max(0, counters.prompt_tokens - self._finished_alone)  # of running rows
        if not prompts or not self._num_answers:
            return self._finished
        num_running = max(1, round(prompts * self._num_answers / max(1, self.tokens_read)))
        # each sequence's first token comes with its prompt
        num_firsts = counters.sequences_finished + num_running
        generated = max(0, counters.decoded_tokens + num_firsts - counters.generated_tokens)
        whole = prompts + max(generated, num_running * self._answer_tokens)
        credit = prompts * (prompts + generated) / whole
        return min(self.tokens_read, self._finished + int(credit))

    @property
    def total_tokens(self) -> int | None:
        """Prompt tokens of the whole input, estimated from its bytes until all is read; None:
        unknown."""
        return round(self.tokens_read / self.progress) if self.progress else None

    @property
    def total_rows(self) -> int | None:
        """Rows of the whole input, estimated in the same way."""
        return round(self.rows_read / self.progress) if self.progress else None

    @property
    def _answer_tokens(self) -> float:
        """Mean tokens of an answer."""
        counters = self.counters
        if counters.sequences_finished:
            return counters.generated_tokens / counters.sequences_finished
        return self._limits / self._num_answers
