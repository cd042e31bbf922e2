"""Progress of a batch job, and of other work in phases, on standard error."""

import sys
from collections.abc import Callable
from time import monotonic
from typing import NoReturn, TextIO

from tqdm import tqdm

from mainstem.batch.summary import Summary
from mainstem.batch.windows import Window
from mainstem.batch.work import JobWork

LOG_INTERVAL_S = 30.0  # between updates, if standard error is not a terminal
PREPARING = "{desc} [{elapsed}]"
RUNNING = (
    "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} prompt tokens"
    " [{elapsed}<{remaining}{postfix}]"
)


class JobBar:
    """Shows what the job does (reading, planning, running) and its progress.

    While rows run: prompt tokens done and time left, rows done, requests/s, tokens/s and saving so
    far. `preparing` returns a text: what the reading thread is doing. Totals are estimated from the
    bytes of the input, and exact once everything is read; those of a pipe are unknown.
    """

    def __init__(self, summary: Summary, preparing: Callable[[], str], is_shown: bool) -> None:
        self._summary = summary
        self._preparing = preparing
        self._work = JobWork(summary.counters)
        self._bar: tqdm[NoReturn] | None = None
        self._began_s: float | None = None  # when rows began to run
        self._next_s = 0.0  # time of the next update
        self._interval_s = interval_s = 0.1 if sys.stderr.isatty() else LOG_INTERVAL_S
        if is_shown:
            self._bar = tqdm(
                desc=preparing(),
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=interval_s,
                smoothing=0.0,  # the mean rate of the whole job, since rows end in bursts
                bar_format=PREPARING,
            )

    def show_preparing(self) -> None:
        """Show that nothing runs, because the next rows are not ready."""
        if self._bar is not None:
            self._bar.set_description_str(self._preparing(), refresh=False)
            self._bar.update(0)  # tqdm limits the refresh rate itself

    def show_window(self, window: Window) -> None:
        """Show that a window was read and planned, and its rows begin to run."""
        if self._bar is None:
            return
        self._work.add_window(window)
        if self._began_s is None:
            self._began_s = monotonic()
            self._bar.bar_format = RUNNING
            self._bar.set_description_str("running", refresh=False)
            self._bar.reset(self._work.total_tokens)  # the time left counts from here
        self._bar.set_description_str("running", refresh=False)
        self._bar.total = self._work.total_tokens
        self._bar.refresh()

    def show_step(self) -> None:
        """Show the progress of running rows. Most calls only check the time."""
        now = monotonic()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self._show(now)

    def _show(self, now: float) -> None:
        if self._bar is None or self._began_s is None:
            return
        elapsed = max(now - self._began_s, 1e-9)
        work, summary = self._work, self._summary
        total = "?" if work.total_rows is None else f"{work.total_rows:,}"
        self._bar.set_postfix_str(
            f"{work.rows_done:,}/{total} rows, {summary.answered / elapsed:.2f} req/s, "
            f"{summary.counters.generated_tokens / elapsed:.0f} tok/s, "
            f"{summary.saving_ratio:.0%} of prompts saved",
            refresh=False,
        )
        self._bar.update(max(0, work.tokens - self._bar.n))

    def show_row(self, prompt_tokens: int, num_answers: int, is_copy: bool) -> None:
        """Count a row that was written. For a failed row, pass 0 tokens and 0 answers."""
        if self._bar is not None:
            self._work.finish(prompt_tokens, num_answers, is_copy)

    def write(self, text: str) -> None:
        """Write a line to standard error, above the bar."""
        tqdm.write(text, file=sys.stderr)

    def __enter__(self) -> "JobBar":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._bar is not None:
            if self._began_s is not None:  # the bar may still say that rows are being read
                self._bar.set_description_str("running", refresh=False)
            self._show(monotonic())
            if error is None and self._summary.is_complete:
                self._bar.n = self._bar.total = self._work.tokens_read
            self._bar.close()


def read_so_far(num_rows: int, progress: float | None) -> str:
    """Return the progress of reading an input, as text."""
    share = "" if progress is None else f", {progress:.0%}"
    return f" {num_rows:,} rows{share}"


class PhaseLine:
    """One line about work in phases. On a terminal it is rewritten; otherwise a new line is written
    from time to time, and work that ends quickly is not mentioned.
    """

    QUIET_S = 2.0  # without a terminal: until the first line
    LOG_S = 10.0  # without a terminal: between two lines
    REFRESH_S = 0.1  # on a terminal: between two updates

    def __init__(self, name: str, is_shown: bool, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = (stream or sys.stderr) if is_shown else None
        self._is_terminal = self._stream is not None and self._stream.isatty()
        self._began_s = monotonic()
        self._next_s = 0.0 if self._is_terminal else self._began_s + self.QUIET_S
        self._is_dirty = False

    def show(self, text: str) -> None:
        """Show progress; may be called often, since most calls only check the time."""
        now = monotonic()
        if self._stream is None or now < self._next_s:
            return
        self._next_s = now + (self.REFRESH_S if self._is_terminal else self.LOG_S)
        self._write(text)

    def begin(self, text: str) -> None:
        """Begin a phase whose progress is not known; the text stays until the phase ends."""
        if self._stream is None:
            return
        if self._is_terminal or monotonic() >= self._began_s + self.QUIET_S:
            self._write(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._stream is not None and self._is_dirty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_dirty = False

    def _write(self, text: str) -> None:
        assert self._stream is not None
        seconds = monotonic() - self._began_s
        line = f"{self._name}: {text} [{seconds:.0f} s]"
        self._stream.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()
        self._is_dirty = self._is_terminal
